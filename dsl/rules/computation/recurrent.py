"""`compile`: rule about recurrent layers, which torch's compiler does not trace."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import below, grouped, name_of, replacement
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.rules.base import Check


class RecurrentCompiled(Check):
    """A module that is compiled as one graph and holds an `nn.RNN`, `nn.LSTM` or `nn.GRU`, or is one.

    torch's compiler does not trace them (PyTorch 2.13). With `fullgraph = false` what is around such a layer is
    compiled, in several graphs; of the layer itself nothing is.
    """

    code = "LP645"
    slug = "recurrent-compiled"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        recurrent = [] if manifest is None else [
            path for path, info in manifest.modules.items() if "recurrent" in info.attributes
        ]  # fmt: skip
        if manifest is None or not recurrent or is_traced(analysis):
            return
        for rule, paths in grouped(compiled_modules(analysis).items()):
            treatment = rule.treatment
            is_layer = [path for path in paths if path in recurrent]
            pairs = [(path, layer) for path in paths for layer in recurrent if below(layer, path)]
            if is_layer:
                path = layer = is_layer[0]
            elif pairs and treatment.fullgraph:
                path, layer = pairs[0]
            else:
                continue
            kind = manifest.modules[layer].class_name
            what = f"is of class `{kind}`" if path == layer else f"holds `{general(manifest, layer)}` of class `{kind}`"
            yield self.at(
                rule.path_origin.written,
                f"`{name_of(path)}` cannot be compiled: it {what}, which torch's compiler does not trace",
                label="compiled",
                help=["compile other modules"] if path == layer else ["allow breaks with `fullgraph = false`"],
                fix=None if path == layer else replacement(treatment, "fullgraph", "false"),
            )
