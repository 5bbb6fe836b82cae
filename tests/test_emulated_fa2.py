"""fa2's CUDA kernels where there is no GPU: the very code of csrc/fa2, emulated (tests/emulator), against float64.

What this cannot show, a GPU must: speed, and what only the real compiler and the real memory model do.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import cases
import emulated
import flash_cuda
import kit
from cases import BF16, F16, Case

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_90 by sm_80", "sm_120 by sm_90")
each_arch = pytest.mark.parametrize("arch", ARCHS)


def case(**changes):
    return Case(**({"batch": 2, "seqlen_q": 130, "seqlen_k": 260, "heads": 2, "heads_kv": 1, "head_dim": 64, "dtype": BF16}
                   | changes))


def check(inputs, *, wanted=("q", "k", "v"), grad_lse=None, **more):
    """Outputs and gradients against the float64 reference, as for every backend."""
    q = inputs.leaves["q"]
    grads = {"wanted": wanted, "grad_out": torch.randn(q.shape).to(q.dtype) if wanted else None, "grad_lse": None}
    if wanted and grad_lse is None:
        grads["grad_lse"] = torch.randn(kit._lse_shape(inputs))
    options = {n: x for n, x in inputs.options.items() if n not in ("softcap", "dropout_p")}
    got = kit.evaluate(emulated.attention, kit.Inputs(inputs.leaves, options, inputs.packed), **grads, **more)
    kit.compare(got, inputs, sum_roundings=max(1, q.shape[-1] / 16), **grads)
    return got


@each_arch
@pytest.mark.parametrize("head_dim, dtype", [(8, BF16), (40, F16), (64, BF16), (64, F16), (96, BF16), (128, F16), (136, BF16),
                                             (192, BF16), (256, BF16), (256, F16)])
def test_head_dims(head_dim, dtype, arch):
    check(cases.build(case(head_dim=head_dim, dtype=dtype, causal=True)), arch=arch)
    assert emulated.library(arch).bank_conflicts() == 0


LENGTHS = [(1, 1), (1, 200), (200, 1), (65, 65), (127, 129), (129, 127), (191, 97), (48, 257), (300, 40)]


@pytest.mark.parametrize("arch, head_dim", [("sm_80", 64), ("sm_86", 96), ("sm_90", 64), ("sm_90", 128)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
@pytest.mark.parametrize("causal", (False, True))
def test_lengths(seqlen_q, seqlen_k, causal, arch, head_dim):
    check(cases.build(case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, causal=causal, batch=1)), arch=arch)


WINDOWS = (None, (0, 0), (3, 0), (0, 5), (70, 20), (None, 40), (150, None), (1000, 1000))


@pytest.mark.parametrize("causal, window", list(itertools.product((False, True, "top_left"), WINDOWS)))
def test_masks(causal, window):
    for arch, (seqlen_q, seqlen_k) in zip(("sm_80", "sm_90"), ((150, 210), (210, 150))):
        check(cases.build(case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, window_size=window, batch=1)), arch=arch)


EDGES = [
    case(heads_kv=2), case(heads=6, heads_kv=2, causal=True), case(layout="bhsd", causal=True), case(seqlen_q=0),
    case(batch=0), case(magnitude=3.0, dtype=F16, causal=True), case(softmax_scale=0.0, causal=True),
    case(softmax_scale=2.0), case(batch=17, seqlen_q=2, seqlen_k=3), case(seqlen_q=70, seqlen_k=5, causal=True),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_edges(edge):
    for deterministic in (False, True):
        check(cases.build(edge), deterministic=deterministic)


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v"), ()], ids="".join)
def test_gradients_of_some(wanted):
    check(cases.build(case(causal=True)), wanted=wanted)
    check(cases.build(case()), wanted=wanted, grad_lse=False)


@pytest.mark.parametrize("lengths", [((5, 9), (33, 17), (1, 1), (64, 80)), ((0, 4), (7, 0), (0, 0), (3, 5)),
                                     ((150, 70), (70, 150), (1, 90)), ((0, 0), (0, 1), (123, 144))], ids=str)
@pytest.mark.parametrize("causal", (False, True, "top_left"))
def test_packed(lengths, causal):
    for arch, deterministic in itertools.product(("sm_80", "sm_90"), (False, True)):
        check(cases.build(case(lengths=lengths, causal=causal, heads=3, heads_kv=3)), arch=arch, deterministic=deterministic)


@pytest.mark.parametrize("kind", [s for s in kit.STRIDES if s != "last_strided"])
def test_strides(kind):
    check(cases.build(case(causal=True, heads=3, heads_kv=3, strides=kind, head_dim=40)))
    check(cases.build(case(strides=kind, heads=3, heads_kv=3)))


def test_scores_beyond_what_a_float_counts():
    """The maximum comes off before the scale, where rounding their product would lose it."""
    for q_value, k_value, dtype, scale in ((60000, 60000, F16, None), (700416, 299008, BF16, None), (3, 5, BF16, 1e20),
                                           (-60000, 60000, F16, 0.3), (1, 1, BF16, 1e-30)):
        q, k = (torch.full((1, n, 1, 64), float(x), dtype=dtype) for n, x in ((70, q_value), (150, k_value)))
        v = torch.randn(1, 150, 1, 64).to(dtype)
        for keys in (k, k * ((1 + torch.arange(150) % 2) / 2).to(dtype).view(1, -1, 1, 1)):
            expected, expected_lse = flash_cuda.reference.attention(q, keys, v, softmax_scale=scale, return_lse=True,
                                                                    dtype=torch.float64)
            out, lse = emulated.attention(q, keys, v, softmax_scale=scale, return_lse=True)
            torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)
            torch.testing.assert_close(lse.double(), expected_lse, rtol=3e-7, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_nothing_masked_is_read_into_a_result(head_dim):  # rule 6
    inputs = cases.build(case(seqlen_q=150, seqlen_k=210, head_dim=head_dim, causal="top_left"))
    for name in "kv":
        inputs.leaves[name][:, 170:] = math.nan
        inputs.leaves[name][:, 160] = math.inf
    got = check(inputs)
    assert all(got[n].isfinite().all() for n in got)


# ---- the schedule of a GPU is not ours to choose

@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_90"))
@pytest.mark.parametrize("head_dim", (64, 96, 128, 192))
def test_every_order_of_warps_gives_the_same_bits(head_dim, arch):
    inputs = cases.build(case(head_dim=head_dim, causal=True))
    grads = {"wanted": ("q", "k", "v"), "grad_out": torch.randn(inputs.leaves["q"].shape).to(BF16)}
    options = {n: inputs.options[n] for n in ("causal",)}

    def run(seed, late):
        return kit.evaluate(emulated.attention, kit.Inputs(inputs.leaves, options), arch=arch, seed=seed, late_copies=late,
                            **grads)

    first = run(0, True)
    for seed, late in ((1, True), (2, False), (3, False)):
        other = run(seed, late)
        assert all(torch.equal(first[n], other[n]) for n in first)


EDITS = [
    ("__syncthreads();  // P and dS of every warp are there; with 3 stages also the next Q and dO", "", True),
    ("__syncthreads();  // everyone's have; and every warp is done with the last query block's P, dS, Q and dO", "", True),
    ("if constexpr (Config::kStages == 3) ptx::cp_async_wait_group<0>();", "", True),
    ("    __syncthreads();\n    return false;", "    return false;", False),
    ("    ptx::cp_async_wait_group<0>();\n    if (clean)", "    if (clean)", False),
]


@pytest.mark.parametrize("text, other, backward", EDITS)
def test_a_missing_wait_shows(text, other, backward):
    """Without one of the kernels' barriers or waits some order of events gives a wrong result."""
    noticed = []
    for head_dim, late, seed in itertools.product((64, 128), (False, True), (0, 1)):
        try:
            check(cases.build(case(head_dim=head_dim)), wanted=("q", "k", "v") if backward else (), late_copies=late, seed=seed,
                  edit=(text, other))
        except AssertionError:
            noticed.append((head_dim, late, seed))
    assert noticed


def test_half_rounds_as_torch_does():
    """Every finite float16, as the only value of a softmax, comes out as it was."""
    v = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(F16)
    v = v[v.isfinite()].reshape(-1, 1, 1, 64)
    q = torch.zeros_like(v)
    out = emulated.attention(q, q, v)
    assert torch.equal(out, v)


def test_dropout_mask():
    seed = torch.tensor([-(2**62) + 5, 12345678901])
    for shape in ((2, 3, 40, 52), (1, 2, 17, 64)):
        keep = torch.full(shape, 7, dtype=torch.uint8)
        emulated.dropout_mask(keep, seed, 0.3)
        assert torch.equal(keep.bool(), flash_cuda.dropout_mask(*shape, 0.3, seed=seed)) and keep.max() == 1
