"""Exact combination of attention over two disjoint sets of keys."""

import math

import torch

__all__ = ["merge"]


def merge(out1, lse1, out2, lse2, *, layout="bshd"):
    """Attention over all keys, from attention over two disjoint parts of them.

    out = (exp(lse1) * out1 + exp(lse2) * out2) / (exp(lse1) + exp(lse2)), the rescaling of online softmax
    (arXiv:1805.02867), computed around the larger LSE so that it stays finite when the two lie far apart. A query that
    saw no key in one part takes the other part's result; one that saw none in both gets output 0, LSE -inf and zero
    gradients. Differentiable in all four tensors. Sinks must have joined one part only.

    Args:
        out1, out2: (batch, seqlen_q, heads, head_dim); with layout="bhsd" (batch, heads, seqlen_q, head_dim); or
            packed, (total_q, heads, head_dim). Any float dtype.
        lse1, lse2: natural logarithms, (batch, heads, seqlen_q), or packed (heads, total_q); float32 or float64.

    Returns:
        out, lse: shaped as the inputs; out in the dtype of out1, lse in that of lse1.

    Raises:
        ValueError: shapes that do not belong together, or another layout.
        TypeError: dtypes that differ, or an LSE that is neither float32 nor float64.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f'flash_cuda.merge: layout must be "bshd" or "bhsd", got {layout!r}; pass one of them')
    for name, tensor in (("out1", out1), ("lse1", lse1), ("out2", out2), ("lse2", lse2)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"flash_cuda.merge: {name} must be a float tensor, got {got}; pass what "
                            f"attention(..., return_lse=True) returned")
    if out1.dim() not in (3, 4):
        raise ValueError(f"flash_cuda.merge: out1 must have 4 dimensions, or 3 when packed, got {tuple(out1.shape)}; "
                         f"pass what attention(..., return_lse=True) returned")
    heads_last = layout == "bshd" or out1.dim() == 3
    lse_shape = (*out1.shape[:-3], *((out1.shape[-2], out1.shape[-3]) if heads_last else out1.shape[-3:-1]))
    for name, tensor, shape, dtype in (("out2", out2, out1.shape, out1.dtype), ("lse1", lse1, lse_shape, lse1.dtype),
                                       ("lse2", lse2, lse_shape, lse1.dtype)):
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"flash_cuda.merge: {name} must have shape {tuple(shape)} beside out1 of "
                             f"{tuple(out1.shape)}, got {tuple(tensor.shape)}; both parts need the same queries")
        if tensor.dtype != dtype:
            raise TypeError(f"flash_cuda.merge: {name} must be {dtype}, got {tensor.dtype}; convert it with .to()")
    if lse1.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"flash_cuda.merge: lse1 must be float32 or float64, got {lse1.dtype}; convert it with .float()")

    larger = torch.maximum(lse1, lse2).detach()
    larger = larger.masked_fill(larger == -math.inf, 0)
    weight1, weight2 = (lse1 - larger).exp(), (lse2 - larger).exp()
    sees_a_key = (lse1 != -math.inf) | (lse2 != -math.inf)
    total = torch.where(sees_a_key, weight1 + weight2, 1)
    lse = torch.where(sees_a_key, larger + total.log(), -math.inf)

    share1, share2 = weight1 / total, weight2 / total
    if heads_last:
        share1, share2 = share1.transpose(-1, -2), share2.transpose(-1, -2)
    out = share1[..., None] * out1 + share2[..., None] * out2
    return out.to(out1.dtype), lse
