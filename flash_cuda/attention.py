"""The calls of the library: attention, attention_varlen, last_call, dropout_mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flash_cuda import _C, arguments, dispatch

if TYPE_CHECKING:
    from flash_cuda.masks import BlockMask

# Versions that a call reaches without asking dispatch, which costs host time and which Dynamo cannot trace; every other
# name goes there, and so does a call that the op refuses, to hear of every reason.
_CPU_CODES = {None: 2} | {v.name: v.code for v in dispatch.VERSIONS.values() if v.cpu}
_CUDA_CODES = {None: 2} | {v.name: v.code for v in dispatch.VERSIONS.values() if v.cuda}
_CUDA_DTYPES, _CAUSAL_CODES = dispatch.CUDA_DTYPES, arguments.CAUSAL_CODES
_forward = _C.forward
_is_compiling, _wants_deterministic = torch.compiler.is_compiling, torch.are_deterministic_algorithms_enabled
_SEED_LOW, _SEED_HIGH = -(2**63), 2**63 - 1


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    version: str | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale * Q K^T) V, tile by tile, in memory linear in the sequence lengths.

    The score of query i and key j is ``s = softmax_scale * q_i . k_j``; softcap makes it
    ``softcap * tanh(s / softcap)``; ALiBi subtracts ``slope * |i + diag - j|``; a float bias is added; then the masks
    hide elements. ``diag`` is ``seqlen_k - seqlen_q`` (bottom right), or 0 with ``causal="top_left"``. A query that
    sees no key gets output 0, LSE -inf and zero gradients. NaN and Inf in keys and values that are masked reach no
    output and no gradient; those in q and in the gradient of `out` are a query's own, and the keys and values of its
    sequence may get them in their gradients, seen by it or not.

    On CUDA tensors fa2 runs, without softcap, alibi_slopes, bias, sinks, block_mask and dropout_p for now: these are
    refused by name.

    Differentiable in q, k, v, bias and sinks, also through the returned LSE, with torch.autograd. Works under
    torch.compile(fullgraph=True), torch.export, autocast (q, k and v are cast) and torch.vmap. A gradient of a
    gradient, forward-mode gradients and torch.func.grad raise NotImplementedError.

    Args:
        q: (batch, seqlen_q, heads, head_dim); float32, bfloat16, float16 or float64 on a CPU, bfloat16 or float16 with
            a head_dim of at most 256 on CUDA. Any strides; only a last dimension that is not contiguous is copied (on
            CUDA also rows that are not whole, aligned groups of 16 bytes), and `last_call` reports it.
        k, v: (batch, seqlen_k, heads_kv, head_dim), dtype and device of q. heads is a multiple of heads_kv; query
            head h reads key head h // (heads / heads_kv).
        causal: True lets query i see key j when j <= i + seqlen_k - seqlen_q; "top_left" when j <= i, as PyTorch's
            is_causal does.
        softmax_scale: finite, at least 0; None is 1 / sqrt(head_dim).
        window_size: (left, right), in keys, inclusive: query i sees keys i + diag - left to i + diag + right. None
            leaves a side, or both, unbounded.
        softcap: caps the scaled scores to (-softcap, softcap); 0.0 turns it off.
        alibi_slopes: (heads,) or (batch, heads), any float dtype; no gradient.
        bias: broadcastable to (batch, heads, seqlen_q, seqlen_k), any strides. Float: added to the scores, -inf hides
            an element, and its gradient comes in its own shape and dtype. Bool: True is visible.
        sinks: (heads,), any float dtype: a key per head without a value, which joins the softmax's sum only.
        block_mask: a `BlockMask` of seqlen_q x seqlen_k; masked blocks are skipped whole (FlashAttention, section 3.3).
        dropout_p: probability in [0, 1) to drop an attention weight; what is kept is scaled up. The mask comes from two
            int64 drawn by torch.randint, so torch.manual_seed rules it, and `dropout_mask` returns it.
        version: "fa1" (FlashAttention, Dao et al. 2022, Algorithm 1 forward and 4 backward), "fa2" (FlashAttention-2,
            Dao 2023, sections 3.1 to 3.3), "fa3", or None for the best that runs: fa3, else fa2, on CUDA tensors, and
            fa2's schedule on CPU tensors. A named version runs or raises; nothing falls back.
        deterministic: gradients bitwise equal run after run; None follows torch.use_deterministic_algorithms. The
            CPU's always are, for one number of threads.
        return_lse: return (out, lse).
        layout: "bshd" as above, or "bhsd" for q (batch, heads, seqlen_q, head_dim) and the like, also for the output.

    Returns:
        out, of the shape and dtype of q. With return_lse also lse, (batch, heads, seqlen_q): the natural logarithm of
        the sum of exponentials of a row's scores, sinks joined; float32, or float64 for float64 inputs.

    Raises:
        ValueError: a value or a shape that does not fit. TypeError: a dtype or a type. NotImplementedError: no kernel
        serves the combination. RuntimeError: this machine cannot run the named version. Each says in one line which
        argument, what was expected, what came, and the way out.
    """
    if layout != "bshd":
        q, k, v = arguments.to_bshd(q, k, v, layout, "attention")
    out, lse = _run(
        "attention", q, k, v, None, None, 0, 0, causal, softmax_scale, window_size, softcap, alibi_slopes, bias, sinks,
        block_mask, dropout_p, version, deterministic,
    )  # fmt: skip
    if layout != "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool | str = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    version: str | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` over sequences of different lengths, packed one after the other without padding.

    Sequence b has queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] and keys cu_seqlens_k[b] to cu_seqlens_k[b + 1], and
    sees no other sequence. Either may be empty. Masks, windows, ALiBi, bias and dropout count rows and keys from the
    start of their own sequence.

    Args:
        q: (total_q, heads, head_dim), dtypes as in `attention`.
        k, v: (total_k, heads_kv, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on the device of q: the cumulated lengths, from 0 to the total.
            On a CPU their values are checked; on CUDA, where looking would wait for the device, they are trusted.
        max_seqlen_q, max_seqlen_k: the longest length, or more.
        bias: broadcastable to (batch, heads, max_seqlen_q, max_seqlen_k).
        block_mask: made for max_seqlen_q x max_seqlen_k.
        causal, softmax_scale, window_size, softcap, alibi_slopes, sinks, dropout_p, version, deterministic, return_lse:
            as in `attention`.

    Returns:
        out, (total_q, heads, head_dim); with return_lse also lse, (heads, total_q).

    Raises:
        As `attention`.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise TypeError(arguments.type_problem("attention_varlen", locals()))
    out, lse = _run(
        "attention_varlen", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
        window_size, softcap, alibi_slopes, bias, sinks, block_mask, dropout_p, version, deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _run(
    name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size, softcap,
    alibi_slopes, bias, sinks, block_mask, dropout_p, version, deterministic,
):  # fmt: skip
    """Settles what is spelled in Python and calls the op. Every line here is host time of every call."""
    try:
        compiling, code = _is_compiling(), None
        if q.is_cpu:
            code = _CPU_CODES.get(version)
        elif q.is_cuda and (compiling or q.dtype in _CUDA_DTYPES):
            code = _CUDA_CODES.get(version)
        if code is None:
            code = _choose(name, q, version, softcap, alibi_slopes, bias, sinks, block_mask, dropout_p)
        causal_code = _CAUSAL_CODES.get(causal)
        if causal_code is None:
            raise ValueError(arguments.causal_problem(causal, name))
        left, right = (-1, -1) if window_size is None else arguments.window_sides(window_size, name)
        if block_mask is None:
            blocks, block_q, block_k = None, 0, 0
        else:
            lengths = (q.shape[1], k.shape[1]) if cu_seqlens_q is None else (max_seqlen_q, max_seqlen_k)
            blocks, block_q, block_k = arguments.block_mask_parts(block_mask, *lengths, name)
        # A p outside [0, 1) draws nothing and gets its error below.
        seed = draw_seed(q.device) if 0 < dropout_p < 1 else None
        if deterministic is None:
            deterministic = _wants_deterministic()
        elif deterministic is not True and deterministic is not False:  # pybind11 would take anything with a truth
            raise TypeError
        # Dynamo cannot see through _C.forward; torch.ops costs three times its host time in eager mode.
        forward = torch.ops.flash_cuda.fwd.default if compiling else _forward
        return forward(
            q, k, v, softmax_scale, causal_code, left, right, softcap, code, max_seqlen_q, max_seqlen_k, dropout_p,
            seed, cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes, sinks, blocks, block_q, block_k, deterministic,
        )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: also NotImplementedError
        problem = arguments.type_problem(name, locals())
        if problem is not None:
            raise TypeError(problem) from None
        if q.is_cuda:
            try:
                _choose(name, q, version, softcap, alibi_slopes, bias, sinks, block_mask, dropout_p)
            except (RuntimeError, ValueError, TypeError) as reasons:
                raise reasons from None
        raise


def _choose(name, q, version, *features):
    """What dispatch says to this call: the version's code, or an error with every reason."""
    return dispatch.choose(
        version, device=q.device, dtype=dispatch.dtype_in_kernel(q), head_dim=q.shape[-1], features=dispatch.features_in_use(*features),
        name=name,
    )  # fmt: skip


def draw_seed(device: torch.device | str) -> torch.Tensor:
    """The two int64 that a dropout mask is a function of, on the device, from torch's generator of that device."""
    return torch.randint(_SEED_LOW, _SEED_HIGH, (2,), dtype=torch.int64, device=device)


def dropout_mask(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    *,
    seed: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Which attention weights dropout keeps: the mask is the same for every version, tile size and device.

    After torch.manual_seed(s), ``dropout_mask(...)`` is the mask of the attention that runs after torch.manual_seed(s).

    Args:
        batch, heads, seqlen_q, seqlen_k: sizes of the score matrices.
        dropout_p: probability in [0, 1) to drop.
        seed: (2,) int64, such as `last_call().dropout_seed`; None draws it as attention does.
        device: where to make it; None is the seed's, or the CPU.

    Returns:
        bool (batch, heads, seqlen_q, seqlen_k), True where the weight is kept.
    """
    for argument, value in (("batch", batch), ("heads", heads), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if not isinstance(value, (int, torch.SymInt)) or value >= arguments.LARGEST:
            raise TypeError(
                f"flash_cuda.dropout_mask: {argument} must be an int below 2**62, got {arguments.shown(value)};"
                " pass a size"
            )
    problem = arguments.type_problem("dropout_mask", {"dropout_p": dropout_p})
    if problem is None and not (seed is None or isinstance(seed, torch.Tensor)):
        problem = f"flash_cuda.dropout_mask: seed must be a tensor or None, got {arguments.shown(seed)}; pass two int64"
    if problem is not None:
        raise TypeError(problem)
    try:
        device = torch.device(device if device is not None else "cpu" if seed is None else seed.device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"flash_cuda.dropout_mask: device must be a torch.device or its name, got {arguments.shown(device)};"
            ' pass "cpu" or "cuda"'
        ) from None
    if device.type == "cuda" and not _C.cuda_built():
        raise NotImplementedError(
            f"flash_cuda.dropout_mask: no kernel for {device}: this build is for CPU only"
            f" ({_C.build_info()['cuda_why']}); make the mask on the CPU and move it"
        )
    seed = draw_seed(device) if seed is None else seed.to(device)
    return torch.ops.flash_cuda.dropout_mask.default(seed, dropout_p, batch, heads, seqlen_q, seqlen_k)


@dataclass(frozen=True)
class LastCall:
    """What the latest attention kernel ran."""

    pass_: str  # "forward" or "backward"
    version: str  # "fa1", "fa2" or "fa3"
    kernel: str  # such as "fa2_fwd_cpu_avx512_bf16"
    device: str
    isa: str  # instruction set of the CPU kernel; "cuda" on a GPU
    tile: tuple[int, int]  # query rows, key rows
    grid: int  # tasks of the main phase; CTAs on a GPU
    fast_memory_bytes: int  # what a tile's buffers take; on a GPU the shared memory of a CTA
    bytes_loaded: int | None  # from the tensors to fast memory, counted tile by tile; None on a GPU
    bytes_stored: int | None
    # Arguments that were copied because their last dimension was not contiguous or, on a GPU, because their rows were
    # not made of whole, aligned groups of 16 bytes.
    copies: tuple[str, ...]
    threads: int  # on a GPU those of a CTA
    dropout_seed: torch.Tensor | None


def last_call() -> LastCall | None:
    """What the latest call did run, forward or backward, in any thread; None before the first."""
    call = _C.last_call()
    return None if call is None else LastCall(**call)
