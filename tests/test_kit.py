"""The pass rule itself: it lets the kernels through and refuses results that are slightly wrong."""

import pytest
import torch

import cases
import kit

CASE = cases.Case(causal=True, bias="1hqk", sinks=True, head_dim=64, seqlen_q=100, seqlen_k=130)
# Relative errors that no kernel may make: some units of the last place of the output, or many of the accumulation.
WRONG = {torch.float32: 3e-5, torch.bfloat16: 0.1, torch.float16: 2e-2, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", WRONG, ids=str)
@pytest.mark.parametrize("name", ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"))
def test_a_slightly_wrong_result_is_refused(name, dtype):
    inputs = cases.build(cases.replace(CASE, dtype=dtype))
    grads = {"wanted": tuple(inputs.leaves), "grad_out": torch.randn(inputs.leaves["q"].shape).to(dtype),
             "grad_lse": torch.randn(2, 4, 100)}
    got = kit.run_kernel(inputs, **grads)
    kit.compare(got, inputs, **grads)
    error = 3e-5 if name == "lse" and dtype != torch.float64 else WRONG[dtype]
    got[name] = got[name] * (1 + error) if name != "lse" else got[name] + error * got[name].abs().max()
    with pytest.raises(AssertionError, match=f"{name}: off by"):
        kit.compare(got, inputs, **grads)


def test_nan_and_infinities_must_sit_at_the_same_places():
    inputs = cases.build(cases.Case(causal=True, seqlen_q=49, seqlen_k=33))
    for name, place, value in (("out", (0, 30, 1, 2), torch.nan), ("out", (1, 30, 0, 0), torch.inf),
                               ("lse", (0, 0, 3), -1e30), ("lse", (0, 0, 40), -torch.inf)):
        got = kit.run_kernel(inputs)
        got[name][place] = value
        with pytest.raises(AssertionError, match=f"{name}: is"):
            kit.compare(got, inputs)


@pytest.mark.parametrize("kind", kit.STRIDES)
def test_restride_keeps_the_values_and_surrounds_them_with_nan(kind):
    x = torch.randn(2, 5, 3, 4)
    y = kit.restride(x, kind)
    assert y.shape == x.shape
    if "expanded" in kind:
        assert 0 in y.stride()
    else:
        assert torch.equal(x, y)
    if kind in ("packed_qkv", "sliced", "last_strided"):
        whole = torch.empty(0).set_(y.untyped_storage())
        assert whole.isnan().sum() == whole.numel() - x.numel() > 0
