"""Rule 6: what is masked or lies beside the tensors is NaN here and is never seen; unset memory is poisoned too."""

import math

import pytest
import torch

import cases
import kit
from flash_cuda import BlockMask, _C

BAD = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf}
SEQLEN_Q, SEQLEN_K = 37, 70


def masked_for_all():
    """Options under which no query sees the keys of `hidden`, by each kind of mask."""
    keys = torch.arange(SEQLEN_K)
    last, first = keys >= 50, keys < 20
    blocks = torch.ones(4, 7, dtype=torch.bool)
    blocks[:, 3] = False
    return {
        "causal_top_left": ({"causal": "top_left"}, keys >= SEQLEN_Q),
        "window_left": ({"window_size": (2, None)}, keys < SEQLEN_K - SEQLEN_Q - 2),
        "window_right": ({"causal": "top_left", "window_size": (None, 4)}, keys >= SEQLEN_Q),
        "block_mask": ({"block_mask": BlockMask(blocks, (10, 10), SEQLEN_Q, SEQLEN_K)}, (keys >= 30) & (keys < 40)),
        "bool_bias": ({"bias": ~last}, last),
        "bool_bias_first": ({"bias": ~first[None, None, None]}, first),
        "inf_bias": ({"bias": torch.zeros(SEQLEN_K).masked_fill(last, -math.inf)}, last),
    }


@kit.each_version
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", masked_for_all())
@kit.each_dtype
def test_keys_that_no_query_sees(dtype, kind, bad, version):
    """Their content moves nothing by more than the order of a sum does; their own gradients are zero."""
    _C.set_cpu_fast_memory(8 * 1024)
    options, hidden = masked_for_all()[kind]
    options |= {"softcap": 5.0, "dropout_p": 0.2}
    leaves = kit.qkv(2, SEQLEN_Q, SEQLEN_K, 4, 2, 32, dtype)
    grads = {"wanted": ("q", "k", "v"), "grad_out": torch.randn(2, SEQLEN_Q, 4, 32).to(dtype),
             "grad_lse": torch.randn(2, 4, SEQLEN_Q), "deterministic": True}
    clean = kit.run_kernel(kit.Inputs(leaves, options), version, **grads)
    poisoned = leaves | {n: leaves[n].clone() for n in "kv"}
    poisoned["k"][:, hidden] = BAD[bad]
    poisoned["v"][:, hidden] = BAD[bad]
    got = kit.run_kernel(kit.Inputs(poisoned, options), version, **grads)
    torch.testing.assert_close(got, clean)
    assert (got["dk"][:, hidden] == 0).all() and (got["dv"][:, hidden] == 0).all()


# Some queries see the poisoned keys and some do not: NaN must sit exactly where the reference has it.
PARTLY_MASKED = {
    "causal": cases.Case(causal=True),
    "top_left": cases.Case(causal="top_left"),
    "window": cases.Case(window_size=(4, 6)),
    "block_mask": cases.Case(block_mask="random", block_size=(5, 7)),
    "bool_bias": cases.Case(bias="bhqk", bias_kind="bool"),
    "inf_bias": cases.Case(bias="1hqk", bias_kind="inf"),
    "softcap": cases.Case(causal=True, softcap=3.0),
    "everything": cases.Case(causal=True, window_size=(20, None), alibi="heads", sinks=True, softcap=3.0),
}


@kit.each_version
@pytest.mark.parametrize("name", ("k", "v"))
@pytest.mark.parametrize("kind", PARTLY_MASKED)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_nan_reaches_only_the_queries_that_see_it(dtype, kind, name, version):
    _C.set_cpu_fast_memory(8 * 1024)
    inputs = cases.build(cases.replace(PARTLY_MASKED[kind], dtype=dtype, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K))
    inputs.leaves[name][:, 45, 0] = math.nan
    inputs.leaves[name][1, 12, 1, 3] = math.nan
    got = kit.check(inputs, version)
    assert got["out"].isfinite().any(), "the case must leave some queries clean"
    assert got["out"].isnan().any(), "and poison some"


@kit.each_version
@pytest.mark.parametrize("bad", ("inf", "minus_inf"))
@kit.each_dtype
def test_a_visible_infinite_value_does_as_ieee_says(dtype, bad, version):
    inputs = cases.build(cases.Case(causal=True, dtype=dtype, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K))
    inputs.leaves["v"][:, 60, :, 5] = BAD[bad]
    got = kit.check(inputs, version, wanted=())
    assert (got["out"].isinf().sum((0, 1, 2)) > 0).tolist() == [column == 5 for column in range(32)]


