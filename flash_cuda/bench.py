"""`python -m flash_cuda bench`: the CPU schedules against torch's own CPU attention, side by side in one run. (The CUDA
kernels: bench_gpu.py.)

Every contestant passes a correctness gate first. Then all of them take turns, so that what else the machine does meets
all alike; medians are compared, and p20 and p80 say how steady they are.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import flash_cuda
from flash_cuda import _C, bench_common, dispatch, reference
from flash_cuda.bench_common import GateError

DEFAULTS = {
    "seqlen": [2048], "head_dim": [64], "dtype": bench_common.DTYPES, "mask": bench_common.MASKS,
    "passes": bench_common.PASSES, "version": tuple(v.name for v in dispatch.VERSIONS.values() if v.cpu),
    "batch": 1, "heads": 8, "isa": _C.cpu_isas(), "repeat": 7,
}  # fmt: skip

COLORS = {"avx512": "tab:blue", "avx2": "tab:green", "generic": "tab:purple"}

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
        return bench_common.quantiles([1e3 * s for s in self.seconds])


def exact(inputs: tuple[torch.Tensor, ...], causal: bool, heads: list[int]) -> dict[str, list[torch.Tensor]]:
    """Output and gradients in float64, for some heads."""
    *qkv, dout = (x[:, :, heads].double() for x in inputs)
    qkv = [x.requires_grad_() for x in qkv]
    out = reference.attention(*qkv, causal=causal)
    return {"forward": [out.detach()], "backward": list(torch.autograd.grad(out, qkv, dout))}


def gate(contestants: list[Contestant], pass_: str, truth: list[torch.Tensor], heads: list[int]) -> None:
    """Raises when an error is larger than `bench_common.allowed_error`."""
    peer, *ours = contestants
    torch_results = peer.turn(pass_)
    for c in ours:
        for i, (result, by_torch, want) in enumerate(zip(c.turn(pass_), torch_results, truth, strict=True)):
            error, torch_error = ((x[:, :, heads].double() - want).abs().max().item() for x in (result, by_torch))
            eps = torch.finfo(result.dtype).eps
            allowed = bench_common.allowed_error(torch_error, eps, want.abs().max().item())
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
    (head_dim,) = args.head_dim
    pairs = list(itertools.product(args.version, args.isa))
    origin = {"commit": args.commit or bench_common.commit(), "cpu": cpu_name(), "threads": torch.get_num_threads(),
              "torch": torch.__version__}  # fmt: skip
    rows = []
    try:
        with Progress(*bench_common.PROGRESS, console=console) as progress:
            task = progress.add_task("", total=len(cells) * (args.repeat + 1))
            for seqlen, dtype, mask, pass_ in cells:
                shape = (args.batch, seqlen, args.heads, head_dim)
                progress.update(task, description=f"seqlen {seqlen} {dtype} {mask} {pass_}")
                generator = torch.Generator().manual_seed(bench_common.SEED)
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
                                  "heads": args.heads, "seqlen": seqlen, "head_dim": head_dim}  # fmt: skip
                rows += compare(contestants, about)
    finally:
        _C.set_cpu_isa(before)
    return rows


def compare(contestants: list[Contestant], about: dict) -> list[Row]:
    names = ("pass_", "mask", "batch", "heads", "seqlen", "head_dim")
    flop = bench_common.flop(*(about[name] for name in names))
    peer, *ours = contestants
    torch_ms, torch_p20, torch_p80 = peer.quantiles()
    rows = []
    for c in ours:
        ms, p20, p80 = c.quantiles()
        times = {"ms": ms, "ms_p20": p20, "ms_p80": p80, "torch_ms": torch_ms, "torch_ms_p20": torch_p20,
                 "torch_ms_p80": torch_p80, "gflops": flop / ms / 1e6, "torch_gflops": flop / torch_ms / 1e6,
                 "ratio": torch_ms / ms}  # fmt: skip
        rounded = {name: bench_common.rounded(x) for name, x in times.items()}
        rows.append(Row(**about, version=c.version, isa=c.isa, **rounded))
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
    return bench_common.read_csv(path, Row)


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
        for isa in dict.fromkeys(r.isa for r in cell):
            color = COLORS[isa]
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
    bench_common.settle(args, DEFAULTS)
    if len(args.head_dim) > 1:
        raise ValueError(f"flash_cuda.bench: --head-dim takes one size on a cpu, got {args.head_dim}; name one of them")
    for version in args.version:
        device, dtype = torch.device("cpu"), torch.float32
        dispatch.choose(version, device=device, dtype=dtype, head_dim=args.head_dim[0], name="bench")
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
        bench_common.write_csv(args.csv, rows)
        console.print(f"rows: {args.csv}")
    if args.plot:
        plot(rows, args.plot)
        console.print(f"picture: {args.plot}")
    return 0
