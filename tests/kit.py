"""How a kernel is compared with the reference, and how awkward tensors are made."""

import functools
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import flash_cuda
from flash_cuda import reference

VERSIONS = ("fa1", "fa2")  # those that run on a CPU
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 20220527

each_version = pytest.mark.parametrize("version", VERSIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@dataclass
class Inputs:
    """One call of attention, or of attention_varlen when `packed` is there."""

    leaves: dict  # q, k, v, and a float bias or sinks: what can have a gradient
    options: dict = field(default_factory=dict)  # every other keyword argument
    packed: tuple = ()  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k

    def __post_init__(self):
        self.dtype = self.leaves["q"].dtype


def qkv(batch=2, seqlen_q=33, seqlen_k=49, heads=4, heads_kv=2, head_dim=32, dtype=torch.float32, magnitude=1.0):
    """q, k, v of normal random values, as a dict."""
    q = torch.randn(batch, seqlen_q, heads, head_dim) * magnitude
    k = torch.randn(batch, seqlen_k, heads_kv, head_dim) * magnitude
    v = torch.randn(batch, seqlen_k, heads_kv, head_dim) * magnitude
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}


def evaluate(function, inputs, *, dtype=None, wanted=(), grad_out=None, grad_lse=None, **more):
    """out, lse and the gradients of the `wanted` leaves ("dq", ...), as a dict. A dtype converts the leaves first."""
    result, grads = _evaluate(function, inputs, dtype, wanted, more)
    return result | grads(grad_out, grad_lse)


def _evaluate(function, inputs, dtype, wanted, more):
    """out and lse, and what maps their gradients to those of the leaves."""
    leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_(n in wanted) for n, t in inputs.leaves.items()}
    named = {n: t for n, t in leaves.items() if n not in "qkv"}
    out, lse = function(leaves["q"], leaves["k"], leaves["v"], *inputs.packed, **named, **inputs.options, **more,
                        return_lse=True)

    def grads(grad_out, grad_lse, retain_graph=False):
        pairs = [(o, g.to(o.dtype)) for o, g in ((out, grad_out), (lse, grad_lse)) if g is not None and o.requires_grad]
        if not pairs or not wanted:
            return {}
        outputs, output_grads = zip(*pairs)
        values = torch.autograd.grad(outputs, [leaves[n] for n in wanted], output_grads, retain_graph=retain_graph)
        return {"d" + n: g for n, g in zip(wanted, values)}

    return {"out": out.detach(), "lse": lse.detach()}, grads


def run_kernel(inputs, version=None, **more):
    """`evaluate` of flash_cuda, from the seed that `run_reference` assumes."""
    torch.manual_seed(SEED)
    return evaluate(flash_cuda.attention_varlen if inputs.packed else flash_cuda.attention, inputs, version=version,
                    **more)


def run_reference(inputs, dtype=torch.float64, *, wanted=(), grad_out=None, grad_lse=None):
    result, grads = _reference(inputs, dtype, wanted)
    return result | grads(grad_out, grad_lse)


def _reference(inputs, dtype, wanted):
    function = reference.attention_varlen if inputs.packed else reference.attention
    more = {"dtype": dtype}
    if inputs.options.get("dropout_p"):
        torch.manual_seed(SEED)
        more["dropout_seed"] = torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64)
    return _evaluate(function, inputs, dtype, wanted, more)


def check(inputs, version, *, wanted=None, grad_out=None, grad_lse=None, **more):
    """Outputs, LSE and gradients of a version against the float64 reference; inputs are left as they were.

    wanted: names of the leaves that need a gradient; None is all of them, () tests forward alone.
    grad_out, grad_lse: None is random. grad_lse=False: the loss does not use the LSE.
    """
    wanted = tuple(inputs.leaves) if wanted is None else wanted
    q = inputs.leaves["q"]
    generator = torch.Generator().manual_seed(SEED)
    if wanted and grad_out is None:
        grad_out = torch.randn(q.shape, generator=generator).to(q.dtype)
    if wanted and grad_lse is None:
        grad_lse = torch.randn(_lse_shape(inputs), generator=generator)
    grads = {"wanted": wanted, "grad_out": grad_out, "grad_lse": None if grad_lse is False else grad_lse}

    before = {n: t.clone() for n, t in inputs.leaves.items()}
    got = run_kernel(inputs, version, **grads, **more)
    for name, tensor in inputs.leaves.items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), f"{name} was overwritten"
    for name in wanted:
        assert got["d" + name].dtype == inputs.leaves[name].dtype
    assert got["out"].dtype == q.dtype
    assert got["lse"].dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    compare(got, inputs, **grads)
    return got


