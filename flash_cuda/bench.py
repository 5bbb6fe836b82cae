"""`python -m flash_cuda bench`: the CPU schedules against torch's own CPU attention, side by side in one run.

Every contestant passes a correctness gate first. Then all of them take turns, so that what else the machine does meets
all alike; medians are compared, and p20 and p80 say how steady they are.
"""

from __future__ import annotations

import csv
import itertools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

import flash_cuda
from flash_cuda import _C, dispatch, reference

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "backward")
MASKS = ("full", "causal")
CPU_VERSIONS = tuple(v.name for v in dispatch.VERSIONS.values() if v.cpu)
SEED = 20220527


@dataclass(frozen=True)
class Row:
    """One contestant at one shape, beside torch in the same run. The fields are the columns of the CSV."""

    commit: str
    cpu: str
    threads: int
    torch: str
    dtype: str
    mask: str
    pass_: str
    version: str
    isa: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    ms: float
    ms_p20: float
    ms_p80: float
    gflops: float
    torch_ms: float
    torch_ms_p20: float
    torch_ms_p80: float
    torch_gflops: float
    ratio: float  # torch's median over this one's: above 1 is faster than torch

    def key(self) -> tuple:
        """What a new measurement replaces."""
        return tuple(str(getattr(self, field.name)) for field in fields(self)[:13])


class GateError(Exception):
    """A result was wrong, so its time means nothing."""


def add_arguments(p, positive: Callable[[str], int]) -> None:
    p.add_argument("--batch", type=positive, default=1)
    p.add_argument("--heads", type=positive, default=8)
    p.add_argument("--seqlen", type=positive, nargs="+", default=[2048], help="one or more; default: 2048")
    p.add_argument("--head-dim", type=positive, default=64)
    p.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    p.add_argument("--mask", choices=MASKS, nargs="+", default=MASKS)
    p.add_argument("--pass", dest="passes", choices=PASSES, nargs="+", default=PASSES)
    p.add_argument("--version", choices=CPU_VERSIONS, nargs="+", default=CPU_VERSIONS)
    p.add_argument("--isa", choices=_C.cpu_isas(), nargs="+", default=_C.cpu_isas(), help="default: all that run here")
    p.add_argument("--repeat", type=positive, default=7, help="turns of every contestant; default: 7")
    p.add_argument("--csv", help="write the rows to this file; rows of the same commit, machine and shape are replaced")
    p.add_argument("--plot", help="save GFLOP/s over sequence length to this picture")


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


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Contestant:
    """One way to compute attention on fixed inputs. `isa` is empty for torch."""

    def __init__(self, version: str, isa: str, inputs: tuple[torch.Tensor, ...], causal: bool):
        self.version, self.isa = version, isa
        *qkv, self.dout = inputs
        self.qkv = [x.detach().requires_grad_() for x in qkv]
        self.causal, self.seconds = causal, []
        self.out = None

    def forward(self) -> torch.Tensor:
        if self.isa:
            return flash_cuda.attention(*self.qkv, causal=self.causal, version=self.version)
        q, k, v = (x.transpose(1, 2) for x in self.qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.out, self.qkv, self.dout, retain_graph=True)

    def turn(self, pass_: str):
        if self.isa:
            _C.set_cpu_isa(self.isa)
        if pass_ == "backward" and self.out is None:
            self.out = self.forward()
        with torch.set_grad_enabled(pass_ == "backward"):
            started = time.perf_counter()
            result = self.backward() if pass_ == "backward" else (self.forward(),)
            self.seconds.append(time.perf_counter() - started)
        return result

    def quantiles(self) -> tuple[float, float, float]:
        """Median, p20 and p80 in milliseconds."""
        ms = sorted(1e3 * s for s in self.seconds)
        return statistics.median(ms), ms[round(0.2 * (len(ms) - 1))], ms[round(0.8 * (len(ms) - 1))]


def exact(inputs: tuple[torch.Tensor, ...], causal: bool, heads: list[int]) -> dict[str, list[torch.Tensor]]:
    """Output and gradients in float64, for some heads."""
    *qkv, dout = (x[:, :, heads].double() for x in inputs)
    qkv = [x.requires_grad_() for x in qkv]
    out = reference.attention(*qkv, causal=causal)
    return {"forward": [out.detach()], "backward": list(torch.autograd.grad(out, qkv, dout))}


