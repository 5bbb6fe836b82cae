"""Merging partial results: exact, finite at any distance (case 31), rule 5, and the gradients of the whole."""

import math

import pytest
import torch

import flash_cuda
import kit

NEVER = -math.inf


def partial(layout="bshd", dtype=torch.float64, count=2):
    """`count` outputs of (2, 5, 3, 4) with their LSE, in a layout; packed drops the batch."""
    shape, lse_shape = {"bshd": ((2, 5, 3, 4), (2, 3, 5)), "bhsd": ((2, 3, 5, 4), (2, 3, 5)),
                        "packed": ((5, 3, 4), (3, 5))}[layout]
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return [x for _ in range(count)
            for x in (torch.randn(shape).to(dtype), torch.randn(lse_shape, dtype=lse_dtype))]


def name_of(layout):
    return "bshd" if layout == "packed" else layout


@pytest.mark.parametrize("layout", ("bshd", "bhsd", "packed"))
def test_is_the_weighted_mean(layout):
    out1, lse1, out2, lse2 = partial(layout)
    out, lse = flash_cuda.merge(out1, lse1, out2, lse2, layout=name_of(layout))
    w1, w2 = (x.exp() if layout == "bhsd" else x.exp().mT for x in (lse1, lse2))
    torch.testing.assert_close(out, (w1[..., None] * out1 + w2[..., None] * out2) / (w1 + w2)[..., None])
    torch.testing.assert_close(lse, torch.logaddexp(lse1, lse2))


@pytest.mark.parametrize("layout", ("bshd", "bhsd", "packed"))
def test_gradients(layout):
    tensors = [t.requires_grad_() for t in partial(layout)]
    assert torch.autograd.gradcheck(lambda *x: flash_cuda.merge(*x, layout=name_of(layout)), tensors)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("lse1, lse2, share", ((1000.0, -1000.0, 1.0), (-3e38, 3e38, 0.0), (5e4, NEVER, 1.0),
                                               (NEVER, -7e4, 0.0), (-1e5, -1e5, 0.5), (88.0, 89.0, 1 / (1 + math.e)),
                                               (-200.0, -201.0, math.e / (1 + math.e))), ids=str)
def test_lse_far_apart_or_infinite(lse1, lse2, share, dtype):  # case 31
    out1, shape1, out2, shape2 = partial(dtype=dtype)
    tensors = [out1, torch.full_like(shape1, lse1), out2, torch.full_like(shape2, lse2)]
    tensors = [t.requires_grad_() for t in tensors]
    out, lse = flash_cuda.merge(*tensors)
    assert out.dtype == dtype and lse.dtype == shape1.dtype
    torch.testing.assert_close(out.double(), share * out1.double() + (1 - share) * out2.double(),
                               rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    expected = max(lse1, lse2) + math.log1p(math.exp(min(lse1, lse2) - max(lse1, lse2)))
    torch.testing.assert_close(lse.double(), torch.full_like(lse, expected, dtype=torch.float64))
    grads = torch.autograd.grad((out.double() * out.detach()).sum() + lse.sum(), tensors)
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(grads[0].double(), share * out.detach().double(), rtol=1e-2, atol=1e-2)


def test_a_query_that_no_part_saw():  # rule 5
    out1, lse1, out2, lse2 = (t.requires_grad_() for t in partial())
    with torch.no_grad():
        for lse, out in ((lse1, out1), (lse2, out2)):
            lse[:, :, 2] = NEVER
            out[:, 2] = 0
    out, lse = flash_cuda.merge(out1, lse1, out2, lse2)
    assert (out[:, 2] == 0).all() and (lse[:, :, 2] == NEVER).all() and lse[:, :, :2].isfinite().all()
    grads = torch.autograd.grad((out * torch.randn_like(out)).sum() + lse.masked_fill(lse == NEVER, 0).sum(),
                                (out1, lse1, out2, lse2))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, 2] == 0).all() and (grads[1][:, :, 2] == 0).all()


def test_nan_is_not_hidden():
    out1, lse1, out2, lse2 = partial()
    lse1[0, 0, 0] = math.nan
    out, lse = flash_cuda.merge(out1, lse1, out2, lse2)
    assert out[0, 0, 0].isnan().all() and lse[0, 0, 0].isnan() and out.isnan().sum() == 4 and lse.isnan().sum() == 1


def test_is_associative():
    a, b, c = (partial(count=1) for _ in range(3))
    torch.testing.assert_close(flash_cuda.merge(*flash_cuda.merge(*a, *b), *c),
                               flash_cuda.merge(*a, *flash_cuda.merge(*b, *c)))


