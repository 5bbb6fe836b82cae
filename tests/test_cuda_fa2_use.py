"""fa2 on CUDA in use: poison, the same again, memory, what is refused, and torch's tools."""

import math

import pytest
import torch

import cases
import flash_cuda
import kit
from cases import BF16
from cuda_kit import CUDA, case, check, on_cuda, to_cuda, unset_memory_is_nan  # noqa: F401

pytestmark = pytest.mark.cuda


# ---- poison


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": "top_left"}, {"window_size": (60, 30)}], ids=str)
def test_only_queries_that_see_it_meet_it(options, head_dim, bad):
    """One bad value in V, and one in K, each in a tile that some queries see and others do not."""
    for name in "kv":
        inputs = cases.build(case(head_dim=head_dim, seqlen_q=230, seqlen_k=200, **options))
        inputs.leaves[name][0, 150, 0, 5] = bad
        # +-inf in K times a query of either sign: rows may stay finite; NaN must sit where the reference has it.
        got = check(inputs) if not math.isinf(bad) else check_finite_rows(inputs)
        assert got["out"][1].isfinite().all() and not got["out"][0].isfinite().all()


def check_finite_rows(inputs):
    """Rows that do not see the bad key are exactly those of the same call with a clean key."""
    clean = kit.Inputs({n: t.nan_to_num(0.0, 0.0, 0.0) for n, t in inputs.leaves.items()}, inputs.options)
    grads = {"wanted": ("q", "k", "v"), "grad_out": torch.randn(2, 230, 4, inputs.leaves["q"].shape[-1]).to(BF16).cuda(),
             "deterministic": True}
    got, expected = (kit.run_kernel(on_cuda(x), "fa2", **grads) for x in (inputs, clean))
    hidden = flash_cuda.reference.attention(  # rows whose only way to the bad key is masked
        torch.zeros(1, 230, 1, 1), torch.zeros(1, 200, 1, 1), (torch.arange(200) == 150).float()[None, :, None, None],
        **inputs.options)[0, :, 0, 0] == 0
    assert hidden.any() and not hidden.all()
    for name in ("out", "dq"):
        assert torch.equal(got[name][0, hidden.cuda()], expected[name][0, hidden.cuda()]), name
        assert torch.equal(got[name][1], expected[name][1]), name
    return {n: x.cpu() for n, x in got.items()}


def test_what_lies_past_the_end_is_never_read():
    """Keys and queries of a sequence end inside a buffer of NaN."""
    q, k, v = (torch.full((2, 400, 2, 64), math.nan, device=CUDA, dtype=BF16) for _ in range(3))
    leaves = {"q": q[:, :130], "k": k[:, :77], "v": v[:, :77]}
    for t in leaves.values():
        t.copy_(torch.randn(t.shape))
    check(kit.Inputs({n: t.cpu().contiguous() for n, t in leaves.items()}), gpu_inputs=kit.Inputs(leaves))


# ---- the same again


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"heads_kv": 1}, {"window_size": (100, 20)},
                                     {"lengths": ((300, 170), (170, 300), (1, 190))}], ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_deterministic(head_dim, options):  # cases 14 and 33
    inputs = on_cuda(cases.build(case(**{"seqlen_q": 500, "seqlen_k": 500, "head_dim": head_dim, **options})))
    grads = {"wanted": ("q", "k", "v"), "grad_out": torch.randn_like(inputs.leaves["q"]), "deterministic": True}
    first = kit.run_kernel(inputs, "fa2", **grads)
    noise = torch.randn(512, 512, device=CUDA)
    for _ in range(20):
        noise = noise @ noise * 1e-2
        again = kit.run_kernel(inputs, "fa2", **grads)
        assert all(torch.equal(first[n], again[n]) for n in first)


def test_forward_is_bitwise_equal():  # case 36
    q, k, v = (torch.randn(2, 700, 4, 128, device=CUDA, dtype=BF16) for _ in range(3))
    first = flash_cuda.attention(q, k, v, causal=True, return_lse=True)
    for _ in range(100):
        assert all(map(torch.equal, first, flash_cuda.attention(q, k, v, causal=True, return_lse=True)))


# ---- memory


