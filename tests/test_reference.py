"""The reference itself: against torch's own attention, against sums written out by hand, and by gradcheck."""

import math

import pytest
import torch
import torch.nn.functional as F

import cases
import kit
from flash_cuda import reference

SEED = torch.tensor([5, -6])


@pytest.mark.parametrize("heads_kv", (4, 2, 1))
@pytest.mark.parametrize("lengths", ((5, 7), (7, 5), (1, 9)), ids=str)
def test_equals_torch_attention_with_its_gradients(lengths, heads_kv):
    tensors = [t.double().requires_grad_() for t in kit.qkv(2, *lengths, 4, heads_kv, 8).values()]
    bias = torch.randn(2, 1, lengths[0], 1, dtype=torch.float64) * torch.randn(lengths[1])
    grad = torch.randn(2, lengths[0], 4, 8, dtype=torch.float64)
    q, k, v = (t.transpose(1, 2) for t in tensors)
    k, v = (t.repeat_interleave(4 // heads_kv, dim=1) for t in (k, v))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
    out, lse = reference.attention(*tensors, bias=bias, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, (q @ k.mT / math.sqrt(8) + bias).logsumexp(-1))
    torch.testing.assert_close(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad))


def test_top_left_is_torch_is_causal():
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    torch.testing.assert_close(reference.attention(q, k, v, causal="top_left", layout="bhsd"),
                               F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_every_feature_by_hand():
    """Loops over single elements, in the order of the formulas of flash_cuda/reference.py."""
    inputs = cases.build(cases.Case(
        batch=2, heads=2, heads_kv=1, seqlen_q=5, seqlen_k=7, head_dim=3, dtype=torch.float64, causal=True,
        window_size=(3, 1), softcap=1.5, alibi="heads", bias="b1qk", bias_kind="inf", sinks=True, block_mask="random",
        block_size=(2, 3), dropout_p=0.3))
    q, k, v, bias, sinks = (inputs.leaves[n] for n in ("q", "k", "v", "bias", "sinks"))
    blocks, slopes = inputs.options["block_mask"].blocks, inputs.options["alibi_slopes"]
    keep = reference.dropout_mask(2, 2, 5, 7, 0.3, seed=SEED)
    out, lse = reference.attention(*(inputs.leaves[n] for n in "qkv"), bias=bias, sinks=sinks, dropout_seed=SEED,
                                   return_lse=True, **inputs.options)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (2, 2, 5))).tolist():
        weights = {}
        for j in range(7):
            score = 1.5 * math.tanh((q[b, i, h] @ k[b, j, 0]).item() / math.sqrt(3) / 1.5)
            score += -slopes[h].item() * abs(i + 2 - j) + bias[b, 0, i, j].item()
            if j <= i + 2 and i + 2 - 3 <= j <= i + 2 + 1 and blocks[b, h, i // 2, j // 3] and score > -math.inf:
                weights[j] = math.exp(score)
        total = sum(weights.values()) + math.exp(sinks[h].item()) if weights else 0
        kept = {j: w / total * 65536 / (65536 - 19661) for j, w in weights.items() if keep[b, h, i, j]}
        expected = sum((w * v[b, j, 0] for j, w in kept.items()), torch.zeros(3, dtype=torch.float64))
        torch.testing.assert_close(out[b, i, h], expected)
        torch.testing.assert_close(lse[b, h, i].item(), math.log(total) if weights else -math.inf)


def test_gradcheck_with_every_feature():
    torch.set_num_threads(1)  # thousands of tiny operations
    slopes = torch.rand(4)

    def function(q, k, v, bias, sinks):
        out, lse = reference.attention(q, k, v, bias=bias, sinks=sinks, causal=True, window_size=(3, None), softcap=2.0,
                                       alibi_slopes=slopes, dropout_p=0.3, dropout_seed=SEED, return_lse=True)
        return out, lse.masked_fill(lse == -math.inf, 0)  # the first rows are empty

    shapes = ((2, 7, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3), (1, 4, 1, 5), (4,))
    assert torch.autograd.gradcheck(function, [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes])


def test_packed_is_each_sequence_alone():
    inputs = cases.build(cases.Case(lengths=((30, 50), (0, 3), (20, 10)), bias="bhqk", alibi="batch", sinks=True))
    q, k, v, bias, sinks = (inputs.leaves[n] for n in ("q", "k", "v", "bias", "sinks"))
    slopes = inputs.options["alibi_slopes"]
    out, lse = reference.attention_varlen(q, k, v, *inputs.packed, bias=bias, sinks=sinks, alibi_slopes=slopes,
                                          return_lse=True)
    for b, (rows, cols) in enumerate(((slice(0, 30), slice(0, 50)), (slice(30, 30), slice(50, 53)),
                                      (slice(30, 50), slice(53, 63)))):
        part = bias[b:b + 1, :, :rows.stop - rows.start, :cols.stop - cols.start]
        expected = reference.attention(q[None, rows], k[None, cols], v[None, cols], bias=part, sinks=sinks,
                                       alibi_slopes=slopes[b], return_lse=True)
        torch.testing.assert_close((out[None, rows], lse[None, :, rows]), expected)


def test_packed_dropout_counts_sequences():
    full = reference.dropout_mask(3, 4, 20, 40, 0.3, seed=SEED)
    assert torch.equal(reference.dropout_mask(1, 4, 17, 33, 0.3, seed=SEED, first_batch=2), full[2:, :, :17, :33])


@pytest.mark.parametrize("counter, key, expected", (
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
), ids=("zeros", "ones", "pi"))
def test_philox_known_answers(counter, key, expected):
    """The vectors that Random123 publishes for philox4x32 with 7 rounds."""
    words = reference.philox_4x32_7([torch.tensor(c) for c in counter], key)
    assert tuple(w.item() for w in words) == expected


def test_masked_pairs_exchange_nothing():
    """Keys 5 and 6 are NaN and infinite, and masked from queries 0 to 3 only."""
    tensors = {n: t.double() for n, t in kit.qkv(1, 6, 7, 2, 1, 4).items()}
    clean = kit.evaluate(reference.attention, kit.Inputs(tensors), causal="top_left", softcap=3.0)
    tensors = tensors | {n: tensors[n].index_fill(1, torch.tensor([5]), math.nan)
                         .index_fill(1, torch.tensor([6]), math.inf) for n in "kv"}
    inputs = kit.Inputs(tensors, {"causal": "top_left", "softcap": 3.0})
    grad_out = torch.randn(1, 6, 2, 4, dtype=torch.float64)
    got = kit.evaluate(reference.attention, inputs, wanted=("q", "k", "v"), grad_out=grad_out)
    torch.testing.assert_close(got["out"][:, :5], clean["out"][:, :5])
    assert got["out"][:, 5].isnan().all() and got["lse"][..., 5].isnan().all()
    assert got["dq"][:, :5].isfinite().all() and got["dq"][:, 5].isnan().all()
    assert (got["dk"][:, 6] == 0).all() and (got["dv"][:, 6] == 0).all()  # no query sees it
