"""`explain`: which version would run a call, why the others would not, and what each would cost. Nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flash_cuda import _C, arguments, dispatch, traffic

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flash_cuda.masks import BlockMask

RUNS, NOT_HERE, NOT_THIS_INPUT = "runs", "cannot run here", "cannot run this input"
_TAGS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class PassPlan:
    """What the forward or the backward pass of one version would run and move."""

    kernel: str
    tile: tuple[int, int]  # query rows, key rows; (0, 0) when no score is to be computed
    grid: int  # tasks of the main phase
    fast_memory_bytes: int  # what a tile's buffers take
    bytes_loaded: int
    bytes_stored: int
    standard_bytes: int  # what attention with a stored score matrix would load and store
    flops: int  # of the visible scores

    @property
    def bytes_moved(self) -> int:
        return self.bytes_loaded + self.bytes_stored

    @property
    def ratio_to_standard(self) -> float:
        return self.bytes_moved / self.standard_bytes if self.standard_bytes else 1.0


@dataclass(frozen=True)
class VersionPlan:
    """One version's answer to a call."""

    name: str
    title: str
    status: str  # RUNS, NOT_HERE or NOT_THIS_INPUT
    reasons: tuple[dispatch.Reason, ...]  # empty when it runs; each with rule, value and fix
    forward: PassPlan | None  # None when it does not run
    backward: PassPlan | None


