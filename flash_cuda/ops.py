"""What torch asks about the ops beside running them: fake kernels, vmap, FLOPs.

The ops themselves are C++ (csrc/torch): `fwd` and `bwd` are what `attention` runs; `dropout_mask` and `bwd_preprocess`
are the steps that have CUDA kernels of their own.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

# The arguments of fwd and bwd after the tensors of the pass, in the order of the schema.
OPTIONS = (
    "softmax_scale", "causal", "window_left", "window_right", "softcap", "version", "max_seqlen_q", "max_seqlen_k",
    "dropout_p", "dropout_seed", "cu_seqlens_q", "cu_seqlens_k", "bias", "alibi_slopes", "sinks", "block_mask",
    "block_mask_q", "block_mask_k", "deterministic",
)  # fmt: skip

# ---- fake kernels: shapes, dtypes and strides without data


def _has_unit_stride(t):
    return t.shape[-1] <= 1 or t.stride(-1) == 1


def _empty_rows(t):
    """As empty_rows of csrc/torch/params.cpp, which sees a copy of a t without contiguous rows."""
    t = t if _has_unit_stride(t) else t.contiguous()
    out = torch.empty_like(t)
    return out if _has_unit_stride(out) else torch.empty_like(t, memory_format=torch.contiguous_format)


def _statistics(q):
    """A (batch, heads, seqlen_q) or (heads, total_q) tensor of the accumulation type."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=dtype)


def _check_fake(q, k, v, options):
    """The least that the shapes below rest on; everything else is checked when the op runs."""
    caller = "attention" if options["cu_seqlens_q"] is None else "attention_varlen"
    dims = 4 if caller == "attention" else 3
    for name, tensor in {"q": q, "k": k, "v": v, **options}.items():
        if isinstance(tensor, torch.Tensor) and tensor.device != q.device:
            raise ValueError(
                f"flash_cuda.{caller}: {name} must be on {q.device} like q, got {tensor.device};"
                " move it with .to(q.device)"
            )
        if name in ("q", "k", "v") and tensor.dim() != dims:
            raise ValueError(
                f"flash_cuda.{caller}: {name} must have {dims} dimensions, got {tensor.dim()} {tuple(tensor.shape)};"
                " add the missing one or flatten"
            )


@torch.library.register_fake("flash_cuda::fwd")
def _fwd_fake(q, k, v, *options):
    _check_fake(q, k, v, dict(zip(OPTIONS, options)))
    return _empty_rows(q), _statistics(q)


@torch.library.register_fake("flash_cuda::bwd")
def _bwd_fake(dout, dlse, q, k, v, out, lse, *options_and_mask):
    *options, wanted = options_and_mask
    o = dict(zip(OPTIONS, options))
    _check_fake(q, k, v, o)

    def like(t, is_wanted):
        return _empty_rows(t) if is_wanted else t.new_empty(0)

    dbias = o["bias"].new_empty(o["bias"].shape) if wanted[3] else q.new_empty(0)
    dsinks = o["sinks"].new_empty(o["sinks"].shape) if wanted[4] else q.new_empty(0)
    return like(q, wanted[0]), like(k, wanted[1]), like(v, wanted[2]), dbias, dsinks


@torch.library.register_fake("flash_cuda::dropout_mask")
def _dropout_mask_fake(seed, dropout_p, batch, heads, seqlen_q, seqlen_k):
    return seed.new_empty((batch, heads, seqlen_q, seqlen_k), dtype=torch.bool)


@torch.library.register_fake("flash_cuda::bwd_preprocess")
def _bwd_preprocess_fake(dout, out, dlse):
    return _statistics(out)


# ---- vmap: one more batch dimension where that says the same, else one call after the other


