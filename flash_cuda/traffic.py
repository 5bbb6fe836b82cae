"""How many bytes a schedule moves between slow memory (the tensors) and fast memory (its tile buffers), and how many
FLOPs the visible scores cost, computed from shapes and masks alone.

This is the analysis of the FlashAttention paper (section 3) with every term kept, so that it agrees to the byte with
what the CPU schedules count while they run. Work is per query block, never per element.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

CAUSAL_OFF, CAUSAL_BOTTOM_RIGHT, CAUSAL_TOP_LEFT = 0, 1, 2
UNBOUNDED = -1


@dataclass(frozen=True)
class Traffic:
    loaded: int = 0
    stored: int = 0

    @property
    def total(self) -> int:
        return self.loaded + self.stored

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.loaded + other.loaded, self.stored + other.stored)


@dataclass(frozen=True)
class Bias:
    numel: int  # of its gradient
    element_size: int
    by_row: bool  # whether it differs from query to query in memory: not when its size or its stride says otherwise
    by_col: bool

    def tiles(self, visits: Visits) -> int:
        """Bytes of the bias tiles that go with the visited score tiles."""
        sizes = {(True, True): visits.area, (True, False): visits.rows, (False, True): visits.cols}
        return sizes.get((self.by_row, self.by_col), visits.tiles) * self.element_size


@dataclass(frozen=True)
class Workload:
    """What of a call decides its traffic. `seqlens` holds (seqlen_q, seqlen_k) of every sequence of the batch."""

    seqlens: tuple[tuple[int, int], ...]
    heads: int
    heads_kv: int
    head_dim: int
    element_size: int  # of q, k, v
    wide: bool  # float32 and float64: sums of O and dQ live in the tensors themselves, not in a workspace
    causal: int = CAUSAL_OFF
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    bias: Bias | None = None
    sinks: bool = False
    block_mask: np.ndarray | None = None  # bool (batch or 1, heads or 1, q blocks, k blocks)
    block_size: tuple[int, int] = (0, 0)

    @property
    def acc_size(self) -> int:
        return max(4, self.element_size)

    @property
    def sum_size(self) -> int:
        """Element size of the place where O (fa1) and dQ are summed up."""
        return self.element_size if self.wide else self.acc_size

    @property
    def total_q(self) -> int:
        return sum(seqlen_q for seqlen_q, _ in self.seqlens)

    def diagonal(self, seqlen_q: int, seqlen_k: int) -> int:
        return 0 if self.causal == CAUSAL_TOP_LEFT else seqlen_k - seqlen_q

    def key_range(self, first_row, last_row, seqlen_q: int, seqlen_k: int):
        """[lo, hi) of the keys that rows first_row..last_row may see (numbers or arrays of them)."""
        left, right = self.window
        if self.causal != CAUSAL_OFF:
            right = 0 if right == UNBOUNDED else min(right, 0)
        diag = self.diagonal(seqlen_q, seqlen_k)
        lo = np.zeros_like(first_row) if left == UNBOUNDED else np.clip(first_row + diag - left, 0, seqlen_k)
        hi = np.full_like(last_row, seqlen_k)
        if right != UNBOUNDED:
            hi = np.clip(last_row + diag + right + 1, 0, seqlen_k)
        return lo, np.maximum(lo, hi)

    def problems(self):
        """Yield (count, seqlen_q, seqlen_k, planes): `count` sequences that look the same. `planes` are the block-mask
        planes of the heads of one KV group and how many groups share them: [(groups, [plane, ...]), ...]."""
        group = self.heads // self.heads_kv
        if self.block_mask is None or self.block_mask.shape[0] == 1:
            batches = [(0, seqlens, count) for seqlens, count in Counter(self.seqlens).items()]
        else:
            batches = [(b, seqlens, 1) for b, seqlens in enumerate(self.seqlens)]
        for b, (seqlen_q, seqlen_k), count in batches:
            if self.block_mask is None:
                planes = [(self.heads_kv, [None] * group)]
            elif self.block_mask.shape[1] == 1:
                planes = [(self.heads_kv, [self.block_mask[b, 0]] * group)]
            else:
                planes = [(1, list(self.block_mask[b, g * group : (g + 1) * group])) for g in range(self.heads_kv)]
            yield count, seqlen_q, seqlen_k, planes


@dataclass(frozen=True)
class Visits:
    """Sums over the score tiles that one (batch, head) pair visits."""

    tiles: int
    rows: int  # valid rows of each visited tile
    cols: int  # valid columns of each
    area: int  # rows * columns of each
    query_rows: int  # rows of the query blocks that visit any key block
    key_used: np.ndarray  # bool (n_blocks): visited by any query block


class _BlockMask:
    """Answers whether a score tile overlaps an active block of one plane of a block mask."""

    def __init__(self, plane: np.ndarray, block_size: tuple[int, int], row_edges, col_edges):
        dtype = np.int32 if plane.size < 2**31 else np.int64
        self.active = np.zeros((plane.shape[0] + 1, plane.shape[1] + 1), dtype)  # summed-area table
        self.active[1:, 1:] = plane.cumsum(0, dtype).cumsum(1, dtype)
        self.top, self.bottom = row_edges[:-1] // block_size[0], -(-row_edges[1:] // block_size[0])
        self.left, self.right = col_edges[:-1] // block_size[1], -(-col_edges[1:] // block_size[1])

    def touches(self, m: int) -> np.ndarray:
        """bool (n_blocks): which tiles of query block m."""
        active = self.active[self.bottom[m]] - self.active[self.top[m]]
        return active[self.right] > active[self.left]


def visits(work: Workload, tile: tuple[int, int], seqlen_q: int, seqlen_k: int, plane: np.ndarray | None) -> Visits:
    block_m, block_n = tile
    row_edges = np.minimum(np.arange(-(-seqlen_q // block_m) + 1) * block_m, seqlen_q)
    col_edges = np.minimum(np.arange(-(-seqlen_k // block_n) + 1) * block_n, seqlen_k)
    rows, n_blocks = np.diff(row_edges), len(col_edges) - 1
    lo, hi = work.key_range(row_edges[:-1], row_edges[1:] - 1, seqlen_q, seqlen_k)
    n_min = lo // block_n
    n_max = np.where(hi > lo, -(-hi // block_n), n_min)
    if plane is None:
        count, cols = n_max - n_min, col_edges[n_max] - col_edges[n_min]
        change = np.zeros(n_blocks + 1, dtype=np.int64)  # +1 where a query block's range starts, -1 where it ends
        np.add.at(change, n_min, 1)
        np.add.at(change, n_max, -1)
        key_used = change.cumsum()[:-1] > 0
    else:
        mask = _BlockMask(plane, work.block_size, row_edges, col_edges)
        widths, key_used = np.diff(col_edges), np.zeros(n_blocks, dtype=bool)
        count, cols = np.zeros_like(rows), np.zeros_like(rows)
        for m, (first, last) in enumerate(zip(n_min, n_max)):
            visited = mask.touches(m)[first:last]
            count[m], cols[m] = visited.sum(), visited @ widths[first:last]
            key_used[first:last] |= visited
    return Visits(
        tiles=int(count.sum()),
        rows=int((rows * count).sum()),
        cols=int(cols.sum()),
        area=int((rows * cols).sum()),
        query_rows=int(rows[count > 0].sum()),
        key_used=key_used,
    )


def _groups(work: Workload, tile: tuple[int, int]):
    """Yield (times, seqlen_q, seqlen_k, visits of each head of a KV group, keys that any of these heads reads)."""
    for count, seqlen_q, seqlen_k, planes in work.problems():
        cols = np.diff(np.minimum(np.arange(-(-seqlen_k // tile[1]) + 1) * tile[1], seqlen_k))
        for groups, heads in planes:
            if all(plane is heads[0] for plane in heads):
                seen = [visits(work, tile, seqlen_q, seqlen_k, heads[0])] * len(heads)
            else:
                seen = [visits(work, tile, seqlen_q, seqlen_k, plane) for plane in heads]
            keys = int(cols[np.logical_or.reduce([v.key_used for v in seen])].sum())
            yield count * groups, seqlen_q, seqlen_k, seen, keys


def forward(work: Workload, version: str, tile: tuple[int, int]) -> Traffic:
    es, acc, oes, dim = work.element_size, work.acc_size, work.sum_size, work.head_dim
    total = Traffic()
    for times, seqlen_q, seqlen_k, seen, _ in _groups(work, tile):
        cols = np.diff(np.minimum(np.arange(-(-seqlen_k // tile[1]) + 1) * tile[1], seqlen_k))
        for v in seen:
            bias = work.bias.tiles(v) if work.bias else 0
            if version == "fa2":  # a query block stays; every key block that it sees passes by
                loaded = v.query_rows * dim * es + 2 * v.cols * dim * es + bias
                stored = seqlen_q * (dim * es + acc)
            else:  # a key block stays; Q, O, row_max and row_sum of every query block pass by
                state = dim * oes + 2 * acc
                loaded = 2 * int(cols[v.key_used].sum()) * dim * es + v.rows * (dim * es + state) + bias
                stored = seqlen_q * state + v.rows * state
                loaded, stored = loaded + 2 * seqlen_q * acc, stored + seqlen_q * acc  # LSE from row_max and row_sum
                if oes != es or work.sinks:  # round O, or scale it by what the sink added to the sum
                    loaded, stored = loaded + seqlen_q * dim * oes, stored + seqlen_q * dim * es
            total += Traffic(times * loaded, times * stored)
    return total


@dataclass(frozen=True)
class Gradients:
    """Which gradients a backward pass computes, and whether LSE brought one in."""

    dq: bool = True
    dkv: bool = True
    dbias: bool = False
    dsinks: bool = False
    dlse: bool = False


def backward(
    work: Workload, version: str, tile: tuple[int, int], splits: int = 1, want: Gradients = Gradients()
) -> Traffic:
    es, acc, dim = work.element_size, work.acc_size, work.head_dim
    sum_size = acc if splits > 1 else work.sum_size
    dlse = acc if want.dlse else 0
    # What a visited tile needs of a row's forward result: LSE and delta (fa2), or O, LSE and dLSE, from which delta
    # is computed anew (fa1).
    row_state = 2 * acc if version == "fa2" else dim * es + acc + dlse
    total, all_rows = Traffic(), work.heads * work.total_q
    if version == "fa2":
        total += Traffic(all_rows * (2 * dim * es + dlse), all_rows * acc)
    if want.dq:
        total += Traffic(0, splits * all_rows * dim * sum_size)  # zeros
        if sum_size != es or splits > 1:
            total += Traffic(splits * all_rows * dim * acc, all_rows * dim * es)
    for times, _, seqlen_k, seen, keys in _groups(work, tile):
        for v in seen:
            tiles = v.rows * (2 * dim * es + row_state) + (work.bias.tiles(v) if work.bias else 0)
            if want.dq or want.dkv:
                dq = v.rows * dim * sum_size if want.dq else 0
                total += Traffic(times * (tiles + dq), times * dq)
            if want.dbias:
                total += Traffic(times * (tiles + 2 * v.cols * dim * es), 0)
        if want.dq or want.dkv:
            total += Traffic(times * 2 * keys * dim * es, times * 2 * seqlen_k * dim * es if want.dkv else 0)
    if want.dbias:
        total += Traffic(0, work.bias.numel * work.bias.element_size)
    if want.dsinks:
        total += Traffic(all_rows * (row_state + (dim * es if version == "fa1" else 0)), work.heads * acc)
    return total


def standard_forward(work: Workload) -> Traffic:
    """Attention with a stored score matrix (FlashAttention paper, algorithm 0): read Q, K, write S; read S, write P;
    read P, V, write O. Every head reads its K and V; masked scores are stored as well."""
    loaded = stored = 0
    for seqlen_q, seqlen_k in work.seqlens:
        scores, q, k = seqlen_q * seqlen_k, seqlen_q * work.head_dim, seqlen_k * work.head_dim
        loaded += q + k + scores + scores + k
        stored += scores + scores + q
    per_head = work.heads * work.element_size
    return Traffic(loaded * per_head, stored * per_head)


def standard_backward(work: Workload) -> Traffic:
    """Algorithm 3 of the paper: read P, dO, write dV; read dO, V, write dP; read P, dP, write dS; read dS, K, write
    dQ; read dS, Q, write dK."""
    loaded = stored = 0
    for seqlen_q, seqlen_k in work.seqlens:
        scores, q, k = seqlen_q * seqlen_k, seqlen_q * work.head_dim, seqlen_k * work.head_dim
        loaded += (scores + q) + (q + k) + 2 * scores + (scores + k) + (scores + q)
        stored += k + scores + scores + q + k
    per_head = work.heads * work.element_size
    return Traffic(loaded * per_head, stored * per_head)


def visible_scores(work: Workload) -> int:
    """The exact number of (query, key) pairs that masks, window and block mask leave, over batch and heads."""
    total = 0
    for count, seqlen_q, seqlen_k, planes in work.problems():
        rows = np.arange(seqlen_q)
        lo, hi = work.key_range(rows, rows, seqlen_q, seqlen_k)
        for groups, heads in planes:
            seen = {id(plane): _visible_in_plane(work, plane, rows, lo, hi) for plane in heads}
            total += count * groups * sum(seen[id(plane)] for plane in heads)
    return total


def _visible_in_plane(work: Workload, plane: np.ndarray | None, rows, lo, hi) -> int:
    if plane is None:
        return int((hi - lo).sum())
    block_q, block_k = work.block_size
    before = np.zeros((plane.shape[0], plane.shape[1] + 1), dtype=np.int64)  # active blocks left of block n
    before[:, 1:] = plane.cumsum(1)
    padded = np.pad(plane, ((0, 0), (0, 1)))

    def active_keys_left_of(j):
        block_row, n = rows // block_q, j // block_k
        return before[block_row, n] * block_k + padded[block_row, n] * (j % block_k)

    return int((active_keys_left_of(hi) - active_keys_left_of(lo)).sum())


def flops(work: Workload, backward: bool = False) -> int:
    """Two products of head_dim multiply-adds per visible score, five in the backward pass (recomputation counted)."""
    return visible_scores(work) * 4 * work.head_dim * (5 if backward else 2) // 2
