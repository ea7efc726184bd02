"""Files that published weights have beside them: the tokenizer, and settings of generation."""

from __future__ import annotations

import filecmp
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from legoai.runtime.data.tokens import CONFIG as TOKENIZER_CONFIG
from legoai.runtime.data.tokens import FILE as TOKENIZER
from legoai.runtime.json_object import read_json_object
from legoai.runtime.published.folder import CONFIG

_GENERATION: Final = "generation_config.json"

_OF_A_TOKENIZER: Final = (
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("added_tokens.json", "chat_template.jinja"),
)

_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Beside:
    """Sources of the files.

    Of a folder that has another tokenizer than the training, nothing is taken: its settings name that one's tokens.

    Attributes:
        tokenizer: the file of the training's, under any name; None where it has none.
        weights: the folder of the initial weights; None where they were drawn.
    """

    tokenizer: Path | None = None
    weights: Path | None = None

    def copy(self, folder: Path) -> dict[str, Any]:
        """Copy the files, and return the ids of tokens for the model's config."""
        ids: dict[str, Any] = {}
        if self.weights is not None:
            ids |= self._copy_from(self.weights, folder, alone=(_GENERATION, CONFIG))
        if self.tokenizer is not None and self.tokenizer.is_file():
            ids |= self._copy_from(self.tokenizer.parent, folder, alone=(TOKENIZER_CONFIG,))
            shutil.copyfile(self.tokenizer, folder / TOKENIZER)
        return ids

    def _copy_from(self, source: Path, folder: Path, *, alone: tuple[str, ...]) -> dict[str, Any]:
        """Copy the files of a folder.

        Args:
            source: their folder.
            folder: that gets them.
            alone: what is taken where the source has no tokenizer under the usual name.
        """
        names: tuple[str, ...] = (*_OF_A_TOKENIZER, _GENERATION, CONFIG)
        if self.tokenizer is not None:
            its = source / TOKENIZER
            if not its.is_file():
                names = alone
            elif not self.tokenizer.is_file() or not filecmp.cmp(its, self.tokenizer, shallow=False):
                names = ()
        for name in names:
            if name != CONFIG and (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return _ids(source / CONFIG) if CONFIG in names else {}


def _ids(config: Path) -> dict[str, Any]:
    try:
        found = read_json_object(config)
        return {name: found[name] for name in _IDS if found.get(name) is not None}
    except (OSError, ValueError):
        return {}
