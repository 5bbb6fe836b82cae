"""Which version runs a call, and every reason why another one does not.

`attention` asks `choose`; `explain` prints `reasons` of each version, so an error and an explanation never disagree.
"""

from __future__ import annotations

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
    capability: tuple[int, int]  # the oldest CUDA compute capability that it is written for


VERSIONS: dict[str, Version] = {
    v.name: v
    for v in (
        Version(
            "fa1", 1, "key blocks outside; O, row_max and row_sum are revisited",
            "FlashAttention (Dao et al. 2022), Algorithm 1 and 4", True, (8, 0),
        ),
        Version(
            "fa2", 2, "query blocks outside; O stays in fast memory and is rescaled once, at the end",
            "FlashAttention-2 (Dao 2023), section 3.1 to 3.3", True, (8, 0),
        ),
        Version(
            "fa3", 3, "warp-specialised: TMA loads, asynchronous wgmma, softmax under matrix products",
            "FlashAttention-3 (Shah et al. 2024), section 3", False, (9, 0),
        ),
    )
}  # fmt: skip

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Reason:
    """Why a version does not run a call."""

    kind: str  # "here": this machine or this build; "input": the tensors or the arguments
    rule: str  # what the version asks for; names it
    value: str  # what it found
    fix: str  # the way out

    def __str__(self) -> str:
        return f"{self.rule}, got {self.value}; {self.fix}"


def reasons(version: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[Reason]:
    """Every reason why `version` cannot run tensors like these; an empty list means that it runs."""
    v = VERSIONS[version]
    if device.type == "cuda":
        return _cuda_reasons(v, device)
    found = []
    if device.type not in ("cpu", "meta"):
        found.append(Reason("input", f"{v.name} runs on cpu tensors", f"{device.type}", "move q, k and v to the CPU"))
    elif not v.cpu:
        found.append(
            Reason("here", f"{v.name} is written for GPUs of compute capability {_dotted(v.capability)}",
                   "tensors on the CPU", 'use version="fa2" or version=None')
        )  # fmt: skip
    if dtype not in CPU_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in CPU_DTYPES)
        found.append(Reason("input", f"{v.name} takes {allowed}", f"{dtype}", "convert q, k and v with .to()"))
    if head_dim < 1:
        found.append(Reason("input", "head_dim must be at least 1", f"{head_dim}", "drop the empty call"))
    return found


def _cuda_reasons(v: Version, device: torch.device) -> list[Reason]:
    found = [
        Reason("here", f"{v.name} needs an attention kernel for CUDA tensors", "a release that has none yet",
               "move q, k and v to the CPU")
    ]  # fmt: skip
    if not _C.cuda_built():
        found.append(
            Reason("here", f"{v.name} needs CUDA kernels in the build",
                   f"a build for CPU only ({_C.build_info()['cuda_why']})",
                   "run FLASH_CUDA_BUILD=cuda pip install --no-build-isolation . where nvcc is")
        )  # fmt: skip
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    if capability is not None and capability < v.capability:
        found.append(
            Reason("here", f"{v.name} needs compute capability {_dotted(v.capability)} or newer", _dotted(capability),
                   "name an older version")
        )  # fmt: skip
    return found


def _dotted(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


def candidates(device: torch.device) -> tuple[str, ...]:
    """What version=None tries, in this order."""
    return ("fa3", "fa2") if device.type == "cuda" else ("fa2",)


def choose(
    version: str | None, *, device: torch.device, dtype: torch.dtype, head_dim: int, name: str = "attention"
) -> int:
    """The code of the version that runs the call; raises with every reason when none does. Nothing falls back."""
    if version is not None and version not in VERSIONS:
        known = ", ".join(repr(n) for n in VERSIONS)
        error = ValueError if isinstance(version, str) else TypeError
        raise error(f"flash_cuda.{name}: version must be None or one of {known}, got {version!r}; name one of them")
    refused = {}
    for candidate in candidates(device) if version is None else (version,):
        refused[candidate] = reasons(candidate, device=device, dtype=dtype, head_dim=head_dim)
        if not refused[candidate]:
            return VERSIONS[candidate].code
    why = " | ".join(str(reason) for all_of_it in refused.values() for reason in all_of_it)
    here = all(reason.kind == "here" for all_of_it in refused.values() for reason in all_of_it)
    # A CUDA tensor misses a kernel (rule 13: no kernel serves the combination), not a better machine.
    error = RuntimeError if here and device.type != "cuda" else NotImplementedError
    raise error(f"flash_cuda.{name}: no kernel for q on {device}: {why}")
