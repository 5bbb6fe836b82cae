"""The CUDA kernels of fa2 without a GPU: csrc/fa2 compiled by the C++ compiler over tests/emulator, on CPU tensors.

`attention` and `attention_varlen` take what flash_cuda's take and a kernel of fa2 has. They do what the bindings do
around a launch; outputs and workspaces start as NaN.
"""

import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_double, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = ROOT / "tests" / "emulator"
FLAGS = ("-std=c++17 -O1 -fPIC -fvisibility=default -ffp-contract=off -U_FORTIFY_SOURCE -w"
         " -fsanitize=alignment -fsanitize-undefined-trap-on-error")
DTYPES = {torch.bfloat16: 1, torch.float16: 2}
# GPUs: the __CUDA_ARCH__ of the code that runs there, and the KB of shared memory that a CTA may have. The last two are
# what PTX is for: an H200 with a build for sm_80 alone, and an sm_120 with one for sm_90.
ARCHS = {"sm_80": (800, 163), "sm_86": (800, 99), "sm_90": (900, 227), "sm_90 by sm_80": (800, 227),
         "sm_120 by sm_90": (900, 99)}  # fmt: skip


class TensorView(ctypes.Structure):
    _fields_ = [("ptr", c_void_p), ("batch_stride", c_int64), ("row_stride", c_int64), ("head_stride", c_int64)]


class RowView(ctypes.Structure):
    _fields_ = [("ptr", c_void_p), ("batch_stride", c_int64), ("head_stride", c_int64)]


class Params(ctypes.Structure):
    """BwdParams of csrc/flash.h, which begins with all of FwdParams and of Problem."""

    _fields_ = [
        *((n, c_int64) for n in ("batch", "heads", "heads_kv", "head_dim", "seqlen_q", "seqlen_k")),
        ("cu_seqlens_q", c_void_p), ("cu_seqlens_k", c_void_p), ("dtype", c_int32),
        ("softmax_scale", c_double), ("softcap", c_double), ("causal", c_int32),
        ("window_left", c_int64), ("window_right", c_int64),
        ("alibi_slopes", c_void_p), ("alibi_batch_stride", c_int64),
        ("bias", c_void_p), ("bias_dtype", c_int32), ("bias_stride", c_int64 * 4), ("sinks", c_void_p),
        ("block_mask", c_void_p), ("block_mask_stride", c_int64 * 4), ("block_mask_q", c_int64),
        ("block_mask_k", c_int64), ("dropout_p", c_double), ("dropout_seed", c_void_p),
        *((n, TensorView) for n in ("q", "k", "v", "out")), ("lse", RowView),
        *((n, TensorView) for n in ("dout", "dq", "dk", "dv")), ("dlse", RowView), ("delta", RowView),
        ("dq_accum", c_void_p), ("dq_tiles_of_head", c_int64), ("dq_tile_size", c_int64), ("dq_turns", c_void_p),
        ("dbias", c_void_p), ("dbias_size", c_int64 * 4), ("dsinks", c_void_p),
    ]  # fmt: skip


class KernelPlan(ctypes.Structure):
    _fields_ = [*((n, c_int32) for n in ("head_dim", "block_m", "block_n", "threads", "smem_bytes")), ("grid", c_int64)]


LAUNCH = re.compile(r"(\w+(?:<[^<>;]*(?:<[^<>;]*>[^<>;]*)?>)?)<<<(.*?)>>>\(")
SHARED = re.compile(r"extern __shared__ __align__\(\d+\) char (\w+)\[\];")


