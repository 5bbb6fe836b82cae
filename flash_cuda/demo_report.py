"""What the demo shows after training: the losses side by side, what each attention cost, the verdict, and a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flash_cuda.explain import human_bytes

if TYPE_CHECKING:
    from flash_cuda.demo import Run, Settings

# How far the two training losses may part, in nats: in the first EARLY_STEPS, and after them. Both runs add the same
# numbers in another order, and training carries that forward and blows it up from step to step, so the early steps tell
# the most. Measured at the defaults over 50 to 240 steps, fa1 and fa2 against standard attention, two to four seeds: at
# most 1e-6 and 2e-6 in float32, 9e-5 and 1.1e-2 in bfloat16. What is wrong parts them within 60 steps, at least:
# float32: a softmax_scale that is off by 0.1 % 2e-4 late, a dV that is off by 1 % 4e-4 early;
# bfloat16: a dV that is off by 10 % 4e-3 early, a dQ of zeros 6e-4 early and 7e-2 late.
EARLY_STEPS = 30
ALLOWED = {"float32": (1e-5, 5e-5), "bfloat16": (5e-4, 5e-2)}
JUDGED_STEPS = 100  # a run shorter than this is not asked whether it learned


def differences(standard: Run, flash: Run) -> list[float]:
    """|loss - loss| of every training step; a NaN loss in either run is an infinite difference."""
    gaps = [abs(a - b) for a, b in zip(standard.losses, flash.losses)]
    return [math.inf if math.isnan(gap) else gap for gap in gaps]


def verdicts(standard: Run, flash: Run, settings: Settings, unigram: float) -> list[tuple[bool, str]]:
    """(passed, sentence) of every check."""
    gaps = differences(standard, flash)
    parts = (gaps[:EARLY_STEPS], f"in the first {EARLY_STEPS} steps"), (gaps[EARLY_STEPS:], "after them")
    found = [(max(part), bound, when) for (part, when), bound in zip(parts, ALLOWED[settings.dtype]) if part]
    same = all(worst <= bound for worst, bound, _ in found)
    word = "differ by rounding only" if same else "PART BY MORE THAN ROUNDING"
    at_most = ", ".join(f"{worst:.2g} {when} (allowed {bound:g})" for worst, bound, when in found)
    results = [(same, f"the losses {word}: at most {at_most}")]
    steps, last = max(flash.validation), flash.validation[max(flash.validation)]
    context = f"validation loss {last:.3f} nats per byte; byte frequencies alone give {unigram:.3f}, guessing 5.545"
    if steps < JUDGED_STEPS:
        results.append((True, f"{context}; {steps} steps are too few to judge the learning"))
    else:
        learned = last < unigram - 0.5
        results.append((learned, f"the model {'learned' if learned else 'DID NOT LEARN'}: {context}"))
    return results


def loss_table(standard: Run, flash: Run) -> Table:
    table = Table(title="Loss, nats per byte (train: that step's batch; validation: held-out files)")
    for name in ("step", "train: standard", "flash_cuda", "difference", "validation: standard", "flash_cuda"):
        table.add_column(name, justify="right")
    table.add_column("difference", justify="right")
    for step in sorted(flash.validation):
        row = [str(step)]
        row += _pair(standard.losses[step - 1], flash.losses[step - 1]) if step else ["", "", ""]
        table.add_row(*row, *_pair(standard.validation[step], flash.validation[step]))
    return table


def _pair(a: float, b: float) -> list[str]:
    return [f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}"]


def costs(standard: Run, flash: Run) -> list[tuple[str, float, float, bool]]:
    """(what, standard, flash, whether it is in bytes)."""
    return [
        ("training speed, tokens/s (median step)", standard.tokens_per_second, flash.tokens_per_second, False),
        ("peak memory of one attention layer, forward + backward", standard.layer_memory, flash.layer_memory, True),
        ("peak memory of a training step", standard.step_memory, flash.step_memory, True),
        ("bytes moved by attention in a training step", standard.moved.total, flash.moved.total, True),
    ]  # fmt: skip


def cost_table(standard: Run, flash: Run) -> Table:
    table = Table(title="What it cost")
    table.add_column("")
    for name in ("standard", "flash_cuda", "flash_cuda / standard"):
        table.add_column(name, justify="right")
    for what, a, b, in_bytes in costs(standard, flash):
        shown = [human_bytes(x) if in_bytes else f"{x:,.0f}" for x in (a, b)]
        table.add_row(what, *shown, f"{b / a:.3f} x")
    return table


MEASURED_HOW = {
    "cpu": "Memory: the most that torch's allocator had handed out at once, from the profiler's record of every "
    "allocation, plus the tile buffers of flash_cuda's threads. Bytes moved: counted by the kernel for flash_cuda "
    "(flash_cuda.last_call())",
    "cuda": "Memory: the most that torch's allocator had handed out at once; tiles lie in shared memory, on the chip. "
    "Bytes moved: nothing counts them on a GPU, so for flash_cuda what its tiles load and store by the model of "
    "flash_cuda.explain()",
}
STANDARD_MOVES = (
    ", and for standard attention what reading and writing its score matrices takes (FlashAttention paper, algorithms "
    "0 and 3)."
)


def plot(standard: Run, flash: Run, settings: Settings, unigram: float) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to save a picture
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    steps = range(1, len(flash.losses) + 1)
    left.plot(steps, standard.losses, color="tab:orange", alpha=0.5, linewidth=3, label="standard attention, train")
    left.plot(steps, flash.losses, color="tab:blue", linewidth=0.8, label="flash_cuda, train")
    left.plot(*zip(*sorted(standard.validation.items())), "o-", color="tab:orange", markersize=9, alpha=0.6,
              label="standard attention, validation")
    left.plot(*zip(*sorted(flash.validation.items())), ".--", color="tab:blue", label="flash_cuda, validation")
    left.axhline(unigram, color="gray", linestyle=":", label=f"byte frequencies alone: {unigram:.2f}")
    left.set(title="The same loss", xlabel="step", ylabel="nats per byte")
    left.legend(fontsize=8)

    floor = 1e-8  # where an exact match goes, which has no place on a logarithmic axis
    middle.semilogy(steps, [max(gap, floor) for gap in differences(standard, flash)], ".", markersize=3,
                    color="tab:blue", label="|difference| of the training losses (0 shown as 1e-8)")
    early, late = ALLOWED[settings.dtype]
    middle.plot(steps, [early if step <= EARLY_STEPS else late for step in steps], color="tab:red",
                drawstyle="steps-mid", label="allowed")
    middle.set(title="They part by rounding only", xlabel="step", ylabel="nats per byte")
    middle.legend(fontsize=8, loc="lower right")

    rows = costs(standard, flash)
    names = ["tokens/s", "attention\nmemory", "training step\nmemory", "attention\nbytes moved"]
    ratios = [b / a for _, a, b, _ in rows]
    right.bar(names, ratios, color="tab:blue", label="flash_cuda")
    right.axhline(1, color="tab:orange", linewidth=3, alpha=0.6, label="standard attention = 1")
    for at, (ratio, (_, a, b, in_bytes)) in enumerate(zip(ratios, rows)):
        values = f"{human_bytes(b)}\nof {human_bytes(a)}" if in_bytes else f"{b:,.0f}\nvs {a:,.0f}"
        right.annotate(f"{ratio:.2f} x\n{values}", (at, ratio), ha="center", va="bottom", fontsize=8)
    right.set(title="What it cost", ylabel="flash_cuda / standard", ylim=(0, 1.35 * max([1.0, *ratios])))
    right.legend(fontsize=8)
    figure.suptitle(
        f"flash_cuda {settings.version or '(best version)'} on {settings.device}, {settings.dtype}, context "
        f"{settings.context}: a small transformer on the source of the Python standard library"
    )
    figure.savefig(settings.out, dpi=110)
    pyplot.close(figure)


def report(standard: Run, flash: Run, settings: Settings, unigram: float, console: Console) -> int:
    console.print(loss_table(standard, flash))
    console.print(cost_table(standard, flash))
    console.print(MEASURED_HOW[settings.device_type] + STANDARD_MOVES, style="dim")
    plot(standard, flash, settings, unigram)
    console.print(f"curves: {settings.out}")
    failed = False
    for passed, sentence in verdicts(standard, flash, settings, unigram):
        failed |= not passed
        console.print(f"{'ok' if passed else 'FAILED'}: {sentence}", style="green" if passed else "bold red")
    return int(failed)
