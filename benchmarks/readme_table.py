"""Makes README's benchmark tables and their pictures from the files in benchmarks/results:
python benchmarks/readme_table.py

The table of the GPU, and its section, are there once its result file is.
"""

import itertools
from pathlib import Path

from flash_cuda import bench, bench_common, bench_gpu_report

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"
RESULTS = sorted(FOLDER.glob("cpu-*.csv"))  # a machine each
MARKS = ("<!-- benchmark: python benchmarks/readme_table.py -->\n", "<!-- end of benchmark -->")
SEQLEN = 2048

GPU_RESULTS = FOLDER / "nvidia-h200.csv"
GPU_PICTURE = GPU_RESULTS.with_suffix(".png")
GPU_MARKS = ("<!-- gpu benchmark: python benchmarks/readme_table.py -->\n", "<!-- end of gpu benchmark -->")
CPU_SECTION = "## Speed on a CPU\n"
GPU_SECTION = f"""## Speed on a GPU

Against torch's own attention in the same run, each result checked against float64 first. The GPU is limited by power, so
every number comes in two kinds: burst, the first 15 ms after a pause, and sustained, after 150 ms of load.

{"".join(GPU_MARKS)}

Made by `python -m flash_cuda bench --device cuda --csv {GPU_RESULTS.relative_to(ROOT)}` and `python benchmarks/readme_table.py`.

"""  # noqa: E501 - README's paragraphs are lines


def latest(rows: list, same: tuple[str, ...]) -> list:
    """The rows that agree with the last one in these columns: the commit that was measured last, on its machine."""
    last = rows[-1]
    return [row for row in rows if all(getattr(row, name) == getattr(last, name) for name in same)]


def cpu_rows(path: Path) -> list[bench.Row]:
    return latest(bench.read_csv(path), ("commit", "cpu", "threads", "torch", "batch", "heads", "head_dim"))


def gpu_rows(path: Path = GPU_RESULTS) -> list[bench_gpu_report.Row]:
    rows = bench_common.read_csv(path, bench_gpu_report.Row)
    return latest(rows, ("commit", "device", "torch", "dtype"))


def render(path: Path) -> str:
    """The table of one CPU in Markdown, and its picture."""
    rows = [row for row in cpu_rows(path) if row.seqlen == SEQLEN]
    first = rows[0]
    contestants = list(dict.fromkeys((row.version, row.isa) for row in rows))
    lines = [
        f"{first.cpu}, {first.threads} threads, torch {first.torch}, batch {first.batch}, heads {first.heads}, seqlen "
        f"{SEQLEN}, head_dim {first.head_dim}, commit {first.commit}; GFLOP/s, causal counted as half:",
        "",
        "| | torch | " + " | ".join(f"{version} {isa}" for version, isa in contestants) + " |",
        "|---" * (2 + len(contestants)) + "|",
    ]
    for (dtype, mask, pass_), cell in itertools.groupby(rows, lambda row: (row.dtype, row.mask, row.pass_)):
        by = {(row.version, row.isa): row for row in cell}
        shown = [f"{by[c].gflops:.0f} ({by[c].ratio:.1f})" if c in by else "" for c in contestants]
        peer = next(iter(by.values())).torch_gflops
        lines.append(f"| {dtype} {mask} {pass_} | {peer:.0f} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + f"\n\n![GFLOP/s over sequence length]({path.with_suffix('.png').relative_to(ROOT)})\n"


def render_gpu(rows: list[bench_gpu_report.Row]) -> str:
    """The GPU's tables in Markdown: the means first, then every cell, won or lost."""
    versions, peers = bench_gpu_report.contestants(rows)
    lines = [
        bench_gpu_report.title(rows) + ", causal counted as half. Times the peer, over all cells:",
        "",
        "| | cells | geometric mean | minimum | cells under " + str(bench_gpu_report.LOW) + " |",
        "|---|---|---|---|---|",
    ]
    for s in bench_gpu_report.summaries(rows):
        mean, least = ("/".join(f"{by[kind]:.2f}" for kind in bench_gpu_report.KINDS) for by in (s.mean, s.least))
        what = f"{s.pass_} {s.version} to {s.peer}{' small' * (s.size == 'small')}"
        lines.append(f"| {what} | {s.cells} | {mean} | {least} | {len(s.low)} |")
    lines += ["", f"![TFLOP/s over sequence length]({GPU_PICTURE.relative_to(ROOT)})", ""]
    ratios = [(version, short) for version in versions for short in bench_gpu_report.BASELINES]
    heads = [*versions, *peers, *(f"{version} x {short}" for version, short in ratios)]
    lines += ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for cell in bench_gpu_report.cells(rows).values():
        shown = [cell[name].both("tflops", 0) if name in cell else "" for name in versions + peers]
        shown += [cell[version].both(f"x_{short}") if version in cell else "" for version, short in ratios]
        lines.append(f"| {next(iter(cell.values())).words()} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def splice(readme: str, table: str, marks: tuple[str, str] = MARKS) -> str:
    """README with this between the marks."""
    begin, end = marks
    before, rest = readme.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def splice_gpu(readme: str, table: str) -> str:
    """The same for the GPU's table, whose section is made before the CPU's when README has none."""
    if GPU_MARKS[0] not in readme:
        readme = readme.replace(CPU_SECTION, GPU_SECTION + CPU_SECTION)
    return splice(readme, table, GPU_MARKS)


if __name__ == "__main__":
    readme = splice((ROOT / "README.md").read_text(), "\n".join(map(render, RESULTS)))
    for path in RESULTS:
        bench.plot(cpu_rows(path), str(path.with_suffix(".png")))
    if GPU_RESULTS.exists():
        rows = gpu_rows()
        readme = splice_gpu(readme, render_gpu(rows))
        bench_gpu_report.plot(rows, str(GPU_PICTURE))
    (ROOT / "README.md").write_text(readme)