def gate(contestants: list[Contestant], pass_: str, truth: list[torch.Tensor], heads: list[int]) -> None:
    """Each error is at most four times torch's in the same dtype plus four roundings of the largest exact value. That
    is wider than what the tests ask: a result that is right must not stop a benchmark on a few last bits."""
    peer, *ours = contestants
    torch_results = peer.turn(pass_)
    for c in ours:
        for i, (result, by_torch, want) in enumerate(zip(c.turn(pass_), torch_results, truth, strict=True)):
            error, torch_error = ((x[:, :, heads].double() - want).abs().max().item() for x in (result, by_torch))
            allowed = 4 * torch_error + 4 * torch.finfo(result.dtype).eps * want.abs().max().item()
            if not error <= allowed:
                what = "out" if pass_ == "forward" else ("dq", "dk", "dv")[i]
                case = f"{str(result.dtype).removeprefix('torch.')} {'causal' if c.causal else 'full'}"
                raise GateError(
                    f"{c.version} {c.isa} {case}: {what} is wrong, expected an error of at most {allowed:.3g}, got "
                    f"{error:.3g}; nothing is timed"
                )


def measure(args, console: Console) -> list[Row]:
    before = _C.cpu_isa()
    cells = list(itertools.product(args.seqlen, args.dtype, args.mask, args.passes))
    pairs = list(itertools.product(args.version, args.isa))
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    origin = {"commit": commit(), "cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    rows = []
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(cells) * (args.repeat + 1))
            for seqlen, dtype, mask, pass_ in cells:
                shape = (args.batch, seqlen, args.heads, args.head_dim)
                progress.update(task, description=f"seqlen {seqlen} {dtype} {mask} {pass_}")
                generator = torch.Generator().manual_seed(SEED)
                inputs = tuple(torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in range(4))
                causal = mask == "causal"
                contestants = [Contestant("torch", "", inputs, causal)]
                contestants += [Contestant(version, isa, inputs, causal) for version, isa in pairs]
                heads = sorted({0, args.heads - 1})  # the others would only repeat the schedule at the price of float64
                gate(contestants, pass_, exact(inputs, causal, heads)[pass_], heads)
                progress.advance(task)
                for c in contestants:
                    c.seconds.clear()
                for _ in range(args.repeat):
                    for c in contestants:
                        c.turn(pass_)
                    progress.advance(task)
                about = origin | {"dtype": dtype, "mask": mask, "pass_": pass_, "batch": args.batch,
                                  "heads": args.heads, "seqlen": seqlen, "head_dim": args.head_dim}  # fmt: skip
                rows += compare(contestants, about)
    finally:
        _C.set_cpu_isa(before)
    return rows


def compare(contestants: list[Contestant], about: dict) -> list[Row]:
    flop = 4 * about["batch"] * about["heads"] * about["seqlen"] ** 2 * about["head_dim"]
    flop *= (2.5 if about["pass_"] == "backward" else 1) * (0.5 if about["mask"] == "causal" else 1)
    peer, *ours = contestants
    torch_ms, torch_p20, torch_p80 = peer.quantiles()
    rows = []
    for c in ours:
        ms, p20, p80 = c.quantiles()
        times = {"ms": ms, "ms_p20": p20, "ms_p80": p80, "torch_ms": torch_ms, "torch_ms_p20": torch_p20,
                 "torch_ms_p80": torch_p80, "gflops": flop / ms / 1e6, "torch_gflops": flop / torch_ms / 1e6,
                 "ratio": torch_ms / ms}  # fmt: skip
        times = {name: float(f"{x:.5g}") for name, x in times.items()}  # more digits would be noise
        rows.append(Row(**about, version=c.version, isa=c.isa, **times))
    return rows


def host_time(calls: int = 2000, rounds: int = 7) -> tuple[float, float, float]:
    """Microseconds of one call on one token: flash_cuda.attention, its kernel alone, torch's attention."""
    q = torch.randn(1, 1, 1, 64)
    p = q.transpose(1, 2)

    def loop(call):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - started

    with torch.no_grad():
        turns = [
            (
                loop(lambda: flash_cuda.attention(q, q, q)),
                _C.time_forward(q, q, q, calls),
                loop(lambda: F.scaled_dot_product_attention(p, p, p)),
            )
            for _ in range(rounds)
        ]
    return tuple(statistics.median(turn) * 1e6 / calls for turn in zip(*turns))


