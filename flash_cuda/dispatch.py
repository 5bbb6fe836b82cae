"""Which version runs a call, and every reason why another one does not.

`attention` asks `choose`; `explain` prints `reasons` of each version, so an error and an explanation never disagree.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flash_cuda import _C


@dataclass(frozen=True)
class Version:
    """One generation of the algorithm."""

    name: str
    code: int  # what the ops call it
    title: str
    paper: str
    cpu: bool  # whether its schedule also runs on a CPU
    cuda: bool  # whether it has CUDA kernels in this release
    capability: tuple[int, int]  # the oldest CUDA compute capability that it is written for


VERSIONS: dict[str, Version] = {
    v.name: v
    for v in (
        Version(
            "fa1", 1, "key blocks outside; O, row_max and row_sum are revisited",
            "FlashAttention (Dao et al. 2022), Algorithm 1 and 4", True, False, (8, 0),
        ),
        Version(
            "fa2", 2, "query blocks outside; O stays in fast memory and is rescaled once, at the end",
            "FlashAttention-2 (Dao 2023), section 3.1 to 3.3", True, True, (8, 0),
        ),
        Version(
            "fa3", 3, "warp-specialised: TMA loads, asynchronous wgmma, softmax under matrix products",
            "FlashAttention-3 (Shah et al. 2024), section 3", False, False, (9, 0),
        ),
    )
}  # fmt: skip

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CUDA_DTYPES = (torch.bfloat16, torch.float16)
CUDA_LARGEST_HEAD_DIM = 256
CUDA_MOST_ROWS, CUDA_MOST = 2**29, 2**31 - 1  # the kernels count in 32 bits


@dataclass(frozen=True)
class Reason:
    """Why a version does not run a call."""

    kind: str  # "here": this machine or this build; "input": the tensors or the arguments
    rule: str  # what the version asks for; names it
    value: str  # what it found
    fix: str  # the way out

    def __str__(self) -> str:
        return f"{self.rule}, got {self.value}; {self.fix}"


def features_in_use(softcap, alibi_slopes, bias, sinks, block_mask, dropout_p) -> tuple[str, ...]:
    """The arguments of a call that no CUDA kernel takes yet."""
    if softcap == 0 and dropout_p == 0 and alibi_slopes is bias is sinks is block_mask is None:
        return ()
    given = {"softcap": softcap != 0, "alibi_slopes": alibi_slopes is not None, "bias": bias is not None,
             "sinks": sinks is not None, "block_mask": block_mask is not None, "dropout_p": dropout_p != 0}  # fmt: skip
    return tuple(name for name, is_given in given.items() if is_given)


def dtype_in_kernel(q: torch.Tensor) -> torch.dtype:
    """The dtype of q once autocast has cast it."""
    kind = q.device.type
    if kind not in ("cpu", "cuda") or q.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return q.dtype
    return torch.get_autocast_dtype(kind)


def reasons(
    version: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, features: tuple[str, ...] = (),
    rows: int = 0, packed_rows: int = 0, heads: int = 0,
) -> list[Reason]:  # fmt: skip
    """Every reason why `version` cannot run a call like this; an empty list means that it runs.

    features: the arguments in use that not every kernel takes, as `features_in_use` tells.
    rows: the length of the longest sequence. packed_rows: of all packed ones together. heads: those of the whole batch.
    """
    v = VERSIONS[version]
    if device.type == "cuda":
        counts = {"rows in a sequence": (rows, CUDA_MOST_ROWS), "packed rows": (packed_rows, CUDA_MOST),
                  "heads in the whole batch": (heads, CUDA_MOST)}  # fmt: skip
        return _cuda_reasons(v, device, dtype, head_dim, features, counts)
    found = []
    if device.type not in ("cpu", "meta"):
        found.append(Reason("input", f"{v.name} runs on cpu tensors", f"{device.type}", "move q, k and v to the CPU"))
    elif not v.cpu:
        found.append(
            Reason("here", f"{v.name} comes later, and for GPUs of compute capability {_dotted(v.capability)}",
                   "tensors on the CPU", 'use version="fa2" or version=None')
        )  # fmt: skip
    if dtype not in CPU_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in CPU_DTYPES)
        found.append(Reason("input", f"{v.name} takes {allowed}", f"{dtype}", "convert q, k and v with .to()"))
    if head_dim < 1:
        found.append(Reason("input", "head_dim must be at least 1", f"{head_dim}", "drop the empty call"))
    return found


def _cuda_reasons(
    v: Version, device: torch.device, dtype: torch.dtype, head_dim: int, features: tuple[str, ...],
    counts: dict[str, tuple[int, int]],
) -> list[Reason]:  # fmt: skip
    found = []
    if not v.cuda:
        found.append(
            Reason("here", f"{v.name} needs an attention kernel for CUDA tensors", "a release that has none yet",
                   'use version="fa2"')
        )  # fmt: skip
    if not _C.cuda_built():
        found.append(
            Reason("here", f"{v.name} needs CUDA kernels in the build",
                   f"a build for CPU only ({_C.build_info()['cuda_why']})",
                   "run FLASH_CUDA_BUILD=cuda pip install --no-build-isolation . where nvcc is")
        )  # fmt: skip
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    if capability is None:
        found.append(
            Reason("here", f"{v.name} needs a CUDA GPU", "none that torch finds", "run it where nvidia-smi shows one")
        )  # fmt: skip
    elif capability < v.capability:
        found.append(
            Reason("here", f"{v.name} needs compute capability {_dotted(v.capability)} or newer", _dotted(capability),
                   "name an older version")
        )  # fmt: skip
    elif _C.cuda_built() and shared_memory(device) == 0:
        found.append(
            Reason("here", f"{v.name} needs code for compute capability {_dotted(capability)} in the build",
                   f"code for {', '.join(_C.cuda_archs())}",
                   f"run FLASH_CUDA_ARCHS={capability[0]}{capability[1]} pip install --no-build-isolation .")
        )  # fmt: skip
    if dtype not in CUDA_DTYPES:
        allowed = " and ".join(str(d).removeprefix("torch.") for d in CUDA_DTYPES)
        found.append(Reason("input", f"{v.name} takes {allowed} on CUDA", f"{dtype}", "convert q, k and v with .to()"))
    if not 1 <= head_dim <= CUDA_LARGEST_HEAD_DIM:
        found.append(
            Reason("input", f"{v.name} takes a head_dim of 1 to {CUDA_LARGEST_HEAD_DIM} on CUDA", f"{head_dim}",
                   "split the heads")
        )  # fmt: skip
    for what, (has, limit) in counts.items():
        if has > limit:
            found.append(Reason("input", f"{v.name} takes at most {limit} {what} on CUDA", f"{has}", "split the call"))
    if features:
        found.append(
            Reason("input", f"{v.name} takes masks and windows but no other feature on CUDA yet", ", ".join(features),
                   "leave them out, or move the call to the CPU")
        )  # fmt: skip
    return found


def shared_memory(device: torch.device) -> int:
    """Bytes of it that a CTA may have with the code that the build has for the device; 0 when it has none."""
    return _C.cuda_smem_available(-1 if device.index is None else device.index)


def _dotted(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


def candidates(device: torch.device) -> tuple[str, ...]:
    """What version=None tries, in this order."""
    return ("fa3", "fa2") if device.type == "cuda" else ("fa2",)


@functools.lru_cache(maxsize=1024)
def choose(
    version: str | None, *, device: torch.device, dtype: torch.dtype, head_dim: int, features: tuple[str, ...] = (),
    name: str = "attention",
) -> int:  # fmt: skip
    """The code of the version that runs the call; raises with every reason when none does. Nothing falls back.

    Answers are kept: the same call asks again and again, and asking the driver costs host time.
    """
    if version is not None and version not in VERSIONS:
        known = ", ".join(repr(n) for n in VERSIONS)
        error = ValueError if isinstance(version, str) else TypeError
        raise error(f"flash_cuda.{name}: version must be None or one of {known}, got {version!r}; name one of them")
    refused = {}
    for candidate in candidates(device) if version is None else (version,):
        refused[candidate] = reasons(candidate, device=device, dtype=dtype, head_dim=head_dim, features=features)
        if not refused[candidate]:
            return VERSIONS[candidate].code
    why = " | ".join(str(reason) for all_of_it in refused.values() for reason in all_of_it)
    here = all(reason.kind == "here" for all_of_it in refused.values() for reason in all_of_it)
    # Where a version has no CUDA kernel at all, no better machine would help (rule 13: no kernel serves the combination).
    helps = device.type != "cuda" or all(VERSIONS[candidate].cuda for candidate in refused)
    error = RuntimeError if here and helps else NotImplementedError
    raise error(f"flash_cuda.{name}: no kernel for q on {device}: {why}")