@functools.cache
def library(arch, edit=None):
    """The kernels as code for `arch`, compiled once for each content.

    edit: (text, other text): what to change in them, to see that a test would notice.
    """
    number = ARCHS[arch][0]
    sources = sorted(p for f in ("core", "fa2", "kernels") for p in (ROOT / "csrc" / f).iterdir()) + [ROOT / "csrc/flash.h"]
    digest = hashlib.sha256(f"{FLAGS} {number} {edit}".encode())
    for path in (*sources, *sorted(p for p in EMULATOR.rglob("*") if p.is_file()), Path(__file__)):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "emulator" / digest.hexdigest()[:20]
    if not (folder / "kernels.so").exists():
        _compile(folder, sources, number, edit)
    lib = ctypes.CDLL(str(folder / "kernels.so"))
    lib.error.restype, lib.bank_conflicts.restype = ctypes.c_char_p, c_int64
    lib.dropout_mask.argtypes = [c_void_p, c_void_p, c_double] + 4 * [c_int64]
    sizes = (c_int64 * 3)()
    lib.sizes(sizes)
    assert list(sizes) == [Params.dout.offset, ctypes.sizeof(Params), ctypes.sizeof(KernelPlan)], "csrc/flash.h changed"
    return lib


def _compile(folder, sources, number, edit):
    stage = folder / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    edited = 0
    for path in sources:  # the kernels as they are, but for the two things that no C++ compiler can read
        text = path.read_text()
        if edit:
            edited += text.count(edit[0])
            text = text.replace(*edit)
        text = SHARED.sub(r"char* \1 = emulator::shared_memory();", text)
        text = LAUNCH.sub(r"emulator::launch(\1, \2)(", text)
        assert "<<<" not in text and "extern __shared__" not in text, path
        to = stage / path.relative_to(ROOT / "csrc")
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)
    assert edited == (edit is not None), f"{edited} places to edit"
    shutil.copytree(EMULATOR / "ptx", stage / "ptx")
    units = [*sorted(stage.rglob("*.cu")), EMULATOR / "face.cpp"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))

    def compile_one(unit):
        out = folder / f"{unit.stem}.o"
        command = [*compiler, *FLAGS.split(), f"-D__CUDA_ARCH__={number}", f"-I{EMULATOR}", f"-I{stage}", "-x", "c++", "-c"]
        subprocess.run([*command, str(unit), "-o", str(out)], check=True)
        return str(out)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, units))
    subprocess.run([*compiler, "-shared", *objects, "-o", str(folder / "kernels.tmp")], check=True)
    (folder / "kernels.tmp").rename(folder / "kernels.so")


# ---- what csrc/torch/ops_cuda.cpp does around a launch


def _is_aligned(t):
    return (t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0 and (t.shape[-1] == 1 or t.stride(-1) == 1)
            and all(t.shape[d] == 1 or t.stride(d) % 8 == 0 for d in range(t.dim() - 1)))


def _rows(t):
    return t if _is_aligned(t) else torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)).contiguous()


def _nan_like(t, head_dim=None, dtype=None):
    return torch.full((*t.shape[:-1], head_dim or t.shape[-1]), float("nan"), dtype=dtype or t.dtype)


def _view(t):
    """A TensorView of (batch, seqlen, heads, head_dim), or of packed (total, heads, head_dim)."""
    strides = [0 if size == 1 else stride for size, stride in zip(t.shape, t.stride())]
    batch, row, head = (0, *strides[:2]) if t.dim() == 3 else strides[:3]
    return TensorView(t.data_ptr(), batch, row, head)


def _row_view(t):
    return RowView(t.data_ptr(), 0 if t.dim() == 2 else t.stride(0), t.stride(-2))


