"""fa2 on CUDA against the float64 reference: head dims, lengths, masks, strides, poison, packed input, torch's tools."""

import itertools
import math

import pytest
import torch

import cases
import flash_cuda
import kit
from cases import BF16, F16, Case, replace

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
each_dtype = pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "fp16"))


@pytest.fixture(autouse=True)
def unset_memory_is_nan():
    """What torch hands out next was NaN before: results and workspaces that are not written show it."""
    for size in (1 << 12, 1 << 18, 1 << 24):
        del [torch.full((size,), math.nan, device=CUDA) for _ in range(4)][:]


def to_cuda(x):
    return x.to(CUDA) if isinstance(x, torch.Tensor) else x


def on_cuda(inputs):
    return kit.Inputs({n: t.to(CUDA) for n, t in inputs.leaves.items()},
                      {n: to_cuda(x) for n, x in inputs.options.items()}, tuple(map(to_cuda, inputs.packed)))


def check(inputs, *, wanted=("q", "k", "v"), grad_out=None, grad_lse=None, gpu_inputs=None, **more):
    """fa2 on the GPU, forward and backward, against the float64 reference on the CPU. grad_lse=False: a loss of out."""
    q = inputs.leaves["q"]
    if wanted and grad_out is None:
        grad_out = torch.randn(q.shape).to(q.dtype)
    if wanted and grad_lse is None:
        grad_lse = torch.randn(kit._lse_shape(inputs))
    grads = {"wanted": wanted, "grad_out": grad_out, "grad_lse": None if grad_lse is False else grad_lse}
    on_gpu = {n: to_cuda(x) for n, x in grads.items()}
    got = kit.run_kernel(gpu_inputs or on_cuda(inputs), "fa2", **on_gpu, **more)
    call = flash_cuda.last_call()
    assert call.version == "fa2" and call.device.startswith("cuda") and "_cuda_" in call.kernel
    got = {n: x.cpu() for n, x in got.items()}
    kit.compare(got, inputs, **grads)
    return got


def case(**changes):
    return Case(**({"seqlen_q": 130, "seqlen_k": 260, "head_dim": 64, "dtype": BF16} | changes))


@each_dtype
@pytest.mark.parametrize("head_dim", (1, 3, 8, 17, 32, 40, 64, 72, 96, 100, 104, 128, 136, 192, 200, 256))
def test_head_dims(head_dim, dtype):
    check(cases.build(case(head_dim=head_dim, dtype=dtype, causal=True)))
    copied = flash_cuda.last_call().copies
    assert set("qkv") <= set(copied) if head_dim % 8 else not copied


@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("seqlen_q, seqlen_k", [
    (1, 1), (1, 300), (300, 1), (7, 63), (63, 7), (64, 64), (65, 65), (127, 129), (128, 128), (129, 127), (192, 96),
    (96, 192), (257, 48), (48, 257), (513, 191)])
def test_lengths(seqlen_q, seqlen_k, causal, head_dim):
    check(cases.build(case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, causal=causal, heads=2, heads_kv=1)))


MASKS = [(causal, window) for causal in (False, True, "top_left")
         for window in (None, (0, 0), (3, 0), (0, 5), (70, 20), (None, 40), (150, None), (1000, 1000))]


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("causal, window", MASKS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 420), (420, 300)])
def test_masks(seqlen_q, seqlen_k, causal, window, head_dim):
    check(cases.build(case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, window_size=window, head_dim=head_dim)))