@pytest.mark.parametrize("heads_kv", (8, 2))
def test_memory(heads_kv):
    """Forward: out and LSE. Backward: the gradients, one float dQ, and delta."""
    batch, seqlen, heads, dim = 1, 4096, 8, 64
    q = torch.randn(batch, seqlen, heads, dim, device=CUDA, dtype=BF16, requires_grad=True)
    k, v = (torch.randn(batch, seqlen, heads_kv, dim, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(2))
    rows, q_bytes, k_bytes = batch * seqlen * heads, q.numel() * 2, k.numel() * 2
    dout = torch.randn_like(q)
    torch.autograd.grad(flash_cuda.attention(q, k, v), (q, k, v), dout)

    def peak(work):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        return torch.cuda.max_memory_allocated() - before, result

    used, out = peak(lambda: flash_cuda.attention(q, k, v))
    assert used <= q_bytes + rows * 4 + 4096
    used, _ = peak(lambda: torch.autograd.grad(out, (q, k, v), dout))
    assert used <= q_bytes + 2 * k_bytes + rows * dim * 4 + rows * 4 + 4096


# ---- what is refused

REFUSED = {
    "softcap": {"softcap": 5.0}, "alibi_slopes": {"alibi_slopes": torch.ones(4)}, "sinks": {"sinks": torch.zeros(4)},
    "bias": {"bias": torch.zeros(130, 260)}, "dropout_p": {"dropout_p": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_features_are_refused_by_name(name):
    inputs = on_cuda(cases.build(case()))
    options = {n: to_cuda(x) for n, x in REFUSED[name].items()}
    with pytest.raises(NotImplementedError, match=rf"fa2 takes masks and windows .* got {name}; "):
        flash_cuda.attention(**inputs.leaves, **options)
    assert flash_cuda.explain(**inputs.leaves, **options).versions["fa2"].status == "cannot run this input"
    with pytest.raises(NotImplementedError, match="no softcap, alibi_slopes, "):
        torch.compile(flash_cuda.attention, fullgraph=True, backend="aot_eager")(**inputs.leaves, **options)


def test_types_and_versions_are_refused():
    inputs = on_cuda(cases.build(case()))
    wide = {n: t.float() for n, t in inputs.leaves.items()}
    with pytest.raises(NotImplementedError, match="fa2 takes bfloat16 and float16 on CUDA, got torch.float32; convert"):
        flash_cuda.attention(**wide)
    large = {n: torch.zeros(1, 4, 1, 264, device=CUDA, dtype=BF16) for n in "qkv"}
    with pytest.raises(NotImplementedError, match="head_dim of 1 to 256 on CUDA, got 264"):
        flash_cuda.attention(**large)
    for version in ("fa1", "fa3"):
        with pytest.raises(NotImplementedError, match=f"{version} needs an attention kernel for CUDA tensors"):
            flash_cuda.attention(**inputs.leaves, version=version)
    with pytest.raises(ValueError, match="k must be on cuda:0 like q, got cpu"):
        flash_cuda.attention(inputs.leaves["q"], inputs.leaves["k"].cpu(), inputs.leaves["v"])


# ---- torch


def test_explain_says_what_runs():
    inputs = on_cuda(cases.build(case(causal=True)))
    plan = flash_cuda.explain(**inputs.leaves, causal=True)
    flash_cuda.attention(**inputs.leaves, causal=True)
    ran, planned = flash_cuda.last_call(), plan.versions["fa2"].forward
    assert plan.selected == "fa2" and "fa2_fwd_cuda_bf16_hd64" in str(plan)
    for name in ("kernel", "tile", "grid", "fast_memory_bytes"):
        assert getattr(ran, name) == getattr(planned, name), name
    assert planned.bytes_loaded > 0 and ran.bytes_loaded is None


@pytest.mark.parametrize("grad", (False, True))
def test_compile(grad):
    inputs = on_cuda(cases.build(case(causal=True)))
    leaves = {n: t.requires_grad_(grad) for n, t in inputs.leaves.items()}
    call = lambda q, k, v: flash_cuda.attention(q, k, v, causal=True, deterministic=True) * 2  # noqa: E731
    out, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(**leaves), call(**leaves)
    assert torch.equal(out, expected)
    if grad:
        got, wanted = (torch.autograd.grad(x.sum(), list(leaves.values())) for x in (out, expected))
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("kind", ("contiguous", "heads_first", "sliced", "last_strided", "heads_first, last strided"))
@pytest.mark.parametrize("head_dim", (64, 20))
@pytest.mark.parametrize("seqlen_k", (260, 0))
def test_fake_tensors_have_the_strides_of_real_ones(seqlen_k, head_dim, kind):  # case 39
    leaves = [t.to(CUDA) for t in cases.build(case(head_dim=head_dim, seqlen_k=seqlen_k)).leaves.values()]
    if kind == "heads_first, last strided":
        leaves = [kit.restride(t.repeat_interleave(2, -1), "heads_first")[..., ::2] for t in leaves]
    else:
        leaves = [kit.restride(t, kind) for t in leaves]
    options = (None, 0, -1, -1, 0.0, 2, 0, 0, 0.0, *(None,) * 7, 0, 0, False)
    torch.library.opcheck(torch.ops.flash_cuda.fwd.default, (*leaves, *options),
                          test_utils=("test_schema", "test_faketensor"))
    out, lse = torch.ops.flash_cuda.fwd(*leaves, *options)
    torch.library.opcheck(torch.ops.flash_cuda.bwd.default,
                          (torch.randn_like(out), None, *leaves, out, lse, *options, [True, True, True, False, False]),
                          test_utils=("test_schema", "test_faketensor"))


def test_graph_and_stream():  # case 35
    q, k, v = (torch.randn(2, 300, 4, 64, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(3))

    def step():
        out = flash_cuda.attention(q, k, v, causal=True, deterministic=True)
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in step()]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for x in captured:
            x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, expected))


def test_graph_with_other_lengths():  # case 38: the lengths in device memory rule
    lengths = [torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([0, 100, 128], [0, 30, 128])]
    cu, (q, k, v) = lengths[0].clone(), (torch.randn(128, 2, 64, device=CUDA, dtype=BF16) for _ in range(3))
    call = lambda cu: flash_cuda.attention_varlen(q, k, v, cu, cu, 128, 128, causal=True)  # noqa: E731
    expected = [call(x) for x in lengths]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(cu)
    for x, wanted in zip(lengths, expected):
        cu.copy_(x)
        graph.replay()
        assert torch.equal(out, wanted)


def test_autocast():
    q, k, v = (torch.randn(2, 65, 4, 64, device=CUDA, requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", torch.bfloat16):
        out = flash_cuda.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32