def _heads_first(inputs):
    return inputs.options.get("layout") == "bhsd"


def _lse_shape(inputs):
    shape = inputs.leaves["q"].shape
    return shape[:3] if _heads_first(inputs) else (*shape[:-3], shape[-2], shape[-3])


def _single_threaded(function):
    """Small operations on several threads mostly wait for each other: 20 times slower on a busy machine."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)
    return run


@_single_threaded
def compare(got, inputs, *, wanted=(), grad_out=None, grad_lse=None, sum_roundings=1.0):
    """The pass rule: max |got - ref| <= 2 * max |torch attention in the same dtype - ref| + 2 * rounding of ref.

    3 times with softcap. NaN and infinities must sit at the same places. LSE is held to float32. The rounding of ref is
    one of its largest value, and how far it moves by the rounding of what it is computed from: `out` and LSE, which
    every FlashAttention backward reads, and in float32 the sums (torch's own may round less by luck in small shapes).
    sum_roundings: how often a sum over head_dim (a score, or rowsum(dO * O)), or what it is compared with, is rounded.
    """
    grads = {"wanted": wanted, "grad_out": grad_out, "grad_lse": grad_lse}
    ref, ref_grads = _reference(inputs, torch.float64, wanted)
    noise = _moved_by_rounding(inputs, ref, ref_grads, grad_out, grad_lse, sum_roundings)
    ref |= ref_grads(grad_out, grad_lse)
    noise["lse"] = (sum_roundings - 1) * torch.finfo(torch.float32).eps * _size_of_scores(inputs)
    if inputs.dtype in (torch.float32, torch.float64):
        sums = _moved_by_sums(inputs, ref, **grads)
        noise = {n: sums[n] + noise.get(n, 0.0) for n in sums}
    torch_error = _error_of_torch(inputs, ref, grads)
    factor = 3 if inputs.options.get("softcap") else 2
    for name, expected in ref.items():
        compare_one(name, got[name], expected, factor * torch_error[name] + 2 * noise.get(name, 0.0))


def _error_of_torch(inputs, ref, grads):
    """The largest error of each result when torch computes it in the dtype of the inputs."""
    same = run_reference(inputs, inputs.dtype, **grads)
    if any((ref[n].isfinite() & ~same[n].isfinite()).any() for n in ref):  # fp16 overflows where a kernel need not
        same = run_reference(inputs, torch.float32, **grads)
    if inputs.dtype in (torch.bfloat16, torch.float16):
        same["lse"] = run_reference(inputs, torch.float32)["lse"]
    return {n: _largest((same[n].double() - ref[n])[ref[n].isfinite()]) for n in ref}


def _size_of_scores(inputs):
    """What a score, and each partial sum on the way to it, comes to where q and k do not know each other."""
    q, k = (inputs.leaves[n].double().nan_to_num(0.0, 0.0, 0.0) for n in "qk")
    if q.numel() == 0 or k.numel() == 0:
        return 0.0
    scale = inputs.options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return scale * _largest(q.norm(dim=-1)) * _largest(k.norm(dim=-1)) * q.shape[-1] ** -0.5


def _largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def _moved_by_rounding(inputs, ref, ref_grads, grad_out, grad_lse, sum_roundings):
    """How far each gradient moves when `out` is rounded to the input dtype, and LSE and the sum to float32 (float64).

    A row's P is exp(S - LSE): an error of its LSE scales the row, as scaled gradients of out and LSE would. An error of
    rowsum(dO * O) acts as a gradient of the LSE does.
    """
    sums = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    heads_first = _heads_first(inputs)
    scale = (ref["lse"].to(sums).double() - ref["lse"]).nan_to_num(0.0, 0.0, 0.0)
    out_error, lse_error = None, torch.zeros_like(scale)
    if grad_out is not None:
        out, grad_out = ref["out"], grad_out.double()
        rowsum = (grad_out * (out.to(inputs.dtype).double() - out)).sum(-1)
        rowsum += sum_roundings * torch.finfo(sums).eps * (grad_out * out).abs().sum(-1)
        out_error = grad_out * (scale if heads_first else scale.mT)[..., None]
        lse_error += rowsum if heads_first else rowsum.mT
    if grad_lse is not None:
        lse_error += scale * grad_lse
    moved = ref_grads(out_error, lse_error.nan_to_num(0.0, 0.0, 0.0), retain_graph=True)
    return {n: _largest(g.nan_to_num(0.0, 0.0, 0.0)) for n, g in moved.items()}


def _moved_by_sums(inputs, ref, wanted, grad_out, grad_lse):
    """How far each result moves when sums round: one of n terms by about sqrt(n) / 2 units of the last place.

    Scores and dO V^T are sums over head_dim, here by way of q and dO, and a score is rounded twice more on its way into
    exp; gradients of bias and sinks sum over what they broadcast to.
    """
    generator = torch.Generator().manual_seed(SEED)
    eps, head_dim = torch.finfo(inputs.dtype).eps, inputs.leaves["q"].shape[-1]

    def off(x):
        signs = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1
        return x.detach().double() * (1 + eps * (1 + math.sqrt(head_dim) / 2) * signs)

    leaves = inputs.leaves | {"q": off(inputs.leaves["q"])}
    moved = run_reference(Inputs(leaves, inputs.options, inputs.packed), wanted=wanted, grad_lse=grad_lse,
                          grad_out=None if grad_out is None else off(grad_out))
    moved = {n: _largest((moved[n] - ref[n]).nan_to_num(0.0, 0.0, 0.0)) for n in ref}
    rows, columns = ref["lse"].numel(), inputs.leaves["k"].shape[-2 if _heads_first(inputs) else -3]
    for name, terms in (("dbias", rows * columns), ("dsinks", rows)):
        if name in ref:
            terms /= max(ref[name].numel(), 1)
            moved[name] += eps / 2 * math.sqrt(terms) * _largest(ref[name][ref[name].isfinite()])
    return moved


def compare_one(name, got, ref, allowed):
    """`allowed` is on top of twice the rounding of ref's largest value."""
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    eps, is_double, got = torch.finfo(got.dtype).eps, got.dtype == torch.float64, got.double()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = (kind(got) != kind(ref)).nonzero()
        assert len(wrong) == 0, (f"{name}: {kind.__name__} differs at {len(wrong)} of {ref.numel()} places, first at "
                                 f"{wrong[0].tolist()}: {got[tuple(wrong[0])]}, expected {ref[tuple(wrong[0])]}")
    got, ref = got[ref.isfinite()], ref[ref.isfinite()]
    largest = max(_largest(ref), 1.0 if name == "lse" else 0.0)
    # No reference is finer than float64: where it cancels, its own error is absolute.
    allowed += 64 * eps * max(largest, 1.0) if is_double else 2 * eps * largest
    error = _largest(got - ref)
    assert error <= allowed, f"{name}: off by {error:.3e}, allowed {allowed:.3e} (largest value {largest:.3e})"


STRIDES = ("contiguous", "packed_qkv", "heads_first", "sequence_first", "sliced", "expanded_heads", "expanded_batch",
           "last_strided")


def restride(x, kind):
    """x (batch, seqlen, heads, head_dim) with other strides; whatever lies between its elements is NaN.

    The expanded kinds repeat one head or one sequence of x, all others keep its values.
    """
    batch, seqlen, heads, dim = x.shape
    if kind == "contiguous":
        return x.clone()
    if kind == "packed_qkv":
        return _into(x, (batch, seqlen, 3, heads, dim), lambda buffer: buffer[:, :, 1])
    if kind == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "sequence_first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "sliced":
        return _into(x, (batch + 1, seqlen + 3, heads + 2, dim + 5),
                     lambda buffer: buffer[1:, 2:2 + seqlen, 1:1 + heads, 3:3 + dim])
    if kind == "expanded_heads":
        return x[:, :, :1].clone().expand_as(x)
    if kind == "expanded_batch":
        return x[:1].clone().expand_as(x)
    if kind == "last_strided":
        return _into(x, (batch, seqlen, heads, dim, 2), lambda buffer: buffer[..., 0])
    raise ValueError(kind)


def _into(x, size, view):
    target = view(torch.full(size, math.nan, dtype=x.dtype, device=x.device))
    return target.copy_(x)


def same_layout(x, y):
    """Whether x and y have the same strides, leaving out dimensions of size 1."""
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), y.stride()))


def python(code, *, timeout=120, **environment):
    """The standard output of `code`, run by a Python of its own that can import flash_cuda and these helpers."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(Path(flash_cuda.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout,
                          env=os.environ | {"PYTHONPATH": path} | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
