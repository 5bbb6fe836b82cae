"""python -m flash_cuda bench --device cuda: what it counts and shows, from made-up rows; the whole run, on a clock that
stands in for CUDA's; and, where there is a GPU, one tiny run."""

import importlib.util
import io
import math
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import flash_cuda
from flash_cuda import bench_common, bench_gpu, bench_gpu_timing, cli, dispatch
from flash_cuda import bench_gpu_report as report

ROOT = Path(flash_cuda.__file__).parents[1]
TINY = ("bench", "--device", "cuda", "--head-dim", "64", "--seqlen", "256", "--tokens", "512", "--hidden", "128")


def made_up(speeds, *, seqlen=1024, pass_="forward", mask="full", head_dim=64, size="large"):
    """The rows of one cell in which every contestant has a speed in TFLOP/s, one in bursts, half of it sustained."""
    about = {"commit": "abc", "device": "GPU", "torch": "2", "dtype": "bfloat16", "size": size, "pass_": pass_,
             "mask": mask, "head_dim": head_dim, "seqlen": seqlen, "batch": 2, "heads": 4}  # fmt: skip
    flop = bench_common.flop(pass_, mask, 2, 4, seqlen, head_dim)
    times = {name: {"burst": [flop / speed / 1e9] * 3, "sustained": [flop / speed / 5e8] * 3}
             for name, speed in speeds.items()}  # fmt: skip
    return report.make_rows(about, flop, times, {"burst": 800.0, "sustained": 700.0})


def some_rows():
    rows = []
    for pass_ in bench_common.PASSES:
        for head_dim in (64, 128):
            for mask in bench_common.MASKS:
                for seqlen in (1024, 4096):
                    fa2 = 90 if (pass_, head_dim, mask, seqlen) == ("backward", 128, "causal", 4096) else 110
                    speeds = {"fa2": fa2, "torch-flash": 100, "torch-cudnn": 200}
                    rows += made_up(speeds, seqlen=seqlen, pass_=pass_, mask=mask, head_dim=head_dim)
    return rows + made_up({"fa2": 50, "torch-flash": 100}, seqlen=512, size="small")


def text_of(shown):
    console = Console(width=180, file=io.StringIO())
    console.print(shown)
    return console.file.getvalue()


def test_flop():
    assert bench_common.flop("forward", "full", 2, 3, 5, 7) == 4 * 2 * 3 * 5 * 5 * 7
    assert bench_common.flop("forward", "causal", 2, 3, 5, 7) == 2 * 2 * 3 * 5 * 5 * 7
    assert bench_common.flop("backward", "full", 2, 3, 5, 7) == 10 * 2 * 3 * 5 * 5 * 7


def test_cells_keep_tokens_and_hidden():
    args = cli.parser().parse_args(["bench", "--device", "cuda", "--small"])
    bench_common.settle(args, bench_gpu.DEFAULTS)
    shapes = bench_gpu.shapes(args)
    assert len(shapes) == len(set(shapes)) == 3 * 2 * (3 + 2)
    for shape in shapes:
        assert shape.heads * shape.head_dim == 2048
        assert shape.batch * shape.seqlen == (16384 if shape.size == "large" else shape.seqlen)


def test_ratios():
    flash, cudnn, ours = made_up({"torch-flash": 100, "torch-cudnn": 400, "fa2": 120})
    assert ours.burst_tflops == pytest.approx(120) and ours.sustained_tflops == pytest.approx(60)
    assert ours.burst_percent == pytest.approx(15) and ours.sustained_percent == pytest.approx(60 / 7, rel=1e-4)
    assert (ours.burst_x_flash, ours.burst_x_cudnn) == pytest.approx((1.2, 0.3))
    assert (flash.burst_x_flash, cudnn.sustained_x_cudnn) == (1, 1)
    (alone,) = made_up({"fa2": 120})
    assert alone.burst_x_flash is None and alone.both("x_flash") == ""


