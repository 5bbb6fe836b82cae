"""How fa2 on CUDA is compared with the float64 reference on the CPU."""

import math

import pytest
import torch

import flash_cuda
import kit
from cases import BF16, F16, Case

CUDA = torch.device("cuda")
each_dtype = pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "fp16"))


@pytest.fixture(autouse=True)
def unset_memory_is_nan():
    """What torch hands out next was NaN before: results and workspaces that are not written show it."""
    for size in (1 << 12, 1 << 18, 1 << 24):
        del [torch.full((size,), math.nan, device=CUDA) for _ in range(4)][:]


def to_cuda(x):
    return x.to(CUDA) if isinstance(x, torch.Tensor) else x


def on_cuda(inputs):
    return kit.Inputs({n: t.to(CUDA) for n, t in inputs.leaves.items()},
                      {n: to_cuda(x) for n, x in inputs.options.items()}, tuple(map(to_cuda, inputs.packed)))


def check(inputs, *, wanted=("q", "k", "v"), grad_out=None, grad_lse=None, gpu_inputs=None, **more):
    """fa2 on the GPU, forward and backward, against the float64 reference on the CPU. grad_lse=False: a loss of out."""
    q = inputs.leaves["q"]
    if wanted and grad_out is None:
        grad_out = torch.randn(q.shape).to(q.dtype)
    if wanted and grad_lse is None:
        grad_lse = torch.randn(kit._lse_shape(inputs))
    grads = {"wanted": wanted, "grad_out": grad_out, "grad_lse": None if grad_lse is False else grad_lse}
    on_gpu = {n: to_cuda(x) for n, x in grads.items()}
    got = kit.run_kernel(gpu_inputs or on_cuda(inputs), "fa2", **on_gpu, **more)
    call = flash_cuda.last_call()
    assert call.version == "fa2" and call.device.startswith("cuda") and "_cuda_" in call.kernel
    got = {n: x.cpu() for n, x in got.items()}
    # A tensor core adds 16 products at a time, and cuts off what does not fit each sum.
    kit.compare(got, inputs, sum_roundings=max(1, q.shape[-1] / 16), **grads)
    return got


def case(**changes):
    return Case(**({"seqlen_q": 130, "seqlen_k": 260, "head_dim": 64, "dtype": BF16} | changes))