EDGES = [
    case(heads_kv=4), case(heads_kv=1, causal=True), case(heads=1, heads_kv=1), case(layout="bhsd", causal=True),
    case(seqlen_q=0), case(seqlen_k=0), case(seqlen_k=0, causal=True), case(batch=0), case(heads=0, heads_kv=0),
    case(magnitude=3.0, dtype=F16, causal=True), case(magnitude=3.0), case(softmax_scale=0.0, causal=True),
    case(softmax_scale=0.0), case(softmax_scale=2.0), case(batch=33, seqlen_q=2, seqlen_k=3),
    case(batch=1, heads=16, heads_kv=16, seqlen_q=3, seqlen_k=5), case(batch=1, seqlen_q=1, seqlen_k=1, head_dim=16),
    case(seqlen_q=1500, seqlen_k=1500, head_dim=128, heads=2, heads_kv=1, causal=True),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_edges(edge):
    check(cases.build(edge))


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v"), ("k", "v"), ()], ids="".join)
def test_gradients_of_some(wanted):
    check(cases.build(case(causal=True)), wanted=wanted)
    check(cases.build(case()), wanted=wanted, grad_lse=False)


@each_dtype
@pytest.mark.parametrize("head_dim", (32, 64, 128))
def test_very_negative_scores(head_dim, dtype):  # case 3: a row's LSE below -88.7 and a tile that the keys end in
    inputs = cases.build(case(batch=1, heads=1, heads_kv=1, seqlen_q=704, seqlen_k=704, head_dim=head_dim, dtype=dtype))
    inputs.leaves["q"] = 1 + inputs.leaves["q"].abs()
    inputs.leaves["k"] = -20 * (1 + inputs.leaves["k"].abs())
    got = check(inputs)
    assert got["lse"].max() < -88.7 and got["dq"].isfinite().all()


def test_one_key():  # case 1: its gradients are exact
    q, k, v = ((torch.randn(1, 1, 1, 16, device=CUDA) * 3).half().requires_grad_() for _ in range(3))
    out = flash_cuda.attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not dq.any() and not dk.any() and torch.equal(dv, torch.ones_like(dv)) and torch.equal(out, v)


def test_equal_huge_scores():  # case 7
    q = torch.zeros(1, 3, 1, 128, device=CUDA, dtype=BF16)
    k = torch.zeros(1, 200, 1, 128, device=CUDA, dtype=BF16)
    q[..., 0], k[..., 0] = 1024, -512
    out, lse = flash_cuda.attention(q, k, torch.ones_like(k), return_lse=True)
    assert torch.equal(out, torch.ones_like(out))
    expected = -524288 / math.sqrt(128) + math.log(200)
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-6, atol=0)


# ---- packed input

VARLEN = [
    ((5, 9), (33, 17), (1, 1), (64, 80)), ((0, 4), (7, 0), (0, 0), (3, 5)), ((0, 1), (1, 1), (2, 2)),
    ((300, 170), (170, 300), (1, 190)), ((0, 0), (0, 1), (1023, 2044)), ((3, 3),),
]


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True, "top_left"))
@pytest.mark.parametrize("lengths", VARLEN, ids=str)
def test_packed(lengths, causal, head_dim):
    check(cases.build(case(lengths=lengths, causal=causal, head_dim=head_dim, heads=3, heads_kv=3)))


@pytest.mark.parametrize("lengths", VARLEN[:4], ids=str)
def test_packed_with_groups_and_windows(lengths):
    check(cases.build(case(lengths=lengths, window_size=(40, 10), heads=9, heads_kv=3)), deterministic=True)


# ---- strides


@pytest.mark.parametrize("kind", kit.STRIDES)
@pytest.mark.parametrize("head_dim", (64, 40))
def test_strides(head_dim, kind):
    plain = cases.build(case(head_dim=head_dim, causal=True, heads=3, heads_kv=3))
    leaves = {n: kit.restride(t.to(CUDA), kind) for n, t in plain.leaves.items()}
    same = kit.Inputs({n: t.cpu().contiguous() for n, t in leaves.items()}, plain.options)
    got = check(same, gpu_inputs=kit.Inputs(leaves, plain.options))
    aligned = kind not in ("sliced", "last_strided")
    assert bool(flash_cuda.last_call().copies) == (not aligned)
    for name in "qkv":
        assert got["d" + name].shape == leaves[name].shape


@pytest.mark.parametrize("kind", kit.STRIDES)
def test_strides_of_dout(kind):  # case 15
    inputs = cases.build(case(causal=True))
    dout = kit.restride(torch.randn(2, 130, 4, 64).to(BF16), kind)
    got = check(inputs, grad_out=dout.contiguous())
    grads = {"wanted": ("q", "k", "v"), "grad_lse": torch.zeros(2, 4, 130, device=CUDA), "deterministic": True}
    a = kit.run_kernel(on_cuda(inputs), "fa2", grad_out=kit.restride(dout.contiguous().to(CUDA), kind), **grads)
    b = kit.run_kernel(on_cuda(inputs), "fa2", grad_out=dout.contiguous().to(CUDA), **grads)
    assert all(torch.equal(a[n], b[n]) for n in a) and got.keys() == a.keys()


