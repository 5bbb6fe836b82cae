"""Gradients of the shared table of cases, each input alone, through the LSE, and with every kind of dout."""

import itertools

import pytest
import torch

import cases
import flash_cuda
import kit
from test_forward import HEAD_DIMS, tile_edges

ALL = cases.Case(bias="1hqk", sinks=True, causal=True)


@kit.each_version
@pytest.mark.parametrize("case", cases.SMOKE + cases.EDGES + cases.LARGE, ids=str)
def test_backward(case, version):
    kit.check(cases.build(case), version)


@kit.each_version
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_lengths_around_the_tile(head_dim, version):  # case 26
    dtype = kit.DTYPES[HEAD_DIMS.index(head_dim) % 3]
    for seqlen_q, seqlen_k in itertools.product(*tile_edges(version, head_dim, dtype)):
        if (seqlen_q + seqlen_k) % 2 == 0:  # the forward test runs the others
            kit.check(kit.Inputs(kit.qkv(2, seqlen_q, seqlen_k, 2, 1, head_dim, dtype), {"causal": True}), version)


@kit.each_version
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ("q", "k", "v", "bias", "sinks"))
def test_one_input_alone_needs_a_gradient(name, dtype, version):  # case 27
    kit.check(cases.build(cases.replace(ALL, dtype=dtype)), version, wanted=(name,))


@kit.each_version
def test_only_the_bias_needs_a_gradient(version):  # case 27 as reported
    leaves = kit.qkv(1, 64, 64, 1, 1, 16) | {"bias": torch.randn(1, 1, 64, 64)}
    kit.check(kit.Inputs(leaves), version, wanted=("bias",))


@kit.each_version
@pytest.mark.parametrize("wanted", list(itertools.combinations(("q", "k", "v", "bias", "sinks"), 3)), ids="".join)
def test_any_three_inputs_need_a_gradient(wanted, version):
    kit.check(cases.build(ALL), version, wanted=wanted)


@kit.each_version
@kit.each_dtype
def test_a_loss_of_the_lse_alone(dtype, version):  # case 28
    inputs = cases.build(cases.replace(ALL, dtype=dtype))
    grads = {"wanted": ("q", "k", "bias", "sinks"), "grad_lse": torch.randn(2, 4, 33)}
    kit.compare(kit.run_kernel(inputs, version, **grads), inputs, **grads)


@kit.each_version
def test_a_loss_that_leaves_the_lse_out(version):
    kit.check(cases.build(ALL), version, grad_lse=False)


@kit.each_version
@pytest.mark.parametrize("kind", kit.STRIDES)
def test_any_strides_of_dout(kind, version):  # case 15
    dout = kit.restride(torch.randn(2, 33, 4, 32), kind)
    kit.check(cases.build(cases.Case(causal=True)), version, grad_out=dout)


@kit.each_version
def test_dout_of_a_sum_is_expanded(version):
    tensors = [t.requires_grad_() for t in kit.qkv().values()]
    out = flash_cuda.attention(*tensors, version=version)
    got = torch.autograd.grad(out.sum(), tensors)
    expected = torch.autograd.grad(flash_cuda.attention(*tensors, version=version), tensors, torch.ones(2, 33, 4, 32))
    assert all(map(torch.equal, got, expected))


@kit.each_version
def test_gradients_add_up_over_two_backward_passes(version):
    tensors = [t.requires_grad_() for t in kit.qkv().values()]
    out = flash_cuda.attention(*tensors, version=version, deterministic=True)
    out.sum().backward(retain_graph=True)
    once = [t.grad.clone() for t in tensors]
    out.sum().backward()
    assert all(torch.equal(t.grad, 2 * g) for t, g in zip(tensors, once))
