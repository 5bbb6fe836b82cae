"""Seeded random combinations of everything, forward and backward, against the reference."""

import random

import pytest
import torch

import cases
import kit
from flash_cuda import _C

DRAWS = 300


def draw(number):
    """A random case; the number alone decides it."""
    r = random.Random(number)
    heads_kv = r.choice((1, 1, 2, 3))
    dropout_p = r.choice((0.0, 0.0, 0.0, 0.17, 0.6))
    case = cases.Case(
        batch=r.choice((1, 2, 3)), heads=heads_kv * r.choice((1, 1, 2, 3)), heads_kv=heads_kv,
        seqlen_q=r.choice((1, 2, 7, r.randint(1, 80), r.randint(1, 80))),
        seqlen_k=r.choice((1, 2, 7, r.randint(1, 120), r.randint(1, 120))),
        head_dim=r.choice((1, 3, 8, 16, 24, 32, 40, 64, 65, 80, 96, 128)),
        dtype=r.choice((cases.F32, cases.F32, cases.BF16, cases.F16, cases.F64)),
        magnitude=r.choice((0.3, 1.0, 1.0, 2.0)),
        causal=r.choice((False, False, True, "top_left")),
        window_size=r.choice((None, None, (r.randint(0, 40), r.randint(0, 40)), (None, r.randint(0, 20)),
                              (r.randint(0, 20), None))),
        softmax_scale=r.choice((None, None, 0.1, 0.5)), softcap=r.choice((0.0, 0.0, 1.0, 20.0)),
        alibi=r.choice((None, None, "heads", "batch")),
        bias=r.choice((None, None, None, "bhqk", "1hqk", "b11k", "bhq1", "hqk", "qk", "k", "q1", "1")),
        bias_kind=r.choice(("same", "float32", "bool", "inf")), sinks=r.random() < 0.3,
        block_mask=r.choice((None, None, None, "local", "bigbird", "random")),
        block_size=r.choice(((16, 16), (8, 24), (5, 3), (64, 64))), dropout_p=dropout_p,
        layout=r.choice(("bshd", "bshd", "bhsd")), strides=r.choice(kit.STRIDES))
    if r.random() < 0.25:
        lengths = tuple((r.choice((0, 1, r.randint(0, 60))), r.choice((0, 1, r.randint(0, 90))))
                        for _ in range(r.randint(1, 4)))
        case = cases.replace(case, lengths=lengths, layout="bshd",
                             strides="contiguous" if "expanded" in case.strides else case.strides)
    if case.dtype == cases.F64 and case.bias_kind == "float32":
        case = cases.replace(case, bias_kind="same")
    return case, r.choice((2048, 8192, 65536, 524288)), r.choice(_C.cpu_isas()), r.choice((1, 2, 3))


@kit.each_version
@pytest.mark.parametrize("number", range(DRAWS))
def test_random_case(number, version):
    case, fast_memory, isa, threads = draw(number)
    torch.manual_seed(number)
    inputs = cases.build(case)
    _C.set_cpu_fast_memory(fast_memory)
    _C.set_cpu_isa(isa)
    torch.set_num_threads(threads)
    wanted = tuple(n for n in inputs.leaves if random.Random(f"{number}{n}").random() < 0.7)
    grad_lse = False if number % 4 == 0 else None
    kit.check(inputs, version, wanted=wanted, deterministic=number % 3 == 0, grad_lse=grad_lse)
