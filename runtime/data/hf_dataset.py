"""Datasets of Hugging Face as texts: one column of a split, from the Hub or from a folder.

No code of a dataset is run: `datasets` runs none since its version 4, the oldest of the extra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from legoai.runtime.data import parquet
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.specs.directives.run import HF_DATASET, HF_FORM, HF_SOURCE

_COMMIT: Final = re.compile("[0-9a-f]{40}")
_SAVED: Final = ("state.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` has written: of one split, or of several."""

_TRAIN: Final = "train"
"""The split that is read where a source names none."""

_ROWS: Final = 1024
"""Rows that are read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Dataset and split that a source names.

    Attributes:
        name: on the Hub, such as `allenai/c4`, or a folder.
        revision: a branch, tag or commit of the Hub; empty for the newest.
        config: one of the dataset's; empty for its default.
        split: empty for the only one of a saved dataset, and otherwise `train`.
    """

    name: str
    revision: str = ""
    config: str = ""
    split: str = ""

    @classmethod
    def of(cls, source: str) -> Self:
        """Return the address of a source.

        Raises:
            RunError: the source is not of this form.
        """
        match = re.fullmatch(HF_SOURCE, source)
        if match is None:
            raise RunError(
                RunErrorCode.WRONG_OPTION,
                f"--data {source} names no dataset",
                help=f"write {HF_FORM}, such as {HF_DATASET}allenai/c4:en, or {HF_DATASET}FOLDER of a saved dataset",
            )
        return cls(**{name: value for name, value in match.groupdict().items() if value})


