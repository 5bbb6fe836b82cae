"""Packed input: sequences of their own lengths, empty ones among them."""

import pytest
import torch

import cases
import flash_cuda
import kit


@kit.each_version
@pytest.mark.parametrize("case", cases.VARLEN, ids=str)
def test_varlen(case, version):
    kit.check(cases.build(case), version)


@kit.each_version
@pytest.mark.parametrize("case", cases.VARLEN, ids=str)
def test_each_sequence_is_attention_of_its_own(case, version):
    """Without dropout, whose draws count the sequences."""
    inputs = cases.build(cases.replace(case, dropout_p=0.0, alibi=case.alibi and "heads", bias=None, block_mask=None))
    got = kit.run_kernel(inputs, version)
    cu_q, cu_k, *_ = (x.tolist() if torch.is_tensor(x) else x for x in inputs.packed)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        rows = {"q": slice(q0, q1), "k": slice(k0, k1), "v": slice(k0, k1)}
        leaves = {n: t[rows[n]][None] if n in rows else t for n, t in inputs.leaves.items()}
        alone = kit.run_kernel(kit.Inputs(leaves, inputs.options), version)
        torch.testing.assert_close(got["out"][q0:q1], alone["out"][0])
        torch.testing.assert_close(got["lse"][:, q0:q1], alone["lse"][0])


@kit.each_version
@pytest.mark.parametrize("causal", (False, True, "top_left"), ids=str)
@kit.each_dtype
def test_more_queries_than_max_seqlen_times_batch_would_hold(dtype, causal, version):  # case 23
    leaves = {n: t[0] for n, t in kit.qkv(1, 2, 8, 9, 3, 64, dtype).items()}
    cu_q, cu_k = torch.tensor([0, 1, 1, 2], dtype=torch.int32), torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    kit.check(kit.Inputs(leaves, {"causal": causal}, (cu_q, cu_k, 1, 5)), version)


@kit.each_version
@pytest.mark.parametrize("causal", (False, True), ids=str)
def test_empty_queries_and_empty_keys(causal, version):  # case 24, with fewer heads
    leaves = {n: t[0] for n, t in kit.qkv(1, 1023, 2045, 1, 1, 128).items()}
    cu_q, cu_k = torch.tensor([0, 0, 0, 1023], dtype=torch.int32), torch.tensor([0, 0, 1, 2045], dtype=torch.int32)
    got = kit.check(kit.Inputs(leaves, {"causal": causal}, (cu_q, cu_k, 1023, 2044)), version)
    assert (got["dk"][0] == 0).all() and (got["dv"][0] == 0).all()  # the key of the sequence without a query


@kit.each_version
def test_max_seqlen_may_be_larger_than_needed(version):
    inputs = cases.build(cases.VARLEN[0])
    exact = kit.run_kernel(inputs, version)
    inputs.packed = (*inputs.packed[:2], 1000, 3000)
    torch.testing.assert_close(kit.run_kernel(inputs, version), exact)


@kit.each_version
def test_no_sequence_at_all(version):
    cu = torch.zeros(1, dtype=torch.int32)
    q, k, v = torch.zeros(0, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8)
    out, lse = flash_cuda.attention_varlen(q, k, v, cu, cu, 0, 0, version=version, return_lse=True)
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)