class Call:
    """One call's sizes and options, on one kind of GPU."""

    def __init__(self, q, k, packed, causal, softmax_scale, window_size, deterministic, arch, seed, late_copies,
                 edit):
        self.lib, self.arch, self.deterministic, self.packed = library(arch, edit), arch, deterministic, packed
        self.lib.schedule(seed, late_copies, ARCHS[arch][1] * 1024)
        smem = c_int32()
        assert self.lib.smem_available(byref(smem)) == 0
        self.smem = smem.value
        left, right = window_size or (None, None)
        p = self.params = Params()
        p.head_dim, p.heads, p.heads_kv = -(-q.shape[-1] // 8) * 8, q.shape[-2], k.shape[-2]
        if packed:
            p.batch, p.seqlen_q, p.seqlen_k = len(packed[0]) - 1, *packed[2:]
            p.cu_seqlens_q, p.cu_seqlens_k = packed[0].data_ptr(), packed[1].data_ptr()
        else:
            p.batch, p.seqlen_q, p.seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        p.dtype = DTYPES[q.dtype]
        p.softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        p.causal = {False: 0, True: 1, "top_left": 2}[causal]
        p.window_left, p.window_right = (-1 if side is None else side for side in (left, right))

    def plan(self, backward):
        plan = KernelPlan()
        self.lib.plan(backward, byref(self.params), self.smem, byref(plan))
        return plan

    def run(self, function, *args):
        code = function(byref(self.params), *args)
        if code or self.lib.error():
            raise RuntimeError(f"emulated {self.arch}: error {code}: {self.lib.error().decode()}")

    def forward(self, q, k, v):
        q, k, v = map(_rows, (q, k, v))
        p = self.params
        out = _nan_like(q)
        lse = torch.full((q.shape[1], q.shape[0]) if self.packed else (q.shape[0], q.shape[2], q.shape[1]), float("nan"))
        p.q, p.k, p.v, p.out, p.lse = _view(q), _view(k), _view(v), _view(out), _row_view(lse)
        self.run(self.lib.forward)
        return out, lse

    def backward(self, q, k, v, out, lse, dout, dlse, want_dq, want_dkv):
        q, k, v, out, dout = map(_rows, (q, k, v, out, dout))
        p, plan = self.params, self.plan(True)
        p.q, p.k, p.v, p.out, p.lse, p.dout = _view(q), _view(k), _view(v), _view(out), _row_view(lse), _view(dout)
        delta = torch.full_like(lse, float("nan"))
        p.delta = _row_view(delta)
        if dlse is not None:
            dlse = dlse.contiguous()
            p.dlse = _row_view(dlse)
        dq, dk, dv = _nan_like(q), _nan_like(k), _nan_like(v)
        if want_dq:
            p.dq = _view(dq)
            p.dq_tiles_of_head = (q.shape[0] // plan.block_m + p.batch if self.packed
                                  else p.batch * -(-p.seqlen_q // plan.block_m))
            tiles = p.heads * p.dq_tiles_of_head
            dq_accum = torch.full((tiles, plan.block_m, plan.head_dim), float("nan"))
            p.dq_accum = dq_accum.data_ptr()
            if self.deterministic:
                dq_turns = torch.full((1 + tiles,), -7, dtype=torch.int32)
                p.dq_turns = dq_turns.data_ptr()
        if want_dkv:
            p.dk, p.dv = _view(dk), _view(dv)
        self.run(self.lib.backward, self.smem)
        return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, packed, options):
        ctx.call = Call(q, k, packed, **options)
        out, lse = ctx.call.forward(q, k, v)
        out = out[..., : q.shape[-1]]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        want = ctx.needs_input_grad
        dq, dk, dv = ctx.call.backward(q, k, v, out, lse, dout, dlse, want[0], want[1] or want[2])
        d = q.shape[-1]
        return (dq[..., :d] if want[0] else None, dk[..., :d] if want[1] else None, dv[..., :d] if want[2] else None,
                None, None)


def attention(q, k, v, *packed, causal=False, softmax_scale=None, window_size=None, deterministic=False,
              return_lse=False, layout="bshd", arch="sm_90", seed=0, late_copies=True, edit=None):
    """flash_cuda.attention by the emulated kernels of fa2, as a GPU of `arch` would run them.

    seed: the order in which warps run. late_copies: cp.async lands when it is waited for, and else at once. edit: as in
    `library`.
    """
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size, "arch": arch,
               "deterministic": deterministic, "seed": seed, "late_copies": late_copies, "edit": edit}
    out, lse = _Attention.apply(q, k, v, packed, options)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, lse) if return_lse else out


attention_varlen = attention


def dropout_mask(keep, seed, p):
    """Fills keep, uint8 (batch, heads, seqlen_q, seqlen_k)."""
    lib = library("sm_90")
    lib.schedule(0, True, 0)
    assert lib.dropout_mask(keep.data_ptr(), seed.data_ptr(), p, *keep.shape) == 0, lib.error()
