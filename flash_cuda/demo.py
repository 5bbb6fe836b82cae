"""`python -m flash_cuda demo`: train one small language model twice, with standard attention and with flash_cuda.

The text is the source of the Python standard library on this machine. Both models start from the same seed and see the
same batches; only the attention differs, so their losses may part by rounding and by nothing else.
"""

from __future__ import annotations

import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import nn

import flash_cuda
from flash_cuda import demo_report, dispatch, traffic

VOCABULARY = 256  # bytes
WIDTH, HEADS, LAYERS = 128, 4, 3
DEFAULT_STEPS = 240
# By device: what trains in a minute or two, and in a type that the kernels take.
DEFAULT_CONTEXT = {"cpu": 512, "cuda": 8192}
DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
TOKENS_PER_STEP = {"cpu": 2048, "cuda": 16384}
TIME_LIMIT = 140  # seconds of training when --steps is not given: a slow machine trains fewer steps, not longer
# Calm on purpose: training blows up what rounding does. At 2e-3 after 20 steps of warming up, runs in bfloat16 part by
# 0.3 nats and runs in float32 by 2e-4, which would hide a wrong kernel; like this by 1e-2 and 2e-6
# (demo_report.ALLOWED), for 0.02 nats of the loss at the end.
LEARNING_RATE, WARM_UP, MAX_GRADIENT = 1.4e-3, 40, 1.0
MIN_CORPUS = 1_000_000
# Positions are rotary (Su et al. 2021, arXiv:2104.09864): with learned ones, a run this short stays at what pairs of
# bytes tell (about 2.5 nats). With the usual base of 10000 many pairs of numbers hardly turn within a context: it
# ends at 2.25 nats where 100 ends at 2.23 (after 120 steps: 10000 at 2.436, 1000 at 2.430, 100 at 2.427).
ROTARY_BASE = 100.0


class DemoError(Exception):
    """The demo cannot run here; the message is for the user."""


@dataclass
class Settings:
    steps: int | None = None  # None: DEFAULT_STEPS, or fewer within TIME_LIMIT
    context: int | None = None  # None: DEFAULT_CONTEXT of the device
    version: str | None = None
    device: str = "cpu"
    dtype: str | None = None  # of q, k and v; None: DEFAULT_DTYPE of the device
    seed: int = 0
    out: str = "flash_cuda_demo.png"

    def __post_init__(self):
        if self.device_type not in DEFAULT_DTYPE:
            raise DemoError(f"--device must be cpu or cuda, got {self.device!r}; name one of them")
        self.context = self.context or DEFAULT_CONTEXT[self.device_type]
        self.dtype = self.dtype or DEFAULT_DTYPE[self.device_type]

    @property
    def device_type(self) -> str:
        return torch.device(self.device).type


@dataclass
class Run:
    """One training run and what was measured in it."""

    name: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)  # by number of steps done
    seconds: list[float] = field(default_factory=list)
    layer_memory: int = 0  # peak bytes of one attention layer, forward and backward
    step_memory: int = 0  # peak bytes of a whole training step
    moved: traffic.Traffic = traffic.Traffic()  # by all attention layers in one training step
    tokens_per_second: float = 0.0


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's source as bytes: (training text, validation text). Every tenth file validates."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = [p for p in sorted(root.rglob("*.py")) if skipped.isdisjoint(p.relative_to(root).parts)]
    texts = [p.read_bytes() for p in files]
    parts = [b"".join(t for i, t in enumerate(texts) if (i % 10 == 0) is held_out) for held_out in (False, True)]
    if min(map(len, parts)) < MIN_CORPUS // 10 or len(parts[0]) < MIN_CORPUS:
        raise DemoError(
            f"the demo reads the standard library's source in {root}, expected at least {MIN_CORPUS} bytes of .py "
            f"files, got {sum(map(len, parts))}; run it with a Python that has its library as files"
        )
    train, validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, validation


def unigram_entropy(text: torch.Tensor) -> float:
    """Nats per byte of a model that knows how often each byte occurs and nothing of what came before."""
    p = torch.bincount(text.int(), minlength=VOCABULARY).double() / len(text)
    return -torch.special.xlogy(p, p).sum().item()


