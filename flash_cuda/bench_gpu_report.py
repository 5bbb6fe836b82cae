"""What the GPU benchmark says: one row for each contestant and cell, ratios of the same run, table, means, picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rich.table import Table

from flash_cuda import bench_common, dispatch

KINDS = ("burst", "sustained")
BASELINES = {"flash": "torch-flash", "cudnn": "torch-cudnn"}  # in names of columns: what the ratios are to
LOW = 0.95  # a cell under this is named


@dataclass(frozen=True)
class Row:
    """One contestant in one cell. The fields are the columns of the CSV; a ratio above 1 is faster than the peer."""

    commit: str
    device: str
    torch: str
    dtype: str
    size: str  # "large", or "small": what --small adds
    pass_: str
    mask: str
    head_dim: int
    seqlen: int
    batch: int
    heads: int
    contestant: str  # a version of flash_cuda, or a peer
    burst_ms: float
    burst_ms_p20: float
    burst_ms_p80: float
    burst_tflops: float
    burst_percent: float  # of the matrix rate of the same run and kind
    burst_x_flash: float | None  # None: that peer was not timed
    burst_x_cudnn: float | None
    sustained_ms: float
    sustained_ms_p20: float
    sustained_ms_p80: float
    sustained_tflops: float
    sustained_percent: float
    sustained_x_flash: float | None
    sustained_x_cudnn: float | None

    def key(self) -> tuple:
        """What a new measurement replaces."""
        return tuple(str(getattr(self, field.name)) for field in fields(self)[:12])

    def cell(self) -> tuple:
        """All contestants with the same one ran side by side. Sorts as the table shows them."""
        order = (bench_common.PASSES.index(self.pass_), self.size, self.dtype, self.head_dim)
        return (*order, bench_common.MASKS.index(self.mask), self.seqlen)

    def words(self) -> str:
        dtype = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"{self.pass_} {self.head_dim} {self.mask} {self.seqlen}{dtype}{' small' * (self.size == 'small')}"

    def both(self, name: str, digits: int = 2) -> str:
        """The two kinds of one column, burst first."""
        numbers = [getattr(self, f"{kind}_{name}") for kind in KINDS]
        return "" if None in numbers else "/".join(f"{number:.{digits}f}" for number in numbers)


def make_rows(
    about: dict, flop: float, times: dict[str, dict[str, list[float]]], rate: dict[str, float]
) -> list[Row]:
    """The rows of one cell. `times`: milliseconds of every launch by contestant and kind; `rate`: TFLOP/s by kind."""
    medians = {name: {kind: bench_common.quantiles(ms)[0] for kind, ms in by.items()} for name, by in times.items()}
    rows = []
    for name, by_kind in times.items():
        numbers = {}
        for kind in KINDS:
            ms, p20, p80 = bench_common.quantiles(by_kind[kind])
            tflops = flop / ms / 1e9
            numbers |= {f"{kind}_ms": ms, f"{kind}_ms_p20": p20, f"{kind}_ms_p80": p80, f"{kind}_tflops": tflops,
                        f"{kind}_percent": 100 * tflops / rate[kind]}  # fmt: skip
            for short, peer in BASELINES.items():
                numbers[f"{kind}_x_{short}"] = medians[peer][kind] / ms if peer in medians else None
        numbers = {key: None if x is None else bench_common.rounded(x) for key, x in numbers.items()}
        rows.append(Row(**about, contestant=name, **numbers))
    return rows


def cells(rows: list[Row]) -> dict[tuple, dict[str, Row]]:
    """Cell by cell, in order, the rows by contestant."""
    grouped: dict[tuple, dict[str, Row]] = {}
    for row in sorted(rows, key=Row.cell):
        grouped.setdefault(row.cell(), {})[row.contestant] = row
    return grouped


def contestants(rows: list[Row]) -> tuple[list[str], list[str]]:
    """(versions of flash_cuda, peers), each in the order of the rows."""
    names = dict.fromkeys(row.contestant for row in rows)
    return [n for n in names if n in dispatch.VERSIONS], [n for n in names if n not in dispatch.VERSIONS]


@dataclass(frozen=True)
class Summary:
    """The ratios of one version to one peer over all cells of a pass and size."""

    pass_: str
    size: str
    version: str
    peer: str
    cells: int
    mean: dict[str, float]  # geometric, by kind
    least: dict[str, float]
    low: list[str]  # the cells under LOW in either kind


def summaries(rows: list[Row]) -> list[Summary]:
    found = []
    for pass_, size in sorted({(row.pass_, row.size) for row in rows}, key=lambda x: (x[1], x[0] != "forward")):
        for version in contestants(rows)[0]:
            for short, peer in BASELINES.items():
                here = [row for row in sorted(rows, key=Row.cell)
                        if (row.pass_, row.size, row.contestant) == (pass_, size, version)
                        and getattr(row, f"burst_x_{short}") is not None]  # fmt: skip
                if not here:
                    continue
                ratios = {kind: [getattr(row, f"{kind}_x_{short}") for row in here] for kind in KINDS}
                mean = {kind: math.exp(sum(map(math.log, x)) / len(x)) for kind, x in ratios.items()}
                low = [row.words() for row, *x in zip(here, *ratios.values()) if min(x) < LOW]
                least = {kind: min(x) for kind, x in ratios.items()}
                found.append(Summary(pass_, size, version, peer, len(here), mean, least, low))
    return found


def title(rows: list[Row]) -> str:
    row = rows[0]
    tokens = max(r.batch * r.seqlen for r in rows)
    rate = "/".join(f"{100 * getattr(row, f'{k}_tflops') / getattr(row, f'{k}_percent'):.0f}" for k in KINDS)
    return (f"{row.device}, torch {row.torch}, {tokens} tokens, {row.heads * row.head_dim} hidden, commit "
            f"{row.commit}; TFLOP/s, burst/sustained (bf16 matrix product: {rate})")  # fmt: skip


def table(rows: list[Row]) -> Table:
    versions, peers = contestants(rows)
    shown = Table(title=title(rows))
    shown.add_column("what", no_wrap=True)
    for name in versions + peers:
        shown.add_column(name, justify="right")
    for version in versions:
        for head in (*(f"x {short}" for short in BASELINES), "% of product"):
            shown.add_column(f"{version}\n{head}", justify="right")
    before = None
    for cell in cells(rows).values():
        first = next(iter(cell.values()))
        if before != (before := (first.pass_, first.size, first.head_dim)):
            shown.add_section()
        line = [cell[name].both("tflops", 0) if name in cell else "" for name in versions + peers]
        for version in versions:
            for column, digits in (*((f"x_{short}", 2) for short in BASELINES), ("percent", 0)):
                line.append(cell[version].both(column, digits) if version in cell else "")
        shown.add_row(first.words(), *line)
    return shown


def summary_table(found: list[Summary]) -> Table:
    shown = Table(title="ratios over all cells, burst/sustained")
    for name in ("what", "cells", "geometric mean", "minimum", f"cells under {LOW}"):
        shown.add_column(name, justify="left" if name == "what" else "right")
    for s in found:
        mean, least = ("/".join(f"{by[kind]:.3f}" for kind in KINDS) for by in (s.mean, s.least))
        what = f"{s.pass_} {s.version} to {s.peer}{' small' * (s.size == 'small')}"
        low = "all" if len(s.low) == s.cells else "\n".join(s.low) or "none"
        shown.add_row(what, str(s.cells), mean, least, low)
    return shown


def plot(rows: list[Row], path: str) -> None:
    """Burst TFLOP/s over sequence length; a panel for each pass and head_dim, causal dashed."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to save a picture
    from matplotlib import pyplot

    rows = [row for row in rows if row.size == "large"] or rows
    rows = [row for row in rows if row.dtype == rows[0].dtype]
    passes = [p for p in bench_common.PASSES if any(row.pass_ == p for row in rows)]
    head_dims = sorted({row.head_dim for row in rows})
    versions, peers = contestants(rows)
    size = (max(6, 4.2 * len(head_dims)), 3.4 * len(passes))
    figure, axes = pyplot.subplots(len(passes), len(head_dims), figsize=size, squeeze=False, layout="constrained")
    # Ours in the first colors, whatever else is timed.
    colors = dict(zip(versions + peers, pyplot.rcParams["axes.prop_cycle"].by_key()["color"]))
    handles = {}
    for y, pass_ in enumerate(passes):
        for x, head_dim in enumerate(head_dims):
            axis = axes[y, x]
            here = [row for row in rows if (row.pass_, row.head_dim) == (pass_, head_dim)]
            for name, color in colors.items():
                for mask, style in (("full", "o-"), ("causal", "o--")):
                    line = sorted((r.seqlen, r.burst_tflops) for r in here if (r.contestant, r.mask) == (name, mask))
                    if line:
                        label = f"{name} {mask}"
                        (handles[label],) = axis.plot(*zip(*line), style, color=color, alpha=0.8, label=label)
            axis.set(title=f"{pass_}, head_dim {head_dim}", xlabel="sequence length", xscale="log", ylim=(0, None))
            ticks = sorted({row.seqlen for row in here})
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.minorticks_off()
        axes[y, 0].set_ylabel("TFLOP/s, burst")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)))
    row = rows[0]
    figure.suptitle(f"{row.device}, torch {row.torch}, {row.dtype}, {max(r.batch * r.seqlen for r in rows)} tokens, "
                    f"{row.heads * row.head_dim} hidden")  # fmt: skip
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
