"""The same results from both schedules, every instruction set, any size of fast memory and any number of threads."""

import pytest
import torch

import cases
import flash_cuda
import kit
from flash_cuda import _C

CASES = [cases.Case(), cases.Case(causal=True, dtype=cases.BF16, head_dim=64), cases.Case(dtype=cases.F16, head_dim=40),
         cases.Case(dtype=cases.F64, head_dim=17), *cases.COMBINATIONS, cases.VARLEN[3], cases.VARLEN[5]]
SHAPES = [cases.replace(c, seqlen_q=67, seqlen_k=131) if c.lengths is None else c for c in CASES]


def run(inputs, version, **more):
    grad_out = torch.ones(()).expand(inputs.leaves["q"].shape).to(inputs.dtype)
    return kit.run_kernel(inputs, version, wanted=tuple(inputs.leaves), grad_out=grad_out, **more)


@kit.each_version
@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_instruction_sets(case, isa, version):
    _C.set_cpu_isa(isa)
    kit.check(cases.build(case), version)
    assert flash_cuda.last_call().isa == isa


@kit.each_version
@pytest.mark.parametrize("fast_memory", (1, 2048, 16 * 1024, 16 * 1024 * 1024))
@pytest.mark.parametrize("case", SHAPES[:6], ids=str)
def test_sizes_of_fast_memory(case, fast_memory, version):
    _C.set_cpu_fast_memory(fast_memory)
    kit.check(cases.build(case), version)


@kit.each_version
@pytest.mark.parametrize("threads", (1, 2, 5))
@pytest.mark.parametrize("case", SHAPES[:6], ids=str)
def test_numbers_of_threads(case, threads, version):
    torch.set_num_threads(threads)
    kit.check(cases.build(case), version)


@pytest.mark.parametrize("case", cases.SMOKE + SHAPES, ids=str)
def test_fa1_and_fa2(case):
    """The reference is not asked."""
    inputs = cases.build(case)
    one, two = (run(inputs, version) for version in kit.VERSIONS)
    for name in one:
        assert torch.equal(one[name].isfinite(), two[name].isfinite()), name
        largest = one[name].double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        allowed = 4 * torch.finfo(one[name].dtype).eps * largest + (1e-12 if case.dtype == cases.F64 else 1e-5)
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=allowed)


def test_unknown_instruction_set_is_an_error():
    with pytest.raises(ValueError, match="sse9"):
        _C.set_cpu_isa("sse9")
    with pytest.raises(ValueError, match="positive"):
        _C.set_cpu_fast_memory(0)
