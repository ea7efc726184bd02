"""`attention`: rules about the kernel of scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.attention import (
    attention_dtypes,
    attention_heads,
    attention_modules,
    attention_widths,
    head_multiple,
    largest_head,
    takes_widths,
)
from legoai.dsl.analysis.facts import replacement, written
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check

_CUDA_ONLY: Final = ("efficient", "cudnn", "flex")
"""Kernels whose backward pass PyTorch has for CUDA devices only."""
_CUDA_DTYPES: Final = {
    "flash": ("bf16", "fp16"),
    "cudnn": ("bf16", "fp16"),
    "efficient": ("bf16", "fp16", "fp32"),
}
"""Dtypes that each kernel takes on CUDA devices (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`)."""


class KernelOnDevice(Check):
    """An attention kernel that cannot train on the device.

    On a CPU, `efficient` and `cudnn` do not exist, and `flex` has no backward pass.

    ## Example
    ```
    cluster cpu(devices = 4)
    attention efficient
    ```

    ## Use instead
    ```
    cluster cpu(devices = 4)
    attention flash
    ```
    """

    code = "LP631"
    slug = "attention-not-on-device"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        attention, device = analysis.plan.attention, analysis.device
        if device is None or device.kind != "cpu" or attention.kernel not in _CUDA_ONLY:
            return
        lacks = "no backward pass" if attention.kernel == "flex" else "no kernel"
        yield self.at(
            analysis.span_of(attention, "kernel"),
            f"`{attention.kernel}` attention has {lacks} for `{device.name}`",
            label="needs a CUDA device",
            others=[
                Label(analysis.span_of(analysis.plan.cluster, "device"), f"`{device.name}` is of kind {device.kind}")
            ],
            help=["a CPU has `flash` and `math`; `default` lets PyTorch choose"],
            fix=replacement(attention, "kernel", "default"),
        )


class KernelTakesDtype(Check):
    """An attention kernel that does not take the dtype of computation.

    On CUDA devices `flash` and `cudnn` take bf16 and fp16, and `efficient` also fp32. PyTorch raises when the
    first step calls the kernel. A model whose own forward enters `torch.autocast` attends in the dtype of that.

    ## Example
    ```
    attention flash
    precision (param = fp32)
    ```

    ## Use instead
    ```
    attention flash
    precision (param = bf16)
    ```
    """

    code = "LP632"
    slug = "attention-dtype"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, device = analysis.plan, analysis.device
        legal = _CUDA_DTYPES.get(plan.attention.kernel)
        if legal is None or device is None or device.kind != "cuda" or plan.precision.param in legal:
            return
        if analysis.manifest is not None:
            modules = attention_modules(analysis)
            if modules and all(attention_dtypes(analysis, path).issubset(legal) for path in modules):
                return
        kernel, param = plan.attention.kernel, plan.precision.param
        others = [name for name, dtypes in _CUDA_DTYPES.items() if param in dtypes]
        yield self.at(
            analysis.span_of(plan.attention, "kernel"),
            f"`{kernel}` attention takes {' and '.join(legal)} on `{device.name}`, and the plan computes in {param}",
            label=f"not in {param}",
            others=[Label(analysis.span_of(plan.precision, "param"), f"`param` = {param}")],
            help=[f"kernels that take {param} are {', '.join(f'`{name}`' for name in [*others, 'math'])}"],
        )


class HeadFits(Check):
    """Heads of a width that the attention kernel does not take.

    On CUDA devices `flash` takes heads of at most 256 features, and `cudnn` of at most 128, or 256 on GPUs of compute
    capability 9.0. For `cudnn` and `efficient` the features are a multiple of 8, in fp32 of 4. PyTorch raises when the
    first step calls the kernel. `default` leaves the choice to PyTorch, and `math` takes all.

    ## Example
    ```
    model gpt3("13b", dim = 5120, n_heads = 10)
    batch (global = 256, micro = 1, seq_len = 2048)
    attention flash
    ```

    ## Use instead
    ```
    model gpt3("13b", dim = 5120, n_heads = 40)
    batch (global = 256, micro = 1, seq_len = 2048)
    attention flash
    ```
    """

    code = "LP633"
    slug = "attention-head-width"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        attention, manifest, device = analysis.plan.attention, analysis.manifest, analysis.device
        kernel = attention.kernel
        if not isinstance(kernel, str) or manifest is None or device is None or device.kind != "cuda":
            return
        capability = device.compute_capability
        for path in attention_modules(analysis):
            widths = attention_widths(analysis, path)
            if widths is None or widths[0] != widths[1]:
                continue
            refusing = (
                dtype
                for dtype in sorted(attention_dtypes(analysis, path))
                if not takes_widths(kernel, widths, capability=capability, dtype=dtype)
            )
            dtype = next(refusing, None)
            if dtype is None:
                continue
            width, largest = widths[0], largest_head(kernel, widths, capability=capability)
            taken = f"whose features are a multiple of {head_multiple(kernel, dtype)} in {dtype}"
            if largest is not None and width > largest:
                taken = f"of at most {largest} features"
            yield self.at(
                analysis.span_of(attention, "kernel"),
                f"`{kernel}` attention takes heads {taken} on `{device.name}`; `{path}` has {width}",
                label=f"heads of {width}",
                others=[Label(analysis.span_of(analysis.plan.model, "family"), "the model")],
                help=[f"use {_usable(analysis, path)} attention, or give the model other heads"],
                fix=replacement(attention, "kernel", "default"),
            )
            return


def _usable(analysis: Analysis, path: str) -> str:
    """The kernels that take the heads of an attention on the plan's device, besides `default`."""
    device, dtypes = analysis.device, attention_dtypes(analysis, path)
    widths, heads = attention_widths(analysis, path), attention_heads(analysis, path)
    assert device is not None and widths is not None
    names = ["math"]
    if device.kind == "cuda":
        fused = [name for name, legal in _CUDA_DTYPES.items() if dtypes.issubset(legal)]
        if heads["n_kv_heads"] not in (0, heads["n_heads"]):
            fused = [name for name in fused if name != "efficient"]  # it does not share heads of keys
        capability = device.compute_capability
        taken = [
            name
            for name in fused
            if all(takes_widths(name, widths, capability=capability, dtype=dtype) for dtype in dtypes)
        ]
        names = taken + names
    return " or ".join(f"`{name}`" for name in names)


class ValueWidths(Check):
    """Heads whose values have another width than their keys, under a kernel that does not take them.

    DeepSeek's latent attention has such heads. `flash` takes none. On CUDA devices `efficient` takes widths that are
    multiples of 8, and `cudnn` those of at most 128 features, on GPUs of compute capability 9.0, 10.0 and 10.3 also
    keys of 192 with values of 128. PyTorch raises when the first step calls the kernel. `default` leaves the choice to
    PyTorch, and `math` takes all.

    ## Example
    ```
    model deepseek("v2_lite")
    attention flash
    ```

    ## Use instead
    ```
    model deepseek("v2_lite")
    attention cudnn
    ```
    """

    code = "LP638"
    slug = "attention-value-widths"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        attention, manifest, device = analysis.plan.attention, analysis.manifest, analysis.device
        kernel = attention.kernel
        if manifest is None or device is None or not isinstance(kernel, str):
            return
        if device.kind == "cpu" and kernel != "flash":
            return  # a rule reports those that a CPU does not have
        for path in attention_modules(analysis):
            widths, capability = attention_widths(analysis, path), device.compute_capability
            if widths is None or widths[0] == widths[1] or takes_widths(kernel, widths, capability=capability):
                continue
            yield self.at(
                analysis.span_of(attention, "kernel"),
                f"`{kernel}` attention does not take keys of {widths[0]} features with values of {widths[1]} on "
                f"`{device.name}`, as `{path}` has them",
                label=f"{widths[0]} and {widths[1]} features",
                others=[Label(analysis.span_of(analysis.plan.model, "family"), "the model")],
                help=[f"use {_usable(analysis, path)} attention, or `default`"],
                fix=replacement(attention, "kernel", "default"),
            )
            return


class HeadsInGroups(Check):
    """Grouped key and value heads under a kernel that takes as many of them as there are query heads.

    PyTorch's memory-efficient kernel does not share a key and value head among several query heads (`enable_gqa`), and
    raises when the first step calls it. `flash`, `cudnn` and `math` do.

    ## Example
    ```
    model llama3("1b")
    attention efficient
    ```

    ## Use instead
    ```
    model llama3("1b")
    attention flash
    ```
    """

    code = "LP635"
    slug = "attention-heads-in-groups"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        attention, manifest, device = analysis.plan.attention, analysis.manifest, analysis.device
        if attention.kernel != "efficient" or manifest is None or device is None or device.kind != "cuda":
            return
        for path, module in manifest.modules.items():
            heads, groups = (module.attributes.get(name) for name in ("n_heads", "n_kv_heads"))
            if module.kind == "attention" and isinstance(groups, int) and heads != groups:
                yield self.at(
                    analysis.span_of(attention, "kernel"),
                    f"`efficient` attention takes as many key and value heads as query heads; `{path}` has {groups} "
                    f"for {heads}",
                    label=f"{groups} for {heads}",
                    others=[Label(analysis.span_of(analysis.plan.model, "family"), "the model")],
                    help=["use `flash` or `math` attention"],
                    fix=replacement(attention, "kernel", "flash"),
                )
                return


class NoAttention(Check):
    """A choice of attention kernel for a model that calls none.

    The choice acts on `scaled_dot_product_attention`. A model that computes attention by hand does not see
    it.

    ## Example
    ```
    model python("torch.nn:Embedding", num_embeddings = 256, embedding_dim = 256)
    attention flash
    ```

    ## Use instead
    ```
    model python("torch.nn:Embedding", num_embeddings = 256, embedding_dim = 256)
    ```
    """

    code = "LP634"
    slug = "attention-without-effect"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        attention, manifest = analysis.plan.attention, analysis.manifest
        if manifest is None or manifest.flow_error is not None or not written(attention, "kernel"):
            return
        if attention.kernel == "default":
            return
        if attention_modules(analysis):
            return
        yield self.at(
            analysis.span_of(attention, "kernel"),
            "the choice of kernel has no effect: the model never calls `scaled_dot_product_attention`",
            label="has no effect",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), "this model")],
            help=["leave the statement out, or let the model call it"],
        )
