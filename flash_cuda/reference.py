"""Attention by plain torch operations: the definition of every feature, and what the kernels are checked against.

It stores the whole score matrix, computes in float64 unless told otherwise, and gets its gradients from autograd.

    s[i, j] = softmax_scale * q[i] . k[j]              scores
    s[i, j] = softcap * tanh(s[i, j] / softcap)        softcap (Gemma 2, arXiv:2408.00118)
    s[i, j] -= slope * |i + diagonal - j|              ALiBi (arXiv:2108.12409)
    s[i, j] += bias[i, j]
    s[i, j] = -inf where j is masked for i             causal, window_size, block_mask, bias False or -inf
    lse[i] = log(sum_j exp(s[i, j]) + exp(sink))       sinks (StreamingLLM, arXiv:2309.17453; gpt-oss, arXiv:2508.10925)
    out[i] = sum_j dropout(exp(s[i, j] - lse[i])) * v[j]

A masked pair (i, j) exchanges nothing, in either direction: NaN or Inf in k[j] or v[j] does not reach out[i] or a
gradient through it. A query that sees no key gets output 0, LSE -inf and zero gradients.
"""

import math

import torch

__all__ = ["attention", "attention_varlen", "dropout_mask"]


def attention(q, k, v, *, causal=False, softmax_scale=None, window_size=None, softcap=0.0, alibi_slopes=None, bias=None,
              sinks=None, block_mask=None, dropout_p=0.0, version=None, deterministic=None, return_lse=False,
              layout="bshd", dropout_seed=None, dtype=torch.float64):
    """What `flash_cuda.attention` computes, slowly and precisely, on any device.

    Args:
        q: (batch, seqlen_q, heads, head_dim); with layout="bhsd" (batch, heads, seqlen_q, head_dim). Any float dtype.
        k, v: (batch, seqlen_k, heads_kv, head_dim), heads a multiple of heads_kv.
        causal: False; True aligns the diagonal to the bottom right (j <= i + seqlen_k - seqlen_q); "top_left": j <= i.
        softmax_scale: None is 1/sqrt(head_dim).
        window_size: (left, right), inclusive around the aligned diagonal; None is unbounded.
        softcap: 0 is off.
        alibi_slopes: (heads,) or (batch, heads).
        bias: float (added) or bool (True: visible), broadcastable to (batch, heads, seqlen_q, seqlen_k).
        sinks: (heads,).
        block_mask: a `flash_cuda.BlockMask`.
        dropout_p, dropout_seed: see `dropout_mask`. Without a seed one is drawn as `flash_cuda.attention` draws it.
        version, deterministic: taken so that calls can be swapped; the result depends on neither.
        dtype: what everything is computed and returned in. The dtype of q gives "torch attention in the same dtype".

    Returns:
        out, like q but of `dtype`; with return_lse also the LSE, (batch, heads, seqlen_q), of `dtype`.

    Raises:
        ValueError: a shape or value that does not fit.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f'reference.attention: layout must be "bshd" or "bhsd", got {layout!r}')
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"reference.attention: {name} must have 4 dimensions, got {tuple(tensor.shape)}")
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads, seqlen_q, _ = q.shape
    blocks = None if block_mask is None else block_mask.to_dense().to(q.device)
    if dropout_p > 0 and dropout_seed is None:
        dropout_seed = _draw_seed(q.device)
    out, lse = _attend(
        q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, bias=_expand(bias, "bias", (batch, heads, seqlen_q, k.shape[2])), sinks=sinks,
        blocks=_expand(blocks, "block_mask", (batch, heads, seqlen_q, k.shape[2])), dropout_p=dropout_p,
        dropout_seed=dropout_seed, dtype=dtype)
    out = out.transpose(1, 2) if layout == "bshd" else out
    return (out, lse) if return_lse else out


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False,
                     softmax_scale=None, window_size=None, softcap=0.0, alibi_slopes=None, bias=None, sinks=None,
                     block_mask=None, dropout_p=0.0, version=None, deterministic=None, return_lse=False,
                     dropout_seed=None, dtype=torch.float64):
    """What `flash_cuda.attention_varlen` computes: `attention` of each sequence of a packed batch.

    Args:
        q: (total_q, heads, head_dim). k, v: (total_k, heads_kv, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integers; sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen_q, max_seqlen_k: at least the longest lengths; bias and block_mask have this size, and positions in
            them, in ALiBi and in dropout count from the start of each sequence.
        The rest: as in `attention`.

    Returns:
        out, like q but of `dtype`; with return_lse also the LSE, (heads, total_q).

    Raises:
        ValueError: a shape or value that does not fit.
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if len(starts_q) != len(starts_k):
        raise ValueError(f"reference.attention_varlen: cu_seqlens_k must have {len(starts_q)} elements as cu_seqlens_q "
                         f"has, got {len(starts_k)}")
    if (starts_q[-1], starts_k[-1]) != (q.shape[0], k.shape[0]):
        raise ValueError(f"reference.attention_varlen: cu_seqlens_q and cu_seqlens_k must end at the rows of q and k, "
                         f"{q.shape[0]} and {k.shape[0]}, got {starts_q[-1]} and {starts_k[-1]}")
    batch, heads = len(starts_q) - 1, q.shape[1]
    full_size = (batch, heads, max_seqlen_q, max_seqlen_k)
    bias = _expand(bias, "bias", full_size)
    blocks = _expand(None if block_mask is None else block_mask.to_dense().to(q.device), "block_mask", full_size)
    if dropout_p > 0 and dropout_seed is None:
        dropout_seed = _draw_seed(q.device)
    outs, lses = [], []
    for b in range(batch):
        rows_q, rows_k = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        corner = (slice(b, b + 1), slice(None), slice(rows_q.stop - rows_q.start), slice(rows_k.stop - rows_k.start))
        out, lse = _attend(
            *(x.transpose(0, 1)[None] for x in (q[rows_q], k[rows_k], v[rows_k])), causal=causal,
            softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b:b + 1],
            bias=None if bias is None else bias[corner], sinks=sinks, blocks=None if blocks is None else blocks[corner],
            dropout_p=dropout_p, dropout_seed=dropout_seed, dtype=dtype, first_batch=b)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    out = torch.cat([q[:0].to(dtype), *outs])  # no sequence at all is an empty tensor
    return (out, torch.cat([q.new_empty(heads, 0, dtype=dtype), *lses], dim=1)) if return_lse else out


