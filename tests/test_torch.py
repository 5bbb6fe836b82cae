"""flash_cuda inside PyTorch: vmap, autocast, double backward, gradients through every door, checkpointing."""

import functools

import pytest
import torch
from kit import each_version
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_kit import close, grads, leaves, options, qkv, same

import flash_cuda
from flash_cuda import reference

ops = torch.ops.flash_cuda


# ---- functorch


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 2), (None, 3, None)], ids=str)
def test_vmap_over_tensors_is_one_call(in_dims):
    q, k, v = (torch.randn(t.shape + (3,)) if d is not None else t.detach() for t, d in zip(qkv(), in_dims))
    q, k, v = (t if d is None else t.movedim(-1, d) for t, d in zip((q, k, v), in_dims))
    call = functools.partial(flash_cuda.attention, causal=True, return_lse=True)
    out, lse = torch.vmap(call, in_dims)(q, k, v)
    assert flash_cuda.last_call().grid % 3 == 0
    for i in range(3):
        one = call(*(t if d is None else t.select(d, i) for t, d in zip((q, k, v), in_dims)))
        same((out[i], lse[i]), one, 1e-6)


def test_vmap_over_options_calls_one_by_one():
    q, k, v = qkv(grad=False)
    bias, slopes = torch.randn(3, 2, 1, 9, 13), torch.rand(2, 4)

    def call(q, bias):
        return flash_cuda.attention(q, k, v, bias=bias, alibi_slopes=slopes)

    queries = torch.randn(3, *q.shape)
    same(torch.vmap(call)(queries, bias), [call(*pair) for pair in zip(queries, bias)], 1e-6)


def test_vmap_over_an_empty_dimension():
    q, k, v = qkv(grad=False)
    assert torch.vmap(lambda q: flash_cuda.attention(q, k, v))(torch.randn(0, *q.shape)).shape == (0, *q.shape)


def test_vmap_with_one_dropout_mask_for_all():
    q, k, v = qkv(grad=False)
    queries = q.expand(3, *q.shape)
    out = torch.vmap(lambda q: flash_cuda.attention(q, k, v, dropout_p=0.5), randomness="same")(queries)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
    out = torch.vmap(lambda q: flash_cuda.attention(q, k, v, dropout_p=0.5), randomness="different")(queries)
    assert not torch.equal(out[0], out[1])


def test_backward_outside_of_vmap():
    q, k, v = (torch.randn(3, *t.shape, requires_grad=True) for t in qkv())
    bias, sinks = leaves((4, 9, 13), (4,))
    inputs = (q, k, v, bias, sinks)

    def call(q, k, v):
        return flash_cuda.attention(q, k, v, bias=bias, sinks=sinks)

    weight = torch.randn(q.shape)
    out = torch.vmap(call)(q, k, v)
    expected = torch.stack([call(*one) for one in zip(q, k, v)])
    same(grads((out * weight).sum(), inputs), grads((expected * weight).sum(), inputs))


def test_backward_inside_of_vmap():
    q, k, v = qkv()
    out = flash_cuda.attention(q, k, v)
    batch = torch.randn(3, *out.shape)
    got = torch.autograd.grad(out, (q, k, v), batch, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for dout in batch]
    same(got, [torch.stack(g) for g in zip(*one_by_one)])


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.func.jacrev(f)], ids=["grad", "jacrev"])
def test_func_grad_says_what_to_use(transform):
    q, k, v = qkv(grad=False)
    with pytest.raises(NotImplementedError, match=r"flash_cuda.attention: torch.func.grad.*reference.attention"):
        transform(lambda q: flash_cuda.attention(q, k, v).sum())(q)


def test_forward_mode_says_what_to_use():
    q, k, v = qkv(grad=False)
    with pytest.raises(NotImplementedError, match=r"flash_cuda.attention: forward-mode .*reference.attention"):
        torch.func.jvp(lambda q: flash_cuda.attention(q, k, v), (q,), (q,))


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_to_the_dtype_of_the_user(dtype):
    q, k, v = qkv()
    bias, sinks = leaves((9, 13), (4,))
    with torch.autocast("cpu", dtype):
        out, lse = flash_cuda.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
        mixed = flash_cuda.attention(q.to(dtype), k, v)
    assert out.dtype == mixed.dtype == dtype and lse.dtype == torch.float32
    expected = flash_cuda.attention(*(t.to(dtype) for t in (q, k, v)), bias=bias, sinks=sinks)
    assert torch.equal(out, expected)
    inputs = (q, k, v, bias, sinks)
    got = grads(out.float().square().sum(), inputs)
    assert [g.dtype for g in got] == [torch.float32] * 5
    same(got, grads(expected.float().square().sum(), inputs))


