"""`context`: how do the pieces of a sequence lie on ranks, and how does attention see them all?"""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.blocks import expression
from legoai.lowering.emit.code import Line, Statement, call, quoted
from legoai.lowering.emit.stages import blocks_of, where_held

_KERNELS = ("default", "flash", "math")
"""Those of which `legoai.runtime.attention_kernels` has the logarithm of the softmax sums."""


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_context_parallel`, and say which axis cuts sequences and how."""
    context, mesh = lowering.plan.context, lowering.plan.mesh
    if context is None:
        if mesh.cp > 1:
            lowering.refuse(
                lowering.place(mesh, "cp"),
                f"no statement says what the {mesh.cp} ranks of `cp` do",
                label="these ranks would do the same work",
                help=["add `context on cp`"],
            )
        return
    if mesh.cp == 1:
        return
    modules = attention_modules(lowering)
    _check(lowering, modules)
    note = lowering.note(context)
    draft.imports.name("legoai.runtime.attention", "context_parallel_attention")
    options = {"rotate": quoted(context.rotate), "balance": quoted(context.balance)}
    body: list[Statement] = []
    for group in lowering.groups(dict.fromkeys(modules, note)):
        blocks = blocks_of(lowering, group)
        calls: list[Statement] = []
        for relative, line in group.members:
            path = f"{blocks.base}.{relative}" if blocks.base and relative else blocks.base or relative
            module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
            made = call("context_parallel_attention", module, "mesh", **options)
            calls += where_held(lowering, group, path, Line(made, "", line))
        body += blocks.loop(calls)
    draft.apply("apply_context_parallel", mesh='mesh["cp"]', body=body, note=note)
    draft.train_with("context_axis", quoted("cp"), note)
    draft.train_with("context_balance", quoted(context.balance), lowering.note(context, "balance"))


def attention_modules(lowering: Lowering) -> list[str]:
    """The paths of the modules that attend in their own forward, in the model's order."""
    modules = lowering.manifest.modules
    return [path for path, info in modules.items() if any(step.op == "attention" for step in info.flow)]


def _check(lowering: Lowering, modules: list[str]) -> None:
    """Refuse attention that could not be made to see the other ranks' tokens."""
    context = lowering.plan.context
    assert context is not None
    if lowering.manifest.flow_error is not None:
        lowering.refuse(
            lowering.place(context),
            f"the model could not be followed, so its attention is not known: {lowering.manifest.flow_error}",
        )
    elif not modules:
        lowering.refuse(lowering.place(context), "the model has no attention that is known as such")
    for path in modules:
        names = {step.name for step in lowering.manifest.modules[path].flow if step.op == "attention"}
        if names != {"scaled_dot_product_attention"}:
            lowering.refuse(
                lowering.place(context),
                f"`{path or 'root'}` attends by `{'`, `'.join(sorted(names))}`; context parallelism is for "
                "`scaled_dot_product_attention`",
            )
    kernel = lowering.plan.attention
    if kernel is not None and kernel.kernel not in _KERNELS:
        lowering.refuse(
            lowering.place(kernel, "kernel"),
            f"`attention {kernel.kernel}` is not lowered together with `context`, which merges what the kernels of "
            f"{', '.join(f'`{name}`' for name in _KERNELS)} give",
        )