def _attend(q, k, v, *, causal, softmax_scale, window_size, softcap, alibi_slopes, bias, sinks, blocks, dropout_p,
            dropout_seed, dtype, first_batch=0):
    """(batch, heads, seqlen, head_dim) tensors, bias and blocks of the full size -> out, lse."""
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1:3]
    if heads_kv == 0 and heads != 0 or heads_kv and heads % heads_kv:
        raise ValueError(f"reference.attention: heads of q must be a multiple of k's, got {heads} and {heads_kv}")
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"reference.attention: k and v must have one shape and q's batch and head_dim, got (batch, "
                         f"heads, seqlen, head_dim) q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    group = heads // heads_kv if heads_kv else 1
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    distance = _distance_from_diagonal(causal, seqlen_q, seqlen_k, q.device)
    visible = _visible(distance, causal, window_size, bias, blocks)

    scores = _scores(q, k, visible) * (1 / math.sqrt(head_dim or 1) if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[..., None, None] * distance.abs()
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias.to(dtype)
    scores = torch.where(visible, scores, -math.inf)

    # The sink is one more column of the softmax that has no value. A row that sees no key has no sink either.
    sees_a_key = visible.any(-1, keepdim=True)
    sink = q.new_tensor(-math.inf) if sinks is None else sinks.to(dtype)[:, None, None]
    sink = torch.where(sees_a_key, sink, -math.inf).expand(batch, heads, seqlen_q, 1)
    logits = torch.cat([scores, sink], dim=-1)
    row_max = logits.detach().amax(-1, keepdim=True).masked_fill(~sees_a_key, 0)
    weights = (logits - row_max).exp()
    row_sum = torch.where(sees_a_key, weights.sum(-1, keepdim=True), 1)
    probs = torch.where(visible, weights[..., :-1] / row_sum, 0)
    lse = (row_max + row_sum.log()).masked_fill(~sees_a_key, -math.inf).squeeze(-1)

    if dropout_p > 0:
        keep = dropout_mask(batch, heads, seqlen_q, seqlen_k, dropout_p, seed=dropout_seed, first_batch=first_batch)
        threshold = _dropout_threshold(dropout_p)
        probs = torch.where(keep, probs * (65536 / max(65536 - threshold, 1)), 0)
    return _weighted_sum(probs, v, visible), lse


def _distance_from_diagonal(causal, seqlen_q, seqlen_k, device):
    """(seqlen_q, seqlen_k): j - (i + diagonal), positive above the aligned diagonal (rule 3)."""
    if causal not in (False, True, "top_left"):
        raise ValueError(f'reference.attention: causal must be False, True or "top_left", got {causal!r}')
    diagonal = 0 if causal == "top_left" else seqlen_k - seqlen_q
    i, j = torch.arange(seqlen_q, device=device), torch.arange(seqlen_k, device=device)
    return j - (i[:, None] + diagonal)


def _visible(distance, causal, window_size, bias, blocks):
    """Bool (batch | 1, heads | 1, seqlen_q, seqlen_k)."""
    left, right = window_size or (None, None)
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"reference.attention: window_size must not be negative, got {window_size}; None is unbounded")
    visible = torch.ones_like(distance, dtype=torch.bool)[None, None]
    if causal:
        visible = visible & (distance <= 0)
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    if bias is not None:
        visible = visible & (bias if bias.dtype == torch.bool else bias != -math.inf)
    return visible if blocks is None else visible & blocks


