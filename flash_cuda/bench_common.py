"""What the benchmarks of the CPU and of the GPU share: flags, FLOPs, the rule of the gate, quantiles, result files."""

from __future__ import annotations

import csv
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

import flash_cuda
from flash_cuda import _C, dispatch

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "backward")
MASKS = ("full", "causal")
PEERS = ("torch-flash", "torch-cudnn", "torch-efficient", "flex", "flash_attn")
SEED = 20220527
PROGRESS = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


class GateError(Exception):
    """A result was wrong, so its time means nothing."""


def add_arguments(p, positive: Callable[[str], int]) -> None:
    """Every flag that depends on the device is None when it is not given; `settle` puts the default there."""
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    p.add_argument("--seqlen", type=positive, nargs="+", help="default: 2048; on cuda 1024 4096 16384")
    p.add_argument("--head-dim", type=positive, nargs="+", help="default: 64, one only; on cuda 64 128 256")
    p.add_argument("--dtype", choices=DTYPES, nargs="+", help="default: all; on cuda bfloat16")
    p.add_argument("--mask", choices=MASKS, nargs="+", help="default: both")
    p.add_argument("--pass", dest="passes", choices=PASSES, nargs="+", help="default: both")
    p.add_argument("--version", choices=dispatch.VERSIONS, nargs="+", help="default: all that run there")
    p.add_argument("--csv", help="write the rows to this file; rows of the same commit, machine and shape are replaced")
    p.add_argument("--plot", help="save speed over sequence length to this picture")
    p.add_argument("--commit", help="what the rows are filed under; default: the commit of the source folder")
    cpu = p.add_argument_group("on a CPU")
    cpu.add_argument("--batch", type=positive, help="default: 1")
    cpu.add_argument("--heads", type=positive, help="default: 8")
    cpu.add_argument("--isa", choices=_C.cpu_isas(), nargs="+", help="default: all that run here")
    cpu.add_argument("--repeat", type=positive, help="turns of every contestant; default: 7")
    gpu = p.add_argument_group("on a GPU")
    gpu.add_argument("--tokens", type=positive, help="batch x seqlen; default: 16384")
    gpu.add_argument("--hidden", type=positive, help="heads x head_dim; default: 2048")
    gpu.add_argument("--peer", choices=PEERS, nargs="+", help="who else is timed; default: torch-flash torch-cudnn")
    gpu.add_argument("--small", action="store_true", default=None, help="also batch 1 with 512 and with 1024 tokens")


def settle(args, defaults: dict) -> None:
    """Puts the device's defaults where nothing was given; a flag that the device does not have is an error."""
    for name, value in vars(args).items():
        if name in ("command", "run", "device", "csv", "plot", "commit"):
            continue
        if value is None:
            setattr(args, name, defaults.get(name))
        elif name not in defaults:
            raise ValueError(
                f"flash_cuda.bench: --{name} is no flag of --device {args.device}, got {value}; leave it out"
            )


def commit() -> str:
    """The commit of the source folder, with + when its code differs; the version where there is no such folder."""

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", ":/csrc", ":/flash_cuda")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return flash_cuda.__version__


def flop(pass_: str, mask: str, batch: int, heads: int, seqlen: int, head_dim: int) -> float:
    """Two products forward and five backward, two operations each; causal hides half of the scores."""
    forward = 4 * batch * heads * seqlen**2 * head_dim
    return forward * (2.5 if pass_ == "backward" else 1) * (0.5 if mask == "causal" else 1)


def allowed_error(torch_error: float, eps: float, largest: float) -> float:
    """At most four times torch's error in the same dtype plus four roundings of the largest exact value. That is wider
    than what the tests ask: a result that is right must not stop a benchmark on a few last bits."""
    return 4 * torch_error + 4 * eps * largest


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, p20 and p80."""
    times = sorted(times)
    return statistics.median(times), times[round(0.2 * (len(times) - 1))], times[round(0.8 * (len(times) - 1))]


def rounded(number: float) -> float:
    """Five digits; more would be noise."""
    return float(f"{number:.5g}")


_PARSERS = {"int": int, "float": float, "float | None": lambda text: float(text) if text else None}


def read_csv(path: str | Path, row_type: type) -> list:
    """The rows of a result file, as the dataclass whose fields are its columns."""
    parsers = {field.name: _PARSERS.get(field.type, str) for field in fields(row_type)}
    with open(path, newline="") as file:
        return [row_type(**{name: parsers[name](text) for name, text in line.items()}) for line in csv.DictReader(file)]


def write_csv(path: str | Path, rows: list) -> None:
    """Add the rows, one or more, to the file; they replace those with the same key()."""
    path = Path(path)
    kept = {row.key(): row for row in (read_csv(path, type(rows[0])) if path.exists() else []) + rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in kept.values())
