"""The demo: a short run ends well, a wrong attention does not, and what it measures is what it says."""

import math

import pytest
import torch
from rich.console import Console

import flash_cuda
from flash_cuda import cli, demo, demo_report, dispatch, traffic

CPU = torch.device("cpu")
cuda = pytest.param("cuda", marks=pytest.mark.cuda)


def run(tmp_path, capsys, **settings):
    """(exit status, what was printed, the picture)."""
    picture = tmp_path / "curves.png"
    words = ["demo", "--out", str(picture)]
    for name, value in ({"steps": 6, "context": 64} | settings).items():
        words += [f"--{name}", str(value)]
    status = cli.main(words)
    return status, capsys.readouterr().out, picture


@pytest.fixture
def small(monkeypatch):
    """The same demo in a tenth of the time: part of the text, a shallower model, smaller batches."""
    part = [x[:200_000] for x in demo.corpus()]
    monkeypatch.setattr(demo, "corpus", lambda: part)
    monkeypatch.setattr(demo, "LAYERS", 2)
    monkeypatch.setattr(demo, "TOKENS_PER_STEP", {"cpu": 256, "cuda": 256})
    torch.set_num_threads(1)  # small steps on two threads mostly wait for each other


@pytest.mark.parametrize("settings", [{}, {"version": "fa1"}, {"dtype": "bfloat16"}, {"context": 300}], ids=str)
def test_a_short_run(tmp_path, capsys, small, settings):
    status, out, picture = run(tmp_path, capsys, **settings)
    assert status == 0, out
    for part in ("Loss, nats per byte", "train: standard", "flash_cuda / standard", "tokens/s",
                 "peak memory of one attention", "bytes moved by attention", "ok: the losses differ by rounding only",
                 str(picture)):  # fmt: skip
        assert part in " ".join(out.split()), part
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def cheat(attend):
    """demo.flash_attention, with something done to it."""
    true = demo.flash_attention
    return lambda *args: attend(true(*args))