def table(rows: list[Row]) -> Table:
    first = rows[0]
    shown = Table(title=f"{first.cpu}, {first.threads} threads, torch {first.torch}: batch {first.batch}, heads "
                        f"{first.heads}, head_dim {first.head_dim}, commit {first.commit}")  # fmt: skip
    shown.add_column("what")
    shown.add_column("by")
    for name in ("ms", "p20 - p80", "GFLOP/s", "x torch"):
        shown.add_column(name, justify="right")
    for (seqlen, dtype, mask, pass_), cell in itertools.groupby(rows, lambda r: (r.seqlen, r.dtype, r.mask, r.pass_)):
        cell = list(cell)
        r = cell[0]
        peer = (f"{r.torch_ms:.2f}", f"{r.torch_ms_p20:.2f} - {r.torch_ms_p80:.2f}", f"{r.torch_gflops:.0f}", "1")
        shown.add_section()
        shown.add_row(f"{dtype} {mask} {pass_} {seqlen}", "torch", *peer)
        for r in cell:
            shown.add_row(
                "", f"{r.version} {r.isa}", f"{r.ms:.2f}", f"{r.ms_p20:.2f} - {r.ms_p80:.2f}", f"{r.gflops:.0f}",
                f"{r.ratio:.2f}", style=None if r.ratio >= 1 else "dim",
            )  # fmt: skip
    return shown


def read_csv(path: str | Path) -> list[Row]:
    """The rows of a result file."""
    types = {field.name: {"int": int, "float": float}.get(field.type, str) for field in fields(Row)}
    with open(path, newline="") as file:
        return [Row(**{name: types[name](text) for name, text in line.items()}) for line in csv.DictReader(file)]


def write_csv(path: str | Path, rows: list[Row]) -> None:
    """Add the rows to the file; they replace those of the same commit, machine and shape."""
    path = Path(path)
    kept = {row.key(): row for row in (read_csv(path) if path.exists() else []) + rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in kept.values())


def plot(rows: list[Row], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to save a picture
    from matplotlib import pyplot

    panels = list(dict.fromkeys((r.dtype, r.mask, r.pass_) for r in rows))
    wide = min(4, len(panels))
    high = -(-len(panels) // wide)
    figure, axes = pyplot.subplots(high, wide, figsize=(4.2 * wide, 3.2 * high), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    styles = {"fa2": "o-", "fa1": "s:"}
    for axis, panel in zip(axes.flat, panels):
        cell = [r for r in rows if (r.dtype, r.mask, r.pass_) == panel]
        for color, isa in zip(("tab:blue", "tab:green", "tab:purple"), dict.fromkeys(r.isa for r in cell)):
            for version in dict.fromkeys(r.version for r in cell):
                line = sorted((r.seqlen, r.gflops) for r in cell if (r.version, r.isa) == (version, isa))
                axis.plot(*zip(*line), styles[version], color=color, alpha=0.8, label=f"{version} {isa}")
        line = sorted({r.seqlen: r.torch_gflops for r in cell}.items())
        axis.plot(*zip(*line), "o-", color="tab:orange", label="torch")
        axis.set(title=" ".join(panel), xlabel="sequence length", ylabel="GFLOP/s", xscale="log", ylim=(0, None))
        ticks = sorted({r.seqlen for r in cell})
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.minorticks_off()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    r = rows[0]
    figure.suptitle(f"{r.cpu}, {r.threads} threads, batch {r.batch}, heads {r.heads}, head_dim {r.head_dim}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(args, console: Console) -> int:
    try:
        rows = measure(args, console)
    except GateError as error:
        console.print(f"FAILED: {error}", style="bold red")
        return 1
    console.print(table(rows))
    whole, kernel, peer = host_time()
    console.print(
        f"host time of a call on one token: {whole:.2f} us, {whole - kernel:.2f} us of it over the kernel's own; "
        f"torch's scaled_dot_product_attention {peer:.2f} us"
    )
    if args.csv:
        write_csv(args.csv, rows)
        console.print(f"rows: {args.csv}")
    if args.plot:
        plot(rows, args.plot)
        console.print(f"picture: {args.plot}")
    return 0
