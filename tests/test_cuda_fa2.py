"""fa2 on CUDA against the float64 reference: head dims, lengths, masks, strides, packed input."""

import itertools
import math

import pytest
import torch

import cases
import flash_cuda
import kit
from cases import BF16, F16, replace
from cuda_kit import CUDA, case, check, each_dtype, on_cuda, unset_memory_is_nan  # noqa: F401

pytestmark = pytest.mark.cuda


@each_dtype
@pytest.mark.parametrize("head_dim", (1, 3, 8, 17, 32, 40, 64, 72, 96, 100, 104, 128, 136, 192, 200, 256))
def test_head_dims(head_dim, dtype):
    check(cases.build(case(head_dim=head_dim, dtype=dtype, causal=True)))
    copied = flash_cuda.last_call().copies
    assert set("qkv") <= set(copied) if head_dim % 8 else not copied


@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("seqlen_q, seqlen_k", [
    (1, 1), (1, 300), (300, 1), (7, 63), (63, 7), (64, 64), (65, 65), (127, 129), (128, 128), (129, 127), (192, 96),
    (96, 192), (257, 48), (48, 257), (513, 191)])
def test_lengths(seqlen_q, seqlen_k, causal, head_dim):
    check(cases.build(case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, causal=causal, heads=2, heads_kv=1)))


MASKS = [(causal, window) for causal in (False, True, "top_left")
         for window in (None, (0, 0), (3, 0), (0, 5), (70, 20), (None, 40), (150, None), (1000, 1000))]


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("causal, window", MASKS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(150, 210), (210, 150)])
def test_masks(seqlen_q, seqlen_k, causal, window, head_dim):
    check(cases.build(case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, window_size=window, head_dim=head_dim)))


EDGES = [
    case(heads_kv=4), case(heads_kv=1, causal=True), case(heads=1, heads_kv=1), case(layout="bhsd", causal=True),
    case(seqlen_q=0), case(seqlen_k=0), case(seqlen_k=0, causal=True), case(batch=0), case(heads=0, heads_kv=0),
    case(magnitude=3.0, dtype=F16, causal=True), case(magnitude=3.0), case(softmax_scale=0.0, causal=True),
    case(softmax_scale=0.0), case(softmax_scale=2.0), case(batch=33, seqlen_q=2, seqlen_k=3),
    case(batch=1, heads=16, heads_kv=16, seqlen_q=3, seqlen_k=5), case(batch=1, seqlen_q=1, seqlen_k=1, head_dim=16),
    case(batch=1, seqlen_q=900, seqlen_k=900, head_dim=128, heads=2, heads_kv=1, causal=True),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_edges(edge):
    check(cases.build(edge))


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v"), ("k", "v"), ()], ids="".join)
def test_gradients_of_some(wanted):
    check(cases.build(case(causal=True)), wanted=wanted)
    check(cases.build(case()), wanted=wanted, grad_lse=False)


@each_dtype
@pytest.mark.parametrize("head_dim", (32, 64, 128))
def test_very_negative_scores(head_dim, dtype):  # case 3: a row's LSE below -88.7 and a tile that the keys end in
    inputs = cases.build(case(batch=1, heads=1, heads_kv=1, seqlen_q=704, seqlen_k=704, head_dim=head_dim, dtype=dtype))
    inputs.leaves["q"] = 1 + inputs.leaves["q"].abs()
    inputs.leaves["k"] = -20 * (1 + inputs.leaves["k"].abs())
    got = check(inputs)
    assert got["lse"].max() < -88.7 and got["dq"].isfinite().all()


def test_one_key():  # case 1: its gradients are exact
    q, k, v = ((torch.randn(1, 1, 1, 16, device=CUDA) * 3).half().requires_grad_() for _ in range(3))
    out = flash_cuda.attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not dq.any() and not dk.any() and torch.equal(dv, torch.ones_like(dv)) and torch.equal(out, v)


def test_equal_huge_scores():  # case 7
    q = torch.zeros(1, 3, 1, 128, device=CUDA, dtype=BF16)
    k = torch.zeros(1, 200, 1, 128, device=CUDA, dtype=BF16)
    q[..., 0], k[..., 0] = 1024, -512
    out, lse = flash_cuda.attention(q, k, torch.ones_like(k), return_lse=True)
    assert torch.equal(out, torch.ones_like(out))
    expected = -524288 / math.sqrt(128) + math.log(200)
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-6, atol=0)


# ---- packed input

VARLEN = [
    ((5, 9), (33, 17), (1, 1), (64, 80)), ((0, 4), (7, 0), (0, 0), (3, 5)), ((0, 1), (1, 1), (2, 2)),
    ((300, 170), (170, 300), (1, 190)), ((0, 0), (0, 1), (223, 544)), ((3, 3),),
]


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True, "top_left"))
@pytest.mark.parametrize("lengths", VARLEN, ids=str)
def test_packed(lengths, causal, head_dim):
    check(cases.build(case(lengths=lengths, causal=causal, head_dim=head_dim, heads=3, heads_kv=3)))