@kit.each_version
@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize("sinks", (False, True))
@kit.each_dtype
def test_split_keys_merge_to_the_whole(dtype, sinks, layout, version):  # cases 30 and 31: a sink is counted once
    tensors = kit.qkv(2, 20, 60, dtype=dtype)
    if layout == "bhsd":
        tensors = {n: t.transpose(1, 2) for n, t in tensors.items()}
    tensors |= {"sinks": torch.randn(4)} if sinks else {}
    dim, cuts = (1 if layout == "bshd" else 2), (0, 7, 8, 40, 60)

    def split(q, k, v, *, return_lse, layout, **more):
        total = None
        for begin, end in zip(cuts, cuts[1:]):
            keys, values = (t.narrow(dim, begin, end - begin) for t in (k, v))
            part = flash_cuda.attention(q, keys, values, version=version, layout=layout, return_lse=True,
                                        **(more if begin == 0 else {}))
            total = part if total is None else flash_cuda.merge(*total, *part, layout=layout)
        return total

    inputs = kit.Inputs(tensors, {"layout": layout})
    grads = {"wanted": tuple(tensors), "grad_out": torch.randn(tensors["q"].shape).to(dtype),
             "grad_lse": torch.randn(2, 4, 20)}
    got, ref = kit.evaluate(split, inputs, **grads), kit.run_reference(inputs, **grads)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]  # each part rounds its output
    for name, value in ref.items():
        torch.testing.assert_close(got[name].double(), value.double(), rtol=tolerance, atol=tolerance, msg=name)


@kit.each_version
def test_causal_parts_with_empty_rows_merge_to_the_whole(version):
    """Ring attention: the part that holds the later keys is seen by the later queries only."""
    q, k, v = kit.qkv(2, 64, 64).values()
    early = flash_cuda.attention(q, k[:, :40], v[:, :40], causal="top_left", return_lse=True, version=version)
    later = flash_cuda.attention(q, k[:, 40:], v[:, 40:], causal=True, window_size=(None, 0), return_lse=True,
                                 version=version)
    assert (later[1][:, :, :40] == NEVER).all()
    whole = flash_cuda.attention(q, k, v, causal=True, return_lse=True, version=version)
    torch.testing.assert_close(flash_cuda.merge(*early, *later), whole)


@kit.each_version
def test_packed_parts_merge_to_the_whole(version):
    q, k, v = (t[0] for t in kit.qkv(1, 30, 50).values())
    cu_q = torch.tensor([0, 10, 30], dtype=torch.int32)
    bounds = ((0, 20, 30), (0, 10, 20))  # 20 + 10 keys of the first sequence, 10 + 10 of the second
    first = torch.cat([torch.arange(0, 20), torch.arange(30, 40)])
    second = torch.cat([torch.arange(20, 30), torch.arange(40, 50)])
    parts = []
    for keys, cu in zip((first, second), bounds):
        cu_k = torch.tensor(cu, dtype=torch.int32)
        parts += flash_cuda.attention_varlen(q, k[keys], v[keys], cu_q, cu_k, 20, 20, return_lse=True, version=version)
    whole = flash_cuda.attention_varlen(q, k, v, cu_q, torch.tensor([0, 30, 50], dtype=torch.int32), 20, 30,
                                        return_lse=True, version=version)
    torch.testing.assert_close(flash_cuda.merge(*parts), whole)


@pytest.mark.parametrize("change, error, words", (
    ({"layout": "hbsd"}, ValueError, "layout must be"),
    ({"out1": torch.zeros(3, 4)}, ValueError, r"4 dimensions, or 3 when packed, got \(3, 4\)"),
    ({"out2": torch.zeros(2, 5, 3, 8)}, ValueError, r"out2 must have shape \(2, 5, 3, 4\).*got \(2, 5, 3, 8\)"),
    ({"lse1": torch.zeros(2, 5, 3)}, ValueError, r"lse1 must have shape \(2, 3, 5\).*got \(2, 5, 3\)"),
    ({"lse2": torch.zeros(2, 3, 6)}, ValueError, r"lse2 must have shape \(2, 3, 5\)"),
    ({"out2": torch.zeros(2, 5, 3, 4)}, TypeError, "out2 must be torch.float64, got torch.float32"),
    ({"lse2": torch.zeros(2, 3, 5)}, TypeError, "lse2 must be torch.float64, got torch.float32"),
    ({"lse1": torch.zeros(2, 3, 5).half(), "lse2": torch.zeros(2, 3, 5).half()}, TypeError, "float32 or float64"),
), ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_errors(change, error, words):
    arguments = dict(zip(("out1", "lse1", "out2", "lse2"), partial())) | change
    with pytest.raises(error, match=words) as caught:
        flash_cuda.merge(**arguments)
    assert "\n" not in str(caught.value)
