"""`python -m flash_cuda bench --device cuda`: the CUDA kernels against torch's attention, side by side in one run.

A cell is one shape, mask and pass. Its contestants pass a correctness gate, then they are timed one after the other, in
the two kinds of bench_gpu_timing.py. What is made of the times: bench_gpu_report.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_cuda
from flash_cuda import bench_common, dispatch, reference
from flash_cuda import bench_gpu_report as report
from flash_cuda.bench_common import GateError
from flash_cuda.bench_gpu_timing import host_times, matrix_rate, time_kinds

DEFAULTS = {
    "seqlen": [1024, 4096, 16384], "head_dim": [64, 128, 256], "dtype": ["bfloat16"], "mask": bench_common.MASKS,
    "passes": bench_common.PASSES, "version": (), "tokens": 16384, "hidden": 2048,
    "peer": ("torch-flash", "torch-cudnn"), "small": False,
}  # fmt: skip
DTYPES = ("bfloat16", "float16")
SDPA = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch-efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip
SMALL_SEQLENS = (512, 1024)


@dataclass(frozen=True)
class Shape:
    """What the tensors of a cell look like; bench_gpu_report.Row has the same names."""

    dtype: str
    size: str
    mask: str
    head_dim: int
    seqlen: int
    batch: int
    heads: int


def shapes(args) -> list[Shape]:
    lengths = [("large", seqlen, max(1, args.tokens // seqlen)) for seqlen in args.seqlen]
    lengths += [("small", seqlen, 1) for seqlen in SMALL_SEQLENS if args.small]
    return [
        Shape(dtype, size, mask, head_dim, seqlen, batch, max(1, args.hidden // head_dim))
        for dtype, head_dim, mask, (size, seqlen, batch) in product(args.dtype, args.head_dim, args.mask, lengths)
    ]


def make_call(name: str, causal: bool, seqlen: int, device: torch.device) -> tuple[Callable, bool, Callable]:
    """(the call, whether it takes heads before seqlen, the context that it runs in); raises where it cannot be had."""
    if name in dispatch.VERSIONS:
        return functools.partial(flash_cuda.attention, causal=causal, version=name), False, contextlib.nullcontext
    if name in SDPA:
        # The context stays open for all launches: opening it costs more host time than a call.
        call = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        return call, True, functools.partial(sdpa_kernel, SDPA[name])
    if name == "flex":
        from torch._functorch import config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch.compiler.reset()  # it gives up compiling, and runs slowly, after a few shapes
        config.donated_buffer = False  # a graph that runs backward more than once needs its buffers
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device) if causal else None
        return functools.partial(torch.compile(flex_attention), block_mask=mask), True, contextlib.nullcontext
    from flash_attn import flash_attn_func

    return functools.partial(flash_attn_func, causal=causal), False, contextlib.nullcontext


class Contestant:
    """One way to compute attention on fixed inputs (batch, seqlen, heads, head_dim): q, k, v, dout."""

    def __init__(self, name: str, inputs: tuple[torch.Tensor, ...], causal: bool):
        self.name = name
        self.call, self.heads_first, self.context = make_call(name, causal, inputs[0].shape[1], inputs[0].device)
        *qkv, self.dout = (x.transpose(1, 2) if self.heads_first else x for x in inputs)
        self.qkv = [x.detach().requires_grad_() for x in qkv]
        self.out = None

    @contextlib.contextmanager
    def ready(self, pass_: str) -> Iterator[Callable]:
        """What launches the pass alone: for backward, forward has run once and its graph is kept."""
        with self.context(), torch.set_grad_enabled(pass_ == "backward"):
            if pass_ == "backward" and self.out is None:
                self.out = self.call(*self.qkv)
            yield self.backward if pass_ == "backward" else lambda: self.call(*self.qkv)

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.out, self.qkv, self.dout, retain_graph=True)

    def results(self, pass_: str) -> list[torch.Tensor]:
        """The output or the gradients, (batch, seqlen, heads, head_dim)."""
        with self.ready(pass_) as launch:
            # The allocator is likely to hand this memory out next: what a kernel leaves unwritten shall not look right.
            poison = [torch.full_like(x, math.nan) for x in self.qkv]
            del poison
            results = launch() if pass_ == "backward" else (launch(),)
            torch.cuda.synchronize()
        return [x.detach().transpose(1, 2) if self.heads_first else x.detach() for x in results]


def one_line(error: Exception, noted: list[warnings.WarningMessage] = ()) -> str:
    """Why something did not run; torch puts its reasons against a backend into warnings."""
    why = [str(w.message).split(" (Triggered")[0].strip() for w in noted]
    why = [w for w in why if "not used because" not in w and "disabled" not in w]
    return "; ".join([(str(error).strip() or type(error).__name__).splitlines()[0], *dict.fromkeys(why)])


def exact(inputs: tuple[torch.Tensor, ...], causal: bool, heads: list[int], rows: int = 1024) -> dict[str, list]:
    """Output and gradients in float64 for some heads of the last sequence, so many query rows at a time."""
    q, k, v, dout = (x[-1:, :, heads].double() for x in inputs)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    outs, dqs = [], []
    seqlen = q.shape[1]
    for start in range(0, seqlen, rows):
        end = min(start + rows, seqlen)
        seen = end if causal else seqlen  # the mask is aligned to the bottom right, so these rows keep their keys
        part = [x.clone().requires_grad_() for x in (q[:, start:end], k[:, :seen], v[:, :seen])]
        out = reference.attention(*part, causal=causal)
        dq, *dkv = torch.autograd.grad(out, part, dout[:, start:end])
        for total, share in zip((dk, dv), dkv):
            total[:, :seen] += share
        outs.append(out.detach())
        dqs.append(dq)
    return {"forward": [torch.cat(outs, 1)], "backward": [torch.cat(dqs, 1), dk, dv]}


def gate(
    contestants: list[Contestant], pass_: str, truth: list[torch.Tensor], heads: list[int], note: Callable
) -> list[Contestant]:
    """Those that can be timed. A peer that raises or is far off, and a version that has no kernel for this, is noted
    and left out; a version that is wrong is an error."""
    results = {}
    for c in contestants:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            try:
                results[c] = c.results(pass_)
            except NotImplementedError as error:
                note(c.name, one_line(error))
            except Exception as error:  # a peer may raise whatever it likes
                if c.name in dispatch.VERSIONS:
                    raise GateError(f"{c.name} raised {one_line(error)}; nothing is timed") from error
                note(c.name, one_line(error, noted))

    if not results:
        return []

    def errors(c):
        pairs = zip(results[c], truth, strict=True)
        return [(x[-1:, :, heads].double() - want).abs().max().item() for x, want in pairs]

    largest = [want.abs().max().item() for want in truth]
    eps = torch.finfo(contestants[0].dout.dtype).eps
    peers = {c: errors(c) for c in results if c.name not in dispatch.VERSIONS}
    for c, found in list(peers.items()):
        if not all(error <= 32 * eps * x for error, x in zip(found, largest)):  # then it is no measure for others
            note(c.name, f"its {pass_} is wrong, by up to {max(found):.3g}")
            del results[c], peers[c]
    for c in [c for c in results if c.name in dispatch.VERSIONS]:
        for i, error in enumerate(errors(c)):
            what = "out" if pass_ == "forward" else ("dq", "dk", "dv")[i]
            allowed = bench_common.allowed_error(max((e[i] for e in peers.values()), default=0), eps, largest[i])
            if not error <= allowed:
                raise GateError(f"{c.name}: {what} is wrong, expected an error of at most {allowed:.3g}, got "
                                f"{error:.3g}; nothing is timed")  # fmt: skip
            for peer in peers:  # float64 saw few heads; all the others are as close to the peers' as these
                apart = (results[c][i] - results[peer][i]).abs().max().item()
                if not apart <= 2 * allowed:
                    raise GateError(f"{c.name}: {what} is wrong, expected at most {2 * allowed:.3g} from {peer.name}, "
                                    f"got {apart:.3g}; nothing is timed")  # fmt: skip
    return list(results)


def runs(versions, shape: Shape, device: torch.device, note: Callable) -> list[str]:
    """The versions that dispatch lets run; of the others, why not."""
    found = []
    for version in versions:
        why = dispatch.reasons(version, device=device, dtype=getattr(torch, shape.dtype), head_dim=shape.head_dim)
        if why:
            note(version, " | ".join(map(str, why)))
        else:
            found.append(version)
    return found


def measure(args, device: torch.device, console: Console) -> tuple[list[report.Row], list[str]]:
    """(rows, what went wrong). The CSV is written after every cell, so that a run that is cut off leaves its rows."""
    about = {"commit": args.commit or bench_common.commit(), "device": torch.cuda.get_device_name(),
             "torch": torch.__version__}  # fmt: skip
    rows: list[report.Row] = []
    wrong: list[str] = []
    noted = set()
    rate = matrix_rate(device)
    planned = shapes(args)
    with Progress(*bench_common.PROGRESS, console=console) as progress:

        def note(name, why):
            if (name, why) not in noted:
                noted.add((name, why))
                progress.console.print(f"{name} is not timed in {words}: {why}", style="yellow")

        task = progress.add_task("", total=len(planned) * len(args.passes))
        for shape in planned:
            generator = torch.Generator(device).manual_seed(bench_common.SEED)
            size = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
            truth = contestants = inputs = None  # gives the memory of the last shape back first
            heads = sorted({0, shape.heads - 1})  # the others would only repeat the kernel at the price of float64
            for pass_ in args.passes:
                words = f"{pass_} {shape.head_dim} {shape.mask} {shape.seqlen} {shape.dtype} {shape.size}"
                progress.update(task, description=words)
                try:
                    if contestants is None:
                        inputs = tuple(
                            torch.randn(size, device=device, dtype=getattr(torch, shape.dtype), generator=generator)
                            for _ in range(4)
                        )
                        truth = exact(inputs, shape.mask == "causal", heads)
                        contestants = enter(args, shape, inputs, note)
                    times = {}
                    for c in gate(contestants, pass_, truth[pass_], heads, note):
                        with c.ready(pass_) as launch:
                            times[c.name] = time_kinds(launch)
                except (GateError, RuntimeError) as error:
                    wrong.append(f"{words}: {one_line(error)}")
                    progress.console.print(f"FAILED: {wrong[-1]}", style="bold red")
                    if not usable():
                        return rows, wrong
                    continue
                finally:
                    progress.advance(task)
                flop = bench_common.flop(pass_, shape.mask, *size[:1], shape.heads, shape.seqlen, shape.head_dim)
                cell = report.make_rows(about | asdict(shape) | {"pass_": pass_}, flop, times, rate)
                if cell and args.csv:
                    bench_common.write_csv(args.csv, cell)
                rows += cell
    return rows, wrong


def enter(args, shape: Shape, inputs: tuple[torch.Tensor, ...], note: Callable) -> list[Contestant]:
    """The versions, then the peers that this machine has."""
    causal = shape.mask == "causal"
    versions = runs(args.version or dispatch.VERSIONS, shape, inputs[0].device, note)
    found = [Contestant(version, inputs, causal) for version in versions]
    for name in args.peer:
        try:
            found.append(Contestant(name, inputs, causal))
        except (ImportError, RuntimeError) as error:
            note(name, one_line(error))
    return found


def usable() -> bool:
    """False after a launch that broke the CUDA context: nothing runs in this process any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main(args, console: Console) -> int:
    bench_common.settle(args, DEFAULTS)
    if not torch.cuda.is_available():
        raise RuntimeError(f"flash_cuda.bench: --device cuda needs a CUDA GPU, got none that torch {torch.__version__} "
                           "can use; leave --device out to time the CPU")  # fmt: skip
    if not set(args.dtype) <= set(DTYPES):
        raise ValueError(f"flash_cuda.bench: --dtype must be {' or '.join(DTYPES)} on cuda, got {' '.join(args.dtype)}")
    device = torch.device("cuda")
    for version, dtype, head_dim in product(args.version, args.dtype, args.head_dim):
        # What is named runs or raises; of the default, those that run are timed.
        dispatch.choose(version, device=device, dtype=getattr(torch, dtype), head_dim=head_dim, name="bench")
    if not console.is_terminal:
        console.width = 180  # a file has no width, and the table is wide
    rows, wrong = measure(args, device, console)
    if rows:
        console.print(report.table(rows))
        console.print(report.summary_table(report.summaries(rows)))
        if args.plot:
            report.plot(rows, args.plot)
            console.print(f"picture: {args.plot}")
        if args.csv:
            console.print(f"rows: {args.csv}")
    for why in wrong:
        console.print(f"FAILED: {why}", style="bold red")
    if usable():
        micros = host_times(report.contestants(rows)[0], device)
        console.print("host time of an eager call at batch 1, seqlen 128, heads 2, head_dim 64, launch included: "
                      + ", ".join(f"{name} {us:.1f} us" for name, us in micros.items()))  # fmt: skip
    return 1 if wrong or not rows else 0