@pytest.mark.parametrize("lengths", VARLEN[:4], ids=str)
def test_packed_with_groups_and_windows(lengths):
    check(cases.build(case(lengths=lengths, window_size=(40, 10), heads=9, heads_kv=3)), deterministic=True)


# ---- strides


@pytest.mark.parametrize("kind", kit.STRIDES)
@pytest.mark.parametrize("head_dim", (64, 40))
def test_strides(head_dim, kind):
    plain = cases.build(case(head_dim=head_dim, causal=True, heads=3, heads_kv=3))
    leaves = {n: kit.restride(t.to(CUDA), kind) for n, t in plain.leaves.items()}
    same = kit.Inputs({n: t.cpu().contiguous() for n, t in leaves.items()}, plain.options)
    got = check(same, gpu_inputs=kit.Inputs(leaves, plain.options))
    aligned = kind not in ("sliced", "last_strided")
    assert bool(flash_cuda.last_call().copies) == (not aligned)
    for name in "qkv":
        assert got["d" + name].shape == leaves[name].shape


@pytest.mark.parametrize("kind", kit.STRIDES)
def test_strides_of_dout(kind):  # case 15
    inputs = cases.build(case(causal=True))
    dout = kit.restride(torch.randn(2, 130, 4, 64).to(BF16), kind)
    got = check(inputs, grad_out=dout.contiguous())
    grads = {"wanted": ("q", "k", "v"), "grad_lse": torch.zeros(2, 4, 130, device=CUDA), "deterministic": True}
    a = kit.run_kernel(on_cuda(inputs), "fa2", grad_out=kit.restride(dout.contiguous().to(CUDA), kind), **grads)
    b = kit.run_kernel(on_cuda(inputs), "fa2", grad_out=dout.contiguous().to(CUDA), **grads)
    assert all(torch.equal(a[n], b[n]) for n in a) and got.keys() == a.keys()


@pytest.mark.parametrize("kind", ("contiguous", "packed_qkv", "heads_first", "sequence_first", "sliced"))
def test_results_have_the_layout_of_their_inputs(kind):
    leaves = {n: kit.restride(t.to(CUDA), kind) for n, t in cases.build(case()).leaves.items()}
    got = kit.run_kernel(kit.Inputs(leaves), "fa2", wanted=("q", "k", "v"),
                         grad_out=torch.randn(2, 130, 4, 64, device=CUDA, dtype=BF16))
    for name in "qkv":
        assert kit.same_layout(got["d" + name], torch.empty_like(leaves[name])), name
    assert kit.same_layout(got["out"], torch.empty_like(leaves["q"]))


@pytest.mark.slow
def test_offsets_beyond_32_bits():  # case 19
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    rows, stride = 100_200, 21_504
    buffer = torch.empty(rows * stride, device=CUDA, dtype=BF16)
    v = buffer.as_strided((1, rows, 1, 64), (0, stride, 64, 1)).copy_(torch.randn(1, rows, 1, 64, device=CUDA))
    q, k = (torch.randn(1, n, 1, 64, device=CUDA, dtype=BF16) for n in (40, rows))
    got, wanted = (flash_cuda.attention(q, k, x) for x in (v, v.contiguous()))
    assert torch.equal(got, wanted)


# ---- small shapes for compute-sanitizer, and everything together

SMALL = [case(seqlen_q=n, seqlen_k=m, head_dim=d, causal=c, heads=2, heads_kv=h, dtype=t) for (n, m), d, c, h, t in [
    ((130, 100), 64, True, 1, BF16), ((70, 200), 128, False, 2, F16), ((65, 65), 96, True, 2, BF16),
    ((40, 129), 256, True, 1, BF16), ((129, 70), 192, False, 1, F16)]]


@pytest.mark.sanitize
@pytest.mark.parametrize("small", SMALL, ids=str)
@pytest.mark.parametrize("deterministic", (False, True))
def test_small_shapes_for_the_sanitizer(small, deterministic):
    check(cases.build(small), deterministic=deterministic)
    check(cases.build(replace(small, lengths=((40, 70), (0, 3), (66, 1)))), deterministic=deterministic)


COMBINED = list(itertools.product((True, "top_left"), ((50, 9), (None, 0)), (24, 128)))


@pytest.mark.parametrize("causal, window, head_dim", COMBINED)
def test_combinations(causal, window, head_dim):
    check(cases.build(case(seqlen_q=333, seqlen_k=277, causal=causal, window_size=window, head_dim=head_dim, heads=6,
                           heads_kv=3, dtype=F16, layout="bhsd", softmax_scale=0.3)), deterministic=True)
