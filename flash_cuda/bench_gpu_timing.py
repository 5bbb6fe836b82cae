"""How the GPU benchmark takes times.

A GPU that is limited by power is fast after a pause and slower under load, so every time comes in two kinds, and only
equal kinds of one run compare: burst, the launches of the first 15 ms after a pause, and sustained, those after 150 ms
of load.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

import flash_cuda
from flash_cuda import bench_common

PAUSE, BURST, LOAD, SUSTAINED = 0.25, 0.015, 0.15, 0.075  # seconds
MATRIX_SIZE = 8192
SPIN_HERTZ = 2e9  # about the clock of a GPU; how long a spin takes need not be exact
HOST_CALLS, HOST_ROUNDS = 1000, 7


def time_launches(launch: Callable, count: int, head_start: float) -> list[float]:
    """Milliseconds from one launch's end to the next. While the GPU spins for a head start, the host queues launches,
    so that what it takes to issue them is not measured."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    if head_start:
        torch.cuda._sleep(int(head_start * SPIN_HERTZ))
    marks[0].record()
    for mark in marks[1:]:
        launch()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def time_kinds(launch: Callable) -> dict[str, list[float]]:
    """Milliseconds of every launch, in each kind."""
    launch()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        launch()
    issue = (time.perf_counter() - started) / 5
    torch.cuda.synchronize()
    takes = statistics.median(time_launches(launch, 5, head_start=0.001 + 10 * issue)) / 1e3

    # Half, since recording events takes host time as well.
    host_is_slow = issue > 0.5 * takes
    # A queue holds about a thousand entries, and a backward pass is several kernels.
    most = 100 if host_is_slow else 1000
    burst, sustained = (
        min(most, max(least, math.ceil(seconds / takes))) for seconds, least in ((BURST, 3), (SUSTAINED, 5))
    )
    time.sleep(PAUSE)
    found = {"burst": time_launches(launch, burst, 0.001 + (2 * issue * burst if host_is_slow else 0))}
    for _ in range(math.ceil(LOAD / max(takes, issue))):
        launch()
    # The queue is still full here, so the load goes on, unless the host is slow: then only a spin can fill it.
    found["sustained"] = time_launches(launch, sustained, 2 * issue * sustained if host_is_slow else 0)
    return found


def matrix_rate(device: torch.device) -> dict[str, float]:
    """TFLOP/s of a large bf16 matrix product, in each kind."""
    generator = torch.Generator(device).manual_seed(bench_common.SEED)
    size = (MATRIX_SIZE, MATRIX_SIZE)
    a, b = (torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    times = time_kinds(lambda: torch.matmul(a, b))
    return {kind: 2 * MATRIX_SIZE**3 / statistics.median(ms) / 1e9 for kind, ms in times.items()}


def host_times(versions: list[str], device: torch.device) -> dict[str, float]:
    """Microseconds of one eager call on a small shape, launch included, so many calls that the host is what is slow."""
    q = torch.randn(1, 128, 2, 64, device=device, dtype=torch.bfloat16)
    p = q.transpose(1, 2)
    calls = {v: functools.partial(flash_cuda.attention, q, q, q, version=v) for v in versions}
    calls |= {"torch": lambda: F.scaled_dot_product_attention(p, p, p), "one trivial op": lambda: q.neg()}
    seconds = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(HOST_ROUNDS + 1):
            for name, call in calls.items():
                started = time.perf_counter()
                for _ in range(HOST_CALLS):
                    call()
                torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - started)
    # The first round loads kernels.
    return {name: statistics.median(found[1:]) * 1e6 / HOST_CALLS for name, found in seconds.items()}
