"""Matching of a model's tensors with those of a folder of published weights."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from legoai.runtime.errors import RunError, RunErrorCode, listed
from legoai.runtime.published.folder import CONFIG, DTYPES, INTEGERS, Folder
from legoai.runtime.published.whole_model import WholeModel
from legoai.specs.models.huggingface import transformers_config
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.published.configs import differences, part_of_type, ties_embeddings
from legoai.specs.published.pieces import Pieces, published_shapes

Match = dict[str, Pieces]
"""The pieces of each of a model's tensors, under the names of a folder."""

_COMPUTED: Final = re.compile(r"(^|\.)(rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias|position_ids)$")
"""Tensors in files of earlier releases that are not weights: tables that every model computes itself."""


def match(whole: WholeModel, folder: Folder, *, others: bool) -> tuple[Match, list[str]]:
    """Find each tensor of a model in a folder.

    Args:
        whole: the model, which has a mapping.
        folder: of published weights.
        others: whether to leave out tensors that only one side has, or that differ in shape.

    Returns:
        The pieces of the tensors that were found, and the names of the model's tensors that were not.

    Raises:
        RunError: they do not match.
    """
    found: Match = {}
    missing: dict[str, str] = {}
    for name, shape in whole.shapes.items():
        pieces = _published_in(whole, name, shape, folder)
        if isinstance(pieces, str):
            if name not in whole.integers:  # a counter starts at its first value, a table of indices is computed
                missing[name] = pieces
        else:
            found[name] = pieces
    wrong = _wrong_shapes(found, folder, refuse=not others)
    for name in [name for name, pieces in found.items() if any(piece.name in wrong for piece in pieces)]:
        missing[name] = found.pop(name)[0].name
    _check_dtypes(found, folder, whole.integers)
    _check_any(missing, found, whole, folder)
    if not others:
        _check_missing(missing, whole, folder)
        _check_left(found, whole, folder)
    return found, sorted(missing)


def check_map(whole: WholeModel) -> None:
    """Check that the mapping to published weights is known for a model.

    Raises:
        RunError: it is not.
    """
    if whole.published is None:
        raise RunError(
            RunErrorCode.NO_WEIGHT_MAP,
            f"which published tensors are those of {whole.kind} is not known",
            help="there is a map for llama3, mixtral, deepseek, gpt2 and gpt3, and for models of transformers; "
            'model huggingface("config.json") is one',
        )


def config_warnings(whole: WholeModel, folder: Folder) -> Iterator[str]:
    """Compare parameters of a model that shapes do not determine with the folder's config; yield differences.

    Raises:
        RunError: the weights have another meaning in the published model.
    """
    if not whole.fields or not folder.config:
        return
    builtin, config = whole.config is not None, folder.path / CONFIG
    compared = _config_of(whole, folder)
    for field, published, own, changes in differences(
        whole.fields, compared if builtin else _completed(compared), builtin=builtin
    ):
        if changes and published is None:
            raise RunError(
                RunErrorCode.WEIGHTS_OTHER_MODEL,
                f"{config} has no {field}, and the plan's model {shown(own)}: the weights may mean something else "
                "there",
                help=f"where the published model has {shown(own)} too, add it to {CONFIG}",
            )
        if changes:
            raise RunError(
                RunErrorCode.WEIGHTS_OTHER_MODEL,
                f"{config} has {field} = {shown(published)}, and the plan's model {shown(own)}: the weights mean "
                "something else there",
                help=f'model huggingface("{config}") is the published one'
                if compared is folder.config and (builtin or field == "model_type")
                else "give the plan's model the value of the published one",
            )
        yield (
            f"{config} has {field} = {shown(published)}, and the plan's model {shown(own)}: with these weights it "
            "computes something else than what was published"
        )


