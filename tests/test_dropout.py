"""Rule 8: the mask is a pure function of seed and place, the same in every version, forward and backward."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cases
import flash_cuda
import kit
from flash_cuda import _C, reference

PROBABILITIES = (0.0, 1e-6, 0.1, 0.25, 0.5, 0.9, 1 - 2**-15, 1 - 1e-7)
SHAPES = ((2, 3, 33, 49), (1, 1, 1, 1), (3, 2, 16, 16), (1, 2, 100, 7), (2, 2, 0, 5), (70, 5, 3, 40))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", PROBABILITIES)
def test_mask_is_the_philox_of_the_definition(p, shape):
    for seed in (torch.tensor([0, 0]), torch.tensor([-1, 2**62 + 12345]), torch.randint(-2**63, 2**63 - 1, (2,))):
        got = flash_cuda.dropout_mask(*shape, p, seed=seed)
        assert got.dtype == torch.bool
        assert torch.equal(got, reference.dropout_mask(*shape, p, seed=seed))


def one_hot_values(seqlen_q, seqlen_k, dtype=torch.float32):
    """q = 0 and v = identity: out is the probabilities themselves, each 1 / seqlen_k before dropout."""
    v = torch.eye(seqlen_k, dtype=dtype)[None, :, None].expand(2, seqlen_k, 3, seqlen_k)
    return torch.zeros(2, seqlen_q, 3, seqlen_k, dtype=dtype), torch.randn(2, seqlen_k, 3, seqlen_k).to(dtype), v


@kit.each_version
@pytest.mark.parametrize("fast_memory", (2048, 8192, 512 * 1024))
@pytest.mark.parametrize("isa", _C.cpu_isas())
@kit.each_dtype
def test_forward_drops_what_the_mask_drops(dtype, isa, fast_memory, version):
    _C.set_cpu_isa(isa)
    _C.set_cpu_fast_memory(fast_memory)
    q, k, v = one_hot_values(37, 53, dtype)
    torch.manual_seed(5)
    keep = flash_cuda.dropout_mask(2, 3, 37, 53, 0.3)
    torch.manual_seed(5)
    out = flash_cuda.attention(q, k, v, dropout_p=0.3, version=version)
    assert torch.equal(out.transpose(1, 2) != 0, keep)
    threshold = math.floor(0.3 * 65536 + 0.5)
    torch.testing.assert_close(out.transpose(1, 2)[keep].float().mean().item(), 65536 / (65536 - threshold) / 53,
                               rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=0)


@kit.each_version
def test_backward_drops_what_the_mask_drops(version):
    """dV of a one-hot dout reads the probabilities that the backward recomputed."""
    q, k, _ = one_hot_values(37, 53)
    v = torch.randn(2, 53, 3, 53, requires_grad=True)
    torch.manual_seed(5)
    keep = flash_cuda.dropout_mask(2, 3, 37, 53, 0.3)
    torch.manual_seed(5)
    out = flash_cuda.attention(q, k, v, dropout_p=0.3, version=version)
    eye = torch.eye(37, 53)[None, :, None].expand(2, 37, 3, 53)
    (dv,) = torch.autograd.grad(out, v, eye)
    assert torch.equal(dv.permute(0, 2, 3, 1)[:, :, :37] != 0, keep)


@kit.each_version
@pytest.mark.parametrize("p", PROBABILITIES)
@kit.each_dtype
def test_any_probability(dtype, p, version):
    kit.check(cases.build(cases.Case(dropout_p=p, dtype=dtype, causal=True)), version)


@kit.each_version
def test_a_probability_that_rounds_to_one_drops_everything(version):
    q, k, v = (t.requires_grad_() for t in kit.qkv().values())
    out, lse = flash_cuda.attention(q, k, v, dropout_p=1 - 1e-7, version=version, return_lse=True)
    assert (out == 0).all() and lse.isfinite().all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_share_of_kept_elements_and_their_independence():
    n = 1 << 20
    keep = flash_cuda.dropout_mask(4, 4, 256, 256, 0.3, seed=torch.tensor([17, 4])).double()
    p = 1 - math.floor(0.3 * 65536 + 0.5) / 65536
    assert abs(keep.mean().item() - p) < 5 * math.sqrt(p * (1 - p) / n)
    centred = (keep - p) / math.sqrt(p * (1 - p))
    for shift in ((0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1), (0, 0, 8, 0), (0, 0, 0, 8), (0, 0, 16, 0), (0, 0, 0, 16),
                  (0, 1, 0, 0), (1, 0, 0, 0)):
        correlation = (centred * centred.roll(shift, (0, 1, 2, 3))).mean().item()
        assert abs(correlation) < 5 / math.sqrt(n), shift
    other = flash_cuda.dropout_mask(4, 4, 256, 256, 0.3, seed=torch.tensor([18, 4])).double()
    assert abs((centred * (other - p)).mean().item()) < 5 / math.sqrt(n)
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3)):  # the share in each row, column and head
        share = keep.mean(dims)
        assert (share - p).abs().max() < 6 * math.sqrt(p * (1 - p) / (n / len(share)))


@kit.each_version
def test_manual_seed_reproduces_and_calls_differ(version):  # rule 8, case 40 in eager mode
    tensors = kit.qkv()
    torch.manual_seed(3)
    first, second = (flash_cuda.attention(**tensors, dropout_p=0.2, version=version) for _ in range(2))
    torch.manual_seed(3)
    again = flash_cuda.attention(**tensors, dropout_p=0.2, version=version)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    seed = flash_cuda.last_call().dropout_seed
    torch.manual_seed(3)
    drawn = flash_cuda.dropout_mask(2, 4, 33, 49, 0.2)
    assert torch.equal(drawn, flash_cuda.dropout_mask(2, 4, 33, 49, 0.2, seed=seed))


def test_versions_agree_on_the_mask():
    tensors = kit.qkv()
    outs = []
    for version in kit.VERSIONS:
        torch.manual_seed(3)
        outs.append(flash_cuda.attention(**tensors, dropout_p=0.2, version=version))
    torch.testing.assert_close(*outs)


@kit.each_version
def test_without_dropout_no_random_number_is_drawn(version):  # case 40
    tensors = [t.requires_grad_() for t in kit.qkv().values()]
    before = torch.get_rng_state()
    flash_cuda.attention(*tensors, version=version).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert flash_cuda.last_call().dropout_seed is None


@kit.each_version
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing_reproduces_the_mask(reentrant, version):  # case 40
    tensors = [t.requires_grad_() for t in kit.qkv().values()]

    def function(q, k, v):
        return flash_cuda.attention(q, k, v, dropout_p=0.4, version=version, deterministic=True)

    torch.manual_seed(8)
    plain = function(*tensors)
    expected = torch.autograd.grad((plain * plain).sum(), tensors)
    torch.manual_seed(8)
    out = checkpoint(function, *tensors, use_reentrant=reentrant)
    torch.rand(5)  # the generator has moved on when the backward runs the forward again
    (out * out).sum().backward()
    assert torch.equal(out, plain)
    assert all(torch.equal(t.grad, g) for t, g in zip(tensors, expected))


@kit.each_version
def test_packed_dropout_uses_the_place_in_the_sequence(version):
    """Sequences of full length: packed equals padded, mask and all."""
    q, k, v = kit.qkv(3, 20, 30).values()
    cu_q, cu_k = torch.arange(0, 61, 20, dtype=torch.int32), torch.arange(0, 91, 30, dtype=torch.int32)
    torch.manual_seed(4)
    padded = flash_cuda.attention(q, k, v, dropout_p=0.5, version=version)
    torch.manual_seed(4)
    packed = flash_cuda.attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_k, 20, 30, dropout_p=0.5,
                                         version=version)
    torch.testing.assert_close(packed, padded.flatten(0, 1))