def _scores(q, k, visible):
    """q @ k^T in which a masked pair exchanges nothing.

    A product with a mask would: 0 * NaN is NaN. So the few keys that hold a NaN or Inf are gathered query by query.
    """
    scores = q @ torch.where(k.isfinite(), k, 0).transpose(-1, -2)
    odd = _rows_not_finite(k)
    k_seen = torch.where(visible[..., odd, None], k[:, :, None, odd], 0)  # (batch, heads, seqlen_q, odd, head_dim)
    return scores.index_copy(-1, odd, (q[:, :, :, None] * k_seen).sum(-1))


def _weighted_sum(probs, v, visible):
    """probs @ v in which a masked pair exchanges nothing, as in `_scores`."""
    odd = _rows_not_finite(v)
    v_seen = torch.where(visible[..., odd, None], v[:, :, None, odd], 0)  # (batch, heads, seqlen_q, odd, head_dim)
    even_probs = probs.index_fill(-1, odd, 0)
    return even_probs @ torch.where(v.isfinite(), v, 0) + (probs[..., odd, None] * v_seen).sum(-2)


def _rows_not_finite(x):
    """Indices of the positions of (batch, heads, seqlen, head_dim) at which any batch, head or dim is NaN or Inf."""
    return (~x.isfinite()).any(3).any(1).any(0).nonzero().flatten()


def _expand(tensor, name, size):
    """A 4-D view of the full size, or None."""
    try:
        return None if tensor is None else tensor.expand(size)
    except RuntimeError:
        raise ValueError(f"reference.attention: {name} must broadcast to (batch, heads, seqlen_q, seqlen_k) = {size}, "
                         f"got {tuple(tensor.shape)}") from None


def _draw_seed(device):
    return torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def dropout_mask(batch, heads, seqlen_q, seqlen_k, dropout_p, *, seed, first_batch=0):
    """Which elements dropout keeps: a pure function of the seed and of the element's place.

    Philox 4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call serves
    the eight elements that one lane of a warp holds in a 16 x 16 block of an `mma` accumulator, with 16 bits for each.

    Args:
        dropout_p: in [0, 1); an element is kept when its draw is at least round(65536 * dropout_p).
        seed: (2,) int64; the low halves of its words are the Philox key.
        first_batch: index of the first sequence, for one sequence of a packed batch.

    Returns:
        Bool (batch, heads, seqlen_q, seqlen_k), on the device of the seed; True is kept. What is kept is scaled by
        65536 / (65536 - round(65536 * dropout_p)).
    """
    row = torch.arange(seqlen_q, device=seed.device)[:, None]
    col = torch.arange(seqlen_k, device=seed.device)
    batch_head = torch.arange(first_batch * heads, (first_batch + batch) * heads, device=seed.device)[:, None, None]
    lane = row % 8 * 4 + col % 8 // 2
    draw = row // 8 % 2 * 4 + col // 8 % 2 * 2 + col % 2  # which of the lane's eight 16-bit draws
    counter = torch.broadcast_tensors(row // 16, col // 16, lane, batch_head)
    words = torch.stack(philox_4x32_7(counter, (seed[0] & 0xFFFFFFFF, seed[1] & 0xFFFFFFFF)))
    word = words.gather(0, (draw // 2).expand_as(words[:1])).squeeze(0)
    keep = (word >> 16 * (draw % 2) & 0xFFFF) >= _dropout_threshold(dropout_p)
    return keep.view(batch, heads, seqlen_q, seqlen_k)


def _dropout_threshold(dropout_p):
    return math.floor(65536 * dropout_p + 0.5)


def philox_4x32_7(counter, key):
    """Four 32-bit counters and two 32-bit keys -> four random 32-bit words, all held in int64 tensors."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(7):
        high0, low0 = _multiply_32(0xD2511F53, c0)
        high1, low1 = _multiply_32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + 0x9E3779B9 & 0xFFFFFFFF, key1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def _multiply_32(a, b):
    """The high and low 32 bits of a 32 x 32 bit product, by halves because int64 has a sign."""
    by_high, by_low = a * (b >> 16), a * (b & 0xFFFF)
    return by_high + (by_low >> 16) >> 16, (by_high << 16) + by_low & 0xFFFFFFFF