def test_means_and_minima():
    rows = made_up({"fa2": 200, "torch-flash": 100}) + made_up({"fa2": 90, "torch-flash": 100}, seqlen=4096)
    (found,) = report.summaries(rows)
    assert (found.pass_, found.version, found.peer, found.cells) == ("forward", "fa2", "torch-flash", 2)
    for kind in report.KINDS:
        assert found.mean[kind] == pytest.approx(math.sqrt(2 * 0.9), rel=1e-4)
        assert found.least[kind] == pytest.approx(0.9, rel=1e-4)
    assert found.low == ["forward 64 full 4096"]


def test_csv_round_trip(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    rows = some_rows()
    assert any(row.burst_x_cudnn is None for row in rows)
    bench_common.write_csv(path, rows)
    assert bench_common.read_csv(path, report.Row) == rows
    bench_common.write_csv(path, made_up({"fa2": 300}))
    again = bench_common.read_csv(path, report.Row)
    assert {row.key() for row in again} == {row.key() for row in rows} and again != rows


def test_table_and_picture(tmp_path):
    rows = some_rows()
    shown = text_of(report.table(rows))
    assert "110/55" in shown and "1.10/1.10" in shown and "0.55/0.55" in shown and "14/8" in shown
    assert "800/700" in shown  # the matrix rate, by kind
    assert len([line for line in shown.splitlines() if "│ forward" in line or "│ backward" in line]) == 17
    means = text_of(report.summary_table(report.summaries(rows)))
    assert "backward 128 causal 4096" in means and "forward fa2 to torch-flash small" in means
    picture = tmp_path / "rows.png"
    report.plot(rows, str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="benchmarks/ is not installed with the package")
def test_readme_table(tmp_path):
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    readme_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme_table)
    path = tmp_path / "gpu.csv"
    bench_common.write_csv(path, some_rows())
    shown = readme_table.render_gpu(readme_table.gpu_rows(path))
    assert "| backward 128 causal 4096 | 90/45 | 100/50 | 200/100 | 0.90/0.90 | 0.45/0.45 |" in shown
    assert "| backward fa2 to torch-flash | 8 | 1.07/1.07 | 0.90/0.90 | 1 |" in shown
    readme = "# title\n\n## Speed on a CPU\n\ntext\n"
    spliced = readme_table.splice_gpu(readme, shown)
    assert shown in spliced and spliced.index("## Speed on a GPU") < spliced.index("## Speed on a CPU")
    assert readme_table.splice_gpu(spliced, shown) == spliced
    assert readme_table.splice_gpu(spliced, "new\n").count("## Speed on a GPU") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(capsys):
    assert cli.main(["bench", "--device", "cuda"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--device cuda needs a CUDA GPU" in err


@pytest.mark.parametrize("words, why", [
    (("--small",), "--small is no flag of --device cpu"),
    (("--device", "cuda", "--repeat", "3"), "--repeat is no flag of --device cuda"),
    (("--head-dim", "32", "64"), "--head-dim takes one size on a cpu, got [32, 64]"),
    (("--version", "fa3"), "fa3 comes later, and for GPUs of compute capability 9.0"),
], ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")  # fmt: skip
def test_flags_of_the_other_device_are_one_line(capsys, words, why):
    assert cli.main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and why in err


class ClockEvent:
    """A CUDA event on a device whose work is done when the call returns."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)


@pytest.fixture
def clock(monkeypatch):
    """Lets the GPU's benchmark run on the CPU."""
    for name, stand_in in {"Event": ClockEvent, "synchronize": lambda: None, "_sleep": lambda cycles: None,
                           "get_device_name": lambda: "no GPU", "is_available": lambda: True}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name, seconds in {"PAUSE": 0, "BURST": 0.001, "LOAD": 0.001, "SUSTAINED": 0.001}.items():
        monkeypatch.setattr(bench_gpu_timing, name, seconds)
    for name, number in {"MATRIX_SIZE": 64, "HOST_CALLS": 2}.items():
        monkeypatch.setattr(bench_gpu_timing, name, number)
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "device", lambda name: cpu)


def test_a_run(clock, capsys, tmp_path):
    csv, picture = tmp_path / "rows.csv", tmp_path / "rows.png"
    words = (*TINY, "--peer", "torch-flash", "torch-cudnn", "flash_attn", "--commit", "abc")
    assert cli.main([*words, "--csv", str(csv), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    rows = bench_common.read_csv(csv, report.Row)
    assert {row.contestant for row in rows} == {"fa1", "fa2", "torch-flash"} and len(rows) == 3 * 2 * 2
    for row in rows:
        assert (row.commit, row.batch, row.seqlen, row.heads, row.head_dim) == ("abc", 2, 256, 2, 64)
        assert row.burst_ms_p20 <= row.burst_ms <= row.burst_ms_p80 and row.sustained_ms > 0
        assert row.burst_x_cudnn is None and row.burst_x_flash > 0
    assert "fa3 is not timed" in out and "flash_attn is not timed" in out
    assert out.count("torch-cudnn is not timed") == 1, "a reason is said once"
    assert "backward fa2 to torch-flash" in out and "host time of an eager call" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("head", [0, 1], ids=["a head that float64 sees", "one that only the peers see"])
def test_nothing_wrong_is_timed(clock, capsys, monkeypatch, tmp_path, head):
    true = flash_cuda.attention

    def off(*qkv, version, **options):
        one_head = (torch.arange(3) == head)[:, None] if options.get("causal") else 0
        return true(*qkv, version=version, **options) * (1 + 0.5 * one_head)

    monkeypatch.setattr(flash_cuda, "attention", off)
    csv = tmp_path / "rows.csv"
    words = (*TINY[:-1], "192", "--pass", "forward", "--version", "fa2", "--peer", "torch-flash", "--csv", str(csv))
    assert cli.main(list(words)) == 1
    out = capsys.readouterr().out
    assert "FAILED: forward 64 causal 256 bfloat16 large: fa2: out is wrong, expected" in out
    assert {row.mask for row in bench_common.read_csv(csv, report.Row)} == {"full"}, "the other cells are timed"


def test_a_version_that_breaks_stops_its_cell(clock, capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("CUDA error: misaligned address\nsecond line")

    monkeypatch.setattr(flash_cuda, "attention", broken)
    monkeypatch.setattr(bench_gpu, "usable", lambda: False)  # what a broken context looks like
    assert cli.main([*TINY, "--version", "fa2"]) == 1
    out = capsys.readouterr().out
    assert "fa2 raised CUDA error: misaligned address; nothing is timed" in " ".join(out.split())
    assert "causal 256" not in out


def test_a_wrong_peer_is_no_measure(clock, capsys, monkeypatch):
    true = bench_gpu.F.scaled_dot_product_attention
    monkeypatch.setattr(bench_gpu.F, "scaled_dot_product_attention", lambda *qkv, **kw: true(*qkv, **kw) * math.nan)
    assert cli.main([*TINY, "--version", "fa2", "--pass", "forward", "--peer", "torch-flash"]) == 0
    out = capsys.readouterr().out
    assert "torch-flash is not timed in forward 64 full 256 bfloat16 large: its forward is wrong" in out


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_exact_result_by_rows_is_that_of_the_whole(causal):
    inputs = tuple(torch.randn(2, 50, 3, 16) for _ in range(4))
    by_rows, whole = (bench_gpu.exact(inputs, causal, [0, 2], rows) for rows in (16, 64))
    for pass_ in bench_common.PASSES:
        for a, b in zip(by_rows[pass_], whole[pass_], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.cuda
def test_a_run_on_a_gpu(capsys, tmp_path):
    csv, picture = tmp_path / "rows.csv", tmp_path / "rows.png"
    status = cli.main([*TINY, "--csv", str(csv), "--plot", str(picture)])
    out = capsys.readouterr().out
    assert status == 0, out
    rows = bench_common.read_csv(csv, report.Row)
    known = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64}
    ours = {name for name in dispatch.VERSIONS if not dispatch.reasons(name, **known)}
    assert ours | {"torch-flash"} <= {row.contestant for row in rows}
    assert all(row.burst_ms > 0 and row.sustained_ms > 0 and 0 < row.burst_percent < 100 for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")
