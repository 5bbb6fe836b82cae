"""Values at the edge of what a type can hold, and types that nearly fit: the right result or one line, in every version."""

import math

import pytest
import torch
from kit import each_version

import flash_cuda
from flash_cuda import reference

NAN = math.nan


def inputs(dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 5, 4, 8), (1, 7, 2, 8), (1, 7, 2, 8)
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=grad) for shape in shapes]


def one_line(error, words, call):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and words in message and "; " in message, message


@each_version
@pytest.mark.parametrize("longest", [5, 10**8, 2**40, 2**61])
def test_max_seqlen_may_be_far_too_large(version, longest):
    q, k, v = (t[0].detach().requires_grad_() for t in inputs())
    offsets = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32)
    out = flash_cuda.attention_varlen(q, k, v, *offsets, longest, longest + 2, version=version, causal=True)
    expected = flash_cuda.attention(q[None], k[None], v[None], version=version, causal=True)[0]
    assert torch.equal(out, expected)
    for got, want in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v))):
        assert torch.equal(got, want)


@each_version
@pytest.mark.parametrize("causal", [False, True])
def test_probabilities_stay_below_one_where_lse_rounds(version, causal):
    """At scores of 1e20 a float32 LSE is coarser than the scores' own differences; P must not leave [0, 1] for it."""
    q, k, v = inputs(grad=True)
    out = flash_cuda.attention(q, k, v, softmax_scale=1e20, causal=causal, version=version)
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert dv.abs().max() <= q.shape[1] * q.shape[2] / k.shape[2]


@each_version
def test_a_nan_sink_is_not_lost(version):
    q, k, v = inputs()
    sinks = torch.tensor([0.0, NAN, 1.0, -math.inf])
    out, lse = flash_cuda.attention(q, k, v, sinks=sinks, return_lse=True, version=version)
    assert lse[:, 1].isnan().all() and out[:, :, 1].isnan().all()
    assert lse[:, [0, 2, 3]].isfinite().all() and out[:, :, [0, 2, 3]].isfinite().all()


@each_version
@pytest.mark.parametrize("low", [torch.finfo(torch.float64).min, -1e39])
def test_a_finite_double_bias_does_not_mask(version, low):
    q, k, v = inputs()
    bias = torch.zeros(5, 7, dtype=torch.float64)
    bias[:2] = low
    out, lse = flash_cuda.attention(q, k, v, bias=bias, return_lse=True, version=version)
    assert lse.isfinite().all()
    assert torch.allclose(out[:, 0], v.mean(1).repeat_interleave(2, 1), atol=1e-6)
    assert torch.allclose(out[:, 2:].double(), reference.attention(q, k, v)[:, 2:], atol=1e-6)


@pytest.mark.parametrize("options", [{"softcap": 1e39}, {"softcap": 1e-50}, {"softmax_scale": 1e39}], ids=str)
def test_numbers_that_float32_does_not_have(options):
    (name,) = options
    one_line(ValueError, f"{name} must be finite", lambda: flash_cuda.attention(*inputs(), **options))
    one_line(ValueError, "in float32", lambda: flash_cuda.attention(*inputs(), **options))
    assert flash_cuda.attention(*inputs(torch.float64), **options).isfinite().all()


@each_version
def test_a_scale_that_rounds_to_zero_is_zero(version):
    q, k, v = inputs()
    tiny, zero = (flash_cuda.attention(q, k, v, softmax_scale=s, causal=True, version=version) for s in (1e-50, 0.0))
    assert torch.equal(tiny, zero) and tiny.isfinite().all()


@pytest.mark.parametrize("argument", ["softmax_scale", "softcap", "dropout_p"])
def test_numbers_that_no_float_holds(argument):
    one_line(TypeError, f"{argument} must be a number", lambda: flash_cuda.attention(*inputs(), **{argument: 10**400}))


@pytest.mark.parametrize("value", [NAN, 2.5, -1, 1j, torch.tensor(True)], ids=str)
def test_deterministic_is_a_bool(value):
    one_line(TypeError, "deterministic must be True, False or None",
             lambda: flash_cuda.attention(*inputs(), deterministic=value))


def test_a_tangent_of_the_slopes_is_not_dropped():
    tensors = inputs()

    def call(slopes):
        return flash_cuda.attention(*tensors, alibi_slopes=slopes)

    one_line(NotImplementedError, "forward-mode", lambda: torch.func.jvp(call, (torch.rand(4),), (torch.ones(4),)))


def blocks(rows, cols):
    return torch.ones(rows, cols, dtype=torch.bool)


@pytest.mark.parametrize("error, words, call", [
    (ValueError, "block_size", lambda: flash_cuda.BlockMask(blocks(1, 1), (2**63 - 1, 2**63 - 1), 5, 7)),
    (ValueError, "block_size", lambda: flash_cuda.BlockMask(blocks(1, 1), (2.7, 3.9), 5, 7)),
    (ValueError, "block_size", lambda: flash_cuda.BlockMask(blocks(1, 2), "64", 5, 7)),
    (TypeError, "seqlen_q", lambda: flash_cuda.BlockMask(blocks(1, 1), (8, 8), 5.9, 7)),
    (TypeError, "seqlen_k", lambda: flash_cuda.BlockMask(blocks(1, 1), (8, 8), 5, None)),
    (TypeError, "window_blocks", lambda: flash_cuda.masks.local(10, 10, 1.5)),
    (TypeError, "window_blocks", lambda: flash_cuda.masks.local(10, 10, "ab")),
    (TypeError, "seqlen_q", lambda: flash_cuda.masks.local(10.5, 10, 1)),
    (TypeError, "seed", lambda: flash_cuda.masks.bigbird(10, 10, seed=None)),
    (TypeError, "global_blocks", lambda: flash_cuda.masks.bigbird(10, 10, global_blocks=1.5)),
], ids=str)  # fmt: skip
def test_masks_of_nearly_right_types(error, words, call):
    one_line(error, words, call)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("bad", [None, "a", torch.ones(1, 5, 4, 8, dtype=torch.int64)], ids=["none", "text", "ints"])
def test_merge_of_nearly_right_types(at, bad):
    out, lse = torch.randn(1, 5, 4, 8), torch.randn(1, 4, 5)
    parts = [out, lse, out, lse]
    parts[at] = bad
    one_line(TypeError, f"{('out1', 'lse1', 'out2', 'lse2')[at]} must be a float tensor",
             lambda: flash_cuda.merge(*parts))


def test_a_mask_without_values_can_be_printed():
    assert "density=nan" in repr(flash_cuda.BlockMask(blocks(1, 1), (8, 8), 5, 7).to("meta"))