class HFDataset:
    """A split of a dataset in its own order.

    Attributes:
        identity: changes with its rows; the same on every machine.

    Args:
        source: as of :class:`Address`, behind `hf:`.

    Raises:
        RunError: there is no such dataset, it cannot be reached, or the package `datasets` is missing.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._rows = _opened(source, Address.of(source))
        # Documented as the hash by which the library's own cache knows a dataset.
        self.identity = f"{HF_DATASET}{self._rows._fingerprint}:{len(self._rows)}"

    def texts(self, column: str) -> Iterator[bytes]:
        """Yield the texts of a column, in the order of the rows.

        Raises:
            RunError: there is no such column, a row of it has no text, or the dataset is damaged.
        """
        parquet.check_column(self._source, column, self._rows.features.arrow_schema)
        batches = self._rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS)
        return parquet.texts_of(self._source, column, (batch.column(0) for batch in batches))


def _opened(source: str, address: Address) -> Any:
    try:
        import datasets
    except ImportError:
        raise RunError(
            RunErrorCode.NO_DATASETS,
            f"--data {source} needs the package `datasets`, which is not installed",
            help="`pip install 'legoai[datasets]'` installs it",
        ) from None
    folder = Path(address.name)
    if folder.is_dir() and address.revision:
        raise RunError(
            RunErrorCode.WRONG_OPTION,
            f"--data {source}: {address.name} is a folder, and has no revision {address.revision}",
            help="leave the revision out, or start from another folder to mean the Hub's dataset",
        )
    if not folder.exists() and (other := _divided(source)):
        raise RunError(
            RunErrorCode.WRONG_OPTION,
            f"--data {source}: the folder {other} cannot be named, as it has ':' or '@' in its name",
            help=f"rename it, or name a symbolic link to it; the form is {HF_FORM}",
        )
    try:
        if any((folder / name).is_file() for name in _SAVED):
            return _split_of(source, address, datasets.load_from_disk(str(folder)))
        commit = _commit(source, address) if address.revision else None
        builder = datasets.load_dataset_builder(address.name, address.config or None, revision=commit)
        if commit is not None and builder.hash != commit:
            raise _unreachable(source, f"the cache offers commit {builder.hash}, and not {commit}")
        builder.download_and_prepare()
        return builder.as_dataset(split=address.split or _TRAIN)
    except RunError:
        raise
    except Exception as error:
        raise _explained(source, error) from error


def _divided(source: str) -> str:
    """Return the folder that a source would name if its name might have the signs that divide a source; or nothing."""
    whole = source.removeprefix(HF_DATASET)
    ends = [match.start() for match in re.finditer("[:@]", whole)][1:]
    return next((whole[:end] for end in (len(whole), *reversed(ends)) if Path(whole[:end]).is_dir()), "")


def _commit(source: str, address: Address) -> str:
    """Return the commit of a revision.

    The library itself takes any commit that its cache has where it does not find the revision, with a warning.

    Raises:
        RunError: the Hub has no such revision, or cannot be asked.
    """
    if _COMMIT.fullmatch(address.revision):
        return address.revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return str(HfApi().dataset_info(address.name, revision=address.revision).sha)
    except RevisionNotFoundError:
        message = f"--data {source}: {address.name} has no revision {address.revision}"
        raise RunError(RunErrorCode.DATA_MISSING, message, help="write a branch, a tag or a whole commit") from None
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(str(error)) from error
    except Exception as error:  # of HTTP, of the connection, or of the library's offline mode
        raise _unreachable(
            source, str(error), "write the whole commit as REVISION: it needs no Hub if it is the last one in the cache"
        ) from error


def _split_of(source: str, address: Address, saved: Any) -> Any:
    """Return the split of a saved dataset; one that was saved alone may have no name, and is that which none names."""
    if address.config:
        raise RunError(
            RunErrorCode.WRONG_OPTION,
            f"--data {source}: a saved dataset has no configs, such as {address.config}",
            help=f"write {HF_DATASET}{address.name}{address.split and f'::{address.split}'}",
        )
    if isinstance(saved, dict):
        splits, wanted = saved, address.split or _TRAIN
    else:
        splits = {"" if saved.split is None else str(saved.split): saved}
        wanted = address.split or next(iter(splits))
    if wanted not in splits:
        raise RunError(
            RunErrorCode.DATA_MISSING,
            f"--data {source}: {address.name} has no split {wanted!r}: it "
            + ("is one dataset, saved without a split" if "" in splits else f"has {', '.join(splits)}"),
            help=f"write {HF_DATASET}{address.name}" + ("" if "" in splits else f"::{next(iter(splits), 'SPLIT')}"),
        )
    return splits[wanted]


def _explained(source: str, error: Exception) -> RunError:
    """Return what an error of the library means, which has few classes of its own."""
    said = _said(error)
    if isinstance(error, FileNotFoundError):
        return RunError(
            RunErrorCode.DATA_MISSING,
            f"--data {source}: no such dataset: {said}",
            help="`hf auth login` gives access to private and gated datasets",
        )
    if type(error) is ValueError:  # of a config or split; those of JSON and Arrow are its subclasses
        return RunError(RunErrorCode.DATA_MISSING, f"--data {source}: {said}", help=f"the form is {HF_FORM}")
    if Path(Address.of(source).name).is_dir():
        return RunError(
            RunErrorCode.DATA_FORMAT,
            f"--data {source}: the dataset is damaged, or none: {said}",
            help="write or copy the folder again, with `save_to_disk` or as files that `datasets.load_dataset` reads",
        )
    if isinstance(error, OSError):
        return _unreachable(source, said)
    return RunError(
        RunErrorCode.DATA_FORMAT,
        f"--data {source} cannot be read by the package `datasets`: {said}",
        help="datasets that need code of their own are not read: convert them to Parquet",
    )


def _said(error: BaseException) -> str:
    """Return the message of an error and of that which caused it: the library's own often hides the reason."""
    said = " ".join(str(error).split())[:300]
    return f"{said} ({_said(error.__cause__)})" if error.__cause__ is not None else said


def _unreachable(source: str, said: str, instead: str = "") -> RunError:
    cure = (
        f"load it once where the Hub is within reach, with the same HF_HOME, or pass {HF_DATASET}FOLDER of a saved one"
    )
    return RunError(
        RunErrorCode.DATA_UNREACHABLE,
        f"--data {source}: it cannot be read from the Hub, nor from the library's cache: {said[:300]}",
        help=instead or cure,
    )
