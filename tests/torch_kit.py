"""What the tests of flash_cuda inside PyTorch share: leaves, the arguments of the ops, and a step of training."""

import torch

import flash_cuda


def leaves(*shapes, dtype=torch.float32, grad=True):
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def qkv(batch=2, seqlen_q=9, seqlen_k=13, heads=4, heads_kv=2, head_dim=16, **kwargs):
    return leaves((batch, seqlen_q, heads, head_dim), *[(batch, seqlen_k, heads_kv, head_dim)] * 2, **kwargs)


def options(**changes):
    """The arguments of the ops after the tensors, in the order of the schema."""
    values = dict.fromkeys(flash_cuda.ops.OPTIONS)
    values |= {"causal": 0, "window_left": -1, "window_right": -1, "softcap": 0.0, "version": 2, "max_seqlen_q": 0,
               "max_seqlen_k": 0, "dropout_p": 0.0, "block_mask_q": 0, "block_mask_k": 0, "deterministic": False}
    assert not changes.keys() - values.keys()
    return tuple((values | changes).values())


def packed_options(**changes):
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 4, 4, 9], [0, 6, 8, 13]))
    return options(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=6, **changes)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)


def grads(loss, inputs):
    return torch.autograd.grad(loss, inputs)


def train(call, tensors, *args, **kwargs):
    out, lse = call(*tensors, *args, **kwargs)
    return [out, lse, *grads(out.square().sum() + lse.sin().sum(), [t for t in tensors if t.requires_grad])]


def same(a, b, tolerance=1e-5):
    for x, y in zip(a, b, strict=True):
        close(x, y, tolerance)
