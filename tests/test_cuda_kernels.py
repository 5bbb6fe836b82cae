"""The two CUDA kernels that stand beside attention: the dropout mask, and what comes before a backward."""

import os

import pytest
import torch

import flash_cuda  # noqa: F401 - registers the ops

pytestmark = [pytest.mark.cuda, pytest.mark.sanitize]
ops = torch.ops.flash_cuda
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def each_dtype(test):
    return pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))(test)


# ---- dropout mask


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.99999])
@pytest.mark.parametrize(
    "batch, heads, seqlen_q, seqlen_k",
    [(2, 3, 1, 1), (2, 3, 17, 33), (1, 2, 16, 16), (2, 1, 15, 160), (1, 1, 3, 1000), (2, 5, 129, 127), (1, 1, 257, 48)],
)
def test_dropout_mask_is_the_cpu_mask(p, batch, heads, seqlen_q, seqlen_k):
    seed = torch.tensor([-(2**62) - 12345, 2**62 + 987654321])
    expected = ops.dropout_mask(seed, p, batch, heads, seqlen_q, seqlen_k)
    assert torch.equal(ops.dropout_mask(seed.cuda(), p, batch, heads, seqlen_q, seqlen_k).cpu(), expected)


def test_dropout_mask_with_more_heads_than_a_grid_axis_has_room_for():
    seed = torch.tensor([1, 2])
    expected = ops.dropout_mask(seed, 0.3, 70_000, 1, 2, 3)
    assert torch.equal(ops.dropout_mask(seed.cuda(), 0.3, 70_000, 1, 2, 3).cpu(), expected)
    assert torch.equal(ops.dropout_mask(seed.cuda(), 0.3, 1, 70_000, 2, 3).cpu(), expected.view(1, 70_000, 2, 3))


@pytest.mark.parametrize("size", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_dropout_mask_of_nothing(size):
    assert ops.dropout_mask(torch.tensor([1, 2], device="cuda"), 0.5, *size).shape == size


# ---- preprocess: delta = rowsum(dout * out) - dlse


def expected_delta(dout, out, dlse=None):
    """(delta in float64, how far a sum in float32 may be from it)."""
    products = (dout.double() * out.double()).movedim(-2, -3)
    delta = products.sum(-1) - (0 if dlse is None else dlse.double())
    # A thread adds up to head_dim / 32 products or the 8 of one load, and 5 shuffles join a warp's sums.
    roundings = 16 + out.shape[-1] / 32
    return delta, roundings * 2**-24 * products.abs().sum(-1) + 2**-23 * delta.abs() + 1e-30


def check(dout, out, dlse=None):
    delta = ops.bwd_preprocess(dout, out, dlse)
    expected, bound = expected_delta(dout, out, dlse)
    assert delta.shape == expected.shape and delta.dtype == torch.float32
    error = (delta.double() - expected).abs()
    assert bool((error <= bound).all()), f"worst error {error.max().item():.3g}, {(error / bound).max().item():.3g} x"


def random(*shape, dtype):
    return (torch.randn(*shape, device="cuda") * 3).to(dtype)


@each_dtype
@pytest.mark.parametrize("head_dim", [1, 7, 8, 16, 36, 40, 64, 65, 96, 128, 129, 192, 256, 264, 520])
def test_preprocess_head_dims(head_dim, dtype):
    out, dout = (random(2, 131, 3, head_dim, dtype=dtype) for _ in range(2))
    check(dout, out)
    check(dout, out, torch.randn(2, 3, 131, device="cuda"))


@each_dtype
@pytest.mark.parametrize("seqlen", [1, 7, 127, 128, 129, 300])
def test_preprocess_lengths(seqlen, dtype):
    out, dout = (random(2, seqlen, 3, 64, dtype=dtype) for _ in range(2))
    check(dout, out, torch.randn(2, 3, seqlen, device="cuda"))


def views(dtype):
    """Tensors of shape (2, 45, 3, 40) in every arrangement; what a kernel must not read is NaN."""
    nan = float("nan")
    values = random(2, 45, 3, 40, dtype=dtype)

    def inside(buffer, view):
        view.copy_(values)
        return view

    def filled(*shape):
        return torch.full(shape, nan, device="cuda", dtype=dtype)

    bhsd = filled(2, 3, 47, 40)
    yield "transposed", inside(bhsd, bhsd[:, :, 1:-1].transpose(1, 2))
    fused = filled(2, 47, 9, 40)
    yield "slice of fused heads", inside(fused, fused[:, 1:-1, 3:6])
    wide = filled(2, 45, 3, 64)
    yield "part of wider rows", inside(wide, wide[..., 8:48])
    yield "unaligned", inside(wide.fill_(nan), wide[..., 3:43])
    odd = filled(2, 45, 3, 41)
    yield "odd row stride", inside(odd, odd[..., :40])
    yield "expanded heads", values[:, :, :1].expand(-1, -1, 3, -1)
    yield "expanded batch and rows", values[:1, :1].expand(2, 45, -1, -1)


@each_dtype
def test_preprocess_strides(dtype):
    plain = random(2, 45, 3, 40, dtype=dtype)
    for name, view in views(dtype):
        dlse = torch.randn(3, 2, 45, device="cuda").transpose(0, 1)
        for dout, out in ((view, plain), (plain, view), (view, view)):
            try:
                check(dout, out, dlse)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@each_dtype
def test_preprocess_packed(dtype):
    out, dout = (random(77, 3, 64, dtype=dtype) for _ in range(2))
    check(dout, out, torch.randn(3, 77, device="cuda"))


def test_preprocess_with_more_heads_than_a_grid_axis_has_room_for():
    for shape in ((70_000, 2, 1, 8), (1, 2, 70_000, 8)):
        check(random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16))