@kit.each_version
def test_a_visible_infinite_key_does_as_ieee_says(version):
    """Its score is +inf for some queries (NaN output) and -inf for the others (no weight)."""
    inputs = cases.build(cases.Case())
    inputs.leaves["k"][:, 20, :, 3] = math.inf
    got, ref = kit.run_kernel(inputs, version), kit.run_reference(inputs)
    assert torch.equal(got["out"].isnan(), ref["out"].isnan())
    assert 0 < got["out"].isnan().float().mean() < 1
    torch.testing.assert_close(got["out"].double(), ref["out"], equal_nan=True, rtol=1e-5, atol=1e-6)


@kit.each_version
@pytest.mark.parametrize("kind", ("sliced", "packed_qkv", "last_strided"))
@kit.each_dtype
def test_what_lies_beside_the_tensors_is_not_read(dtype, kind, version):
    """kit.restride fills the gaps with NaN; no tile or vector divides these lengths and head dims."""
    for head_dim, seqlen_q, seqlen_k in ((20, 5, 9), (33, 65, 130), (64, 17, 100)):
        case = cases.Case(strides=kind, dtype=dtype, head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        grad_out = kit.restride(torch.randn(2, seqlen_q, 4, head_dim).to(dtype), kind)
        got = kit.check(cases.build(case), version, grad_out=grad_out)
        assert all(t.isfinite().all() for t in got.values())


@kit.each_version
def test_the_neighbours_in_a_packed_batch_are_not_read(version):
    """One sequence of NaN beside clean ones."""
    inputs = cases.build(cases.Case(lengths=((30, 50), (20, 10), (9, 70)), causal=True))
    grads = {"wanted": ("q", "k", "v"), "grad_out": torch.randn(59, 4, 32), "deterministic": True}
    clean = kit.run_kernel(inputs, version, **grads)
    for name, rows in (("q", slice(30, 50)), ("k", slice(50, 60)), ("v", slice(50, 60))):
        inputs.leaves[name][rows] = math.nan
    got = kit.run_kernel(inputs, version, **grads)
    for name, value in clean.items():
        rows = slice(50, 60) if name in ("dk", "dv") else slice(30, 50)
        keep = torch.ones(value.shape[1 if name == "lse" else 0], dtype=torch.bool).index_fill(
            0, torch.arange(rows.start, rows.stop), False)
        if name == "lse":
            value, got[name] = value.T, got[name].T
        assert torch.equal(got[name][keep], value[keep]), name


@kit.each_version
@pytest.mark.parametrize("case", (*cases.COMBINATIONS, cases.VARLEN[5], cases.Case(seqlen_k=0)), ids=str)
def test_unset_outputs_and_workspaces_do_not_survive(case, version):  # case 37
    """torch fills what it allocates with NaN under deterministic algorithms."""
    inputs = cases.build(case)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(8).isnan().all()
        kit.check(inputs, version)
    finally:
        torch.use_deterministic_algorithms(False)


POISONED_ALLOCATOR = """
import torch, cases, kit
assert torch.empty(1000).min() > 1e37
for case in (*cases.COMBINATIONS, *cases.VARLEN):
    for version in kit.VERSIONS:
        torch.manual_seed(0)
        kit.check(cases.build(case), version)
print("clean")
"""


def test_unset_scratch_memory_does_not_survive():  # case 37
    """glibc fills all that malloc gives with a byte that makes huge floats, and all that is freed with another."""
    assert kit.python(POISONED_ALLOCATOR, GLIBC_TUNABLES="glibc.malloc.perturb=129").strip() == "clean"


MALLOC_CHECK = {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
WRITE_PAST_THE_END = """
import ctypes, torch
x = torch.empty(250)
ctypes.memset(x.data_ptr() + 1000, 7, 1)
del x
"""
ALL_KERNELS = """
import torch, cases, kit
from flash_cuda import _C
for case in (*cases.EDGES, *cases.COMBINATIONS, *cases.VARLEN, cases.Case(head_dim=40, dtype=cases.BF16)):
    for isa in _C.cpu_isas():
        for fast_memory in (1, 8192, 512 * 1024):
            _C.set_cpu_isa(isa)
            _C.set_cpu_fast_memory(fast_memory)
            inputs = cases.build(case)
            for version in kit.VERSIONS:
                kit.run_kernel(inputs, version, wanted=tuple(inputs.leaves), grad_out=inputs.leaves["q"])
print("clean")
"""


def test_nothing_is_written_past_the_end_of_an_output_or_a_workspace():
    """glibc puts a canary behind each block and looks at it when the block is freed."""
    try:
        kit.python(WRITE_PAST_THE_END, **MALLOC_CHECK)
    except AssertionError as aborted:
        assert "free()" in str(aborted)
    else:
        pytest.skip("this C library has no libc_malloc_debug that notices a write past the end of a block")
    assert kit.python(ALL_KERNELS, **MALLOC_CHECK).strip() == "clean"