@pytest.mark.parametrize("kind", ("contiguous", "packed_qkv", "heads_first", "sequence_first", "sliced"))
def test_results_have_the_layout_of_their_inputs(kind):
    leaves = {n: kit.restride(t.to(CUDA), kind) for n, t in cases.build(case()).leaves.items()}
    got = kit.run_kernel(kit.Inputs(leaves), "fa2", wanted=("q", "k", "v"),
                         grad_out=torch.randn(2, 130, 4, 64, device=CUDA, dtype=BF16))
    for name in "qkv":
        assert kit.same_layout(got["d" + name], torch.empty_like(leaves[name])), name
    assert kit.same_layout(got["out"], torch.empty_like(leaves["q"]))


@pytest.mark.slow
def test_offsets_beyond_32_bits():  # case 19
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    rows, stride = 100_200, 21_504
    buffer = torch.empty(rows * stride, device=CUDA, dtype=BF16)
    v = buffer.as_strided((1, rows, 1, 64), (0, stride, 64, 1)).copy_(torch.randn(1, rows, 1, 64, device=CUDA))
    q, k = (torch.randn(1, n, 1, 64, device=CUDA, dtype=BF16) for n in (40, rows))
    got, wanted = (flash_cuda.attention(q, k, x) for x in (v, v.contiguous()))
    assert torch.equal(got, wanted)


# ---- poison


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": "top_left"}, {"window_size": (60, 30)}], ids=str)
def test_only_queries_that_see_it_meet_it(options, head_dim, bad):
    """One bad value in V, and one in K, each in a tile that some queries see and others do not."""
    for name in "kv":
        inputs = cases.build(case(head_dim=head_dim, seqlen_q=230, seqlen_k=200, **options))
        inputs.leaves[name][0, 150, 0, 5] = bad
        # +-inf in K times a query of either sign: rows may stay finite; NaN must sit where the reference has it.
        got = check(inputs) if not math.isinf(bad) else check_finite_rows(inputs)
        assert got["out"][1].isfinite().all() and not got["out"][0].isfinite().all()


def check_finite_rows(inputs):
    """Rows that do not see the bad key are exactly those of the same call with a clean key."""
    clean = kit.Inputs({n: t.nan_to_num(0.0, 0.0, 0.0) for n, t in inputs.leaves.items()}, inputs.options)
    grads = {"wanted": ("q", "k", "v"), "grad_out": torch.randn(2, 230, 4, inputs.leaves["q"].shape[-1]).to(BF16).cuda(),
             "deterministic": True}
    got, expected = (kit.run_kernel(on_cuda(x), "fa2", **grads) for x in (inputs, clean))
    hidden = flash_cuda.reference.attention(  # rows whose only way to the bad key is masked
        torch.zeros(1, 230, 1, 1), torch.zeros(1, 200, 1, 1), (torch.arange(200) == 150).float()[None, :, None, None],
        **inputs.options)[0, :, 0, 0] == 0
    assert hidden.any() and not hidden.all()
    for name in ("out", "dq"):
        assert torch.equal(got[name][0, hidden.cuda()], expected[name][0, hidden.cuda()]), name
        assert torch.equal(got[name][1], expected[name][1]), name
    return {n: x.cpu() for n, x in got.items()}


def test_what_lies_past_the_end_is_never_read():
    """Keys and queries of a sequence end inside a buffer of NaN."""
    q, k, v = (torch.full((2, 400, 2, 64), math.nan, device=CUDA, dtype=BF16) for _ in range(3))
    leaves = {"q": q[:, :130], "k": k[:, :77], "v": v[:, :77]}
    for t in leaves.values():
        t.copy_(torch.randn(t.shape))
    check(kit.Inputs({n: t.cpu().contiguous() for n, t in leaves.items()}), gpu_inputs=kit.Inputs(leaves))


