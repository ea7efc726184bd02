"""`model`: the model that is trained."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Listed, Text
from legoai.specs.models.source import ModelSource

FOREIGN: Final = ("python", "huggingface")
"""Names for a model that is not built in."""


def model_names() -> tuple[str, ...]:
    """Return every name allowed after `model`: the built-in families, then the two ways to name another model."""
    from legoai.specs.models.families import FAMILIES

    return (*FAMILIES, *FOREIGN)


class Model(Directive):
    """The model: a built-in one, a Python factory, or a Hugging Face config.

    A built-in model takes the name of a preset and keyword arguments that override its dimensions:
    `model llama3("8b", n_layers = 4)`. `python("package.module:function", …)` names a function that returns a
    `torch.nn.Module`; `huggingface("config.json", …)` names a config file whose fields the arguments override. Linting
    runs no code but such a factory, in a process of its own, after saying so.
    """

    keyword: ClassVar[str] = "model"
    subject: ClassVar[str | None] = "family"
    subject_holds_options: ClassVar[bool] = True
    open_options: ClassVar[bool] = True

    family: str = option(Listed(model_names, "a model"), doc="A built-in family, `python` or `huggingface`.")
    target: str | None = option(
        Text("a quoted preset, factory or config file"),
        doc='The preset (`"8b"`), the factory (`"package.module:function"`) or the config file.',
        default=None,
    )

    def source(self) -> ModelSource:
        """The model as the manifest loader and the lowered program name it."""
        arguments = dict(self.arguments)
        if self.family not in FOREIGN:
            return ModelSource(kind="builtin", target=self.family, preset=self.target, arguments=arguments)
        assert self.target is not None
        kind: Literal["python", "huggingface"] = "python" if self.family == "python" else "huggingface"
        return ModelSource(kind=kind, target=self.target, preset=None, arguments=arguments)
