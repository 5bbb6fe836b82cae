"""torch.compile and torch.export: one graph for every length, the values of eager mode, and dropout that stays true."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_kit import close, grads, leaves, qkv, same, train

import flash_cuda

ops = torch.ops.flash_cuda


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


LENGTHS = ((9, 13), (17, 21), (33, 40), (64, 5))
no_recompile = functools.partial(torch.compiler.set_stance, "fail_on_recompile")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, None])
def test_compile_serves_all_lengths_with_one_graph(backend, dynamic):
    def call(q, k, v):
        return flash_cuda.attention(q, k, v, causal=True, window_size=(7, None), return_lse=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)

    def check(seqlen_q, seqlen_k):
        tensors = qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        same(train(compiled, tensors), train(call, tensors))

    # Without dynamic=True, torch takes the first lengths for constants and the second for the proof that they are not.
    for lengths in LENGTHS[: 1 if dynamic else 2]:
        check(*lengths)
    with no_recompile():
        for lengths in LENGTHS[2:]:
            check(*lengths)


def test_compile_serves_all_packed_lengths_with_one_graph():
    def call(q, k, v, cu_seqlens, longest):
        return flash_cuda.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")

    def check(*lengths):
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        tensors = leaves((sum(lengths), 4, 16), *[(sum(lengths), 2, 16)] * 2)
        same(train(compiled, tensors, cu, max(lengths)), train(call, tensors, cu, max(lengths)))

    check(3, 0, 5)
    with no_recompile():
        check(4, 4, 9)
        check(11, 2, 7)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_compile_with_every_argument(layout):
    q, k, v = qkv(seqlen_q=20, seqlen_k=24)
    if layout == "bhsd":
        q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))
    bias, sinks = leaves((4, 20, 24), (4,))
    mask = flash_cuda.BlockMask(torch.rand(4, 3, 3) > 0.2, (8, 8), 20, 24)

    def call(q, k, v, bias, sinks):
        return flash_cuda.attention(
            q, k, v, bias=bias, sinks=sinks, causal="top_left", softmax_scale=0.2, window_size=(9, 1), softcap=4.0,
            alibi_slopes=torch.full((2, 4), 0.1), block_mask=mask, version="fa1", deterministic=True, return_lse=True,
            layout=layout,
        )  # fmt: skip

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    same(train(compiled, (q, k, v, bias, sinks)), train(call, (q, k, v, bias, sinks)))


@pytest.mark.parametrize("seqlen", [196, 257])
def test_compile_of_transposed_heads(seqlen):
    # Case 39: (batch, heads, seqlen, head_dim) tensors transposed before the call; fake and real strides must agree.
    tensors = leaves(*[(2, 3, seqlen, 32)] * 3)

    def call(q, k, v):
        return flash_cuda.attention(*(t.transpose(1, 2) for t in (q, k, v)), return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    same(train(compiled, tensors), train(call, tensors))
    out = call(*tensors)[0]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(*(mode.from_tensor(t) for t in tensors))[0]
    assert fake.stride() == out.stride() == tensors[0].transpose(1, 2).stride()


def test_two_calls_with_dropout_in_one_graph_draw_two_masks():
    # Case 40.
    q, k, v = qkv(1, 32, 32, 2, 2)

    def call(q, k, v):
        first = flash_cuda.attention(q, k, v, dropout_p=0.5)
        return first, flash_cuda.attention(q, k, v, dropout_p=0.5)

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        torch.manual_seed(5)
        first, second = compiled(q, k, v)
        assert not torch.equal(first, second)
        torch.manual_seed(5)
        assert torch.equal(compiled(q, k, v)[0], first)
        # Backward uses forward's mask: out is linear in v, so <dout, out> = <dv, v> only with one and the same mask.
        (dv,) = grads((first * q.detach()).sum(), [v])
        close((dv * v).sum(), (first * q).sum(), 1e-4)
    torch.manual_seed(5)
    eager = call(q, k, v)
    torch._dynamo.reset()
    torch.manual_seed(5)
    same(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), eager)


def test_dropout_of_zero_needs_no_seed():
    q, k, v = qkv(grad=False)
    state = torch.get_rng_state()
    flash_cuda.attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)
    assert flash_cuda.last_call().dropout_seed is None


def test_compile_of_dropout_mask():
    compiled = torch.compile(flash_cuda.dropout_mask, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    mask = compiled(2, 3, 5, 7, 0.5)
    torch.manual_seed(3)
    assert torch.equal(mask, flash_cuda.dropout_mask(2, 3, 5, 7, 0.5))


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_length(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_cuda.attention(q, k, v, causal=True, return_lse=True)

    length = torch.export.Dim("length", min=2, max=4096)
    example = qkv(seqlen_q=12, seqlen_k=12, grad=False)
    shapes = {name: {1: length} for name in "qkv"}
    program = torch.export.export(Module(), tuple(example), dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert ops.fwd.default in targets
    for module in (program.module(), program.run_decompositions().module()):
        other = qkv(seqlen_q=40, seqlen_k=40, grad=False)
        same(module(*other), Module()(*other))


def test_meta_tensors_have_the_shapes():
    q, k, v = (t.to("meta") for t in qkv(dtype=torch.bfloat16))
    out, lse = flash_cuda.attention(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, torch.bfloat16, (2, 4, 9), torch.float32)


def test_compiled_autograd_of_an_eager_forward():
    q, k, v = qkv()
    sinks = leaves((4,))[0]

    def loss():
        out, lse = flash_cuda.attention(q, k, v, sinks=sinks, window_size=(3, 2), return_lse=True)
        return out.square().sum() + lse.sum()

    expected = grads(loss(), (q, k, v, sinks))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss().backward()
    same([t.grad for t in (q, k, v, sinks)], expected)


def test_compile_under_autocast():
    q, k, v = qkv()

    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return flash_cuda.attention(q, k, v, return_lse=True)

    same(train(torch.compile(call, fullgraph=True, backend="aot_eager"), (q, k, v)), train(call, (q, k, v)))


def test_checkpoint_in_a_graph_reproduces_dropout():
    # Case 40: aot_eager draws the numbers of eager mode.
    q, k, v = qkv(1, 32, 32, 2, 2)

    def call(q, k, v):
        return flash_cuda.attention(q, k, v, dropout_p=0.5)

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def checkpointed(q, k, v):
        return checkpoint(call, q, k, v, use_reentrant=False)

    torch.manual_seed(7)
    expected = call(q, k, v)
    torch.manual_seed(7)
    out = checkpointed(q, k, v)
    close(out, expected)
    same(grads(out.square().sum(), (q, k, v)), grads(expected.square().sum(), (q, k, v)))
