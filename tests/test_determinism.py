"""Rule 10: bitwise equal gradients and outputs, run after run, under load (cases 14 and 36 on the CPU)."""

import threading

import pytest
import torch

import cases
import flash_cuda
import kit

RUNS = 200
CALLS = {
    "heads": cases.Case(heads_kv=4), "grouped": cases.Case(heads=6, heads_kv=2), "causal": cases.Case(causal=True),
    "window": cases.Case(window_size=(9, 4)), "packed": cases.Case(lengths=((30, 50), (0, 7), (40, 33)), causal=True),
    "dim64": cases.Case(head_dim=64, dtype=cases.BF16), "dim128": cases.Case(head_dim=128, dtype=cases.F16),
    "dim256": cases.Case(head_dim=256), "features": cases.replace(cases.COMBINATIONS[0], seqlen_q=60, seqlen_k=90),
}


def run(inputs, version, **more):
    return kit.run_kernel(inputs, version, wanted=tuple(inputs.leaves), grad_out=inputs.leaves["q"].detach(), **more)


@kit.each_version
@pytest.mark.parametrize("name", CALLS)
def test_deterministic_gradients(name, version):  # case 14
    inputs = cases.build(cases.replace(CALLS[name], batch=1) if CALLS[name].lengths is None else CALLS[name])
    first = run(inputs, version, deterministic=True)
    for _ in range(RUNS):
        again = run(inputs, version, deterministic=True)
        assert all(torch.equal(again[n], first[n]) for n in first)


@kit.each_version
def test_the_switch_of_torch_is_obeyed(version):
    inputs = cases.build(cases.Case(seqlen_q=200, seqlen_k=300))
    torch.set_num_threads(4)
    expected = run(inputs, version, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            got = run(inputs, version)
            assert all(torch.equal(got[n], expected[n]) for n in got)
    finally:
        torch.use_deterministic_algorithms(False)


@kit.each_version
@pytest.mark.parametrize("threads", (2, 3, 8))
def test_deterministic_gradients_with_threads(threads, version):
    torch.set_num_threads(threads)
    inputs = cases.build(cases.Case(seqlen_q=300, seqlen_k=400, heads=2, heads_kv=1, causal=True))
    first = run(inputs, version, deterministic=True)
    for _ in range(10):
        again = run(inputs, version, deterministic=True)
        assert all(torch.equal(again[n], first[n]) for n in first)


@kit.each_version
def test_forward_is_bitwise_equal_under_load(version):  # case 36
    tensors = kit.qkv(2, 60, 90)
    expected = flash_cuda.attention(**tensors, version=version)
    stop = threading.Event()

    def load():
        other = kit.qkv(1, 100, 100, dtype=torch.bfloat16)
        while not stop.is_set():
            flash_cuda.attention(**other, causal=True)

    worker = threading.Thread(target=load)
    worker.start()
    try:
        assert all(torch.equal(flash_cuda.attention(**tensors, version=version), expected) for _ in range(RUNS))
    finally:
        stop.set()
        worker.join()


@kit.each_version
def test_calls_from_several_threads_at_once(version):
    inputs = [cases.build(cases.Case(seqlen_q=n, causal=True)) for n in (20, 50, 90)]
    grad = {"deterministic": True}
    expected, wrong = [run(i, version, **grad) for i in inputs], []

    def work(number):
        for _ in range(20):
            got = run(inputs[number], version, **grad)
            wrong.extend(n for n in got if not torch.equal(got[n], expected[number][n]))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
