"""The compiled part: the typed fast path of attention, and what the build and the CPU backend say about themselves."""

from typing import Literal, TypedDict

import torch
from torch import Tensor

class _LastCall(TypedDict):
    pass_: str
    version: str
    kernel: str
    device: str
    isa: str
    tile: tuple[int, int]
    grid: int
    fast_memory_bytes: int
    bytes_loaded: int | None
    bytes_stored: int | None
    copies: tuple[str, ...]
    threads: int
    dropout_seed: Tensor | None

class _Sizes(TypedDict):
    packed: bool
    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    softmax_scale: float

class _BuildInfo(TypedDict):
    torch: str
    cuda: bool
    cuda_archs: list[str]
    cuda_why: str
    compiler: str

class _CpuPlan(TypedDict):
    tile: tuple[int, int]
    grid: int
    fast_memory_bytes: int
    splits: int
    dq_accum_bytes: int
    phase_tasks: tuple[int, ...]

def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: int,
    window_left: int,
    window_right: int,
    softcap: float,
    version: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_mask: Tensor | None,
    block_mask_q: int,
    block_mask_k: int,
    deterministic: bool,
    /,
) -> tuple[Tensor, Tensor]: ...
def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: int,
    window_left: int,
    window_right: int,
    softcap: float,
    version: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_mask: Tensor | None,
    block_mask_q: int,
    block_mask_k: int,
    deterministic: bool,
    /,
) -> _Sizes:
    """The sizes of a call, after every check that the call would make; nothing runs."""

def time_forward(q: Tensor, k: Tensor, v: Tensor, n: int, /) -> float:
    """Seconds that n plain calls of the CPU kernel take, without Python and the dispatcher."""

def last_call() -> _LastCall | None: ...
def build_info() -> _BuildInfo: ...
def cuda_built() -> bool: ...
def cuda_archs() -> list[str]: ...
def cpu_isa() -> str: ...
def cpu_isas() -> list[str]: ...
def set_cpu_isa(name: str, /) -> None: ...
def cpu_fast_memory() -> int: ...
def set_cpu_fast_memory(bytes: int, /) -> int:
    """Sizes the tiles of later calls for so many bytes; returns what was set before."""

def cpu_plan(
    pass_: Literal["forward", "backward"],
    version: int,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    heads_kv: int,
    head_dim: int,
    seqlen_q: int,
    seqlen_k: int,
    block_mask_q: int = 0,
    block_mask_k: int = 0,
    causal: int = 0,
    window_left: int = -1,
    window_right: int = -1,
    bias: bool = False,
    sinks: bool = False,
    dlse: bool = False,
    dq: bool = True,
    dkv: bool = True,
    dbias: bool = False,
    dsinks: bool = False,
    fast_memory: int | None = None,
    threads: int | None = None,
) -> _CpuPlan:
    """The plan that a call of these sizes would run, without any tensor."""

def cuda_smem_available(device: int = -1, /) -> int:
    """Bytes of shared memory that a CTA may have on a CUDA device (-1: the current one) with the code that the build has
    for it; 0 when it has none. RuntimeError in a build for CPU only."""

class _CudaPlan(TypedDict):
    head_dim: int
    tile: tuple[int, int]
    threads: int
    smem_bytes: int
    grid: int

def cuda_plan(
    pass_: Literal["forward", "backward"],
    batch: int = 1,
    heads: int = 1,
    heads_kv: int = 1,
    head_dim: int = 64,
    seqlen_q: int = 1,
    seqlen_k: int = 1,
    smem_available: int = 0,
) -> _CudaPlan:
    """What a CUDA kernel of fa2 takes; RuntimeError in a build for CPU only."""