def rotary_angles(seqlen: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of the angle of every position and pair of numbers; the pairs turn at speeds from 1 downwards."""
    pairs = WIDTH // HEADS // 2
    speed = ROTARY_BASE ** -(torch.arange(pairs, device=device) / pairs)
    angle = torch.arange(seqlen, device=device)[:, None, None, None] * speed
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """q and k, stacked as (batch, seqlen, 2, heads, head_dim), with each pair of numbers turned by its angle: a score
    then depends on how far apart query and key are, not on where they are."""
    (cos, sin), (a, b) = angles, x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, attend, angles) -> torch.Tensor:
        batch, seqlen, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, seqlen, 3, HEADS, WIDTH // HEADS)
        q, k = rotate(qkv[:, :, :2], angles).unbind(2)
        x = x + self.out(attend(q, k, qkv[:, :, 2]).reshape(batch, seqlen, WIDTH))
        return x + self.mlp(self.norm_mlp(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def loss(self, tokens: torch.Tensor, attend) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        angles = rotary_angles(x.shape[1], x.device)
        for block in self.blocks:
            x = block(x, attend, angles)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def standard_attention(context: int, device: torch.device, dtype: torch.dtype):
    """softmax(Q K^T / sqrt(d)) V over the keys up to each query, with the whole score matrix in memory."""
    mask = torch.full((context, context), -math.inf, device=device, dtype=dtype).triu(1)  # added: no pass in backward

    def attend(q, k, v):
        q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).add_(mask)
        return (scores.softmax(-1) @ v).transpose(1, 2).float()

    return attend


def flash_attention(dtype: torch.dtype, version: str | None):
    def attend(q, k, v):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        return flash_cuda.attention(q, k, v, causal=True, version=version).float()

    return attend


def new_run(name: str, attend, settings: Settings) -> Run:
    torch.manual_seed(settings.seed)
    model = LanguageModel().to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return Run(name, attend, model, optimizer)


def sample(text: torch.Tensor, settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """A batch of random windows, (batch, context + 1)."""
    batch = max(1, TOKENS_PER_STEP[settings.device_type] // settings.context)
    starts = torch.randint(len(text) - settings.context - 1, (batch,), generator=generator)
    windows = [text[at : at + settings.context + 1] for at in starts.tolist()]
    return torch.stack(windows).long().to(settings.device)


def train_step(run: Run, tokens: torch.Tensor, step: int, steps: int) -> None:
    rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    started = time.perf_counter()
    run.optimizer.zero_grad(set_to_none=True)
    loss = run.model.loss(tokens, run.attend)
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), MAX_GRADIENT)
    run.optimizer.step()
    run.losses.append(loss.item())
    run.seconds.append(time.perf_counter() - started)


@torch.no_grad()
def validate(run: Run, batches: list[torch.Tensor]) -> None:
    losses = [run.model.loss(tokens, run.attend).item() for tokens in batches]
    run.validation[len(run.losses)] = statistics.fmean(losses)


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes that torch's allocator had handed out at once while `work()` ran, over those before it. On a CPU
    the profiler reports every allocation, also those inside compiled ops, which a dispatch mode would not see."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)  # the allocator has counted by now, but a kernel that fails shall fail here
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would report its own start and stop on stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(run: Run, settings: Settings, tokens: torch.Tensor) -> None:
    """Fill in speed, memory and bytes moved; the last two at the shape of the training but outside of its clock."""
    run.tokens_per_second = len(tokens) * settings.context / statistics.median(run.seconds[1:] or run.seconds)
    batch, context, head_dim, device = len(tokens), settings.context, WIDTH // HEADS, tokens.device
    q, k, v, dout = (torch.randn(batch, context, HEADS, head_dim, device=device) for _ in range(4))
    inputs = [x.to(getattr(torch, settings.dtype)).requires_grad_() for x in (q, k, v)]
    calls: list[flash_cuda.LastCall] = []

    def layer():
        out = run.attend(*inputs)
        calls.append(flash_cuda.last_call())
        torch.autograd.grad(out, inputs, dout)
        calls.append(flash_cuda.last_call())

    layer()  # what a first call allocates for good is not the layer's
    calls.clear()
    run.layer_memory = peak_bytes(layer, device)
    run.step_memory = peak_bytes(lambda: run.model.loss(tokens, run.attend).backward(), device)
    run.model.zero_grad(set_to_none=True)
    if run.name == "standard":
        size = inputs[0].element_size()
        work = traffic.Workload(((context, context),) * batch, HEADS, HEADS, head_dim, size, size >= 4)
        moved = traffic.standard_forward(work) + traffic.standard_backward(work)
    else:
        passes = calls
        if device.type == "cuda":  # nothing counts there, and tiles lie on the chip
            plan = flash_cuda.explain(*inputs, causal=True, version=calls[0].version).versions[calls[0].version]
            passes = [plan.forward, plan.backward]
        else:  # the workers' tile buffers do not come from torch's allocator
            run.layer_memory += max(c.threads * c.fast_memory_bytes for c in calls)
        moved = sum((traffic.Traffic(p.bytes_loaded, p.bytes_stored) for p in passes), traffic.Traffic())
    run.moved = traffic.Traffic(LAYERS * moved.loaded, LAYERS * moved.stored)


def train(runs: list[Run], text: torch.Tensor, validation: torch.Tensor, settings: Settings, console: Console) -> None:
    """Train all runs side by side, step by step, so that they also share what else the machine does meanwhile."""
    steps = settings.steps or DEFAULT_STEPS
    generator = torch.Generator().manual_seed(settings.seed)
    held_out = [sample(validation, settings, generator) for _ in range(4)]
    checkpoints = {round(steps * part / 8) for part in range(9)}
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.fields[loss]}")
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, loss="")
        for step in range(steps + 1):
            late = settings.steps is None and step < steps and time.perf_counter() - started > TIME_LIMIT
            if step in checkpoints or late:
                for run in runs:
                    validate(run, held_out)
                losses = "  ".join(f"{run.name} {run.validation[step]:.4f}" for run in runs)
                progress.update(task, completed=step, loss=losses)
                if not console.is_terminal:
                    console.print(f"step {step:4d} of {steps}   validation loss  {losses}")
            if late:
                console.print(f"stopped after {step} of {steps} steps: {TIME_LIMIT} s are up (--steps sets no limit)")
            if step == steps or late:
                break
            tokens = sample(text, settings, generator)
            for run in runs:
                train_step(run, tokens, step, steps)
            progress.update(task, completed=step + 1)
    for run in runs:
        measure(run, settings, held_out[0])


def check(settings: Settings, text: torch.Tensor, validation: torch.Tensor) -> None:
    """Raises now what would otherwise come after minutes of training."""
    folder = Path(settings.out).resolve().parent
    if not folder.is_dir():
        raise DemoError(f"--out must name a file in a folder that exists, got {settings.out!r}; make {folder} first")
    longest = min(len(text), len(validation)) - 2
    if settings.context > longest:
        raise DemoError(f"--context must be at most {longest}, the bytes of the text, got {settings.context}; shorten it")
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    dispatch.choose(settings.version, device=device, dtype=dtype, head_dim=WIDTH // HEADS)  # a refusal has its reasons


def main(settings: Settings, console: Console) -> int:
    """Run the demo; 0 when both runs learned the same, 1 when they did not."""
    text, validation = corpus()
    check(settings, text, validation)
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    runs = [
        new_run("standard", standard_attention(settings.context, device, dtype), settings),
        new_run("flash_cuda", flash_attention(dtype, settings.version), settings),
    ]
    parameters = sum(p.numel() for p in runs[0].model.parameters())
    console.print(
        f"A causal transformer ({parameters / 1e6:.1f} M parameters, {LAYERS} layers, {HEADS} heads, context "
        f"{settings.context}, attention in {settings.dtype}) learns {len(text) / 1e6:.1f} MB of Python source byte by "
        f"byte on {settings.device}, twice from one seed: with standard attention and with flash_cuda."
    )
    train(runs, text, validation, settings, console)
    return demo_report.report(*runs, settings, unigram_entropy(text), console)
