"""Rule 1 and rule 11: any strides with a contiguous last dimension run without a copy, also past 2^31 elements."""

import itertools

import pytest
import torch

import cases
import flash_cuda
import kit


def bits_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def contiguous(inputs):
    return kit.Inputs({n: t.contiguous() for n, t in inputs.leaves.items()}, inputs.options, inputs.packed)


def run_and_compare(inputs, version, grad_out=None, exact=True):
    """A version on strided inputs: within the pass rule, and the same bits as on contiguous copies."""
    wanted = tuple(inputs.leaves)
    grad_out = torch.randn(inputs.leaves["q"].shape).to(inputs.dtype) if grad_out is None else grad_out
    got = kit.check(inputs, version, grad_out=grad_out, grad_lse=False, deterministic=True)
    expected = kit.run_kernel(contiguous(inputs), version, wanted=wanted, grad_out=grad_out.contiguous(),
                              deterministic=True)
    bits_equal(got, expected)
    return got


@kit.each_version
@pytest.mark.parametrize("kind", kit.STRIDES)
@kit.each_dtype
def test_strides_of_q_k_v(dtype, kind, version):
    run_and_compare(cases.build(cases.Case(strides=kind, dtype=dtype, causal=True)), version)


@kit.each_version
@pytest.mark.parametrize("kinds", list(itertools.permutations(kit.STRIDES, 3))[::17], ids="-".join)
def test_q_k_v_of_different_strides(kinds, version):
    leaves = {n: kit.restride(t, kind) for (n, t), kind in zip(kit.qkv(heads=3, heads_kv=3).items(), kinds)}
    run_and_compare(kit.Inputs(leaves), version)


@kit.each_version
@pytest.mark.parametrize("kind", ("contiguous", "packed_qkv", "heads_first", "sequence_first", "sliced"))
@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
def test_gradients_have_the_layout_of_their_inputs(layout, kind, version):
    inputs = cases.build(cases.Case(strides=kind, layout=layout))
    got = kit.run_kernel(inputs, version, wanted=("q", "k", "v"), grad_out=torch.randn(inputs.leaves["q"].shape))
    for name in "qkv":
        expected = torch.empty_like(inputs.leaves[name])  # torch's own rule: the order of dimensions, without gaps
        assert kit.same_layout(got["d" + name], expected), name
    assert kit.same_layout(got["out"], torch.empty_like(inputs.leaves["q"]))


@kit.each_version
@pytest.mark.parametrize("kind", kit.STRIDES)
def test_only_a_strided_last_dimension_is_copied_and_said_so(kind, version):
    q, k, v = kit.qkv().values()
    flash_cuda.attention(kit.restride(q, kind), k, kit.restride(v, kind), version=version)
    assert set(flash_cuda.last_call().copies) == ({"q", "v"} if kind == "last_strided" else set())


@kit.each_version
def test_a_gradient_that_is_a_view(version):  # case 15
    q, k, v = kit.qkv(2, 32, 32, 4, 1, 128, torch.float16).values()
    views = (torch.randn(2, 4, 32, 128).half().transpose(1, 2), torch.randn(2, 32, 4, 256).half()[..., 128:],
             torch.randn(2, 32, 4, 256).half()[..., ::2], torch.randn(32, 1, 1).half().expand(2, 32, 4, 128))
    for grad_out in views:
        run_and_compare(kit.Inputs({"q": q, "k": k, "v": v}), version, grad_out)


@kit.each_version
@pytest.mark.parametrize("shape", ((2048, 1), (1, 2048), (2, 33)), ids=str)
def test_one_buffer_split_into_heads(shape, version):  # case 16
    q, k, v = torch.randn(*shape, 18, 64).half().split((16, 1, 1), dim=2)
    inputs = kit.Inputs({"q": q, "k": k, "v": v}, {"causal": True})
    if shape == (1, 2048):  # too large for the float64 reference to be quick
        grads = {"wanted": ("q", "k", "v"), "grad_out": torch.randn(q.shape).half(), "deterministic": True}
        bits_equal(kit.run_kernel(inputs, version, **grads), kit.run_kernel(contiguous(inputs), version, **grads))
        assert flash_cuda.last_call().copies == ()
    else:
        run_and_compare(inputs, version)


