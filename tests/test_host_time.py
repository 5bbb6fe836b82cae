"""What a call costs beside the kernel: Python, pybind11 and the dispatcher, on the smallest call there is."""

import time

import pytest
import torch

import flash_cuda
from flash_cuda import _C

CALLS, ROUNDS = 2000, 25
TARGET = 4e-6  # seconds over the kernel itself


def seconds_of_python(q, k, v):
    start = time.perf_counter()
    for _ in range(CALLS):
        flash_cuda.attention(q, k, v)
    return (time.perf_counter() - start) / CALLS


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_host_time_of_a_one_token_call(grad, record_property):
    q, k, v = (torch.randn(1, 1, 1, 64) for _ in range(3))
    leaves = [t.clone().requires_grad_(grad) for t in (q, k, v)]
    # The best of alternating rounds: whatever else runs on the machine only ever adds to either.
    kernel, whole = float("inf"), float("inf")
    for _ in range(ROUNDS):
        kernel = min(kernel, _C.time_forward(q, k, v, CALLS) / CALLS)
        whole = min(whole, seconds_of_python(*leaves))
    record_property("microseconds", f"{whole * 1e6:.2f}, kernel {kernel * 1e6:.2f}")
    # With a gradient the node of the autograd graph and the tensors that it saves come on top: torch's own cost, which
    # on a slow machine was seen at twice the call without.
    limit = TARGET * (3 if grad else 1)
    assert whole - kernel < limit, f"{whole * 1e6:.2f} us, of which the kernel is {kernel * 1e6:.2f} us"
