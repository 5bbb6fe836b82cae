"""Inputs that broke other attention kernels, each as a test of its kind; shapes: (batch, seqlen, heads, head_dim)."""

import itertools
import math

import pytest
import torch

import flash_cuda
import kit

F32, BF16, F16 = kit.DTYPES
HALF = pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
NEVER = -math.inf


@kit.each_version
@pytest.mark.parametrize("head_dim", (1, 16, 64, 128))
@kit.each_dtype
def test_one_key(dtype, head_dim, version):  # case 1
    """Its probability is 1 whatever the score: dQ = dK = 0, dV = dout."""
    leaves = kit.qkv(1, 1, 1, 1, 1, head_dim, dtype, magnitude=3.0)
    grad_out = torch.ones(1, 1, 1, head_dim, dtype=dtype)
    got = kit.check(kit.Inputs(leaves), version, grad_out=grad_out, grad_lse=False)
    assert torch.equal(got["out"], leaves["v"])
    torch.testing.assert_close(got["dv"], grad_out)
    tiny = 1e-5 * leaves["v"].float().abs().sum() * leaves["k"].float().abs().max()
    assert got["dq"].float().abs().max() <= tiny and got["dk"].float().abs().max() <= tiny


@kit.each_version
@HALF
def test_large_scores_over_a_long_sequence(dtype, version):  # case 2
    inputs = kit.Inputs(kit.qkv(1, 1024, 1024, 1, 1, 128, dtype, magnitude=3.0), {"causal": True})
    got = kit.check(inputs, version, grad_lse=False)
    assert all(g.isfinite().all() for g in got.values())


@kit.each_version
@pytest.mark.parametrize("head_dim", (32, 64, 128))
@pytest.mark.parametrize("seqlen", (64, 192, 704))
@HALF
def test_lse_under_what_exp_can_hold(dtype, seqlen, head_dim, version):  # case 3
    """Every score is far below -88.7: a padded key scored 0 would overflow."""
    k = 4.0 + 0.1 * torch.randn(2, seqlen, 1, head_dim)
    leaves = {"q": (-k).to(dtype), "k": k.to(dtype), "v": torch.randn(2, seqlen, 1, head_dim).to(dtype)}
    got = kit.check(kit.Inputs(leaves), version)
    assert got["lse"].max() < -80 and all(g.isfinite().all() for g in got.values())


@kit.each_version
@pytest.mark.parametrize("size, shown", ((8, 4), (70, 33), (130, 1)), ids=str)
@kit.each_dtype
def test_mask_that_shows_a_corner(dtype, size, shown, version):  # case 4
    corner = torch.zeros(size, size, dtype=torch.bool)
    corner[:shown, :shown] = True
    got = kit.check(kit.Inputs(kit.qkv(2, size, size, dtype=dtype), {"bias": corner}), version)
    assert (got["out"][:, shown:] == 0).all() and (got["lse"][:, :, shown:] == NEVER).all()
    assert (got["dq"][:, shown:] == 0).all() and (got["dk"][:, shown:] == 0).all() and (got["dv"][:, shown:] == 0).all()


@kit.each_version
@pytest.mark.parametrize("hidden", (slice(0, 128), slice(128, 441), slice(0, 441), slice(0, 1)), ids=str)
@kit.each_dtype
def test_mask_of_the_smallest_float(dtype, hidden, version):  # case 5
    """A finite huge number in place of -inf, over the first tiles, the last ones, or all: then it cancels."""
    bias = torch.zeros(2, 1, 1, 441, dtype=dtype)
    bias[..., hidden] = torch.finfo(dtype).min
    leaves = kit.qkv(2, 441, 441, 3, 3, 64, dtype)
    got = kit.run_kernel(kit.Inputs(leaves, {"bias": bias}), version, wanted=("q", "k", "v"),
                         grad_out=leaves["q"])
    assert all(t.isfinite().all() for t in got.values())
    if hidden == slice(0, 441) and dtype != F16:  # fp32 scores vanish beside the huge number: uniform attention
        torch.testing.assert_close(got["out"].float(), leaves["v"].float().mean(1, keepdim=True).expand_as(got["out"]),
                                   rtol=2e-2, atol=1e-5 if dtype == F32 else 1e-3)
        assert (got["lse"] < -3e38).all()
    else:
        kit.check(kit.Inputs(leaves, {"bias": bias}), version)