def _foldable(options, in_dims):
    """Whether a mapped dimension of the pass's tensors can join the batch of an op with these options."""
    o = dict(zip(OPTIONS, options))
    unmapped = all(dim is None for dim in in_dims)
    bias, slopes, mask = o["bias"], o["alibi_slopes"], o["block_mask"]
    same_in_a_batch = (
        (bias is None or bias.dim() < 4 or bias.shape[0] == 1)
        and (slopes is None or slopes.dim() == 1)
        and (mask is None or mask.shape[0] == 1)
    )
    # The batch index is part of what dropout draws from, and packed sequences are numbered by cu_seqlens.
    return unmapped and same_in_a_batch and o["dropout_seed"] is None and o["cu_seqlens_q"] is None


def _fold(tensors, in_dims, size):
    """Each (size, batch, ...) tensor as (size * batch, ...)."""
    front = (
        None if t is None else t.movedim(dim, 0) if dim is not None else t.unsqueeze(0).expand(size, *t.shape)
        for t, dim in zip(tensors, in_dims)
    )  # fmt: skip
    return [None if t is None else t.flatten(0, 1) for t in front]


def _unfold(t, size):
    return t.unflatten(0, (size, t.shape[0] // size))


def _one_by_one(op, size, in_dims, args):
    def pick(a, dim, i):
        if dim is None or not isinstance(a, torch.Tensor):
            return a
        # An empty dimension has no element, but its result has a shape, which one call on zeros tells.
        return a.select(dim, i) if size > 0 else a.new_zeros(a.shape[:dim] + a.shape[dim + 1 :])

    results = [op(*(pick(a, dim, i) for a, dim in zip(args, in_dims))) for i in range(max(size, 1))]
    return tuple(torch.stack(parts)[:size] for parts in zip(*results))


@torch.library.register_vmap("flash_cuda::fwd")
def _fwd_vmap(info, in_dims, *args):
    op, size = torch.ops.flash_cuda.fwd.default, info.batch_size
    if size == 0 or not _foldable(args[3:], in_dims[3:]):
        return _one_by_one(op, size, in_dims, args), (0, 0)
    folded = op(*_fold(args[:3], in_dims, size), *args[3:])
    return tuple(_unfold(t, size) for t in folded), (0, 0)


@torch.library.register_vmap("flash_cuda::bwd")
def _bwd_vmap(info, in_dims, *args):
    op, size, wanted = torch.ops.flash_cuda.bwd.default, info.batch_size, args[-1]
    # dbias and dsinks sum over the batch, but not over the mapped dimension.
    if size == 0 or wanted[3] or wanted[4] or not _foldable(args[7:-1], in_dims[7:-1]):
        return _one_by_one(op, size, in_dims, args), (0,) * 5
    folded = op(*_fold(args[:7], in_dims, size), *args[7:])
    dims = tuple(0 if is_wanted else None for is_wanted in wanted)
    return tuple(t if dim is None else _unfold(t, size) for t, dim in zip(folded, dims)), dims


# ---- FLOPs, counted as PyTorch counts attention: every score, masked or not


def _scores(q, k, options):
    o = dict(zip(OPTIONS, options))
    if o["cu_seqlens_q"] is None:
        return q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    lengths = zip(*(_lengths(o["cu_seqlens_" + s], o["max_seqlen_" + s]) for s in "qk"))
    return q.shape[1] * sum(length_q * length_k for length_q, length_k in lengths)


def _lengths(cu_seqlens, longest):
    # A fake tensor has no values; the longest possible lengths bound the count from above.
    if cu_seqlens.device.type == "meta" or isinstance(cu_seqlens, torch._subclasses.FakeTensor):
        return [longest] * (cu_seqlens.shape[0] - 1)
    return cu_seqlens.diff().tolist()


@register_flop_formula(torch.ops.flash_cuda.fwd, get_raw=True)
def _fwd_flops(q, k, v, *options, out_val=None):
    return 2 * 2 * _scores(q, k, options) * q.shape[-1]  # QK^T and PV


@register_flop_formula(torch.ops.flash_cuda.bwd, get_raw=True)
def _bwd_flops(dout, dlse, q, k, v, out, lse, *options, out_val=None):
    return 5 * 2 * _scores(q, k, options) * q.shape[-1]  # QK^T again, dO V^T, P^T dO, dS K, dS^T Q