def _config_of(whole: WholeModel, folder: Folder) -> Mapping[str, Any]:
    """The fields of a folder's config for the plan's model, which may be one part of several of the published one."""
    return part_of_type(whole.fields.get("model_type"), folder.config)


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the fields that a config leaves out the values that `transformers` gives them, as those of the plan's model.

    A config of a type that the installed `transformers` does not know, or refuses, stays as it is.
    """
    if not isinstance(config.get("model_type"), str):
        return config
    try:
        completed: dict[str, Any] = transformers_config(config).to_dict()
    except ManifestError:
        return config
    return completed


def shown(value: object) -> str:
    """A value of a config in a message."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _published_in(whole: WholeModel, name: str, shape: tuple[int, ...], folder: Folder) -> Pieces | str:
    """Return the pieces of a tensor by a folder's names; where some are missing, the name of one of them."""
    assert whole.published is not None, "see `check_map`"
    lacking = ""
    alike = [name, *(other for other, first in whole.tied.items() if first == name)]
    for one in alike:
        for pieces in whole.published(one, shape):
            for prefix in ("", _base(pieces)):
                named = tuple(piece._replace(name=piece.name.removeprefix(prefix)) for piece in pieces)
                lost = next((piece.name for piece in named if piece.name not in folder.tensors), None)
                if lost is None:
                    return named
                lacking = lacking or lost
    return lacking


def _base(pieces: Pieces) -> str:
    """The beginning that names lack in files of a model without its output layer, as GPT-2's."""
    return _first(pieces[0].name)


def _first(name: str) -> str:
    return f"{name.partition('.')[0]}."


class _Prefix(NamedTuple):
    """The beginning of names in a folder of a larger model, and the one that the same names have in one of its part.

    `tensors` is the number of the model's tensors that the folder has only so.
    """

    there: str
    usual: str
    tensors: int


_FEW: Final = 3
"""So many tensors may have equal names and shapes under another beginning by chance."""


