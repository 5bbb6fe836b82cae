"""Makes README's benchmark tables and their pictures, one of each for every benchmarks/results/cpu-*.csv:
python benchmarks/readme_table.py"""

import itertools
from pathlib import Path

from flash_cuda import bench

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("cpu-*.csv"))
BEGIN, END = "<!-- benchmark: python benchmarks/readme_table.py -->\n", "<!-- end of benchmark -->"
SEQLEN = 2048


def latest(results: Path) -> list[bench.Row]:
    """The rows of the commit that was measured last, at the shapes of the last measurement."""
    rows = bench.read_csv(results)
    last = rows[-1]
    same = ("commit", "cpu", "threads", "torch", "batch", "heads", "head_dim")
    return [row for row in rows if all(getattr(row, name) == getattr(last, name) for name in same)]


def render(results: Path) -> str:
    """The table in Markdown, and the picture."""
    rows = latest(results)
    rows = [row for row in rows if row.seqlen == SEQLEN]
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
    return "\n".join(lines) + f"\n\n![GFLOP/s over sequence length]({results.with_suffix('.png').relative_to(ROOT)})\n"


def splice(readme: str, table: str) -> str:
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(splice(readme.read_text(), "\n".join(map(render, RESULTS))))
    for results in RESULTS:
        bench.plot(latest(results), str(results.with_suffix(".png")))
