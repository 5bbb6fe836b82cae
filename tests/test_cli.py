"""python -m flash_cuda: what it prints, what it returns, and one line for wrong usage. (The demo: test_demo.py.)"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_cuda
from flash_cuda import _C, bench, cli


def run(capsys, *words):
    """(exit status, stdout, stderr)."""
    try:
        status = cli.main(list(words))
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_the_module_runs():
    folder = Path(flash_cuda.__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "flash_cuda", "info"], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    for fact in (flash_cuda.__version__, torch.__version__, _C.cpu_isa(), _C.build_info()["compiler"]):
        assert fact in done.stdout


def test_a_missing_module_is_one_line():
    code = (
        "import runpy, sys; sys.modules['rich.console'] = None; runpy.run_module('flash_cuda', run_name='__main__')"
    )
    folder = Path(flash_cuda.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("python -m flash_cuda: ") and "rich.console" in done.stderr


@pytest.mark.parametrize("words, why", [
    ((), "the following arguments are required"),
    (("train",), "invalid choice: 'train'"),
    (("demo", "--steps", "0"), "--steps: must be a whole number of at least 1, got '0'"),
    (("demo", "--context", "x"), "--context: must be a whole number of at least 2, got 'x'"),
    (("demo", "--device", "abacus"), "--device: must be a device such as cpu or cuda:0, got 'abacus'"),
    (("demo", "--device", "cuda:99"), "--device: cuda:99 is not on this machine"),
    (("demo", "--device", "meta"), "--device must be cpu or cuda, got 'meta'"),
    (("demo", "--version", "fa9"), "--version: invalid choice: 'fa9'"),
    (("demo", "--dtype", "int8"), "--dtype: invalid choice"),
    (("bench", "--isa", "sse9"), "--isa: invalid choice: 'sse9'"),
    (("bench", "--repeat", "-3"), "--repeat: must be a whole number of at least 1, got '-3'"),
    (("explain", "--window", "3"), "--window: expected 2 arguments"),
    (("explain", "--heads", "8", "--heads-kv", "3"), "the heads of q must be a multiple of the heads of k, 3, got 8"),
    (("demo", "--version", "fa3", "--steps", "1"), "fa3 comes later, and for GPUs of compute capability 9.0"),
], ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")  # fmt: skip
def test_wrong_usage_is_one_line(capsys, words, why):
    status, out, err = run(capsys, *words)
    assert status == 2
    assert err.count("\n") == 1 and err.startswith("python -m flash_cuda")
    assert why in err


def test_an_error_of_our_own_is_not_hidden(monkeypatch):
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(cli, "_info", broken)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["info"])


def test_explain(capsys):
    status, out, _ = run(capsys, "explain", "--batch", "3", "--heads", "6", "--heads-kv", "2", "--seqlen-q", "100",
                         "--seqlen-k", "300", "--head-dim", "96", "--dtype", "bfloat16", "--causal",
                         "--window", "20", "-1")  # fmt: skip
    assert status == 0
    q = torch.empty(3, 100, 6, 96, dtype=torch.bfloat16, device="meta")
    k = torch.empty(3, 300, 2, 96, dtype=torch.bfloat16, device="meta")
    plan = flash_cuda.explain(q, k, k, causal=True, window_size=(20, None))
    assert out.rstrip() == str(plan)
    assert run(capsys, "explain", "--version", "fa3")[0] == 1


TINY = ("bench", "--heads", "2", "--head-dim", "16", "--repeat", "2")


def test_bench(capsys, tmp_path):
    csv, picture = tmp_path / "new" / "rows.csv", tmp_path / "rows.png"
    words = (*TINY, "--seqlen", "32", "64", "--csv", str(csv), "--plot", str(picture))
    status, out, _ = run(capsys, *words)
    assert status == 0
    rows = bench.read_csv(csv)
    assert len(rows) == 2 * 3 * 2 * 2 * 2 * len(_C.cpu_isas())  # lengths, dtypes, masks, passes, versions, ISAs
    for row in rows:
        assert row.ms_p20 <= row.ms <= row.ms_p80
        assert row.ratio == pytest.approx(row.torch_ms / row.ms, rel=1e-2)
        flop = 4 * 2 * row.seqlen**2 * 16 * (2.5 if row.pass_ == "backward" else 1) / (2 if row.mask == "causal" else 1)
        assert row.gflops == pytest.approx(flop / row.ms / 1e6, rel=1e-2)
        assert f"{row.version} {row.isa}" in out
    assert "host time of a call on one token" in out
    assert picture.read_bytes().startswith(b"\x89PNG")

    run(capsys, *TINY, "--seqlen", "32", "--dtype", "float32", "--csv", str(csv))
    again = bench.read_csv(csv)
    assert {row.key() for row in again} == {row.key() for row in rows}, "rows of the same commit are replaced"
    assert again != rows


def test_bench_times_nothing_that_is_wrong(capsys, monkeypatch):
    isa = _C.cpu_isas()[-1]
    true = bench.Contestant.forward

    def off_by_a_thousandth(c):
        return true(c) * (1.001 if (c.version, c.isa) == ("fa1", isa) else 1)

    monkeypatch.setattr(bench.Contestant, "forward", off_by_a_thousandth)
    status, out, _ = run(capsys, *TINY, "--seqlen", "32")
    assert status == 1
    assert f"FAILED: fa1 {isa} float32 full: out is wrong" in out and "GFLOP/s" not in out


def test_bench_leaves_the_instruction_set(capsys):
    before = _C.cpu_isa()
    run(capsys, *TINY, "--seqlen", "32", "--dtype", "float32", "--mask", "full", "--pass", "forward")
    assert _C.cpu_isa() == before
