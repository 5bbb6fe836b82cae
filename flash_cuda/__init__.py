"""Exact attention in three generations: FlashAttention 1, 2 and 3, from scratch, for CUDA GPUs and for the CPU.

`attention` and `attention_varlen` compute; `explain` says what would run and why, `last_call` what did run; `merge`
joins partial results; `reference.attention` is the same mathematics in plain torch.
"""

from flash_cuda import _extension

_C = _extension.load()

from flash_cuda import masks, ops, reference  # noqa: E402, F401 - ops registers what torch.compile and vmap need
from flash_cuda.attention import LastCall, attention, attention_varlen, dropout_mask, last_call  # noqa: E402
from flash_cuda.explain import Plan, explain  # noqa: E402
from flash_cuda.masks import BlockMask  # noqa: E402
from flash_cuda.merge import merge  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "LastCall",
    "Plan",
    "attention",
    "attention_varlen",
    "dropout_mask",
    "explain",
    "last_call",
    "masks",
    "merge",
    "reference",
]
