"""`model`: rules about what is trained."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.codes.names import WrongModel
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.rules.base import Check
from legoai.specs.directives.model import FOREIGN


class ModelIsKnown(WrongModel, Check):
    """The built-in family has the preset and the dimensions (see ``wrong-model``)."""

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        from legoai.specs.models.configs import ConfigError
        from legoai.specs.models.families import resolve_config

        model = analysis.plan.model
        if model.family in FOREIGN:
            if model.target is None:
                noun = "factory" if model.family == "python" else "config file"
                yield self.at(
                    analysis.place(model, "family"),
                    f"`{model.family}` needs the {noun} in quotes",
                    label="nothing is named",
                )
            return
        try:
            resolve_config(model.family, model.target, model.arguments)
        except ConfigError as error:
            field = {"preset": "target"}.get(error.argument, error.argument)
            legal = error.legal if len(error.legal) <= 24 else ()
            help = suggestion(str(model.target if field == "target" else error.argument), error.legal)
            if legal:
                help.append(f"legal are {', '.join(f'`{item}`' for item in legal)}")
            yield self.at(analysis.place(model, field), error.message, label="not of this model", help=help)