@kit.each_version
@kit.each_dtype
def test_transposed_last_dimension(dtype, version):  # case 17
    leaves = {n: t.transpose(1, 3).contiguous().transpose(1, 3) for n, t in kit.qkv(dtype=dtype).items()}
    run_and_compare(kit.Inputs(leaves), version)
    out, _ = flash_cuda.attention(**leaves, version=version, return_lse=True)
    assert set(flash_cuda.last_call().copies) == {"q", "k", "v"}
    assert out.shape == leaves["q"].shape


@kit.each_version
@pytest.mark.parametrize("seqlen_k", (33, 65, 97, 129))
def test_expanded_key_heads(seqlen_k, version):  # case 18
    leaves = kit.qkv(2, 40, seqlen_k, 4, 4, 64, torch.bfloat16)
    leaves |= {n: leaves[n][:, :, :1].expand(2, seqlen_k, 4, 64) for n in "kv"}
    run_and_compare(kit.Inputs(leaves, {"causal": True}), version)
    assert flash_cuda.last_call().copies == ()


@kit.each_version
def test_strides_of_size_one_dimensions_are_ignored(version):  # case 20
    q = torch.randn(1, 1, 1, 2).transpose(2, 3)
    assert q.stride() == (2, 2, 1, 2)
    run_and_compare(kit.Inputs({"q": q, "k": torch.randn(1, 1, 1, 1), "v": torch.randn(1, 1, 1, 1)}), version)
    for strides in ((7, 5, 3, 1), (0, 0, 0, 0), (1, 1, 1, 9), (2**40, 2**41, 2**42, 2**43)):
        leaves = {n: torch.randn(1).as_strided((1, 1, 1, 1), strides) for n in "qkv"}
        run_and_compare(kit.Inputs(leaves), version)
        assert flash_cuda.last_call().copies == ()


def untouched(elements, dtype):
    """Memory whose pages cost nothing until they are written."""
    try:
        return torch.empty(elements, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"{elements} elements of address space are not to be had: {error}")


# Each stride of q, k, v or dout in turn carries an offset past 2^31 elements.
HUGE = {"batch": (2**31 + 8, 16, 8, 1), "row": (16, 2**31 // 6 + 8, 8, 1), "head": (64, 8, 2**31 + 8, 1)}


@kit.each_version
@pytest.mark.parametrize("dimension", HUGE)
@pytest.mark.parametrize("name", ("q", "k", "v", "dout"))
def test_offsets_past_32_bits(name, dimension, version):  # case 19, rule 11
    shape, strides = (2, 7, 2, 8), HUGE[dimension]
    far = untouched(sum((n - 1) * s for n, s in zip(shape, strides)) + 1, torch.bfloat16).as_strided(shape, strides)
    tensors = kit.qkv(*(2, 7, 7, 2, 2, 8), torch.bfloat16) | {"dout": torch.randn(shape).bfloat16()}
    far.copy_(tensors[name])
    grad_out = far if name == "dout" else tensors.pop("dout")
    leaves = {n: far if n == name else tensors[n] for n in "qkv"}
    run_and_compare(kit.Inputs(leaves, {"causal": True}), version, grad_out)
    assert flash_cuda.last_call().copies == ()


@kit.each_version
def test_values_in_a_wide_fused_buffer(version):  # case 19
    rows, width = 100_001, 21_504
    buffer = untouched(rows * width, torch.bfloat16).view(1, rows, 1, width)
    v = buffer[..., width - 16:]
    v.copy_(torch.randn(v.shape))
    leaves = {"q": torch.randn(1, 3, 1, 16).bfloat16(), "k": torch.randn(1, rows, 1, 16).bfloat16(), "v": v}
    run_and_compare(kit.Inputs(leaves), version)