@kit.each_version
@pytest.mark.parametrize("value", (-1e30, -1e38, 1e30, 1e38))
def test_bias_of_huge_constants(value, version):  # case 5
    bias = torch.zeros(1, 1, 40, 90)
    bias[..., 30:60] = value
    bias[..., 7, :] = value
    inputs = kit.Inputs(kit.qkv(2, 40, 90), {"bias": bias})
    # A row whose every score is huge has an LSE that cannot hold the log of its sum: a backward gets no P from it.
    lost = kit.run_reference(inputs)["lse"].abs().amax((0, 1)) > 1e6
    grad_out = torch.randn(2, 40, 4, 32).masked_fill(lost[None, :, None, None], 0)
    got = kit.check(inputs, version, grad_out=grad_out, grad_lse=False)
    assert all(t.isfinite().all() for t in got.values())


@kit.each_version
@kit.each_dtype
def test_caches_with_nan_past_their_lengths(dtype, version):  # case 6
    leaves = kit.qkv(2, 1, 3, dtype=dtype)
    visible = torch.tensor([[True, False, False], [True, True, True]])[:, None, None]
    for name in "kv":
        leaves[name][0, 1:] = math.nan
    got = kit.check(kit.Inputs(leaves, {"bias": visible}), version)
    assert all(t.isfinite().all() for t in got.values())


@kit.each_version
@pytest.mark.parametrize("dtype, size", ((BF16, 64.0), (F32, 64.0), (F16, 30.0), (BF16, 2048.0)), ids=str)
@pytest.mark.parametrize("seqlen_k", (1, 100))
def test_every_score_hugely_negative(seqlen_k, dtype, size, version):  # case 7
    q, k, v = (torch.full((2, n, 2, 128), value, dtype=dtype)
               for n, value in ((5, size), (seqlen_k, -size), (seqlen_k, 1.0)))
    out, lse = flash_cuda.attention(q, k, v, version=version, return_lse=True)
    assert (out == 1).all()
    expected = -size * size * 128 / math.sqrt(128) + math.log(seqlen_k)
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=3e-7, atol=0)


@kit.each_version
@pytest.mark.parametrize("score", (5000.0, -10000.0, 0.0, 40.0))
@kit.each_dtype
def test_softcap_saturates(dtype, score, version):  # cases 8 and 29
    """One key: the LSE is the capped score. A second one makes the derivative show."""
    q = torch.full((2, 3, 1, 16), math.copysign(math.sqrt(abs(score) / 16), score)).to(dtype)
    k = torch.full((2, 1, 1, 16), math.sqrt(abs(score) / 16)).to(dtype)
    options = {"softcap": 50.0, "softmax_scale": 1.0}
    _, lse = flash_cuda.attention(q, k, k, version=version, return_lse=True, **options)
    exact = (q.double() * k.double()).sum(-1)[:, None, :, 0]
    torch.testing.assert_close(lse.double(), 50 * torch.tanh(exact / 50), rtol=1e-6, atol=1e-6)
    two = torch.cat([k, -k], dim=1)
    got = kit.check(kit.Inputs({"q": q, "k": two, "v": two.flip(1)}, options), version)
    assert all(t.isfinite().all() for t in got.values())


@kit.each_version
@kit.each_dtype
def test_derivative_of_softcap_comes_before_the_mask(dtype, version):  # case 29
    """Hidden keys whose scores would overflow the derivative's formula from a masked score."""
    leaves = kit.qkv(2, 40, 60, dtype=dtype, magnitude=2.0)
    for options in ({"causal": True}, {"bias": torch.rand(60) < 0.5}, {"window_size": (3, 3)}):
        kit.check(kit.Inputs(leaves, options | {"softcap": 1.5}), version)