@pytest.mark.slow
def test_preprocess_offsets_beyond_32_bits():
    rows, stride = 2200, 1_000_008  # of bfloat16: over 2^31 elements and 4.4 GB from the first row to the last
    free = torch.cuda.mem_get_info()[0]
    if free < 3 * 2 * rows * stride:
        pytest.skip(f"needs 13 GB of free GPU memory, found {free / 1e9:.1f}")
    buffer = torch.empty(rows * stride, device="cuda", dtype=torch.bfloat16)
    dout = buffer.as_strided((1, rows, 1, 64), (0, stride, 64, 1))
    dout.copy_(random(1, rows, 1, 64, dtype=torch.bfloat16))
    check(dout, random(1, rows, 1, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)])
def test_preprocess_of_nothing(shape):
    empty = torch.empty(shape, device="cuda")
    assert ops.bwd_preprocess(empty, empty, None).shape == (shape[0], shape[2], shape[1])


def test_preprocess_of_float64_is_refused():
    x = torch.ones(1, 2, 1, 8, device="cuda", dtype=torch.float64)
    with pytest.raises((NotImplementedError, RuntimeError)):
        ops.bwd_preprocess(x, x, None)
    check(x.float(), x.float())  # and the refusal has broken nothing


# ---- both


@pytest.fixture
def canary():
    """Calls an op whose result begins a block of known bytes, and looks at the bytes that follow the result."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        pytest.skip("PYTORCH_NO_CUDA_MEMORY_CACHING is set: the canary lives in torch's memory cache")

    def call(op, *args):
        size = 64 << 20
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):  # in a pool of its own the block is all there is to take
            block = torch.full((size,), 0x5A, device="cuda", dtype=torch.uint8)
            start = block.data_ptr()
            del block
            result = op(*args)
            used = result.numel() * result.element_size()
            assert used % 512 == 0, "pick a shape whose bytes the allocator does not round up"
            rest = torch.empty(size - used, device="cuda", dtype=torch.uint8)
            assert (result.data_ptr(), rest.data_ptr()) == (start, start + used), "the allocator put them elsewhere"
            assert bool((rest == 0x5A).all()), "written past the end of the result"
            del result, rest

    return call


def test_dropout_mask_writes_nothing_behind_its_end(canary):
    seed = torch.tensor([5, 6], device="cuda")
    canary(ops.dropout_mask, seed, 0.5, 1, 512, 67, 61)
    canary(ops.dropout_mask, seed, 0.5, 1, 512, 67, 64)  # whole vectors


def test_preprocess_writes_nothing_behind_its_end(canary):
    out = random(1, 2051, 128, 8, dtype=torch.bfloat16)
    canary(ops.bwd_preprocess, out, out, None)


def test_both_follow_the_current_stream():
    source = random(2, 33, 3, 64, dtype=torch.bfloat16)
    seed = torch.tensor([7, 8], device="cuda")
    delta, mask = ops.bwd_preprocess(source, source, None), ops.dropout_mask(seed, 0.5, 2, 3, 33, 33)
    late, late_seed = torch.zeros_like(source), torch.zeros_like(seed)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms; a launch on another stream would read the zeros
        late.copy_(source)
        late_seed.copy_(seed)
        late_delta, late_mask = ops.bwd_preprocess(late, late, None), ops.dropout_mask(late_seed, 0.5, 2, 3, 33, 33)
    stream.synchronize()
    assert torch.equal(late_delta, delta) and torch.equal(late_mask, mask)