def scaled(gradient):
    """The identity, whose gradient is multiplied."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * gradient

    return Scaled.apply


WRONG = {
    "sees the future": lambda true: lambda q, k, v: flash_cuda.attention(q, k, v),
    "sees eight keys": lambda true: lambda q, k, v: flash_cuda.attention(q, k, v, causal=True, window_size=(8, 0)),
    "a wrong scale": lambda true: lambda q, k, v: true(q * 3, k, v),
    "a wrong output": lambda true: lambda q, k, v: true(q, k, v) * 1.1,
    "a wrong dV": lambda true: lambda q, k, v: true(q, k, scaled(1.1)(v)),
    "a wrong dQ": lambda true: lambda q, k, v: true(scaled(-1.0)(q), k, v),
    "a dQ of zeros": lambda true: lambda q, k, v: true(scaled(0.0)(q), k, v),
    "NaN": lambda true: lambda q, k, v: true(q, k, v) * math.nan,
}


@pytest.mark.parametrize("dtype", demo_report.ALLOWED)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_attention_fails(tmp_path, capsys, small, monkeypatch, wrong, dtype):
    monkeypatch.setattr(demo, "flash_attention", cheat(WRONG[wrong]))
    status, out, _ = run(tmp_path, capsys, steps=demo_report.EARLY_STEPS, dtype=dtype)
    assert status == 1
    assert "FAILED: the losses PART BY MORE THAN ROUNDING" in out


def finished(losses, validation):
    result = demo.Run("x", None, None, None)
    result.losses, result.validation = losses, validation
    return result


EARLY, LATE = demo_report.ALLOWED["float32"]


@pytest.mark.parametrize("losses, last, passed", [
    ([2.0] * 100, 2.0, [True, True]),
    ([2.0] * 99 + [2.0 + 2 * LATE], 2.0, [False, True]),
    ([2.0 + 2 * EARLY] + [2.0] * 99, 2.0, [False, True]),
    ([2.0] * demo_report.EARLY_STEPS + [2.0 + 2 * EARLY] * 70, 2.0, [True, True]),
    ([math.nan] + [2.0] * 99, 2.0, [False, True]),
    ([2.0] * 100, 2.9, [True, False]),
    ([2.0] * 100, math.nan, [True, False]),
    ([2.0] * 10, 2.9, [True, True]),
], ids=["good", "parted", "parted early", "more is allowed later", "nan", "not learned", "nan validation",
        "too short to judge"])  # fmt: skip
def test_the_verdict(losses, last, passed):
    standard = finished([2.0] * len(losses), {0: 5.5, len(losses): 2.0})
    flash = finished(losses, {0: 5.5, len(losses): last})
    verdicts = demo_report.verdicts(standard, flash, demo.Settings(), unigram=3.2)
    assert [ok for ok, _ in verdicts] == passed


@pytest.mark.parametrize("device", ["cpu", cuda])
def test_peak_memory_is_what_lives_at_once(device):
    def work():
        first = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        second = torch.empty(3 << 20, dtype=torch.uint8, device=device)
        del first, second
        torch.empty(2 << 20, dtype=torch.uint8, device=device)

    assert demo.peak_bytes(work, torch.device(device)) == 4 << 20


def test_peak_memory_sees_into_compiled_ops():
    q = torch.randn(1, 64, 4, 32)
    out, lse = 4 * q.numel(), 4 * 64 * 4
    assert out + lse <= demo.peak_bytes(lambda: flash_cuda.attention(q, q, q), CPU) < 2 * (out + lse)


@pytest.mark.parametrize("device", ["cpu", cuda])
def test_what_is_measured(small, device):
    """Memory and bytes of one attention layer, against what they must be."""
    seqlen = 1024 if device == "cuda" else 256
    settings = demo.Settings(steps=2, context=seqlen, device=device)
    dtype, device = getattr(torch, settings.dtype), torch.device(device)
    runs = [demo.new_run("standard", demo.standard_attention(seqlen, device, dtype), settings),
            demo.new_run("flash_cuda", demo.flash_attention(dtype, None), settings)]  # fmt: skip
    demo.train(runs, *demo.corpus(), settings, Console(quiet=True))
    standard, flash = runs
    batch, scores = 1, 4 * seqlen * seqlen * dtype.itemsize
    assert 2 * scores <= standard.layer_memory <= 6 * scores, "at least the probabilities and a gradient of them"
    assert flash.layer_memory < standard.layer_memory / 2 and flash.step_memory < standard.step_memory
    work = traffic.Workload(((seqlen, seqlen),) * batch, 4, 4, 32, dtype.itemsize, dtype.itemsize >= 4)
    both = traffic.standard_forward(work) + traffic.standard_backward(work)
    assert standard.moved.total == demo.LAYERS * both.total
    q, k, v = (torch.empty(batch, seqlen, 4, 32, dtype=dtype, device=device) for _ in range(3))
    plan = flash_cuda.explain(q, k, v, causal=True).versions["fa2"]
    assert flash.moved.total == demo.LAYERS * (plan.forward.bytes_moved + plan.backward.bytes_moved)
    assert standard.losses == pytest.approx(flash.losses, abs=demo_report.ALLOWED[settings.dtype][0])


@pytest.mark.cuda
def test_on_a_gpu(tmp_path, capsys):
    """The defaults there, but for the steps."""
    words = ("--device", "cuda", "--version", "fa2", "--steps", "8", "--out", str(tmp_path / "x.png"))
    status = cli.main(["demo", *words])
    out = " ".join(capsys.readouterr().out.split())
    assert status == 0, out
    for part in ("context 8192, attention in bfloat16", "on cuda", "ok: the losses differ by rounding only",
                 "by the model of flash_cuda.explain()"):  # fmt: skip
        assert part in out, part


@pytest.mark.parametrize("given, context, dtype", [
    ({}, 512, "float32"),
    ({"device": "cuda"}, 8192, "bfloat16"),
    ({"device": "cuda:1", "context": 64}, 64, "bfloat16"),
    ({"device": "cuda", "dtype": "float32"}, 8192, "float32"),
], ids=str)  # fmt: skip
def test_defaults_by_device(given, context, dtype):
    settings = demo.Settings(**given)
    assert (settings.context, settings.dtype) == (context, dtype)


@pytest.mark.parametrize("module, name, why", [
    (torch.cuda, "is_available", "fa2 needs a CUDA GPU, got none that torch finds"),
    (dispatch._C, "cuda_built", "fa2 needs CUDA kernels in the build, got a build for CPU only"),
])  # fmt: skip
def test_without_cuda_it_is_one_line(capsys, monkeypatch, module, name, why):
    monkeypatch.setattr(cli, "_device", str)  # which would say that there is no such GPU
    monkeypatch.setattr(module, name, lambda: False)
    assert cli.main(["demo", "--device", "cuda"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and why in err


def test_scores_depend_on_distance_alone():
    q, k = torch.randn(2, demo.HEADS, demo.WIDTH // demo.HEADS)
    everywhere = torch.stack((q, k)).expand(1, 600, 2, *q.shape)
    turned = demo.rotate(everywhere, demo.rotary_angles(600, CPU))
    scores = torch.einsum("bqhd,bkhd->bhqk", *turned.unbind(2))
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], rtol=0, atol=1e-3)
    torch.testing.assert_close(turned[:, 0], everywhere[:, 0])
    by_distance = scores[0, :, -1, -100:]
    assert (by_distance.diff().abs().amax(-1) > 0.1).all(), "and it does depend on it"


def test_a_slow_machine_trains_fewer_steps(tmp_path, capsys, small, monkeypatch):
    monkeypatch.setattr(demo, "TIME_LIMIT", 0.5)
    status = cli.main(["demo", "--context", "64", "--out", str(tmp_path / "x.png")])
    out = " ".join(capsys.readouterr().out.split())
    assert status == 0 and f"of {demo.DEFAULT_STEPS} steps: 0.5 s are up" in out and "steps are too few to judge the learning" in out
    assert f"{demo.DEFAULT_STEPS}/{demo.DEFAULT_STEPS}" not in out


def test_a_library_without_source_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda _: str(tmp_path))
    assert cli.main(["demo"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "expected at least 1000000 bytes of .py files, got 0" in err


def test_the_corpus_is_split_by_files():
    train, validation = demo.corpus()
    assert len(train) > 5 * len(validation) > 100_000
    assert 2.5 < demo.unigram_entropy(train) < 4
