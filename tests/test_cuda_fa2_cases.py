"""fa2 on CUDA with inputs that broke other attention kernels; the numbers are those of the project's list of cases."""

import math
import os
import subprocess
import sys

import pytest
import torch

import cases
import flash_cuda
import kit
from cases import BF16, F16
from cuda_kit import CUDA, case, check, on_cuda, unset_memory_is_nan  # noqa: F401

pytestmark = pytest.mark.cuda


def dense(q, k, v, causal=False):
    """Standard attention in float32 on the GPU, for shapes too large for the reference on the CPU."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(s.shape[-1] - s.shape[-2] + 1)
        s = s.masked_fill(hidden, -math.inf)
    return (s.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def close(got, expected, dtype=BF16):
    """Within a few roundings of the largest value."""
    error, largest = (got.float() - expected.float()).abs().max().item(), expected.float().abs().max().item()
    assert error <= 4 * torch.finfo(dtype).eps * max(largest, 1e-3), (error, largest)


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "fp16"))
def test_large_scores_over_a_long_sequence(dtype):  # case 2
    inputs = cases.build(case(batch=1, seqlen_q=1024, seqlen_k=1024, heads=1, heads_kv=1, head_dim=128, dtype=dtype,
                              magnitude=3.0, causal=True))
    got = check(inputs)
    assert all(got["d" + n].isfinite().all() for n in "qkv")


def test_caches_with_nan_past_their_lengths():  # case 6
    k, v = (torch.full((2, 3, 2, 64), math.nan, device=CUDA, dtype=BF16) for _ in range(2))
    q = torch.randn(2, 2, 64, device=CUDA, dtype=BF16)
    for batch, length in ((0, 1), (1, 3)):
        k[batch, :length], v[batch, :length] = torch.randn(2, length, 2, 64)
        out = flash_cuda.attention(q[batch, None, None], k[batch, None, :length], v[batch, None, :length])
        close(out, dense(q[batch, None, None], k[batch, None, :length], v[batch, None, :length]))


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_more_queries_than_keys(head_dim):  # case 9
    q = torch.randn(1, 2048, 2, head_dim, device=CUDA, dtype=BF16, requires_grad=True)
    k, v = (torch.randn(1, 1024, 2, head_dim, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(2))
    out, lse = flash_cuda.attention(q, k, v, causal=True, return_lse=True)
    dout = torch.randn_like(out)
    dq, *_ = torch.autograd.grad(out, (q, k, v), dout)
    assert not out[:, :1024].any() and not dq[:, :1024].any() and (lse[..., :1024] == -math.inf).all()
    close(out, dense(q, k, v, causal=True))
    assert lse[..., 1024:].isfinite().all() and dq.isfinite().all()


@pytest.mark.parametrize("causal, keys", [(True, 777), ("top_left", 1)])
def test_one_query_and_many_keys(causal, keys):  # case 10
    q = torch.randn(2, 1, 4, 64, device=CUDA, dtype=BF16)
    k, v = (torch.randn(2, 777, 4, 64, device=CUDA, dtype=BF16) for _ in range(2))
    out = flash_cuda.attention(q, k, v, causal=causal)
    assert torch.equal(out, flash_cuda.attention(q, k[:, :keys], v[:, :keys]))


@pytest.mark.parametrize("window", [(None, 300), (0, 300), (400, 250)])
def test_windows_wider_than_the_keys(window):  # case 11
    check(cases.build(case(seqlen_q=300, seqlen_k=90, window_size=window)))


def test_negative_window_sides_are_an_error():  # case 12
    inputs = on_cuda(cases.build(case()))
    with pytest.raises(ValueError, match="window_size"):
        flash_cuda.attention(**inputs.leaves, window_size=(-1, -3))


def test_one_buffer_split_into_heads():  # case 16
    buffer = torch.randn(2048, 1, 18, 64, device=CUDA, dtype=F16).transpose(0, 1)
    q, k, v = buffer.split([16, 1, 1], dim=2)
    views, copies = (flash_cuda.attention(*x, causal=True) for x in ((q, k, v), [x.contiguous() for x in (q, k, v)]))
    assert torch.equal(views, copies)
    flash_cuda.attention(q, k, v)
    assert not flash_cuda.last_call().copies


@pytest.mark.parametrize("seqlen_k", (33, 97, 32 * 7 + 1))
def test_expanded_key_heads(seqlen_k):  # case 18
    q = torch.randn(2, 70, 8, 64, device=CUDA, dtype=BF16)
    k, v = (torch.randn(2, seqlen_k, 1, 64, device=CUDA, dtype=BF16).expand(-1, -1, 8, -1) for _ in range(2))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_cuda.attention(*leaves, deterministic=True)
    plain = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    expected = flash_cuda.attention(*plain, deterministic=True)
    dout = torch.randn_like(out)
    assert torch.equal(out, expected)
    grads = (torch.autograd.grad(o, x, dout) for o, x in ((out, leaves), (expected, plain)))
    assert all(map(torch.equal, *grads))


def test_strides_of_size_one_dimensions_are_ignored():  # case 20
    q = torch.randn(1, 2, 1, 1, device=CUDA, dtype=BF16).transpose(1, 2)
    k, v = (torch.randn(1, 1, 1, 1, device=CUDA, dtype=BF16) for _ in range(2))
    out = flash_cuda.attention(q, k, v)
    assert torch.equal(out, v.expand_as(out)) or torch.equal(out, v.expand(1, 1, 2, 1).transpose(1, 2))


def test_heads_and_length_swapped():  # case 21: works, as so many heads of length 3
    q, k, v = (torch.randn(1, 3, 71280, 128, device=CUDA, dtype=BF16) for _ in range(3))
    out = flash_cuda.attention(q, k, v)
    some = slice(70000, 70100)
    close(out[:, :, some], dense(q[:, :, some], k[:, :, some], v[:, :, some]))


@pytest.mark.slow
def test_tensors_of_more_than_2_31_elements():  # case 22
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    q = torch.randn(400, 10496, 4, 128, device=CUDA, dtype=BF16, requires_grad=True)
    k, v = (torch.randn(400, 128, 4, 128, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(2))
    out = flash_cuda.attention(q, k, v)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for batch in (0, 399):
        leaves = [x[batch : batch + 1].detach().float().requires_grad_() for x in (q, k, v)]
        expected = dense(*leaves)
        close(out[batch], expected[0])
        for got, wanted in zip(grads, torch.autograd.grad(expected, leaves, dout[batch : batch + 1].float())):
            close(got[batch], wanted[0])


@pytest.mark.parametrize("batch, heads", [(65536, 1), (1, 65536)])
def test_more_batches_or_heads_than_a_grid_axis_has(batch, heads):  # case 22
    leaves = [torch.randn(batch, 5, heads, 8, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(3)]
    out = flash_cuda.attention(*leaves)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    expected = dense(*leaves)
    close(out, expected)
    for got, wanted in zip(grads, torch.autograd.grad(expected, leaves, dout.float())):
        close(got, wanted)


def test_packed_as_reported():  # case 23
    check(cases.build(case(lengths=((1, 3), (0, 0), (1, 5)), heads=9, heads_kv=3)))


@pytest.mark.parametrize("causal", (False, True))
def test_empty_queries_and_empty_keys(causal):  # case 24
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([0, 0, 0, 1023], [0, 0, 1, 2045]))
    q = torch.randn(1023, 32, 128, device=CUDA, dtype=BF16, requires_grad=True)
    k, v = (torch.randn(2045, 32, 128, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(2))
    out = flash_cuda.attention_varlen(q, k, v, cu_q, cu_k, 1023, 2044, causal=causal)
    _, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert not dk[0].any() and not dv[0].any() and dk[1:].any(-1).all()
    close(out, dense(q[None], k[None, 1:], v[None, 1:], causal)[0])


@pytest.mark.parametrize("shape", [(0, 0, 2, 0), (2, 0, 2, 64), (0, 5, 2, 64), (2, 5, 0, 64)])
def test_empty_tensors(shape):  # case 25
    leaves = [torch.zeros(shape, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(3)]
    out, lse = flash_cuda.attention(*leaves, return_lse=True)
    assert out.shape == shape and lse.shape == (shape[0], shape[2], shape[1])
    assert all(g.shape == shape for g in torch.autograd.grad(out.sum() + lse.sum(), leaves))


def test_large_channels_with_grouped_heads():  # case 32
    inputs = cases.build(case(seqlen_q=200, seqlen_k=200, heads=16, heads_kv=2, head_dim=256, causal=True))
    for name in "qk":
        inputs.leaves[name][..., ::61] *= 8
    got = check(inputs, grad_lse=False, grad_out=(grad := torch.randn(2, 200, 16, 256).to(BF16)))
    wide = {n: t.float().requires_grad_() for n, t in inputs.leaves.items()}
    out = flash_cuda.attention(**wide, causal=True)
    (dq,) = torch.autograd.grad(out, wide["q"], grad.float())
    assert (got["dq"].float() - dq).norm() <= 0.01 * dq.norm()


@pytest.mark.sanitize
def test_only_queries_need_a_gradient():  # case 34, with the caching allocator off: see below
    check(cases.build(case(causal=True, heads=2, heads_kv=1)), wanted=("q",))


def test_only_queries_need_a_gradient_without_a_caching_allocator():  # case 34
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__ +
                          "::test_only_queries_need_a_gradient"], capture_output=True, text=True, timeout=120,
                         env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})  # fmt: skip
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout[-2000:] + run.stderr[-2000:]
