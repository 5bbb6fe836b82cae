"""Outputs and LSE of the shared table of cases; lengths around the tiles' edges."""

import itertools

import pytest
import torch

import cases
import flash_cuda
import kit
from flash_cuda import _C

HEAD_DIMS = (1, 8, 16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)


@kit.each_version
@pytest.mark.parametrize("case", cases.SMOKE + cases.EDGES + cases.LARGE, ids=str)
def test_forward(case, version):
    kit.check(cases.build(case), version, wanted=())


@kit.each_version
def test_lse_is_returned_only_on_request(version):
    tensors = kit.qkv()
    out, lse = flash_cuda.attention(**tensors, version=version, return_lse=True)
    assert torch.equal(flash_cuda.attention(**tensors, version=version), out)
    assert lse.shape == (2, 4, 33)


def test_the_cpu_runs_fa2_when_no_version_is_named():
    tensors = kit.qkv()
    out = flash_cuda.attention(**tensors)
    assert flash_cuda.last_call().version == "fa2"
    assert torch.equal(flash_cuda.attention(**tensors, version="fa2"), out)


def tile_edges(version, head_dim, dtype):
    """Case 26: 1, 7, tile - 1, tile, tile + 1, tile + half, for q and k; small tiles keep the shapes small."""
    _C.set_cpu_fast_memory(16 * 1024)
    plan = _C.cpu_plan("forward", kit.VERSIONS.index(version) + 1, dtype, 2, 2, 1, head_dim, 1024, 1024)
    return [sorted({1, 7, max(tile - 1, 1), tile, tile + 1, tile + tile // 2}) for tile in plan["tile"]]


@kit.each_version
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_lengths_around_the_tile(head_dim, version):
    dtype = kit.DTYPES[HEAD_DIMS.index(head_dim) % 3]
    for seqlen_q, seqlen_k in itertools.product(*tile_edges(version, head_dim, dtype)):
        inputs = kit.Inputs(kit.qkv(2, seqlen_q, seqlen_k, 2, 1, head_dim, dtype))
        inputs.options["causal"] = (seqlen_q + seqlen_k) % 2 == 0
        kit.check(inputs, version, wanted=())
