"""Every feature alone and together, forward and backward."""

import pytest
import torch

import cases
import flash_cuda
import kit
from flash_cuda import _C


@kit.each_version
@pytest.mark.parametrize("case", cases.FEATURES, ids=str)
def test_feature(case, version):
    kit.check(cases.build(case), version)


@kit.each_version
@pytest.mark.parametrize("case", cases.FEATURES[::3], ids=str)
def test_feature_over_many_small_tiles(case, version):
    _C.set_cpu_fast_memory(4 * 1024)
    kit.check(cases.build(cases.replace(case, seqlen_q=67, seqlen_k=91)), version)


@kit.each_version
def test_scale_is_the_true_one_at_any_head_dim(version):  # rule 2
    for head_dim in (1, 5, 33, 72, 100):
        tensors = kit.qkv(head_dim=head_dim)
        torch.testing.assert_close(flash_cuda.attention(**tensors, version=version),
                                   flash_cuda.attention(**tensors, softmax_scale=head_dim**-0.5, version=version))


@kit.each_version
@pytest.mark.parametrize("shape", ((4,), (2, 4)), ids=str)
@kit.each_dtype
def test_slopes_of_any_float_dtype(dtype, shape, version):
    slopes = torch.rand(shape).to(dtype)
    kit.check(kit.Inputs(kit.qkv(), {"alibi_slopes": slopes, "causal": True}), version)


@kit.each_version
@kit.each_dtype
def test_sinks_of_any_float_dtype(dtype, version):
    kit.check(kit.Inputs(kit.qkv() | {"sinks": torch.randn(4).to(dtype)}), version)


@kit.each_version
@pytest.mark.parametrize("sink", (-1e4, -30.0, 30.0, 1e4))
def test_a_sink_far_from_the_scores(sink, version):
    kit.check(kit.Inputs(kit.qkv() | {"sinks": torch.tensor([sink, 0.0, sink, -sink])}, {"causal": True}), version)


@kit.each_version
@pytest.mark.parametrize("kind", ("transposed", "stepped", "expanded"))
@pytest.mark.parametrize("bias_dtype", (torch.float32, torch.bool), ids=str)
def test_bias_of_any_strides(bias_dtype, kind, version):
    bias = {"transposed": torch.randn(2, 4, 49, 33).transpose(2, 3), "stepped": torch.randn(2, 4, 33, 98)[..., ::2],
            "expanded": torch.randn(4, 1, 49).expand(2, 4, 33, 49)}[kind]
    if bias_dtype == torch.bool:
        bias = torch.where(bias > -1, True, False) if kind != "expanded" else (bias[0, :, :1] > -1).expand(2, 4, 33, 49)
        kit.check(kit.Inputs(kit.qkv(), {"bias": bias}), version)
    else:
        kit.check(kit.Inputs(kit.qkv() | {"bias": bias}), version)


@kit.each_version
def test_causal_is_a_window_without_a_right_side(version):
    tensors = kit.qkv()
    assert torch.equal(flash_cuda.attention(**tensors, causal=True, version=version),
                       flash_cuda.attention(**tensors, window_size=(None, 0), version=version))


@kit.each_version
@pytest.mark.parametrize("group", (1, 2, 3, 8))
@pytest.mark.parametrize("heads_kv", (1, 2))
@kit.each_dtype
def test_grouped_heads(dtype, heads_kv, group, version):
    case = cases.Case(heads=group * heads_kv, heads_kv=heads_kv, causal=True, dtype=dtype, seqlen_q=40, seqlen_k=70)
    kit.check(cases.build(case), version)


@kit.each_version
def test_grouped_heads_are_repeated_heads(version):
    q, k, v = kit.qkv(heads=6, heads_kv=2).values()
    torch.testing.assert_close(
        flash_cuda.attention(q, k, v, version=version),
        flash_cuda.attention(q, k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2), version=version))
