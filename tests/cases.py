"""The one table of cases that every backend runs, and how a case becomes tensors."""

import itertools
from dataclasses import dataclass, fields, replace

import torch

import kit
from flash_cuda import BlockMask, masks

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@dataclass(frozen=True)
class Case:
    """A call in words. Batch is at least 2 unless 1 is the point."""

    batch: int = 2
    seqlen_q: int = 33
    seqlen_k: int = 49
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    dtype: torch.dtype = F32
    magnitude: float = 1.0
    causal: bool | str = False
    window_size: tuple | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None  # "heads" or "batch": slopes (heads,) or (batch, heads)
    bias: str | None = None  # its sizes from the right: b, h, q, k for the full one, 1 for 1: "1hqk", "k", ...
    bias_kind: str = "same"  # dtype of q; or "float32", "bool", or "inf": some elements are -inf
    sinks: bool = False
    block_mask: str | None = None  # "local", "bigbird", "random" (of its own for each batch and head)
    block_size: tuple = (16, 16)
    dropout_p: float = 0.0
    layout: str = "bshd"
    strides: str = "contiguous"  # see kit.restride
    lengths: tuple | None = None  # (seqlen_q, seqlen_k) of each sequence: packed input

    def __str__(self):
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                text = str(value).removeprefix("torch.").replace(" ", "")
                parts.append(f.name if value is True else f"{f.name}={text}")
        return "-".join(parts) or "plain"


def build(case):
    """The tensors of a case."""
    c = case
    if c.lengths is not None:
        lengths_q, lengths_k = zip(*c.lengths)
        c = replace(c, batch=len(c.lengths), seqlen_q=max(lengths_q), seqlen_k=max(lengths_k))
        tensors = kit.qkv(1, sum(lengths_q), sum(lengths_k), c.heads, c.heads_kv, c.head_dim, c.dtype, c.magnitude)
    else:
        tensors = kit.qkv(c.batch, c.seqlen_q, c.seqlen_k, c.heads, c.heads_kv, c.head_dim, c.dtype, c.magnitude)
    leaves = {n: kit.restride(t, c.strides) for n, t in tensors.items()}
    if c.lengths is not None:
        leaves = {n: t[0] for n, t in leaves.items()}
    elif c.layout == "bhsd":
        leaves = {n: t.transpose(1, 2) for n, t in leaves.items()}

    options = {n: getattr(c, n) for n in ("causal", "window_size", "softmax_scale", "softcap", "dropout_p")}
    if c.lengths is None:
        options["layout"] = c.layout
    if c.alibi:
        options["alibi_slopes"] = torch.rand(*((c.batch,) if c.alibi == "batch" else ()), c.heads)
    if c.sinks:
        leaves["sinks"] = torch.randn(c.heads, dtype=F64 if c.dtype == F64 else F32)
    if c.bias:
        full = dict(zip("bhqk", (c.batch, c.heads, c.seqlen_q, c.seqlen_k)))
        bias = torch.randn([full.get(letter, 1) for letter in c.bias])
        if c.bias_kind == "bool":
            options["bias"] = bias > -0.5
        else:
            bias = bias.masked_fill(bias < -0.5, -torch.inf) if c.bias_kind == "inf" else bias
            leaves["bias"] = bias.to(F32 if c.bias_kind == "float32" else c.dtype)
    if c.block_mask:
        options["block_mask"] = _block_mask(c)
    packed = (_starts(lengths_q), _starts(lengths_k), c.seqlen_q, c.seqlen_k) if c.lengths is not None else ()
    return kit.Inputs(leaves, options, packed)