@kit.each_version
@pytest.mark.parametrize("lengths", ((2048, 1024), (100, 1), (65, 64), (129, 3)), ids=str)
def test_more_queries_than_keys(lengths, version):  # case 9
    got = kit.check(kit.Inputs(kit.qkv(1 if lengths[0] == 2048 else 2, *lengths, 1, 1, 16), {"causal": True}), version)
    empty = lengths[0] - lengths[1]
    assert (got["out"][:, :empty] == 0).all() and (got["dq"][:, :empty] == 0).all()
    assert (got["lse"][:, :, :empty] == NEVER).all() and (got["lse"][:, :, empty:] > NEVER).all()


@kit.each_version
@pytest.mark.parametrize("seqlen_k", (1, 2, 65, 300))
@pytest.mark.parametrize("seqlen_q", (1, 3))
def test_few_queries_and_many_keys(seqlen_q, seqlen_k, version):  # case 10
    leaves = kit.qkv(2, seqlen_q, seqlen_k)
    kit.check(kit.Inputs(leaves, {"causal": True}), version)
    kit.check(kit.Inputs(leaves, {"causal": "top_left"}), version)
    q, k, v = leaves.values()
    if seqlen_q == 1:
        assert torch.equal(flash_cuda.attention(q, k, v, causal=True, version=version),
                           flash_cuda.attention(q, k, v, version=version))
        torch.testing.assert_close(flash_cuda.attention(q, k, v, causal="top_left", version=version),
                                   v[:, :1].repeat_interleave(2, dim=2))


@kit.each_version
@pytest.mark.parametrize("window", ((0, 7), (None, 6), (30, 5), (9, 100), (100, 9), (2**62, 2**62), (0, 2**31)),
                         ids=str)
@pytest.mark.parametrize("lengths", ((12, 4), (70, 33), (4, 12)), ids=str)
def test_windows_wider_than_the_keys(lengths, window, version):  # case 11
    kit.check(kit.Inputs(kit.qkv(2, *lengths), {"window_size": window}), version)
    kit.check(kit.Inputs(kit.qkv(2, *lengths), {"window_size": window, "causal": "top_left"}), version)


@pytest.mark.parametrize("window", ((-1, -3), (-1, 0), (0, -1), (-1, -1), (None, -2)), ids=str)
def test_negative_windows_are_errors(window):  # cases 12 and 13: -1 is not "unbounded"; the message says what is
    with pytest.raises(ValueError, match="window_size.*None"):
        flash_cuda.attention(**kit.qkv(), window_size=window)


@kit.each_version
def test_more_heads_than_a_grid_axis(version):  # cases 21 and 22
    """(1, 3, 71280, 128) with heads and length "swapped" is 71280 heads; so are 65536 and more sequences."""
    for shape in ((1, 3, 71280, 128), (65537, 1, 2, 8), (1, 2, 65537, 8), (300, 1, 300, 4)):
        q, k, v = (torch.randn(shape).bfloat16().requires_grad_() for _ in "qkv")
        out = flash_cuda.attention(q, k, v, version=version)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        for corner in (slice(0, 1), slice(-1, None)):  # the reference of the first and the last head
            part = [t.detach()[corner, :, corner] for t in (q, k, v)]
            inputs, ones = kit.Inputs(dict(zip("qkv", part))), torch.ones_like(part[0])
            got = {n: t[corner, :, corner] for n, t in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads))}
            got["lse"] = kit.run_kernel(inputs, version)["lse"]
            kit.compare(got, inputs, wanted=("q", "k", "v"), grad_out=ones)


@kit.each_version
@pytest.mark.parametrize("causal", (False, True, "top_left"), ids=str)
@pytest.mark.parametrize("sinks", (False, True))
@kit.each_dtype
def test_no_keys(dtype, sinks, causal, version):  # case 25, rule 5
    leaves = kit.qkv(2, 5, 0, dtype=dtype) | ({"sinks": torch.randn(4)} if sinks else {})
    got = kit.check(kit.Inputs(leaves, {"causal": causal}), version)
    assert (got["out"] == 0).all() and (got["lse"] == NEVER).all() and (got["dq"] == 0).all()
    assert not sinks or (got["dsinks"] == 0).all()