def test_autocast_leaves_float64_alone():
    q, k, v = qkv(dtype=torch.float64, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_cuda.attention(q, k, v).dtype == torch.float64


# ---- the gradient of a gradient


def test_double_backward_is_an_error():
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(flash_cuda.attention(q, k, v).square().sum(), q, create_graph=True)
    close(dq.detach(), torch.autograd.grad(reference.attention(q, k, v).square().sum(), q)[0])
    with pytest.raises(NotImplementedError, match=r"double backward .* flash_cuda.reference.attention"):
        dq.sum().backward()


def test_double_backward_mixed_with_another_loss_is_an_error():
    q, k, v = qkv()
    out = flash_cuda.attention(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        (out.sum() + dq.square().sum()).backward()


def test_double_backward_through_the_gradient_alone_is_an_error():
    # dout depends on a parameter although q, k and v do not require a gradient any more.
    q, k, v = qkv(grad=False)
    out, lse = flash_cuda.attention(q, k, v, return_lse=True)
    dout = torch.randn_like(out).requires_grad_()
    dq = ops.bwd(dout, None, q, k, v, out, lse, *options(), [True, True, True, False, False])[0]
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


# ---- gradients through every door


def test_only_lse_is_used():
    q, k, v = qkv()
    _, lse = flash_cuda.attention(q, k, v, return_lse=True)
    _, expected = reference.attention(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.sin().sum(), (q, k))
    same(got, torch.autograd.grad(expected.sin().sum(), (q, k)))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
@each_version
def test_each_input_alone(name, version):
    # Case 27.
    inputs = dict(zip(("q", "k", "v"), qkv(grad=False)))
    inputs |= dict(zip(("bias", "sinks"), leaves((9, 13), (4,), grad=False)))
    inputs[name].requires_grad_()
    loss = flash_cuda.attention(**inputs, version=version).square().sum()
    expected = reference.attention(**inputs).square().sum()
    same(grads(loss, [inputs[name]]), grads(expected, [inputs[name]]))


def test_gradients_have_the_dtype_of_their_input():
    q, k, v = qkv(dtype=torch.bfloat16)
    bias, sinks = leaves((9, 13), (4,), dtype=torch.float16)
    got = grads(flash_cuda.attention(q, k, v, bias=bias, sinks=sinks).float().sum(), (q, k, v, bias, sinks))
    assert [g.dtype for g in got] == [torch.bfloat16] * 3 + [torch.float16] * 2


def test_saved_tensors_notice_a_change_in_place():
    q, k, v = qkv()
    bias = torch.zeros(9, 13)
    out = flash_cuda.attention(q, k, v, bias=bias)
    bias += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_inference_mode_and_no_grad():
    q, k, v = qkv()
    expected = flash_cuda.attention(q, k, v).detach()
    with torch.inference_mode():
        assert torch.equal(flash_cuda.attention(q, k, v), expected)
    with torch.no_grad():
        out = flash_cuda.attention(q, k, v)
    assert torch.equal(out, expected) and not out.requires_grad


# ---- checkpointing


def count_calls(function, *args):
    """How often the forward op ran while function(*args) did."""

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += func is ops.fwd.default
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        result = function(*args)
    return result, counter.calls


def test_checkpoint_reproduces_dropout():
    # Case 40.
    q, k, v = qkv(1, 32, 32, 2, 2)
    call = functools.partial(flash_cuda.attention, dropout_p=0.5)
    torch.manual_seed(7)
    expected = call(q, k, v)
    torch.manual_seed(7)
    out = checkpoint(call, q, k, v, use_reentrant=False)
    assert torch.equal(out, expected)
    same(grads(out.square().sum(), (q, k, v)), grads(expected.square().sum(), (q, k, v)))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_selective_checkpoint_saves_the_op(dropout_p):
    # Case 41.
    q, k, v = qkv()

    def block(q, k, v):
        return flash_cuda.attention(q.sin(), k, v, dropout_p=dropout_p).cos()

    def save(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is ops.fwd.default else CheckpointPolicy.PREFER_RECOMPUTE

    def loss_and_grads(**kwargs):
        torch.manual_seed(7)
        out = checkpoint(block, q, k, v, use_reentrant=False, **kwargs)
        return grads(out.square().sum(), (q, k, v))

    torch.manual_seed(7)
    expected = grads(block(q, k, v).square().sum(), (q, k, v))
    recomputed, calls = count_calls(loss_and_grads)
    assert calls == 2
    same(recomputed, expected)
    context = functools.partial(create_selective_checkpoint_contexts, save)
    saved, calls = count_calls(functools.partial(loss_and_grads, context_fn=context))
    assert calls == 1
    same(saved, expected)
