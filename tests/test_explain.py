"""explain: the plan is what would run, reasons are named, errors are those of attention, and nothing is launched."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cuda
from flash_cuda import _C
from flash_cuda.explain import NOT_HERE, NOT_THIS_INPUT, RUNS, explain
from test_errors import BAD, BAD_PACKED, expect, good, good_packed


def qkv(*shape, **options):
    q, k, v = (torch.randn(shape or (2, 70, 4, 32)).to(**options) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("version", [None, "fa1", "fa2"])
@pytest.mark.parametrize("isa", _C.cpu_isas())
def test_the_plan_is_what_runs(version, isa):
    _C.set_cpu_isa(isa)
    q, k, v = qkv(dtype=torch.bfloat16)
    plan = explain(q, k, v, causal=True, version=version)
    flash_cuda.attention(q, k, v, causal=True, version=version)
    ran = flash_cuda.last_call()
    assert plan.selected == ran.version
    chosen = plan.versions[plan.selected].forward
    assert (chosen.kernel, chosen.tile, chosen.grid) == (ran.kernel, ran.tile, ran.grid)
    asked = "None" if version is None else f'"{version}"'
    assert str(plan).startswith(f"{ran.version} would run: {ran.kernel} (version={asked})\n")


def test_the_plan_is_what_runs_under_autocast():
    q, k, v = qkv()
    for dtype, tag in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        with torch.autocast("cpu", dtype):
            for inputs in ((q, k, v), (q.to(dtype), k, v), (q, k.double().float(), v[..., ::2].repeat(1, 1, 1, 2))):
                plan = explain(*inputs)
                flash_cuda.attention(*inputs)
                ran = flash_cuda.last_call()
                assert (plan.versions["fa2"].forward.kernel, plan.copies) == (ran.kernel, ran.copies)
                assert ran.kernel.endswith(tag)
            strided = torch.randn(2, 70, 4, 64)[..., ::2]  # is not copied: the cast has contiguous rows
            plan = explain(strided, k, v)
            flash_cuda.attention(strided, k, v)
            assert plan.copies == flash_cuda.last_call().copies == ()
        with torch.autocast("cpu", dtype):
            assert explain(*qkv(dtype=torch.float64)).versions["fa2"].forward.kernel.endswith("fp64")


def test_every_version_answers():
    plan = explain(*qkv())
    assert {name: v.status for name, v in plan.versions.items()} == {"fa1": RUNS, "fa2": RUNS, "fa3": NOT_HERE}
    assert plan.versions["fa1"].reasons == () and plan.versions["fa3"].forward is None
    (reason,) = plan.versions["fa3"].reasons
    assert "9.0" in reason.rule and "CPU" in reason.value and "fa2" in reason.fix
    fa2 = plan.versions["fa2"].backward
    assert 0 < fa2.fast_memory_bytes <= _C.cpu_fast_memory()
    assert fa2.ratio_to_standard == fa2.bytes_moved / fa2.standard_bytes
    assert fa2.flops == 2 * 4 * 70 * 70 * 32 * 10


def test_a_named_version_that_cannot_run_is_an_answer():
    plan = explain(*qkv(), version="fa3")
    assert plan.selected is None and plan.asked == "fa3"
    text = str(plan)
    assert text.startswith('nothing would run with version="fa3"')
    for part in plan.versions["fa3"].reasons[0], "fa3 cannot run here":
        assert " ".join(str(part).split()) in " ".join(text.split())


def test_cuda_tensors_get_reasons_without_a_gpu():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 64, 4, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        plan = explain(q, k, v, causal=True)
    refused = [name for name, version in plan.versions.items() if version.status == NOT_HERE and version.reasons]
    assert plan.selected is None and refused == ["fa1", "fa2", "fa3"]
    for name in refused:
        assert str(plan).count(f"{name} {NOT_HERE}: ") == len(plan.versions[name].reasons)


def test_an_input_that_no_version_takes(monkeypatch):
    monkeypatch.setattr(flash_cuda.dispatch, "CPU_DTYPES", (torch.float32,))
    plan = explain(*qkv(dtype=torch.float16))
    assert plan.selected is None
    assert plan.versions["fa2"].status == NOT_THIS_INPUT
    assert plan.versions["fa3"].status == NOT_HERE, "what the machine lacks comes first"
    assert plan.versions["fa2"].reasons[0].value == "torch.float16"


def test_nothing_is_launched_and_the_generator_stays():
    q, k, v = qkv()
    flash_cuda.attention(q, k, v)
    before, state = flash_cuda.last_call(), torch.get_rng_state()
    explain(q, k, v, dropout_p=0.5, causal=True, version="fa1")
    assert flash_cuda.last_call() == before and torch.equal(torch.get_rng_state(), state)


def test_meta_tensors_take_no_memory():
    q, k, v = (torch.empty(4, 1 << 20, 16, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    plan = explain(q, k, v, causal=True)
    assert plan.selected == "fa2" and plan.versions["fa2"].forward.flops > 1e16
    assert plan.versions["fa2"].forward.bytes_moved > 1e14


def test_copies_are_those_of_the_call():
    q, k, v = qkv()
    k, v = k.transpose(-1, -2).contiguous().transpose(-1, -2), v.expand(2, 70, 4, 32)
    plan = explain(q, k, v)
    flash_cuda.attention(q, k, v)
    assert plan.copies == flash_cuda.last_call().copies == ("k",)
    assert "copied first" in str(plan) and str(plan).split("\n")[2].endswith(": k")


def test_the_gradients_that_are_required_are_planned():
    q, k, v = qkv()
    all_three, only_q = explain(q, k, v), explain(q.requires_grad_(), k, v)
    assert only_q.versions["fa2"].backward.bytes_stored < all_three.versions["fa2"].backward.bytes_stored


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=str)
def test_an_empty_call_moves_nothing(shape):
    q, k, v = qkv(*shape)
    chosen = explain(q, k, v).versions["fa2"].forward
    flash_cuda.attention(q, k, v)
    assert (chosen.tile, chosen.bytes_moved, chosen.flops) == (flash_cuda.last_call().tile, 0, 0)
    assert "0 x 0" in str(explain(q, k, v))


def test_the_text_shows_every_number():
    plan = explain(*qkv(), causal=True)
    text = str(plan)
    assert "float32 on cpu: batch 2, 70 queries, 70 keys, 4 heads of 32; 50.7% of the scores are visible" in text
    for version in ("fa1", "fa2"):
        for pass_ in (plan.versions[version].forward, plan.versions[version].backward):
            assert f"{pass_.tile[0]} x {pass_.tile[1]}" in text
            assert f"{pass_.ratio_to_standard:.4f} x" in text
    assert max(len(line) for line in text.splitlines()) <= 110
    assert "fa2 would run" in plan._repr_html_() and "<pre" in plan._repr_html_()


def test_the_other_layout_and_packed_input_are_the_same_problem():
    q, k, v = qkv()
    plan = explain(q, k, v, causal=True)
    assert explain(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bhsd") == plan
    offsets = torch.tensor([0, 70, 140], dtype=torch.int32)
    packed = explain(*(x.flatten(0, 1) for x in (q, k, v)), causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets,
                     max_seqlen_q=70, max_seqlen_k=70)
    assert packed.versions == plan.versions and "2 packed sequences, 140 queries" in str(packed)


# A version that cannot run here is an answer of explain, not an error.
ERRORS, ERRORS_PACKED = ([c for c in table if c[2] is not RuntimeError] for table in (BAD, BAD_PACKED))


@pytest.mark.parametrize("argument, value, error, pattern", ERRORS, ids=[c[0] for c in ERRORS])
def test_bad_arguments_are_those_of_attention(argument, value, error, pattern):
    expect(error, r"flash_cuda\.attention: .*" + pattern, lambda: explain(**good(**{argument: value})))


@pytest.mark.parametrize("argument, value, error, pattern", ERRORS_PACKED, ids=[c[0] for c in ERRORS_PACKED])
def test_bad_packed_arguments_are_those_of_attention_varlen(argument, value, error, pattern):
    call = lambda: explain(**good_packed(**{argument: value}))  # noqa: E731
    expect(error, r"flash_cuda\.attention_varlen: .*" + pattern, call)