def _starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _block_mask(c):
    if c.block_mask == "local":
        return masks.local(c.seqlen_q, c.seqlen_k, 1, c.block_size)
    if c.block_mask == "bigbird":
        return masks.bigbird(c.seqlen_q, c.seqlen_k, block_size=c.block_size, window_blocks=0, random_blocks=1)
    counts = (-(-c.seqlen_q // c.block_size[0]), -(-c.seqlen_k // c.block_size[1]))
    return BlockMask(torch.rand(c.batch, c.heads, *counts) < 0.5, c.block_size, c.seqlen_q, c.seqlen_k)


SMOKE = [
    Case(),
    Case(dtype=BF16), Case(dtype=F16), Case(dtype=F64),
    Case(causal=True, dtype=BF16),
    Case(heads_kv=4), Case(heads_kv=1), Case(heads=1, heads_kv=1),
    Case(layout="bhsd"),
    Case(seqlen_q=130, seqlen_k=260, head_dim=64, causal=True),
]

EDGES = [
    Case(seqlen_q=1, seqlen_k=1), Case(seqlen_q=1, causal=True), Case(seqlen_k=1), Case(seqlen_k=1, causal=True),
    Case(seqlen_q=0), Case(seqlen_k=0), Case(seqlen_k=0, causal=True, sinks=True), Case(batch=0),
    Case(heads=0, heads_kv=0),
    Case(seqlen_q=49, seqlen_k=33, causal=True), Case(seqlen_q=49, seqlen_k=33, causal="top_left"),
    Case(seqlen_q=70, seqlen_k=5, causal=True, sinks=True),
    Case(head_dim=1), Case(head_dim=3), Case(head_dim=8), Case(head_dim=17, dtype=BF16), Case(head_dim=100, dtype=F16),
    Case(head_dim=256), Case(head_dim=264), Case(head_dim=512, dtype=BF16),
    Case(magnitude=3.0), Case(magnitude=3.0, dtype=BF16, causal=True), Case(magnitude=3.0, dtype=F16),
    Case(softmax_scale=0.0), Case(softmax_scale=2.0), Case(batch=1, heads=16, heads_kv=16, seqlen_q=3, seqlen_k=5),
    Case(batch=33, seqlen_q=2, seqlen_k=3),
]

WINDOWS = [(0, 0), (3, 0), (0, 5), (7, 2), (None, 4), (6, None), (None, None), (1000, 1000), (0, None)]

# Each feature alone, in a shape of several tiles' edges.
SINGLE_FEATURES = [
    *(Case(causal=causal, window_size=window) for causal in (False, True, "top_left") for window in WINDOWS),
    Case(seqlen_q=49, seqlen_k=20, window_size=(4, 30)), Case(seqlen_q=49, seqlen_k=20, window_size=(30, 4)),
    *(Case(softcap=cap) for cap in (0.5, 5.0, 50.0)), Case(softcap=10.0, magnitude=3.0),
    *(Case(alibi=kind, causal=causal) for kind in ("heads", "batch") for causal in (False, True, "top_left")),
    *(Case(bias=sizes, bias_kind=kind) for kind in ("same", "bool", "inf")
      for sizes in ("bhqk", "1hqk", "b1qk", "bh1k", "bhq1", "11q1", "b111", "hqk", "h11", "qk", "1k", "q1", "k", "1")),
    Case(bias="bhqk", bias_kind="float32", dtype=BF16), Case(bias="11qk", dtype=BF16), Case(bias="h1k", dtype=F16),
    Case(sinks=True), Case(sinks=True, causal=True, dtype=BF16),
    *(Case(block_mask=kind, block_size=size) for kind in ("local", "bigbird", "random")
      for size in ((16, 16), (8, 32), (1, 1), (7, 13), (64, 64))),
    *(Case(dropout_p=p) for p in (0.1, 0.5, 0.9)),
]

# Features together: what the score passes through on its way, in every order that matters.
COMBINATIONS = [
    Case(causal=True, softcap=5.0, alibi="heads", bias="1h1k", sinks=True, dropout_p=0.2),
    Case(causal="top_left", window_size=(9, 3), bias="bhqk", bias_kind="inf", sinks=True, seqlen_q=49, seqlen_k=33),
    Case(window_size=(20, 20), block_mask="random", alibi="batch", sinks=True, heads_kv=1),
    Case(causal=True, block_mask="bigbird", bias="b1qk", bias_kind="bool", softcap=2.0, dropout_p=0.3, layout="bhsd"),
    Case(softcap=3.0, bias="q1", block_mask="local", dropout_p=0.5, head_dim=40, heads=6, heads_kv=3),
    Case(causal=True, window_size=(5, None), sinks=True, dropout_p=0.1, seqlen_q=70, seqlen_k=40),
]
FEATURES = SINGLE_FEATURES + [replace(c, dtype=dtype) for c in COMBINATIONS for dtype in kit.DTYPES]

VARLEN = [
    Case(lengths=((5, 9), (33, 17), (1, 1), (64, 80))),
    Case(lengths=((0, 4), (7, 0), (0, 0), (3, 5)), causal=True),
    Case(lengths=((0, 1), (1, 1), (2, 2)), sinks=True),
    Case(lengths=((40, 70), (70, 40), (1, 90)), causal=True, dtype=BF16, head_dim=64),
    Case(lengths=((40, 70), (70, 40), (1, 90)), causal="top_left", window_size=(10, 4)),
    Case(lengths=((30, 50), (20, 10), (0, 7)), alibi="batch", bias="bhqk", sinks=True, dropout_p=0.3),
    Case(lengths=((30, 50), (20, 10), (0, 7)), bias="1h1k", bias_kind="bool", softcap=4.0, dtype=F16),
    Case(lengths=((30, 50), (20, 10), (33, 1)), block_mask="random", causal=True, alibi="heads"),
    Case(lengths=((30, 50), (20, 10)), strides="packed_qkv", heads=9, heads_kv=3, dropout_p=0.1),
    Case(lengths=((30, 50), (20, 10)), strides="sliced", bias="bhqk", bias_kind="inf"),
    Case(lengths=((3, 3),)),
]

LARGE = [
    Case(batch=2, heads=4, heads_kv=2, seqlen_q=700, seqlen_k=1030, head_dim=64, causal=True, dtype=BF16),
    Case(batch=2, heads=2, heads_kv=1, seqlen_q=1030, seqlen_k=700, head_dim=128, dtype=F32, sinks=True),
    Case(batch=2, heads=2, heads_kv=2, seqlen_q=400, seqlen_k=500, head_dim=64, window_size=(100, 30), dropout_p=0.1),
    Case(heads=2, heads_kv=2, seqlen_q=900, seqlen_k=900, head_dim=64, block_mask="bigbird", block_size=(64, 64)),
]
