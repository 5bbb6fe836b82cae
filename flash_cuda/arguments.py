"""What Python settles before the ops see a call: spellings, and clear words for wrong types.

Shapes, dtypes, devices and values are checked in C++ (csrc/torch/check.cpp), where that costs no host time.
"""

from __future__ import annotations

import numbers
import operator

import torch

from flash_cuda.masks import BlockMask

CAUSAL_CODES = {False: 0, True: 1, "top_left": 2}
LARGEST = 2**62  # what fits an int64 with room to add to it

_TENSORS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
_PACKED_ONLY = ("cu_seqlens_q", "cu_seqlens_k")
_OPTIONAL_TENSORS = ("bias", "alibi_slopes", "sinks")
_LENGTHS = ("max_seqlen_q", "max_seqlen_k")


def shown(value: object) -> str:
    """A value on one line, however large it is."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # an array of another library
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def causal_problem(causal: object, name: str) -> str:
    return (
        f'flash_cuda.{name}: causal must be False, True (bottom right) or "top_left", got {shown(causal)};'
        " pass one of them"
    )


def window_sides(window_size: tuple[int | None, int | None], name: str) -> tuple[int, int]:
    """(left, right) as the ops take them, with -1 for unbounded."""
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(
            f"flash_cuda.{name}: window_size must be None or a pair (left, right), got {shown(window_size)};"
            " None leaves a side unbounded"
        )
    if len(window_size) != 2:
        raise ValueError(
            f"flash_cuda.{name}: window_size must have two sides (left, right), got {len(window_size)};"
            " None leaves a side unbounded"
        )
    return _window_side(window_size[0], window_size, name), _window_side(window_size[1], window_size, name)


def _window_side(side: int | None, window_size: tuple, name: str) -> int:
    if side is None:
        return -1
    if type(side) is not int:
        try:
            side = operator.index(None if isinstance(side, bool) else side)
        except TypeError:
            raise TypeError(
                f"flash_cuda.{name}: window_size must hold int or None, got {shown(side)}; None leaves a side unbounded"
            ) from None
    if side < 0:
        raise ValueError(
            f"flash_cuda.{name}: window_size must not be negative, got {tuple(window_size)};"
            " None leaves a side unbounded"
        )
    return min(side, LARGEST)


def block_mask_parts(block_mask: BlockMask | None, seqlen_q: int, seqlen_k: int, name: str):
    """(blocks, block_q, block_k) as the ops take them."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"flash_cuda.{name}: block_mask must be a flash_cuda.BlockMask or None, got {shown(block_mask)};"
            " build one with flash_cuda.masks"
        )
    if block_mask.seqlen_q != seqlen_q or block_mask.seqlen_k != seqlen_k:
        raise ValueError(
            f"flash_cuda.{name}: block_mask must be made for seqlen_q {seqlen_q} and seqlen_k {seqlen_k},"
            f" got {block_mask.seqlen_q} and {block_mask.seqlen_k}; build it for these lengths"
        )
    return block_mask.blocks, *block_mask.block_size


def to_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, name: str):
    """q, k and v of layout="bhsd" as views in the order of the ops."""
    if layout != "bhsd":
        raise ValueError(
            f'flash_cuda.{name}: layout must be "bshd" (batch, seqlen, heads, head_dim) or "bhsd" (batch, heads,'
            f" seqlen, head_dim), got {shown(layout)}; pass one of them"
        )
    for argument, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(_tensor_wanted(name, argument, tensor))
        if tensor.dim() != 4:
            length = "seqlen_q" if argument == "q" else "seqlen_k"
            raise ValueError(
                f"flash_cuda.{name}: {argument} must have 4 dimensions (batch, heads, {length}, head_dim), got"
                f" {tensor.dim()} {tuple(tensor.shape)}; add the missing one or flatten"
            )
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _tensor_wanted(name: str, argument: str, value: object) -> str:
    fix = "pass one" if value is None else "convert it with torch.as_tensor"
    return f"flash_cuda.{name}: {argument} must be a torch.Tensor, got {shown(value)}; {fix}"


def _fits_a_float(value: object) -> bool:
    try:
        return isinstance(value, numbers.Real) and float(value) is not None
    except OverflowError:  # an int beyond 1e308
        return False


def layout_problem(name: str, argument: str, value: object) -> str | None:
    """One line on a tensor that is sparse, nested, quantized or the like; None for all else."""
    if not isinstance(value, torch.Tensor):
        return None
    if not (value.is_nested or value.is_quantized or value.layout != torch.strided):
        return None
    kind = "nested" if value.is_nested else "quantized" if value.is_quantized else f"{value.layout}"
    fix = "attention_varlen takes sequences of different lengths" if value.is_nested else "make it dense"
    return f"flash_cuda.{name}: {argument} must be a plain strided tensor, got a {kind} one; {fix}"


def type_problem(name: str, given: dict[str, object]) -> str | None:
    """One line on the first argument whose Python type is wrong; None when the types are right."""

    def wanted(argument, what, fix):
        return f"flash_cuda.{name}: {argument} must be {what}, got {shown(given[argument])}; {fix}"

    for argument, value in given.items():
        if argument in _PACKED_ONLY and name == "attention":
            continue
        if argument in _TENSORS and not isinstance(value, torch.Tensor):
            return _tensor_wanted(name, argument, value)
        if argument in _OPTIONAL_TENSORS and not (value is None or isinstance(value, torch.Tensor)):
            return wanted(argument, "a torch.Tensor or None", "convert it with torch.as_tensor")
        if problem := layout_problem(name, argument, value):
            return problem
        if argument in _LENGTHS and not (isinstance(value, numbers.Integral) and abs(value) < LARGEST):
            return wanted(argument, "an int below 2**62", "pass the longest length, such as int(lengths.max())")
        if argument == "softmax_scale" and not (value is None or _fits_a_float(value)):
            return wanted(argument, "a number or None", "pass None for 1 / sqrt(head_dim)")
        if argument in ("softcap", "dropout_p") and not _fits_a_float(value):
            return wanted(argument, "a number", "0.0 turns it off")
        if argument == "deterministic" and not (value is None or isinstance(value, bool)):
            return wanted(argument, "True, False or None", "None follows torch.use_deterministic_algorithms")
        if argument == "causal" and not isinstance(value, (bool, str)):
            return wanted(argument, 'False, True or "top_left"', "pass one of them")
        if argument == "version" and not (value is None or isinstance(value, str)):
            return wanted(argument, 'None, "fa1", "fa2" or "fa3"', "pass one of them")
    return None