def _prefix(missing: Mapping[str, str], found: Match, whole: WholeModel, folder: Folder) -> _Prefix | None:
    """Find another beginning of names with which the folder has what it lacks, if this is most of the model."""
    absent = {own: name for own, name in missing.items() if name not in folder.tensors}
    least = max((len(missing) + len(found)) // 2, _FEW) + 1
    if len(absent) < least:
        return None
    one, *others = absent.values()
    bases = {_first(name) for name in absent.values()}
    for usual in ("", *(bases if len(bases) == 1 else ())):
        end = one.removeprefix(usual)
        for name in folder.tensors:
            there = name.removesuffix(end)
            if name.endswith(f".{end}") and all(
                f"{there}{each.removeprefix(usual)}" in folder.tensors for each in others
            ):
                count = len(_found_under(there, usual, absent, whole, folder))
                if count >= least:
                    return _Prefix(there, usual, count)
    return None


def _found_under(there: str, usual: str, names: Iterable[str], whole: WholeModel, folder: Folder) -> set[str]:
    """Return which of a model's tensors a folder has, in their shapes, under names with another beginning."""
    renamed = {
        usual + name.removeprefix(there): stored for name, stored in folder.tensors.items() if name.startswith(there)
    }
    part = replace(folder, tensors=renamed)
    alike = {name: _published_in(whole, name, whole.shapes[name], part) for name in names}
    found = {name: pieces for name, pieces in alike.items() if not isinstance(pieces, str)}
    wrong = _wrong_shapes(found, part, refuse=False)
    return {name for name, pieces in found.items() if not any(piece.name in wrong for piece in pieces)}


def _check_any(missing: Mapping[str, str], found: Match, whole: WholeModel, folder: Folder) -> None:
    """Check that some tensors are read, even where others may be missing, and that most are not under other names."""
    prefix = _prefix(missing, found, whole, folder)
    if prefix is not None:
        names = (
            f"with names that begin with `{prefix.usual}`" if prefix.usual else f"with names without `{prefix.there}`"
        )
        raise RunError(
            RunErrorCode.WEIGHTS_OTHER_MODEL,
            f"{folder.path} has {prefix.tensors} of the {len(missing) + len(found)} tensors of the plan's model only "
            f"under names that begin with `{prefix.there}`, as those of one part of a larger model",
            help=f"write that part into a folder of its own, {names}",
        )
    if not found:
        raise RunError(
            RunErrorCode.WEIGHTS_OTHER_MODEL,
            f"{folder.path} has none of the tensors of the plan's model by name and shape; it has "
            f"{listed(folder.tensors) or 'no tensors'}",
            help="take the weights of such a model, or give the plan the model of the folder's config.json",
        )


def _wrong_shapes(found: Match, folder: Folder, *, refuse: bool) -> set[str]:
    shapes = published_shapes(piece for pieces in found.values() for piece in pieces)
    wrong = {name: shape for name, shape in shapes.items() if folder.tensors[name].shape != shape}
    if wrong and refuse:
        name, shape = next(iter(wrong.items()))
        own = next(own for own, pieces in found.items() if any(piece.name == name for piece in pieces))
        more = _others(len(wrong) - 1, "differs", "differ")
        raise RunError(
            RunErrorCode.WEIGHTS_OTHER_MODEL,
            f"{name} of {folder.path} has the shape {list(folder.tensors[name].shape)}, and the plan's model needs "
            f"{list(shape)} for its {own}{more}",
            help="give the plan's model the dimensions of the folder's config.json, or pass --resume-other-plan to "
            "load what has the same shape",
        )
    return set(wrong)


def _others(count: int, does: str, do: str) -> str:
    return "" if not count else f"; another {does} too" if count == 1 else f"; {count} others {do} too"


def _check_dtypes(found: Match, folder: Folder, integers: Container[str]) -> None:
    for name, pieces in found.items():
        dtypes, what = (INTEGERS, "integers") if name in integers else (DTYPES, "weights")
        for piece in pieces:
            stored = folder.tensors[piece.name]
            if stored.dtype not in dtypes:
                raise RunError(
                    RunErrorCode.WEIGHTS_OTHER_MODEL,
                    f"{piece.name} of {folder.path} is in {stored.dtype}: {what} are read from {', '.join(dtypes)}, "
                    "and quantized ones are not",
                    help="take weights that are not quantized",
                )


def _check_missing(missing: Mapping[str, str], whole: WholeModel, folder: Folder) -> None:
    if not missing:
        return
    name, published = min(missing.items(), key=lambda item: (item[1], item[0]))
    more = _others(len(missing) - 1, "is missing", "are missing")
    ties = published == "lm_head.weight" and ties_embeddings(_config_of(whole, folder))
    raise RunError(
        RunErrorCode.WEIGHTS_OTHER_MODEL,
        f"{folder.path} has no {published}, which is {name} of the plan's model{more}",
        help="the published model ties it to the embedding: give the plan's model tie_embeddings = true"
        if ties
        else "pass --resume-other-plan to start afresh with what is missing",
    )


def _check_left(found: Match, whole: WholeModel, folder: Folder) -> None:
    """Check that nothing is left over that the published model computes with."""
    taken = {piece.name for pieces in found.values() for piece in pieces}
    taken |= _tied_names(whole, folder)
    left = [name for name in folder.tensors if name not in taken and not _COMPUTED.search(name)]
    if left:
        raise RunError(
            RunErrorCode.WEIGHTS_OTHER_MODEL,
            f"{folder.path} has tensors that the plan's model has not: {listed(left)}",
            help="give the plan's model what they are for, or pass --resume-other-plan to leave them out",
        )


def _tied_names(whole: WholeModel, folder: Folder) -> set[str]:
    """Published names of tied tensors, which are not read twice, where the published model ties them too."""
    assert whole.published is not None, "see `check_map`"
    # A folder without a config is taken for one of the plan's model.
    if ties_embeddings(_config_of(whole, folder) or {"model_type": whole.fields.get("model_type")}) is False:
        return set()
    names = {
        piece.name
        for name, first in whole.tied.items()
        for alike in (name, first)
        for pieces in whole.published(alike, whole.shapes[first])
        for piece in pieces
    }
    return names | {name.partition(".")[2] for name in names}
