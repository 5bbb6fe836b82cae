"""The command line: python -m flash_cuda demo | bench | explain | info."""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console

import flash_cuda
from flash_cuda import _C, bench, bench_common, bench_gpu, demo, demo_report, dispatch
from flash_cuda.explain import explain

DTYPES = ("float32", "bfloat16", "float16", "float64")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line instead of the whole usage."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _at_least(least: int):
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return number

    return parse


_positive = _at_least(1)


def _device(text: str) -> str:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"must be a device such as cpu or cuda:0, got {text!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"{text} is not on this machine: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return text


def _by_device(defaults: dict[str, object]) -> str:
    return ", ".join(f"{value} on {device}" for device, value in defaults.items())


def parser() -> argparse.ArgumentParser:
    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")

    top = _Parser(prog="python -m flash_cuda", description=flash_cuda.__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"flash_cuda {flash_cuda.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="demo | bench | explain | info")

    p = add("demo", "train a small language model with standard attention and with flash_cuda")
    p.add_argument("--device", type=_device, default="cpu", help="default: cpu")
    p.add_argument("--version", choices=dispatch.VERSIONS, help="default: the best that runs")
    p.add_argument("--steps", type=_positive,
                   help=f"default: {demo.DEFAULT_STEPS}, or what {demo.TIME_LIMIT} s allow on a slow machine")
    p.add_argument("--context", type=_at_least(2), help=f"bytes; default: {_by_device(demo.DEFAULT_CONTEXT)}")
    p.add_argument("--dtype", choices=demo_report.ALLOWED,
                   help=f"of q, k and v; default: {_by_device(demo.DEFAULT_DTYPE)}")
    p.add_argument("--seed", type=int, default=0, help="default: 0")
    p.add_argument("--out", default="flash_cuda_demo.png", help="the picture; default: %(default)s")
    p.set_defaults(run=_demo)

    p = add("bench", "time the CPU schedules or the CUDA kernels against torch's own attention")
    bench_common.add_arguments(p, _positive)
    p.set_defaults(run=_bench)

    p = add("explain", "what would run for these shapes, why not the others, and at what cost")
    p.add_argument("--batch", type=_positive, default=1, help="default: 1")
    p.add_argument("--heads", type=_positive, default=8, help="of the queries; default: 8")
    p.add_argument("--heads-kv", type=_positive, help="default: as many as --heads")
    p.add_argument("--head-dim", type=_positive, default=64, help="default: 64")
    p.add_argument("--seqlen-q", type=_positive, default=2048, help="default: 2048")
    p.add_argument("--seqlen-k", type=_positive, help="default: --seqlen-q")
    p.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    p.add_argument("--causal", choices=("false", "true", "top_left"), nargs="?", const="true", default="false",
                   help="true aligns to the bottom right; default: false")  # fmt: skip
    p.add_argument("--window", type=_at_least(-1), nargs=2, metavar=("LEFT", "RIGHT"), help="keys seen on each side of the diagonal; -1 leaves a side unbounded")
    p.add_argument("--device", type=_device, default="cpu", help="default: cpu")
    p.add_argument("--version", choices=dispatch.VERSIONS, help="default: the best that runs")
    p.set_defaults(run=_explain)

    p = add("info", "versions, instruction sets, and what was built")
    p.set_defaults(run=_info)
    return top


def _demo(args: argparse.Namespace, console: Console) -> int:
    settings = {name: value for name, value in vars(args).items() if name not in ("run", "command")}
    return demo.main(demo.Settings(**settings), console)


def _bench(args: argparse.Namespace, console: Console) -> int:
    return (bench_gpu if args.device == "cuda" else bench).main(args, console)


def _explain(args: argparse.Namespace, console: Console) -> int:
    dtype = getattr(torch, args.dtype)
    device = "meta" if args.device == "cpu" else args.device  # shapes are enough, a plan takes no memory
    heads_kv, seqlen_k = args.heads_kv or args.heads, args.seqlen_k or args.seqlen_q
    q = torch.empty(args.batch, args.seqlen_q, args.heads, args.head_dim, dtype=dtype, device=device)
    k = torch.empty(args.batch, seqlen_k, heads_kv, args.head_dim, dtype=dtype, device=device)
    window = args.window and tuple(None if side < 0 else side for side in args.window)
    causal = {"false": False, "true": True}.get(args.causal, args.causal)
    plan = explain(q, k, k, causal=causal, window_size=window, version=args.version)
    console.print(plan)
    return 0 if plan.selected else 1


def _info(args: argparse.Namespace, console: Console) -> int:
    build = _C.build_info()
    threads = torch.get_num_threads()
    console.print(f"flash_cuda {flash_cuda.__version__} in {flash_cuda.__path__[0]}")
    console.print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, built for torch {build['torch']}")
    console.print(f"compiler: {build['compiler']}")
    console.print(f"CPU: uses {_C.cpu_isa()} (there are {', '.join(_C.cpu_isas())}); {threads} threads; tiles for "
                  f"{_C.cpu_fast_memory() // 1024} KiB of fast memory")  # fmt: skip
    built = f"built for {', '.join(build['cuda_archs'])}" if build["cuda"] else "not built"
    console.print(f"CUDA kernels: {built} ({build['cuda_why']})")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    console.print(f"CUDA devices: {', '.join(gpus) or 'none that torch can use'}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    # A file or a pipe has no width of its own; the tables need about this much.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    try:
        return args.run(args, console)
    except (demo.DemoError, NotImplementedError, RuntimeError, ValueError, TypeError, OSError) as error:
        # What the library refuses, it refuses in one sentence; a traceback would hide it.
        if not str(error).startswith("flash_cuda") and not isinstance(error, (demo.DemoError, OSError)):
            raise
        print(f"python -m flash_cuda {args.command}: {error}", file=sys.stderr)
        return 2
