"""The analytical traffic model: equal, to the byte, to what the CPU schedules count while they run."""

import time

import numpy as np
import pytest
import torch

import flash_cuda
import kit
from cases import BF16, EDGES, F16, F64, FEATURES, LARGE, SMOKE, VARLEN, Case, build
from flash_cuda import BlockMask, _C, traffic
from flash_cuda.explain import explain

SMALL, DEFAULT = 16 * 1024, _C.cpu_fast_memory()


def run(inputs, version, wanted, dlse=False):
    """LastCall of forward and of backward."""
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in inputs.leaves.items()}
    q, k, v = (leaves.pop(n) for n in "qkv")
    function = flash_cuda.attention_varlen if inputs.packed else flash_cuda.attention
    out, lse = function(q, k, v, *inputs.packed, **leaves, **inputs.options, version=version, return_lse=True)
    forward = flash_cuda.last_call()
    (out.sum() + lse.nan_to_num(neginf=0).sum() if dlse else out.sum()).backward()
    return forward, flash_cuda.last_call()


def plan(inputs, version, wanted):
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in inputs.leaves.items()}
    q, k, v = (leaves.pop(n) for n in "qkv")
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packed = dict(zip(names, inputs.packed))
    return explain(q, k, v, **packed, **leaves, **inputs.options, version=version)


def agree(inputs, version, wanted=None):
    wanted = tuple(inputs.leaves) if wanted is None else wanted
    predicted = plan(inputs, version, wanted).versions[version]
    for ran, said in zip(run(inputs, version, wanted), (predicted.forward, predicted.backward)):
        for name in ("kernel", "tile", "grid", "fast_memory_bytes", "bytes_loaded", "bytes_stored"):
            assert getattr(said, name) == getattr(ran, name), f"{ran.pass_}: {name}"


@kit.each_version
@pytest.mark.parametrize("fast_memory", (SMALL, DEFAULT), ids=("small", "default"))
@pytest.mark.parametrize("case", SMOKE + EDGES + FEATURES + VARLEN + LARGE, ids=str)
def test_the_model_is_what_the_kernels_count(case, fast_memory, version):
    _C.set_cpu_fast_memory(fast_memory)
    agree(build(case), version)


@kit.each_version
@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v", "sinks"), ("bias",), ("sinks",), ("q", "bias"), ("k", "v")],
                         ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16, F64], ids=str)
def test_only_the_wanted_gradients_are_counted(wanted, dtype, version):
    case = Case(bias="bhqk", sinks=True, causal=True, seqlen_q=150, seqlen_k=130, dtype=dtype)
    _C.set_cpu_fast_memory(SMALL)
    agree(build(case), version, wanted)


@kit.each_version
def test_a_gradient_through_lse_is_counted(version):
    inputs = build(Case(sinks=True, seqlen_q=70, causal=True))
    _, ran = run(inputs, version, tuple(inputs.leaves), dlse=True)
    want = traffic.Gradients(dsinks=True, dlse=True)
    said = traffic.backward(plan(inputs, version, ()).workload, version, ran.tile, 1, want)
    without = traffic.backward(plan(inputs, version, ()).workload, version, ran.tile, 1, traffic.Gradients(dsinks=True))
    assert (said.loaded, said.stored) == (ran.bytes_loaded, ran.bytes_stored)
    assert said.loaded > without.loaded


@kit.each_version
@pytest.mark.parametrize("size", [(2, 4, 33, 1), (1, 1, 1, 49), (1, 1, 1, 1), (2, 1, 33, 49)], ids=str)
def test_an_expanded_bias_is_read_where_it_has_memory(size, version):
    inputs = build(Case())
    inputs.options["bias"] = torch.randn(size).expand(2, 4, 33, 49)
    agree(inputs, version, ("q", "k", "v"))


def test_key_ranges_with_sums_of_their_own_are_counted():
    torch.set_num_threads(4)
    inputs = build(Case(batch=1, heads=1, heads_kv=1, seqlen_q=300, seqlen_k=600, causal=True))
    shape = (1, 1, 1, 32, 300, 600)
    assert _C.cpu_plan("backward", 2, torch.float32, *shape)["splits"] > 1, "the case must split, or it tests nothing"
    agree(inputs, "fa2")