@dataclass(frozen=True)
class Plan:
    """What `explain` found. str() and print give it as text; a notebook shows it as a table."""

    call: str  # the shapes in words
    device: torch.device
    asked: str | None  # the version argument
    selected: str | None  # the version that would run; None: the call would raise
    copies: tuple[str, ...]  # arguments that would be copied, as in `LastCall`
    workload: traffic.Workload  # what decides bytes and FLOPs
    versions: Mapping[str, VersionPlan]

    def __str__(self) -> str:
        return self._record().export_text().rstrip("\n")

    def __rich__(self) -> RenderableType:
        return _render(self)

    def _repr_html_(self) -> str:
        return self._record().export_html(inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>')

    def _record(self):
        import io

        from rich.console import Console

        console = Console(width=110, file=io.StringIO(), record=True, force_jupyter=False)
        console.print(self)
        return console


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    version: str | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> Plan:
    """What `attention` with these arguments would run, without running it; with cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q and max_seqlen_k, what `attention_varlen` would.

    Bad arguments raise what `attention` raises, but a version that cannot run them is an answer, not an error. The
    backward pass is that of the inputs that require a gradient (q, k and v when none does), for a loss of `out` alone.

    Args:
        q, k, v and all others: as in `attention` and `attention_varlen`. Tensors on the device "meta" are explained as
            CPU tensors, so that a plan needs no memory.

    Returns:
        A `Plan`: `plan.selected` is the version that would run and `plan.versions["fa1"]` and so on hold status,
        reasons, tile, grid, fast memory, bytes, ratio to standard attention and FLOPs. print(plan) shows all of it.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    name = "attention_varlen" if packed else "attention"
    try:
        if packed and (cu_seqlens_q is None or cu_seqlens_k is None):
            raise TypeError  # in words below
        if any(arguments.layout_problem(name, key, x) for key, x in locals().items()):
            raise TypeError
        if layout != "bshd":
            q, k, v = arguments.to_bshd(q, k, v, layout, name)
        q, k, v = map(_as_cast, (q, k, v))
        sizes, options = _settle(
            name, q, k, v, causal, softmax_scale, window_size, softcap, alibi_slopes, bias, sinks, block_mask,
            dropout_p, deterministic, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        )  # fmt: skip
        if version is not None and version not in dispatch.VERSIONS:
            dispatch.choose(version, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], name=name)  # raises
        features = dispatch.features_in_use(softcap, alibi_slopes, bias, sinks, block_mask, dropout_p)
    except (AttributeError, TypeError):
        # The checks in C++ come first, as in attention: they say more about a tensor than its type.
        given = {key: x for key, x in locals().items() if packed or not key.startswith("cu_seqlens")}
        problem = arguments.type_problem(name, given)
        if problem is None:
            raise
        raise TypeError(problem) from None
    work = _workload(q, sizes, options, bias, sinks, block_mask, cu_seqlens_q, cu_seqlens_k)
    needs = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    needs = {key for key, x in needs.items() if x is not None and x.requires_grad} or {"q", "k", "v"}
    want = traffic.Gradients(
        dq="q" in needs, dkv=bool(needs & {"k", "v"}), dbias="bias" in needs, dsinks="sinks" in needs
    )
    versions = {v: _explain_version(v, q, sizes, options, work, want, block_mask, features) for v in dispatch.VERSIONS}
    tried = dispatch.candidates(q.device) if version is None else (version,)
    return Plan(
        call=_in_words(q, sizes, work),
        device=q.device,
        asked=version,
        selected=next((v for v in tried if versions[v].status == RUNS), None),
        copies=tuple(n for n, x in (("q", q), ("k", k), ("v", v)) if _is_copied(x)),
        workload=work,
        versions=versions,
    )


def _settle(
    name, q, k, v, causal, softmax_scale, window_size, softcap, alibi_slopes, bias, sinks, block_mask, dropout_p,
    deterministic, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
):  # fmt: skip
    """Check the arguments as `attention` does; (sizes as the ops see them, (causal, left, right) as they take them)."""
    code = arguments.CAUSAL_CODES.get(causal)
    if code is None:
        raise ValueError(arguments.causal_problem(causal, name))
    left, right = (-1, -1) if window_size is None else arguments.window_sides(window_size, name)
    blocks, block_q, block_k = None, 0, 0
    if block_mask is not None:
        lengths = (q.shape[1], k.shape[1]) if name == "attention" else (max_seqlen_q, max_seqlen_k)
        blocks, block_q, block_k = arguments.block_mask_parts(block_mask, *lengths, name)
    # Not drawn: an explanation leaves torch's generator as it was.
    seed = torch.zeros(2, dtype=torch.int64, device=q.device) if 0 < dropout_p < 1 else None
    sizes = _C.check(
        q, k, v, softmax_scale, code, left, right, softcap, 2, max_seqlen_q, max_seqlen_k, dropout_p, seed,
        cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes, sinks, blocks, block_q, block_k, deterministic or False,
    )  # fmt: skip
    if torch.is_grad_enabled() and alibi_slopes is not None and alibi_slopes.requires_grad:  # checked by autograd there
        raise ValueError(
            f"flash_cuda.{name}: alibi_slopes must not require a gradient, got requires_grad=True; pass"
            " alibi_slopes.detach()"
        )
    return sizes, (code, left, right)


def _workload(q, sizes, options, bias, sinks, block_mask, cu_seqlens_q, cu_seqlens_k) -> traffic.Workload:
    if sizes["packed"]:
        seqlens = tuple(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()))
    else:
        seqlens = ((sizes["seqlen_q"], sizes["seqlen_k"]),) * sizes["batch"]
    code, left, right = options
    longest = sizes["total_q"] + sizes["total_k"]  # a wider window hides nothing
    return traffic.Workload(
        seqlens=seqlens,
        heads=sizes["heads"],
        heads_kv=sizes["heads_kv"],
        head_dim=sizes["head_dim"],
        element_size=q.element_size(),
        wide=q.element_size() >= 4,
        causal=code,
        window=(min(left, longest), min(right, longest)),
        bias=None if bias is None else _bias_traffic(bias),
        sinks=sinks is not None,
        block_mask=None if block_mask is None else block_mask.blocks.cpu().numpy(),
        block_size=(0, 0) if block_mask is None else block_mask.block_size,
    )


def _bias_traffic(bias: torch.Tensor) -> traffic.Bias:
    by_row, by_col = (bias.dim() >= d and bias.shape[-d] > 1 and bias.stride(-d) != 0 for d in (2, 1))
    return traffic.Bias(bias.numel(), bias.element_size(), by_row, by_col)


def _as_cast(x: torch.Tensor) -> torch.Tensor:
    """x, or a tensor like what autocast makes of it."""
    dtype = dispatch.dtype_in_kernel(x)
    return x if dtype == x.dtype else torch.empty_like(x, dtype=dtype, requires_grad=x.requires_grad)


def _is_copied(x: torch.Tensor) -> bool:
    """As unit_stride (CPU) and aligned_rows (CUDA) of csrc/torch decide."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return True
    if not x.is_cuda:
        return False
    whole = all(x.stride(d) % 8 == 0 for d in range(x.dim() - 1) if x.shape[d] > 1)
    return not (x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0 and whole)


def _explain_version(version, q, sizes, options, work, want, block_mask, features) -> VersionPlan:
    v = dispatch.VERSIONS[version]
    reasons = dispatch.reasons(
        version, device=q.device, dtype=q.dtype, head_dim=sizes["head_dim"], features=features,
        rows=max(sizes["seqlen_q"], sizes["seqlen_k"]), heads=sizes["batch"] * sizes["heads"],
        packed_rows=max(sizes["total_q"], sizes["total_k"]) if sizes["packed"] else 0,
    )  # fmt: skip
    if reasons:
        # What the machine lacks comes first: changing the input would not help then.
        status = NOT_HERE if any(reason.kind == "here" for reason in reasons) else NOT_THIS_INPUT
        return VersionPlan(version, v.title, status, tuple(reasons), None, None)
    passes = [_plan_pass(p, v, q, sizes, options, work, want, block_mask) for p in ("forward", "backward")]
    return VersionPlan(version, v.title, RUNS, (), *passes)


def _plan_pass(pass_, v, q, sizes, options, work, want, block_mask) -> PassPlan:
    backward = pass_ == "backward"
    where = "cuda" if q.is_cuda else f"cpu_{_C.cpu_isa()}"
    kernel = f"{v.name}_{'bwd' if backward else 'fwd'}_{where}_{_TAGS[q.dtype]}"
    shape = ("batch", "heads", "heads_kv", "head_dim", "seqlen_q", "seqlen_k")
    if 0 in (sizes[key] for key in shape):
        return PassPlan(kernel, (0, 0), 0, 0, 0, 0, 0, 0)
    if q.is_cuda:
        plan = _C.cuda_plan(pass_, *(sizes[key] for key in shape), dispatch.shared_memory(q.device))
        plan = {"splits": 1, "fast_memory_bytes": plan["smem_bytes"], **plan}
        kernel += f"_hd{plan['head_dim']}"
    else:
        plan = _C.cpu_plan(
            pass_, v.code, q.dtype, *(sizes[key] for key in shape), *(block_mask.block_size if block_mask else (0, 0)),
            *options, bias=work.bias is not None, sinks=work.sinks, dlse=want.dlse, dq=want.dq,
            dkv=want.dkv, dbias=want.dbias, dsinks=want.dsinks,
        )  # fmt: skip
    if backward:
        moved = traffic.backward(work, v.name, plan["tile"], plan["splits"], want)
        standard = traffic.standard_backward(work)
    else:
        moved, standard = traffic.forward(work, v.name, plan["tile"]), traffic.standard_forward(work)
    return PassPlan(
        kernel=kernel,
        tile=tuple(plan["tile"]),
        grid=plan["grid"],
        fast_memory_bytes=plan["fast_memory_bytes"],
        bytes_loaded=moved.loaded,
        bytes_stored=moved.stored,
        standard_bytes=standard.total,
        flops=traffic.flops(work, backward),
    )


def _in_words(q, sizes, work) -> str:
    if sizes["packed"]:
        shape = f"{sizes['batch']} packed sequences, {sizes['total_q']} queries, {sizes['total_k']} keys"
    else:
        shape = f"batch {sizes['batch']}, {sizes['seqlen_q']} queries, {sizes['seqlen_k']} keys"
    heads = f"{sizes['heads']} heads" + (f" on {sizes['heads_kv']}" if sizes["heads_kv"] != sizes["heads"] else "")
    scores = sizes["heads"] * sum(seqlen_q * seqlen_k for seqlen_q, seqlen_k in work.seqlens)
    visible = traffic.visible_scores(work) / scores if scores else 0.0
    dtype = str(q.dtype).removeprefix("torch.")
    device = "cpu" if q.device.type == "meta" else q.device
    return f"{dtype} on {device}: {shape}, {heads} of {sizes['head_dim']}; {visible:.1%} of the scores are visible"


def human_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: every size has a unit")


def _render(plan: Plan) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    by = "version=None" if plan.asked is None else f'version="{plan.asked}"'
    if plan.selected:
        kernel = plan.versions[plan.selected].forward.kernel
        answer = Text.assemble((f"{plan.selected} would run", "bold green"), f": {kernel} ({by})")
    else:
        answer = Text.assemble(("nothing would run", "bold red"), f" with {by}, for the reasons below")
    lines: list[RenderableType] = [answer, Text(plan.call)]
    if plan.copies:
        lines.append(Text(f"copied first, because their rows are not as the kernel reads them: {', '.join(plan.copies)}"))
    if plan.asked is None:
        lines.append(Text(f"version=None takes the first that runs of: {', '.join(dispatch.candidates(plan.device))}"))
    table = Table(show_edge=False)
    table.add_column("")
    for version in plan.versions.values():
        table.add_column(version.name, justify="right")
    table.add_row("", *(Text(v.status, "green" if v.status == RUNS else "red") for v in plan.versions.values()))
    for pass_ in ("forward", "backward"):
        table.add_section()
        passes = [getattr(version, pass_) for version in plan.versions.values()]
        if not any(passes):
            continue
        for what, show in _ROWS.items():
            table.add_row(f"{pass_}: {what}", *("" if p is None else show(p) for p in passes))
    lines.append(table)
    for version in plan.versions.values():
        lines += [Text.assemble((f"{version.name} {version.status}", "red"), f": {r}") for r in version.reasons]
    return Group(*lines)


_ROWS = {
    "tile, query x key rows": lambda p: f"{p.tile[0]} x {p.tile[1]}",
    "grid, tasks": lambda p: f"{p.grid}",
    "fast memory of a tile": lambda p: human_bytes(p.fast_memory_bytes),
    "bytes loaded": lambda p: human_bytes(p.bytes_loaded),
    "bytes stored": lambda p: human_bytes(p.bytes_stored),
    "moved / standard attention": lambda p: f"{p.ratio_to_standard:.4f} x",
    "FLOPs": lambda p: f"{p.flops / 1e9:.2f} G",
}
