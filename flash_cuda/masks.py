"""Block-sparse masks: which blocks of the score matrix are visible.

Attention skips a masked block whole, so that its work and traffic fall with the density of the mask: block-sparse
FlashAttention (arXiv:2205.14135, section 3.3).
"""

import math
import operator

import torch

__all__ = ["BlockMask", "from_dense", "local", "bigbird"]


class BlockMask:
    """A mask made of whole blocks: query i sees key j where blocks[..., i // block_q, j // block_k] is True.

    Args:
        blocks: bool (nq, nk), (heads | 1, nq, nk) or (batch | 1, heads | 1, nq, nk), with nq = ceil(seqlen_q / block_q)
            and nk = ceil(seqlen_k / block_k). Kept 4-D as the attribute `blocks`.
        block_size: (block_q, block_k), any sizes from 1 up.
        seqlen_q, seqlen_k: what the mask covers; for packed input the longest lengths.

    Raises:
        TypeError: blocks is no bool tensor.
        ValueError: a size that does not fit.
    """

    def __init__(self, blocks, block_size, seqlen_q, seqlen_k):
        if not isinstance(blocks, torch.Tensor) or blocks.dtype != torch.bool:
            got = blocks.dtype if isinstance(blocks, torch.Tensor) else type(blocks).__name__
            raise TypeError(f"flash_cuda.BlockMask: blocks must be a bool tensor, got {got}; convert it with .bool()")
        self.block_size = _check_block_size("BlockMask", block_size)
        _check_ints("BlockMask", seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        self.seqlen_q, self.seqlen_k = operator.index(seqlen_q), operator.index(seqlen_k)
        counts = _block_counts(self.seqlen_q, self.seqlen_k, self.block_size)
        if blocks.dim() not in (2, 3, 4) or tuple(blocks.shape[-2:]) != counts:
            raise ValueError(f"flash_cuda.BlockMask: blocks must be (..., {counts[0]}, {counts[1]}) with 2 to 4 dimensions for "
                             f"seqlen_q {seqlen_q}, seqlen_k {seqlen_k} and block_size {self.block_size}, "
                             f"got {tuple(blocks.shape)}; one flag for each block, the last ones cut off")
        self.blocks = blocks[(None,) * (4 - blocks.dim())]

    def to(self, device):
        """The same mask on another device."""
        return BlockMask(self.blocks.to(device), self.block_size, self.seqlen_q, self.seqlen_k)

    def to_dense(self):
        """Bool (batch | 1, heads | 1, seqlen_q, seqlen_k): the mask of the elements."""
        block_q, block_k = self.block_size
        i = torch.arange(self.seqlen_q, device=self.blocks.device) // block_q
        j = torch.arange(self.seqlen_k, device=self.blocks.device) // block_k
        return self.blocks[:, :, i[:, None], j]

    @property
    def density(self):
        """The share of blocks that are visible, from 0 to 1; NaN on the meta device, which has no values."""
        if self.blocks.is_meta:
            return math.nan
        return self.blocks.float().mean().item() if self.blocks.numel() else 0.0

    def __repr__(self):
        return (f"BlockMask(blocks={tuple(self.blocks.shape)}, block_size={self.block_size}, seqlen_q={self.seqlen_q}, "
                f"seqlen_k={self.seqlen_k}, density={self.density:.3f}, device={self.blocks.device})")


def from_dense(mask, block_size=(64, 64)):
    """The BlockMask of an element mask in which every block is all True or all False.

    Args:
        mask: bool (seqlen_q, seqlen_k), (heads | 1, seqlen_q, seqlen_k) or (batch | 1, heads | 1, seqlen_q, seqlen_k).
        block_size: (block_q, block_k).

    Raises:
        TypeError: mask is no bool tensor.
        ValueError: a block is mixed (the first such block is named), or mask has another rank.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"flash_cuda.masks.from_dense: mask must be a bool tensor, got {got}; convert it with .bool()")
    if mask.dim() not in (2, 3, 4):
        raise ValueError(f"flash_cuda.masks.from_dense: mask must have 2 to 4 dimensions, got {tuple(mask.shape)}; "
                         f"the last two are (seqlen_q, seqlen_k)")
    block_size = _check_block_size("masks.from_dense", block_size)
    # The first element of each block speaks for it; a mixed block then differs from the mask that this makes.
    result = BlockMask(mask[..., ::block_size[0], ::block_size[1]], block_size, *mask.shape[-2:])
    mixed = (result.to_dense() != mask).nonzero()
    if len(mixed):
        batch, head, row, col = mixed[0].tolist()
        row, col = row // block_size[0] * block_size[0], col // block_size[1] * block_size[1]
        raise ValueError(f"flash_cuda.masks.from_dense: every block of {block_size} must be all True or all False, but "
                         f"the block at batch {batch}, head {head}, row {row}, column {col} is mixed; use smaller blocks, or "
                         f"pass the mask as bias")
    return result


def local(seqlen_q, seqlen_k, window_blocks, block_size=(64, 64)):
    """A band of blocks: each query block sees the key blocks on its part of the diagonal and some beside them.

    The diagonal is aligned to the bottom right, as in `causal=True`.

    Args:
        window_blocks: key blocks seen on each side of the diagonal's own; an int, or (left, right).
        block_size: (block_q, block_k).

    Raises:
        ValueError: a negative window, or a size that does not fit.
    """
    pair = isinstance(window_blocks, (tuple, list)) and len(window_blocks) == 2
    left, right = window_blocks if pair else (window_blocks, window_blocks)
    _check_ints("masks.local", seqlen_q=seqlen_q, seqlen_k=seqlen_k, window_blocks=left)
    _check_ints("masks.local", window_blocks=right)
    if min(left, right) < 0:
        raise ValueError(f"flash_cuda.masks.local: window_blocks must not be negative, got {window_blocks}; "
                         f"0 leaves the diagonal's own blocks")
    block_q, block_k = block_size = _check_block_size("masks.local", block_size)
    count_q, count_k = _block_counts(seqlen_q, seqlen_k, block_size)
    first_row = torch.arange(count_q)[:, None] * block_q
    last_row = (first_row + block_q - 1).clamp(max=seqlen_q - 1)
    first_own = (first_row + seqlen_k - seqlen_q).div(block_k, rounding_mode="floor")
    last_own = (last_row + seqlen_k - seqlen_q).div(block_k, rounding_mode="floor")
    block = torch.arange(count_k)
    return BlockMask((block >= first_own - left) & (block <= last_own + right), block_size, seqlen_q, seqlen_k)


def bigbird(seqlen_q, seqlen_k, *, block_size=(64, 64), window_blocks=1, global_blocks=1, random_blocks=2, seed=0):
    """BigBird's mask (arXiv:2007.14062, section 2): a band, global blocks, and random blocks.

    Args:
        window_blocks: the band, as in `local`.
        global_blocks: the first so many query blocks see every key, and every query sees the first so many key blocks.
        random_blocks: further key blocks that each query block sees, drawn from those it does not see otherwise; the
            draw depends on the seed alone.

    Raises:
        ValueError: a negative count, or a size that does not fit.
    """
    _check_ints("masks.bigbird", global_blocks=global_blocks, random_blocks=random_blocks, seed=seed)
    if min(global_blocks, random_blocks) < 0:
        raise ValueError(f"flash_cuda.masks.bigbird: global_blocks and random_blocks must not be negative, got "
                         f"{global_blocks} and {random_blocks}; 0 leaves them out")
    mask = local(seqlen_q, seqlen_k, window_blocks, block_size)
    blocks = mask.blocks[0, 0]
    blocks[:global_blocks] = True
    blocks[:, :global_blocks] = True
    # The random_blocks lowest of random keys; blocks that are visible already come last.
    keys = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(blocks, 2.0)
    chosen = keys.argsort(dim=1)[:, :random_blocks]
    return BlockMask(blocks.scatter(1, chosen, True), mask.block_size, seqlen_q, seqlen_k)


def _check_ints(where, **values):
    for name, value in values.items():
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"flash_cuda.{where}: {name} must be an int, got {type(value).__name__} {value!r:.40}; "
                            f"pass a whole number") from None


def _check_block_size(where, block_size):
    try:
        block_q, block_k = map(operator.index, block_size)
    except (TypeError, ValueError):
        raise ValueError(f"flash_cuda.{where}: block_size must be two ints (block_q, block_k), got {block_size!r}; "
                         f"(64, 64) is usual") from None
    if not 1 <= min(block_q, block_k) <= max(block_q, block_k) < 2**31:
        wanted = "at least (1, 1)" if min(block_q, block_k) < 1 else "below 2**31"
        raise ValueError(f"flash_cuda.{where}: block_size must be {wanted}, got {block_size!r}; (64, 64) is usual")
    return block_q, block_k


def _block_counts(seqlen_q, seqlen_k, block_size):
    if min(seqlen_q, seqlen_k) < 0:
        raise ValueError(f"flash_cuda.BlockMask: seqlen_q and seqlen_k must not be negative, got {seqlen_q} and "
                         f"{seqlen_k}; pass the lengths of q and k")
    return math.ceil(seqlen_q / block_size[0]), math.ceil(seqlen_k / block_size[1])