@kit.each_version
@pytest.mark.parametrize("shape", ((0, 5, 4, 8), (2, 0, 4, 8), (2, 5, 0, 8), (0, 0, 2, 8), (0, 0, 0, 8)), ids=str)
def test_empty_tensors(shape, version):  # case 25, rule 12
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in "qkv")
    out, lse = flash_cuda.attention(q, k, v, version=version, return_lse=True)
    assert out.shape == shape and lse.shape == (shape[0], shape[2], shape[1])
    assert all(g.shape == shape for g in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)))


@kit.each_version
def test_empty_tensors_without_a_head_dim(version):  # case 25 as reported
    q, k, v = (torch.zeros(0, 0, 2, 0) for _ in "qkv")
    assert flash_cuda.attention(q, k, v, version=version).shape == (0, 0, 2, 0)


@kit.each_version
@pytest.mark.parametrize("causal", (False, True), ids=str)
@HALF
def test_large_channels_with_grouped_heads(dtype, causal, version):  # case 32
    leaves = kit.qkv(2, 70, 90, 16, 2, 256, dtype)
    for name in "qk":
        leaves[name][..., (3, 100, 255)] *= 8
    inputs, grad_out = kit.Inputs(leaves, {"causal": causal}), torch.randn(2, 70, 16, 256).to(dtype)
    got = kit.check(inputs, version, grad_out=grad_out, grad_lse=False)
    exact = kit.run_reference(inputs, wanted=("q",), grad_out=grad_out)["dq"]
    assert (got["dq"].double() - exact).norm() < 0.01 * exact.norm()


@kit.each_version
@pytest.mark.parametrize("length", (1, 2, 7, 31, 32, 33))
def test_sinks_join_the_sum_once(length, version):  # case 30
    """All scores 0: out = sum of v / (length + e^sink), LSE = log(length + e^sink)."""
    q, k, v = torch.zeros(2, 3, 4, 8), torch.randn(2, length, 4, 8), torch.randn(2, length, 4, 8)
    sinks = torch.tensor([-50.0, 0.0, 2.0, 50.0], requires_grad=True)
    out, lse = flash_cuda.attention(q, k, v, sinks=sinks, version=version, return_lse=True)
    total = length + sinks.detach().double().exp()
    expected = (v.double().sum(1) / total[:, None])[:, None].expand(2, 3, 4, 8)
    torch.testing.assert_close(out.detach().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.detach().double(), total.log()[None, :, None].expand(2, 4, 3), rtol=1e-6, atol=1e-6)
    (dsinks,) = torch.autograd.grad(lse.sum(), sinks)
    torch.testing.assert_close(dsinks.double(), 6 * (1 - length / total), rtol=1e-5, atol=1e-5)


@kit.each_version
@pytest.mark.parametrize("scale", (0.0, 1e-30, 1e-3, 1e3))
@pytest.mark.parametrize("magnitude", (1e-20, 1.0, 1e15))
def test_extreme_scales(magnitude, scale, version):
    """As long as a score fits a float."""
    leaves = kit.qkv(2, 20, 30)
    leaves["q"] *= magnitude
    leaves["k"] *= magnitude
    got = kit.run_kernel(kit.Inputs(leaves, {"softmax_scale": scale}), version)
    assert all(t.isfinite().all() for t in got.values())
    ref = kit.run_reference(kit.Inputs(leaves, {"softmax_scale": scale}))
    if magnitude * magnitude * scale < 1e4:  # beyond, which key wins hangs on the last bit of its score
        torch.testing.assert_close(got["out"].double(), ref["out"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got["lse"].double(), ref["lse"], rtol=1e-5, atol=1e-5)


@kit.each_version
def test_every_pair_of_short_lengths(version):  # case 26, rule 12
    for seqlen_q, seqlen_k in itertools.product((1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17), repeat=2):
        causal = (False, True, "top_left")[(seqlen_q + seqlen_k) % 3]
        kit.check(kit.Inputs(kit.qkv(2, seqlen_q, seqlen_k, 2, 1, 5), {"causal": causal}), version)
