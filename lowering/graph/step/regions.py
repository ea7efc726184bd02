"""Regions of a step's graph: the computation of a compiled module between two collectives, as one function.

A region's inputs are the values that it reads, and its outputs those that later nodes read. It is functionalised,
decomposed for inductor, and compiled; it frees each input after its last reader, as nodes outside of a region do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta

from legoai.lowering.graph.step.places import holds
from legoai.runtime.initialize import plain_path
from legoai.runtime.torch_internals.compiler.graph_passes import make_fx
from legoai.runtime.torch_internals.fake_tensors import FakeTensor

Backend = Literal["inductor", "aot_eager"]
Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes a list, which it empties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """How the regions of a module are compiled.

    Attributes:
        backend: that of `torch.compile`; `aot_eager` runs their operators one by one.
        mode: of `torch.compile`.
    """

    backend: Backend = "inductor"
    mode: str = "default"


_COMPILED: Final[weakref.WeakKeyDictionary[nn.Module, Compilation]] = weakref.WeakKeyDictionary()


def compile_module(module: nn.Module, *, backend: Backend = "inductor", mode: str = "default") -> None:
    """Let the pass `compile_regions` compile the forward and backward computation of a module.

    Args:
        module: with all that it holds; of the whole model, the loss too.
        backend: that of `torch.compile`; `aot_eager` runs the operators of a region one by one.
        mode: of `torch.compile`; none with CUDA graphs, since gathered parameters are somewhere else each time.
    """
    _COMPILED[module] = Compilation(backend=backend, mode=mode)


def compiled_modules_of(model: nn.Module) -> dict[str, Compilation]:
    """Return the modules whose regions are compiled, by their paths; of nested ones the outermost."""
    found: dict[str, Compilation] = {}
    for path, module in model.named_modules():
        plain = plain_path(path)
        how = _COMPILED.get(module)
        if how is not None and not any(holds(above, plain) for above in found):
            found.setdefault(plain, how)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a region computes.

    Attributes:
        module: a graph of the region alone, whose nodes have their places.
        path: of the innermost module on whose behalf all of it is computed.
        given: its inputs, as fake tensors.
        how: options of the compilation.
        key: equal for regions with the same computation.
    """

    module: fx.GraphModule
    path: str
    given: tuple[torch.Tensor, ...]
    how: Compilation
    key: Hashable


class Region(nn.Module):
    """Compiled region, shared by all regions with the same computation.

    Attributes:
        source: its graph and inputs.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.run = compiled(source)

    def forward(self, *given: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the region's outputs."""
        return self.run(list(given))


def compiled(source: Source) -> Run:
    """Compile a region."""
    if source.how.backend == "aot_eager":
        return interpreted(functional(source, {}))
    from legoai.runtime.torch_internals.compiler.regions import (
        V,
        compile_fx_inner,
        config,
        fx_graph_cse,
        joint_graph_passes,
        list_mode_options,
        select_decomp_table,
    )

    module = functional(source, select_decomp_table(), once=fx_graph_cse)
    with V.set_fake_mode(fake_mode_of(source)), config.patch(list_mode_options(source.how.mode)):
        run: Run = compile_fx_inner(joint_graph_passes(module), list(source.given))
    return run


def interpreted(module: fx.GraphModule) -> Run:
    """Return a function that runs a graph operator by operator, and frees each value after its last use."""
    return lambda given: fx.Interpreter(module).boxed_run(given)


def functional(
    source: Source,
    decompositions: Mapping[Any, Callable[..., Any]],
    *,
    once: Callable[[fx.Graph], fx.Graph] | None = None,
) -> fx.GraphModule:
    """Return the graph of a region without in-place updates; strides of results are preserved.

    Args:
        source: its computation.
        decompositions: operators that are replaced by others, for inductor.
        once: common-subexpression elimination, if any.
    """

    def run(*given: torch.Tensor) -> Any:
        return fx.Interpreter(source.module).run(*given)

    with torch.no_grad(), preserve_node_meta(), fake_mode_of(source):
        made = make_fx(torch.func.functionalize(run), decomposition_table=dict(decompositions))(*source.given)
    made.graph.eliminate_dead_code()
    if once is not None:
        made.graph = once(made.graph)
    output = made.graph.output_node()
    results: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in results]
    made.recompile()
    return made


def fake_mode_of(source: Source) -> Any:
    """Return the mode of the fake tensors that a region takes."""
    return next(item.fake_mode for item in source.given if isinstance(item, FakeTensor))
