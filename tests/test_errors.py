"""Bad input of every argument: one line that names the argument, what was expected, what came, and the way out."""

import re

import pytest
import torch
from kit import VERSIONS

import flash_cuda
from flash_cuda import _C, dispatch

B, SQ, SK, H, HKV, D = 2, 5, 7, 4, 2, 8
NAN, INF = float("nan"), float("inf")


def good(**changes):
    """Arguments of `attention` that are right, but for the changes."""
    arguments = {"q": torch.randn(B, SQ, H, D), "k": torch.randn(B, SK, HKV, D), "v": torch.randn(B, SK, HKV, D)}
    return arguments | changes


def good_packed(**changes):
    cu_q, cu_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)
    arguments = {"q": torch.randn(SQ, H, D), "k": torch.randn(SK, HKV, D), "v": torch.randn(SK, HKV, D),
                 "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 3, "max_seqlen_k": 4}  # fmt: skip
    return arguments | changes


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def mask(seqlen_q=SQ, seqlen_k=SK, blocks=(1, 1, 3, 4)):
    return flash_cuda.BlockMask(torch.ones(blocks, dtype=torch.bool), (2, 2), seqlen_q, seqlen_k)


def meta(*shape):
    return torch.empty(shape, device="meta")


def expect(error, pattern, call, longest=400):
    """`call` raises `error`, in one line of the agreed form that matches `pattern`."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert "\n" not in message and len(message) < longest, message
    assert re.fullmatch(r"flash_cuda\.\w+: .+, got .+; .+", message), message
    assert re.search(pattern, message), message


# Argument, bad value, error, what the message says.
BAD = [
    ("q", torch.randn(SQ, H, D), ValueError, r"q must have 4 dimensions \(batch, .*head_dim\), got 3 \(5, 4, 8\)"),
    ("q", torch.randn(1, B, SQ, H, D), ValueError, r"q must have 4 dimensions .* got 5"),
    ("q", torch.randn(B, SQ, H, D).numpy(), TypeError, r"q must be a torch.Tensor, got ndarray of shape \(2, 5, 4, 8\); convert"),
    ("q", None, TypeError, "q must be a torch.Tensor, got NoneType None; pass one"),
    ("q", [[1.0]], TypeError, "q must be a torch.Tensor, got list"),
    ("q", torch.randint(9, (B, SQ, H, D)), TypeError, "q must be float32, bfloat16, .* got torch.int64"),
    ("q", torch.randn(B, SQ, H, D, dtype=torch.complex64), TypeError, "q must be float32, .* got torch.complex64"),
    ("q", torch.randn(B, SQ, 3, D), ValueError, "heads of q must be a multiple of the heads of k, 2, got 3; .*layout"),
    ("q", torch.randn(B, SQ, H, D).to_sparse(), TypeError, "q must be a plain strided tensor, got a torch.sparse_coo one"),
    ("k", torch.nested.nested_tensor([torch.randn(SK, HKV, D)] * B, layout=torch.jagged), TypeError, "k .* nested one"),
    ("bias", torch.randn(SQ, SK).to_mkldnn(), TypeError, "bias must be a plain strided tensor, got a torch._mkldnn"),
    ("q", torch.randn(B, SQ, H, 0), ValueError, "k must have the head_dim of q, 0, got 8"),
    ("k", torch.randn(SK, HKV, D), ValueError, r"k must have 4 dimensions \(batch, seqlen_k, heads, head_dim\), got 3"),
    ("k", torch.randn(3, SK, HKV, D), ValueError, "k must have the batch size of q, 2, got 3"),
    ("k", torch.randn(B, SK, HKV, 9), ValueError, "k must have the head_dim of q, 8, got 9"),
    ("k", torch.randn(B, SK, 0, D), ValueError, "v must have the heads of k, 0, got 2"),
    ("k", torch.randn(B, SK, HKV, D).bfloat16(), TypeError, "k must have the dtype of q, .*32, got torch.bfloat16"),
    ("k", meta(B, SK, HKV, D), ValueError, "k must be on cpu like q, got meta"),
    ("k", "keys", TypeError, "k must be a torch.Tensor, got str 'keys'"),
    ("v", torch.randn(B, SK, D), ValueError, "v must have 4 dimensions"),
    ("v", torch.randn(1, SK, HKV, D), ValueError, "v must have the batch size of k, 2, got 1"),
    ("v", torch.randn(B, 6, HKV, D), ValueError, "v must have the seqlen_k of k, 7, got 6"),
    ("v", torch.randn(B, SK, 1, D), ValueError, "v must have the heads of k, 2, got 1"),
    ("v", torch.randn(B, SK, HKV, 16), ValueError, "v must have the head_dim of k, 8, got 16"),
    ("v", torch.randn(B, SK, HKV, D).half(), TypeError, "v must have the dtype of q, torch.float32, got torch.float16"),
    ("v", meta(B, SK, HKV, D), ValueError, "v must be on cpu like q, got meta"),
    ("v", 1.0, TypeError, "v must be a torch.Tensor, got float 1.0"),
    ("causal", "left", ValueError, """causal must be False, True .*"top_left", got str 'left'"""),
    ("causal", 2, ValueError, "causal must be .* got int 2"),
    ("causal", None, ValueError, "causal must be .* got NoneType None"),
    ("causal", ["top_left"], TypeError, "causal must be .* got list"),
    ("softmax_scale", NAN, ValueError, "softmax_scale must be finite and not negative, got nan"),
    ("softmax_scale", INF, ValueError, "softmax_scale must be finite and not negative, got inf"),
    ("softmax_scale", -0.5, ValueError, "softmax_scale must be finite and not negative, got -0.5"),
    ("softmax_scale", "1", TypeError, "softmax_scale must be a number or None, got str '1'"),
    ("window_size", (-1, -3), ValueError, r"window_size must not be negative, got \(-1, -3\); None leaves"),
    ("window_size", (3, -1), ValueError, r"window_size must not be negative, got \(3, -1\)"),
    ("window_size", 5, TypeError, r"window_size must be None or a pair \(left, right\), got int 5"),
    ("window_size", (1, 2, 3), ValueError, r"window_size must have two sides \(left, right\), got 3"),
    ("window_size", (1.5, 2), TypeError, "window_size must hold int or None, got float 1.5"),
    ("window_size", (True, 2), TypeError, "window_size must hold int or None, got bool True"),
    ("window_size", ("a", 2), TypeError, "window_size must hold int or None, got str 'a'"),
    ("softcap", NAN, ValueError, "softcap must be finite and not negative, got nan"),
    ("softcap", INF, ValueError, "softcap must be finite and not negative, got inf"),
    ("softcap", -1, ValueError, "softcap must be finite and not negative, got -1"),
    ("softcap", None, TypeError, "softcap must be a number, got NoneType None"),
    ("alibi_slopes", torch.randn(3), ValueError, r"alibi_slopes must be .* \(2, 4\), got \(3\)"),
    ("alibi_slopes", torch.randn(1, H), ValueError, r"alibi_slopes must be .* got \(1, 4\)"),
    ("alibi_slopes", torch.ones(H, dtype=torch.int32), TypeError, "alibi_slopes must be a float.* got torch.int32"),
    ("alibi_slopes", torch.randn(H, requires_grad=True), ValueError, "alibi_slopes must not require a gradient"),
    ("alibi_slopes", meta(H), ValueError, "alibi_slopes must be on cpu like q, got meta"),
    ("alibi_slopes", 0.5, TypeError, "alibi_slopes must be a torch.Tensor or None, got float 0.5"),
    ("bias", torch.randn(SQ, SK + 1), ValueError, r"bias must broadcast to .* = \(2, 4, 5, 7\), got \(5, 8\)"),
    ("bias", torch.randn(3, 1, SQ, SK), ValueError, r"bias must broadcast to .* got \(3, 1, 5, 7\)"),
    ("bias", torch.randn(HKV, SQ, SK), ValueError, r"bias must broadcast to .* got \(2, 5, 7\)"),
    ("bias", torch.randn(1, 1, 1, SQ, SK), ValueError, r"bias must broadcast to .* got \(1, 1, 1, 5, 7\)"),
    ("bias", torch.randn(SQ, 0), ValueError, r"bias must broadcast to .* got \(5, 0\)"),
    ("bias", torch.ones(SQ, SK, dtype=torch.int64), TypeError, "bias must be a float .* torch.bool .* got torch.int64"),
    ("bias", meta(SQ, SK), ValueError, "bias must be on cpu like q, got meta"),
    ("bias", [[0.0]], TypeError, "bias must be a torch.Tensor or None, got list"),
    ("sinks", torch.randn(HKV), ValueError, r"sinks must be \(heads,\) = \(4\), got \(2\)"),
    ("sinks", torch.randn(1, H), ValueError, r"sinks must be .* got \(1, 4\)"),
    ("sinks", torch.ones(H, dtype=torch.bool), TypeError, "sinks must be a float tensor, got torch.bool"),
    ("sinks", meta(H), ValueError, "sinks must be on cpu like q, got meta"),
    ("sinks", True, TypeError, "sinks must be a torch.Tensor or None, got bool True"),
    ("block_mask", torch.ones(3, 4, dtype=torch.bool), TypeError, "block_mask must be a .*BlockMask .* got a tensor"),
    ("block_mask", mask(seqlen_q=6), ValueError, "block_mask must be made for seqlen_q 5 and seqlen_k 7, got 6 and 7"),
    ("block_mask", mask(seqlen_k=8), ValueError, "block_mask must be made for .* got 5 and 8"),
    ("block_mask", mask(blocks=(3, 1, 3, 4)), ValueError, r"block_mask must have blocks .* got \(3, 1, 3, 4\)"),
    ("block_mask", mask(blocks=(1, HKV, 3, 4)), ValueError, r"block_mask must have blocks .* got \(1, 2, 3, 4\)"),
    ("block_mask", mask().to("meta"), ValueError, "block_mask must be on cpu like q, got meta"),
    ("dropout_p", 1.0, ValueError, r"dropout_p must be in \[0, 1\), got 1"),
    ("dropout_p", -0.1, ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    ("dropout_p", NAN, ValueError, r"dropout_p must be in \[0, 1\), got nan"),
    ("dropout_p", "0.1", TypeError, "dropout_p must be a number, got str '0.1'"),
    ("dropout_p", None, TypeError, "dropout_p must be a number, got NoneType None"),
    ("version", "fa4", ValueError, "version must be None or one of 'fa1', 'fa2', 'fa3', got 'fa4'"),
    ("version", 2, TypeError, 'version must be None, "fa1", "fa2" or "fa3", got int 2'),
    ("version", ["fa2"], TypeError, "version must be None, .* got list"),
    ("version", "fa3", RuntimeError, "fa3 comes later, .* 9.0, got tensors on the CPU; use version"),
    ("deterministic", "yes", TypeError, "deterministic must be True, False or None, got str 'yes'"),
    ("layout", "sbhd", ValueError, r"""layout must be "bshd" .* or "bhsd" .* got str 'sbhd'"""),
    ("layout", 0, ValueError, "layout must be .* got int 0"),
]  # fmt: skip


@pytest.mark.parametrize("argument, value, error, pattern", BAD, ids=[case[0] for case in BAD])
def test_bad_argument(argument, value, error, pattern):
    arguments = good(**{argument: value})
    state = torch.get_rng_state()
    expect(error, r"flash_cuda\.attention: .*" + pattern, lambda: flash_cuda.attention(**arguments))
    assert torch.equal(torch.get_rng_state(), state), "a refused call drew random numbers"


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("dims", [1, 2, 3, 5])
def test_bad_rank_in_the_other_layout(argument, dims):
    tensors = {name: t.transpose(1, 2) for name, t in good().items()}
    tensors[argument] = torch.randn((2,) * dims)
    order = rf"{argument} must have 4 dimensions \(batch, heads, seqlen_., head_dim\), got {dims} \(2,"
    expect(ValueError, order, lambda: flash_cuda.attention(**tensors, layout="bhsd"))


def test_bad_type_in_the_other_layout():
    arguments = good(k=None, layout="bhsd")
    expect(TypeError, "k must be a torch.Tensor, got NoneType None", lambda: flash_cuda.attention(**arguments))


BAD_PACKED = [
    ("q", torch.randn(B, SQ, H, D), ValueError, r"q must have 3 dimensions \(total_q, heads, head_dim\), got 4"),
    ("k", torch.randn(SK, D), ValueError, r"k must have 3 dimensions \(total_k, heads, head_dim\), got 2"),
    ("v", torch.randn(SK - 1, HKV, D), ValueError, "v must have the rows of k, 7, got 6"),
    ("q", torch.randn(SQ, 3, D), ValueError, "heads of q must be a multiple of the heads of k, 2, got 3"),
    ("cu_seqlens_q", offsets(0, 2, 5, dtype=torch.int64), TypeError, "cu_seqlens_q must be .*int32, got torch.int64"),
    ("cu_seqlens_k", offsets(0, 4, 7, dtype=torch.float32), TypeError, "cu_seqlens_k must be .*int32, got .*float32"),
    ("cu_seqlens_q", offsets(1, 2, 5), ValueError, "cu_seqlens_q must start at 0, got 1"),
    ("cu_seqlens_k", offsets(0, 8, 7), ValueError, "max_seqlen_k must be at least the longest sequence, 8, got 4"),
    ("cu_seqlens_q", offsets(0, 3, 2), ValueError, "cu_seqlens_q must not decrease, got 2 after 3 at index 2"),
    ("cu_seqlens_q", offsets(0, -2, 5), ValueError, "cu_seqlens_q must not decrease, got -2 after 0 at index 1"),
    ("cu_seqlens_q", offsets(0, 3, 6), ValueError, "cu_seqlens_q must end at the rows of q, 5, got 6"),
    ("cu_seqlens_k", offsets(0, 3, 6), ValueError, "cu_seqlens_k must end at the rows of k, 7, got 6"),
    ("cu_seqlens_k", offsets(0, 7), ValueError, r"cu_seqlens_k must be a 1-D tensor of batch \+ 1 .* got shape \(2\)"),
    ("cu_seqlens_q", offsets(0, 2, 5)[None], ValueError, r"cu_seqlens_q must be a 1-D tensor .* got shape \(1, 3\)"),
    ("cu_seqlens_q", offsets(), ValueError, r"cu_seqlens_q must hold batch \+ 1 offsets, got none"),
    ("cu_seqlens_q", None, TypeError, "cu_seqlens_q must be a torch.Tensor, got NoneType"),
    ("cu_seqlens_k", [0, 4, 7], TypeError, "cu_seqlens_k must be a torch.Tensor, got list"),
    ("cu_seqlens_k", offsets(0, 4, 7).to("meta"), ValueError, "cu_seqlens_k must be on cpu like q, got meta"),
    ("max_seqlen_q", 2, ValueError, "max_seqlen_q must be at least the longest sequence, 3, got 2"),
    ("max_seqlen_k", -1, ValueError, "max_seqlen_k must not be negative, got -1"),
    ("max_seqlen_q", 3.5, TypeError, "max_seqlen_q must be an int below .* got float 3.5"),
    ("max_seqlen_k", 2**70, TypeError, "max_seqlen_k must be an int below .* got int"),
    ("bias", torch.randn(SQ, SK), ValueError, r"bias must .*max_seqlen_q, max_seqlen_k\) = \(2, 4, 3, 4\)"),
    ("block_mask", mask(), ValueError, "block_mask must be made for seqlen_q 3 and seqlen_k 4, got 5 and 7"),
    ("dropout_p", 2.0, ValueError, r"dropout_p must be in \[0, 1\), got 2"),
    ("version", "fa3", RuntimeError, "fa3 comes later"),
]  # fmt: skip


@pytest.mark.parametrize("argument, value, error, pattern", BAD_PACKED, ids=[case[0] for case in BAD_PACKED])
def test_bad_packed_argument(argument, value, error, pattern):
    call = lambda: flash_cuda.attention_varlen(**good_packed(**{argument: value}))  # noqa: E731
    expect(error, r"flash_cuda\.attention_varlen: .*" + pattern, call)


BAD_MASK = [
    ("batch", -1, ValueError, "batch must not be negative, got -1"),
    ("heads", 1.5, TypeError, "heads must be an int .*, got float 1.5"),
    ("seqlen_q", 2**70, TypeError, r"seqlen_q must be an int below 2\*\*62, got int"),
    ("seqlen_k", "7", TypeError, "seqlen_k must be an int .*, got str '7'"),
    ("dropout_p", 1.0, ValueError, r"dropout_p must be in \[0, 1\), got 1"),
    ("dropout_p", None, TypeError, "dropout_p must be a number, got NoneType"),
    ("device", "warp", ValueError, "device must be a torch.device or its name, got str 'warp'"),
    ("seed", 17, TypeError, "seed must be a tensor or None, got int 17"),
    ("seed", torch.tensor([1]), ValueError, r"seed must have shape \(2\), got \(1\)"),
    ("seed", torch.tensor([1.0, 2.0]), TypeError, "seed must be torch.int64, got torch.float32"),
]


@pytest.mark.parametrize("argument, value, error, pattern", BAD_MASK, ids=[case[0] for case in BAD_MASK])
def test_bad_argument_of_dropout_mask(argument, value, error, pattern):
    arguments = {"batch": 1, "heads": 2, "seqlen_q": 3, "seqlen_k": 4, "dropout_p": 0.5} | {argument: value}
    expect(error, r"flash_cuda\.dropout_mask: " + pattern, lambda: flash_cuda.dropout_mask(**arguments))


def backward(**changes):
    """Calls the backward op with arguments that are right, but for the changes."""
    q, k, v = good().values()
    out, lse = flash_cuda.attention(q, k, v, return_lse=True)
    given = {"dout": torch.randn_like(out), "dlse": None, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    options = dict.fromkeys(flash_cuda.ops.OPTIONS, 0) | {"softmax_scale": None, "window_left": -1, "window_right": -1}
    tensors = ("dropout_seed", "cu_seqlens_q", "cu_seqlens_k", "bias", "alibi_slopes", "sinks", "block_mask")
    options |= dict.fromkeys(tensors)
    options |= {"version": 2, "output_mask": [True, True, True, False, False]}
    torch.ops.flash_cuda.bwd(**(given | options | changes))


BAD_BACKWARD = [
    ("dout", torch.randn(B, SQ, H, 9), ValueError, r"dout must .* shape of q, \(2, 5, 4, 8\), got \(2, 5, 4, 9\)"),
    ("dout", torch.randn(B, SQ, H, D).half(), TypeError, "dout must have the dtype of q, .* got torch.float16"),
    ("out", torch.randn(B, SQ + 1, H, D), ValueError, "out must have the shape of q"),
    ("lse", torch.randn(B, SQ, H), ValueError, r"lse must have shape \(batch, heads, seqlen_q\), got \(2, 5, 4\)"),
    ("lse", torch.randn(B, H, SQ).double(), TypeError, "lse must be torch.float32, got torch.float64"),
    ("dlse", torch.randn(B, H), ValueError, "dlse must have the shape of lse"),
    ("output_mask", [True, True, True, True, False], ValueError, "output_mask must ask for dbias only .* got None"),
    ("output_mask", [False, False, False, False, True], ValueError, "output_mask must ask for dsinks only .* got None"),
    ("version", 3, RuntimeError, "version must be 1 or 2 for tensors on the CPU, got 3"),
    ("version", 4, ValueError, "version must be 1, 2 or 3, got 4"),
    ("causal", 3, ValueError, "causal must be 0 .* got 3"),
    ("window_left", -2, ValueError, r"window_size must not be negative, got \(-2, -1\)"),
    ("dropout_p", 0.5, ValueError, "dropout_seed must be given when dropout_p is not 0, got None"),
    ("cu_seqlens_q", offsets(0, 5), ValueError, "q must have 3 dimensions"),
]  # fmt: skip


@pytest.mark.parametrize("argument, value, error, pattern", BAD_BACKWARD, ids=[case[0] for case in BAD_BACKWARD])
def test_bad_argument_of_the_backward_op(argument, value, error, pattern):
    expect(error, pattern, lambda: backward(**{argument: value}))


BAD_PREPROCESS = [
    ((torch.randn(2, 3), torch.randn(2, 3), None), ValueError, "out must have 3 or 4 dimensions, got 2"),
    ((torch.randn(2, 3, 4), torch.randn(2, 3, 5), None), ValueError, "dout must have the shape of out"),
    ((torch.randn(2, 3, 4), torch.randn(2, 3, 4).half(), None), TypeError, "dout must have the dtype of out"),
    ((torch.ones(2, 3, 4).int(), torch.ones(2, 3, 4).int(), None), TypeError, "out must be float32"),
    ((torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 3)), ValueError, r"dlse must have shape \(3, 2\)"),
    ((torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(3, 2).half()), TypeError, "dlse must be torch.float32"),
]


@pytest.mark.parametrize("args, error, pattern", BAD_PREPROCESS, ids=[case[2] for case in BAD_PREPROCESS])
def test_bad_argument_of_bwd_preprocess(args, error, pattern):
    expect(error, pattern, lambda: torch.ops.flash_cuda.bwd_preprocess(*args))


def test_bad_settings():
    expect(ValueError, "name must be one of .*generic, got mmx", lambda: _C.set_cpu_isa("mmx"))
    expect(ValueError, "bytes must be positive, got 0", lambda: _C.set_cpu_fast_memory(0))


# ---- dispatch: every reason, and never a fallback


def cuda_reasons(monkeypatch, *, built, capability):
    monkeypatch.setattr(_C, "cuda_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "shared_memory", lambda device: {(9, 0): 232448, (8, 6): 101376}.get(capability, 0))
    monkeypatch.setattr(_C, "cuda_archs", lambda: ["86", "90a"])
    cuda = torch.device("cuda", 0)
    return {v: dispatch.reasons(v, device=cuda, dtype=torch.bfloat16, head_dim=64) for v in dispatch.VERSIONS}


NO_KERNEL = ("fa1", "fa3")  # on CUDA, in this release


@pytest.mark.parametrize("version", [None, "fa1", "fa2", "fa3"])
def test_cuda_tensors_get_every_reason(monkeypatch, version):
    cuda_reasons(monkeypatch, built=False, capability=(8, 0))
    cuda = torch.device("cuda", 0)
    tried = [version] if version else ["fa3", "fa2"]
    with pytest.raises(RuntimeError if version == "fa2" else NotImplementedError) as caught:
        dispatch.choose(version, device=cuda, dtype=torch.bfloat16, head_dim=64)
    message = str(caught.value)
    assert message.startswith("flash_cuda.attention: no kernel for q on cuda:0: ") and "\n" not in message
    for name in tried:
        assert (f"{name} needs an attention kernel for CUDA tensors" in message) == (name in NO_KERNEL)
        assert f"{name} needs CUDA kernels in the build" in message
    assert ("fa3 needs compute capability 9.0 or newer, got 8.0" in message) == ("fa3" in tried)


def test_reasons_name_what_is_missing(monkeypatch):
    by_version = cuda_reasons(monkeypatch, built=True, capability=(7, 5))
    for version, found in by_version.items():
        assert [r.kind for r in found] == ["here"] * (1 + (version in NO_KERNEL))
        assert found[-1].rule.startswith(f"{version} needs compute capability") and found[-1].value == "7.5"
    by_version = cuda_reasons(monkeypatch, built=True, capability=(9, 0))
    assert {version: len(found) for version, found in by_version.items()} == {"fa1": 1, "fa2": 0, "fa3": 1}


def test_a_build_without_code_for_the_gpu_says_how_to_get_it(monkeypatch):
    (reason,) = cuda_reasons(monkeypatch, built=True, capability=(8, 0))["fa2"]
    assert reason.kind == "here" and reason.value == "code for 86, 90a" and "compute capability 8.0" in reason.rule
    assert "FLASH_CUDA_ARCHS=80 " in reason.fix


def test_reasons_of_a_cuda_call(monkeypatch):
    cuda_reasons(monkeypatch, built=True, capability=(8, 6))
    cuda = {"device": torch.device("cuda", 0), "dtype": torch.float16, "head_dim": 64}
    reasons = lambda **changes: dispatch.reasons("fa2", **(cuda | changes))  # noqa: E731
    assert reasons() == []
    for limit, name in ((2**29, "rows"), (2**31 - 1, "packed_rows"), (2**31 - 1, "heads")):
        assert reasons(**{name: limit}) == []
        (reason,) = reasons(**{name: limit + 1})
        assert (reason.kind, reason.value) == ("input", str(limit + 1)) and f"at most {limit} " in reason.rule
    (reason,) = reasons(head_dim=264)
    assert (reason.kind, reason.value) == ("input", "264") and "head_dim of 1 to 256" in reason.rule
    (reason,) = reasons(dtype=torch.float32)
    assert (reason.kind, reason.value) == ("input", "torch.float32")
    features = dispatch.features_in_use(1.0, None, torch.ones(1), None, None, 0.5)
    (reason,) = reasons(features=features)
    assert (reason.kind, reason.value) == ("input", "softcap, bias, dropout_p")
    assert dispatch.features_in_use(0.0, None, None, None, None, 0) == ()
    assert dispatch.choose(None, **cuda) == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_reasons_on_the_cpu(version):
    cpu = {"device": torch.device("cpu"), "head_dim": 64}
    assert dispatch.reasons(version, dtype=torch.float16, **cpu) == []
    (reason,) = dispatch.reasons(version, dtype=torch.float8_e4m3fn, **cpu)
    assert (reason.kind, reason.value) == ("input", "torch.float8_e4m3fn")
    (reason,) = dispatch.reasons(version, dtype=torch.float16, device=torch.device("xpu"), head_dim=64)
    assert (reason.kind, reason.value) == ("input", "xpu")


def test_cuda_tensors_are_refused_by_the_call():
    # Fake tensors say that they are on a GPU, on any machine; slicing them would need a torch built for CUDA.
    with torch._subclasses.FakeTensorMode():
        padded = {name: torch.empty(2, 4, 2, 8, device="cuda") for name in "qkv"}
        expect(NotImplementedError, "no kernel for q on cuda:0", lambda: flash_cuda.attention(**padded), 900)
        packed = good_packed(**{name: torch.empty(4, 2, 8, device="cuda") for name in "qkv"})
        expect(NotImplementedError, "no kernel for q on cuda:0", lambda: flash_cuda.attention_varlen(**packed), 900)


def test_errors_arrive_through_compile():
    compiled = torch.compile(flash_cuda.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="flash_cuda.attention: softmax_scale must be finite and not negative, got -1"):
        compiled(**good(), softmax_scale=-1.0)
