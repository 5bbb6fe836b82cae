"""The ops as PyTorch sees them: opcheck, gradcheck, FLOPs, and the record of the latest call."""

import warnings

import pytest
import torch
from kit import VERSIONS, each_version
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torch_kit import close, grads, leaves, options, packed_options, qkv

import flash_cuda
from flash_cuda import _C, reference

ops = torch.ops.flash_cuda


# ---- opcheck: schema, autograd registration, fake kernels, AOT dispatch with symbolic shapes


def op_cases():
    q, k, v = qkv()
    packed = leaves((9, 4, 16), (13, 2, 16), (13, 2, 16))
    bias, sinks = leaves((4, 9, 13), (4,))
    blocks = torch.rand(1, 4, 3, 2) > 0.3
    seed = torch.tensor([3, 5])
    return {
        "plain": (q, k, v, *options()),
        "fa1": (q, k, v, *options(version=1, causal=1, softmax_scale=0.3)),
        "features": (q, k, v, *options(causal=2, window_left=5, window_right=3, softcap=2.0, bias=bias, sinks=sinks,
                                       alibi_slopes=torch.rand(4))),
        "bool bias": (q, k, v, *options(bias=torch.rand(9, 13) > 0.5)),
        "block mask": (q, k, v, *options(block_mask=blocks, block_mask_q=4, block_mask_k=7)),
        "dropout": (q, k, v, *options(dropout_p=0.3, dropout_seed=seed)),
        "packed": (*packed, *packed_options(causal=1)),
        "transposed": (*(t.transpose(1, 2).detach().contiguous().requires_grad_().transpose(1, 2) for t in (q, k, v)),
                       *options()),
        "last dimension not contiguous": (*(t.mT.detach().contiguous().requires_grad_().mT for t in (q, k, v)),
                                          *options()),
        "double": (*(t.detach().double().requires_grad_() for t in (q, k, v)), *options()),
    }  # fmt: skip


OP_CASES = tuple(op_cases())


@pytest.mark.parametrize("name", OP_CASES)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_opcheck_forward(name, grad):
    args = op_cases()[name]
    if not grad:
        args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    torch.library.opcheck(ops.fwd.default, args)


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("name", OP_CASES)
def test_opcheck_backward(name, wanted):
    args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in op_cases()[name])
    out, lse = ops.fwd(*args)
    given = dict(zip(flash_cuda.ops.OPTIONS, args[3:]))
    extra = (given["bias"] is not None and given["bias"].is_floating_point(), given["sinks"] is not None)
    bwd_args = (torch.randn_like(out), torch.randn_like(lse), *args[:3], out, lse, *args[3:], [*wanted, *extra])
    torch.library.opcheck(ops.bwd.default, bwd_args)


def test_opcheck_the_other_ops():
    torch.library.opcheck(ops.dropout_mask.default, (torch.tensor([1, 2]), 0.25, 2, 3, 17, 19))
    out, dlse = torch.randn(2, 9, 4, 16), torch.randn(2, 4, 9)
    torch.library.opcheck(ops.bwd_preprocess.default, (torch.randn_like(out), out, dlse))
    torch.library.opcheck(ops.bwd_preprocess.default, (torch.randn(9, 4, 16), torch.randn(9, 4, 16), None))


@pytest.mark.parametrize("packed", [False, True])
def test_preprocess_is_the_row_sum(packed):
    shape = (9, 4, 16) if packed else (2, 9, 4, 16)
    out, dout = torch.randn(shape), torch.randn(shape)
    dlse = torch.randn(shape[:-3] + (4, 9))
    close(ops.bwd_preprocess(dout, out, dlse), (dout * out).sum(-1).transpose(-1, -2) - dlse)
    close(ops.bwd_preprocess(dout.mT.contiguous().mT, out, None), (dout * out).sum(-1).transpose(-1, -2))


@each_version
def test_gradcheck(version):
    q, k, v = qkv(1, 4, 5, 2, 1, 3, dtype=torch.float64)
    bias, sinks = leaves((2, 4, 5), (2,), dtype=torch.float64)

    def call(q, k, v, bias, sinks):
        return flash_cuda.attention(q, k, v, bias=bias, sinks=sinks, causal=True, softcap=3.0, version=version,
                                    return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks))


# ---- FLOPs


@each_version
def test_flops_are_counted_as_for_torch_attention(version):
    q, k, v = qkv(heads_kv=4)
    with FlopCounterMode(display=False) as ours:
        flash_cuda.attention(q, k, v, version=version).sum().backward()
    shapes = [t.transpose(1, 2).shape for t in (q, k, v)]
    theirs = sdpa_flop_count(*shapes) + sdpa_backward_flop_count(shapes[0], *shapes)
    assert ours.get_total_flops() == theirs == (4 + 10) * 2 * 4 * 9 * 13 * 16


def test_flops_of_packed_sequences():
    q, k, v = leaves((9, 4, 16), (13, 2, 16), (13, 2, 16))
    with FlopCounterMode(display=False) as counter:
        ops.fwd(q, k, v, *packed_options())
    assert counter.get_total_flops() == 4 * 4 * 16 * (4 * 6 + 0 * 2 + 5 * 5)


# ---- the record of the latest call


@pytest.mark.parametrize("version", VERSIONS)
def test_last_call(version):
    q, k, v = qkv()
    q = q.detach().mT.contiguous().mT
    out = flash_cuda.attention(q, k, v, version=version, dropout_p=0.25)
    call = flash_cuda.last_call()
    assert (call.pass_, call.version, call.copies, call.device) == ("forward", version, ("q",), "cpu")
    assert call.kernel == f"{version}_fwd_cpu_{_C.cpu_isa()}_fp32"
    mask = flash_cuda.dropout_mask(2, 4, 9, 13, 0.25, seed=call.dropout_seed)
    expected = reference.attention(q, k, v, dropout_p=0.25, dropout_seed=call.dropout_seed)
    close(out, expected)
    assert 0 < mask.float().mean() < 1
    grads(out.sum(), [v])  # a gradient that is expanded: no row of it is contiguous
    call = flash_cuda.last_call()
    assert (call.pass_, call.kernel) == ("backward", f"{version}_bwd_cpu_{_C.cpu_isa()}_fp32")
    assert call.copies == ("q", "dout") and call.bytes_loaded > 0 and call.threads <= torch.get_num_threads()


def test_deterministic_follows_torch():
    q, k, v = qkv(grad=False)

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.deterministic = args[-1]
            return func(*args, **(kwargs or {}))

    torch.use_deterministic_algorithms(True)
    try:
        with Recorder() as recorder:
            flash_cuda.attention(q, k, v)
        assert recorder.deterministic is True
        with Recorder() as recorder:
            flash_cuda.attention(q, k, v, deterministic=False)
        assert recorder.deterministic is False
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_warning_in_training():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q, k, v = qkv()
        flash_cuda.attention(q, k, v, causal=True).sum().backward()
