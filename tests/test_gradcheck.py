"""Numerical derivatives of the kernels themselves, in float64, for every feature."""

import math

import pytest
import torch

import cases
import flash_cuda
import kit

SMALL = cases.Case(batch=2, heads=2, heads_kv=1, seqlen_q=5, seqlen_k=7, head_dim=3, dtype=torch.float64,
                   block_size=(2, 3))
FEATURES = {
    "plain": {}, "heads": {"heads_kv": 2}, "causal": {"causal": True}, "top_left": {"causal": "top_left"},
    "empty_rows": {"causal": True, "seqlen_q": 7, "seqlen_k": 4}, "window": {"window_size": (1, 2)},
    "scale": {"softmax_scale": 0.3}, "softcap": {"softcap": 1.5}, "alibi": {"alibi": "batch"},
    "bias": {"bias": "bhqk"}, "bias_broadcast": {"bias": "h1k"}, "bias_inf": {"bias": "11qk", "bias_kind": "inf"},
    "bool_bias": {"bias": "1hqk", "bias_kind": "bool"}, "sinks": {"sinks": True}, "blocks": {"block_mask": "random"},
    "dropout": {"dropout_p": 0.3}, "bhsd": {"layout": "bhsd"}, "packed": {"lengths": ((3, 4), (0, 2), (4, 3))},
    "all": {"causal": True, "window_size": (4, None), "softcap": 2.0, "alibi": "heads", "bias": "1hqk", "sinks": True,
            "block_mask": "random", "dropout_p": 0.2},
    "all_packed": {"lengths": ((3, 4), (0, 2), (4, 3)), "causal": True, "softcap": 2.0, "alibi": "batch",
                   "bias": "bhqk", "sinks": True, "dropout_p": 0.2},
}


@kit.each_version
@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(feature, version):
    torch.set_num_threads(1)  # thousands of tiny calls
    inputs = cases.build(cases.replace(SMALL, **FEATURES[feature]))
    names = list(inputs.leaves)

    def function(*tensors):
        torch.manual_seed(1)  # the same dropout in every evaluation
        leaves = dict(zip(names, tensors))
        q, k, v = (leaves.pop(n) for n in "qkv")
        attention = flash_cuda.attention_varlen if inputs.packed else flash_cuda.attention
        out, lse = attention(q, k, v, *inputs.packed, **leaves, **inputs.options, version=version, return_lse=True)
        assert lse.dtype == torch.float64
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(function, [t.detach().clone().requires_grad_() for t in inputs.leaves.values()],
                                    nondet_tol=1e-12)