# ---- the same again


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"heads_kv": 1}, {"window_size": (100, 20)},
                                     {"lengths": ((300, 170), (170, 300), (1, 190))}], ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_deterministic(head_dim, options):  # cases 14 and 33
    inputs = on_cuda(cases.build(case(**{"seqlen_q": 500, "seqlen_k": 500, "head_dim": head_dim, **options})))
    grads = {"wanted": ("q", "k", "v"), "grad_out": torch.randn_like(inputs.leaves["q"]), "deterministic": True}
    first = kit.run_kernel(inputs, "fa2", **grads)
    noise = torch.randn(512, 512, device=CUDA)
    for _ in range(20):
        noise = noise @ noise * 1e-2
        again = kit.run_kernel(inputs, "fa2", **grads)
        assert all(torch.equal(first[n], again[n]) for n in first)


def test_forward_is_bitwise_equal():  # case 36
    q, k, v = (torch.randn(2, 700, 4, 128, device=CUDA, dtype=BF16) for _ in range(3))
    first = flash_cuda.attention(q, k, v, causal=True, return_lse=True)
    for _ in range(100):
        assert all(map(torch.equal, first, flash_cuda.attention(q, k, v, causal=True, return_lse=True)))


# ---- memory


@pytest.mark.parametrize("heads_kv", (8, 2))
def test_memory(heads_kv):
    """Forward: out and LSE. Backward: the gradients, one float dQ, and delta."""
    batch, seqlen, heads, dim = 1, 4096, 8, 64
    q = torch.randn(batch, seqlen, heads, dim, device=CUDA, dtype=BF16, requires_grad=True)
    k, v = (torch.randn(batch, seqlen, heads_kv, dim, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(2))
    rows, q_bytes, k_bytes = batch * seqlen * heads, q.numel() * 2, k.numel() * 2
    dout = torch.randn_like(q)
    torch.autograd.grad(flash_cuda.attention(q, k, v), (q, k, v), dout)

    def peak(work):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        return torch.cuda.max_memory_allocated() - before, result

    used, out = peak(lambda: flash_cuda.attention(q, k, v))
    assert used <= q_bytes + rows * 4 + 4096
    used, _ = peak(lambda: torch.autograd.grad(out, (q, k, v), dout))
    assert used <= q_bytes + 2 * k_bytes + rows * dim * 4 + rows * 4 + 4096


# ---- what is refused

REFUSED = {
    "softcap": {"softcap": 5.0}, "alibi_slopes": {"alibi_slopes": torch.ones(4)}, "sinks": {"sinks": torch.zeros(4)},
    "bias": {"bias": torch.zeros(130, 260)}, "dropout_p": {"dropout_p": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_features_are_refused_by_name(name):
    inputs = on_cuda(cases.build(case()))
    options = {n: to_cuda(x) for n, x in REFUSED[name].items()}
    with pytest.raises(NotImplementedError, match=rf"fa2 takes masks and windows .* got {name}; "):
        flash_cuda.attention(**inputs.leaves, **options)
    assert flash_cuda.explain(**inputs.leaves, **options).versions["fa2"].status == "cannot run this input"
    with pytest.raises(NotImplementedError, match="no softcap, alibi_slopes, "):
        torch.compile(flash_cuda.attention, fullgraph=True, backend="aot_eager")(**inputs.leaves, **options)


def test_types_and_versions_are_refused():
    inputs = on_cuda(cases.build(case()))
    wide = {n: t.float() for n, t in inputs.leaves.items()}
    with pytest.raises(NotImplementedError, match="fa2 takes bfloat16 and float16 on CUDA, got torch.float32; convert"):
        flash_cuda.attention(**wide)
    large = {n: torch.zeros(1, 4, 1, 264, device=CUDA, dtype=BF16) for n in "qkv"}
    with pytest.raises(NotImplementedError, match="head_dim of 1 to 256 on CUDA, got 264"):
        flash_cuda.attention(**large)
    for version in ("fa1", "fa3"):
        with pytest.raises(NotImplementedError, match=f"{version} needs an attention kernel for CUDA tensors"):
            flash_cuda.attention(**inputs.leaves, version=version)
    with pytest.raises(ValueError, match="k must be on cuda:0 like q, got cpu"):
        flash_cuda.attention(inputs.leaves["q"], inputs.leaves["k"].cpu(), inputs.leaves["v"])


# ---- torch


def test_explain_says_what_runs():
    inputs = on_cuda(cases.build(case(causal=True)))
    plan = flash_cuda.explain(**inputs.leaves, causal=True)
    flash_cuda.attention(**inputs.leaves, causal=True)
    ran, planned = flash_cuda.last_call(), plan.versions["fa2"].forward
    assert plan.selected == "fa2" and "fa2_fwd_cuda_bf16_hd64" in str(plan)
    for name in ("kernel", "tile", "grid", "fast_memory_bytes"):
        assert getattr(ran, name) == getattr(planned, name), name
    assert planned.bytes_loaded > 0 and ran.bytes_loaded is None


@pytest.mark.parametrize("grad", (False, True))
def test_compile(grad):
    inputs = on_cuda(cases.build(case(causal=True)))
    leaves = {n: t.requires_grad_(grad) for n, t in inputs.leaves.items()}
    call = lambda q, k, v: flash_cuda.attention(q, k, v, causal=True, deterministic=True) * 2  # noqa: E731
    out, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(**leaves), call(**leaves)
    assert torch.equal(out, expected)
    if grad:
        got, wanted = (torch.autograd.grad(x.sum(), list(leaves.values())) for x in (out, expected))
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("kind", ("contiguous", "heads_first", "sliced", "last_strided"))
@pytest.mark.parametrize("head_dim", (64, 20))
def test_fake_tensors_have_the_strides_of_real_ones(head_dim, kind):  # case 39
    leaves = [kit.restride(t.to(CUDA), kind) for t in cases.build(case(head_dim=head_dim)).leaves.values()]
    options = (None, 0, -1, -1, 0.0, 2, 0, 0, 0.0, *(None,) * 7, 0, 0, False)
    torch.library.opcheck(torch.ops.flash_cuda.fwd.default, (*leaves, *options),
                          test_utils=("test_schema", "test_faketensor"))
    out, lse = torch.ops.flash_cuda.fwd(*leaves, *options)
    torch.library.opcheck(torch.ops.flash_cuda.bwd.default,
                          (torch.randn_like(out), None, *leaves, out, lse, *options, [True, True, True, False, False]),
                          test_utils=("test_schema", "test_faketensor"))


def test_graph_and_stream():  # case 35
    q, k, v = (torch.randn(2, 300, 4, 64, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(3))

    def step():
        out = flash_cuda.attention(q, k, v, causal=True, deterministic=True)
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in step()]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for x in captured:
            x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, expected))


def test_graph_with_other_lengths():  # case 38: the lengths in device memory rule
    lengths = [torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([0, 100, 128], [0, 30, 128])]
    cu, (q, k, v) = lengths[0].clone(), (torch.randn(128, 2, 64, device=CUDA, dtype=BF16) for _ in range(3))
    call = lambda cu: flash_cuda.attention_varlen(q, k, v, cu, cu, 128, 128, causal=True)  # noqa: E731
    expected = [call(x) for x in lengths]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(cu)
    for x, wanted in zip(lengths, expected):
        cu.copy_(x)
        graph.replay()
        assert torch.equal(out, wanted)


def test_autocast():
    q, k, v = (torch.randn(2, 65, 4, 64, device=CUDA, requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", torch.bfloat16):
        out = flash_cuda.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


SMALL = [case(seqlen_q=n, seqlen_k=m, head_dim=d, causal=c, heads=2, heads_kv=h, dtype=t) for (n, m), d, c, h, t in [
    ((130, 100), 64, True, 1, BF16), ((70, 200), 128, False, 2, F16), ((65, 65), 96, True, 2, BF16),
    ((40, 129), 256, True, 1, BF16), ((129, 70), 192, False, 1, F16)]]


@pytest.mark.sanitize
@pytest.mark.parametrize("small", SMALL, ids=str)
@pytest.mark.parametrize("deterministic", (False, True))
def test_small_shapes_for_the_sanitizer(small, deterministic):
    check(cases.build(small), deterministic=deterministic)
    check(cases.build(replace(small, lengths=((40, 70), (0, 3), (66, 1)))), deterministic=deterministic)


COMBINED = list(itertools.product((True, "top_left"), ((50, 9), (None, 0)), (24, 128)))


@pytest.mark.parametrize("causal, window, head_dim", COMBINED)
def test_combinations(causal, window, head_dim):
    check(cases.build(case(seqlen_q=333, seqlen_k=277, causal=causal, window_size=window, head_dim=head_dim, heads=6,
                           heads_kv=3, dtype=F16, layout="bhsd", softmax_scale=0.3)), deterministic=True)