@kit.each_version
@pytest.mark.parametrize("causal", (False, True))
def test_traffic_falls_as_fast_memory_grows(version, causal):
    """FlashAttention, theorem 2: Theta(N^2 d^2 / M) bytes, in the model and in what the kernel counts."""
    inputs = build(Case(batch=1, heads=1, heads_kv=1, seqlen_q=1024, seqlen_k=1024, head_dim=64, causal=causal))
    moved = []
    for fast_memory in (32 << 10, 128 << 10, 512 << 10):
        _C.set_cpu_fast_memory(fast_memory)
        ran, _ = run(inputs, version, ("q",))
        said = plan(inputs, version, ("q",)).versions[version].forward
        assert said.fast_memory_bytes <= fast_memory
        assert said.bytes_moved == ran.bytes_loaded + ran.bytes_stored
        moved.append(said.bytes_moved)
    assert moved[0] > moved[1] > moved[2]
    assert moved[0] > 3 * moved[2], "sixteen times the fast memory saves more than two thirds of the traffic"


def test_hidden_blocks_cost_nothing():
    inputs = build(Case(seqlen_q=512, seqlen_k=512))
    full = plan(inputs, "fa2", ("q", "k", "v"))
    blocks = torch.eye(8, dtype=torch.bool)
    inputs.options["block_mask"] = BlockMask(blocks, (64, 64), 512, 512)
    sparse = plan(inputs, "fa2", ("q", "k", "v"))
    assert sparse.versions["fa2"].forward.flops * 8 == full.versions["fa2"].forward.flops
    assert sparse.versions["fa2"].forward.bytes_moved < full.versions["fa2"].forward.bytes_moved


@pytest.mark.parametrize("case", [c for c in FEATURES + VARLEN + EDGES if c.causal or c.window_size or c.block_mask],
                         ids=str)
def test_visible_scores_are_counted_one_by_one(case):
    work = plan(build(case), "fa2", ()).workload
    total = 0
    for b, (seqlen_q, seqlen_k) in enumerate(work.seqlens):
        i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
        diag = 0 if case.causal == "top_left" else seqlen_k - seqlen_q
        left, right = case.window_size or (None, None)
        visible = np.ones((seqlen_q, seqlen_k), dtype=bool)
        visible &= (j <= i + diag) | (not case.causal)
        visible &= True if left is None else j >= i + diag - left
        visible &= True if right is None else j <= i + diag + right
        for h in range(work.heads):
            if work.block_mask is None:
                total += visible.sum()
            else:
                plane = work.block_mask[b % work.block_mask.shape[0], h % work.block_mask.shape[1]]
                total += (visible & plane[i // work.block_size[0], j // work.block_size[1]]).sum()
    assert traffic.visible_scores(work) == total
    assert traffic.flops(work) == total * 4 * work.head_dim
    assert traffic.flops(work, backward=True) * 2 == total * 20 * work.head_dim


def test_standard_attention_by_hand():
    work = traffic.Workload(((2, 3),), heads=1, heads_kv=1, head_dim=5, element_size=4, wide=True)
    q, k, scores = 2 * 5, 3 * 5, 2 * 3
    assert traffic.standard_forward(work) == traffic.Traffic(4 * (q + k + 2 * scores + k), 4 * (2 * scores + q))
    loaded = (scores + q) + (q + k) + 2 * scores + (scores + k) + (scores + q)
    assert traffic.standard_backward(work) == traffic.Traffic(4 * loaded, 4 * (k + scores + scores + q + k))


def test_a_million_tokens_take_no_time():
    n = 1 << 20
    blocks = np.tri(n // 1024, dtype=bool)[None, None]
    work = traffic.Workload(((n, n),), 8, 8, 64, 2, False, traffic.CAUSAL_BOTTOM_RIGHT, (5000, -1), block_mask=blocks,
                            block_size=(1024, 1024))
    started = time.perf_counter()
    for version in kit.VERSIONS:
        traffic.forward(work, version, (64, 256))
        traffic.backward(work, version, (64, 256))
    traffic.visible_scores(work)
    assert time.perf_counter() - started < 10  # about 1.5 s on one core; element by element it would take hours
