"""`legoai export`: writes a checkpoint's weights as Hugging Face publishes them."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legoai.commands import WrongUsage
from legoai.commands.shared import (
    STANDARD_OUTPUT,
    add_no_factories,
    add_resolution,
    announce,
    sound,
    source_of,
)
from legoai.runtime.torch_internals.cpp_warnings import without_cpp_warnings
from legoai.specs.dtypes import TORCH_DTYPES
from legoai.specs.models.import_path import add_author_folder, author_folder
from legoai.specs.units import UNITS, counted, format_bytes

if TYPE_CHECKING:
    from legoai.dsl.analysis.analysis import Analysis
    from legoai.runtime.published.beside import Beside
    from legoai.runtime.published.whole_model import WholeModel
    from legoai.specs.plan import Plan

_DESCRIPTION = """\
Write the weights of a checkpoint into a folder of safetensors files with their index and a config.json, from which
`transformers.AutoModelForCausalLM.from_pretrained` makes the same model. The plan determines the model; no GPU is
needed, and one file is in memory at a time. Nothing is unpickled.

The exit status is 1 if the plan has errors, or its model cannot be published or the checkpoint not be read.
"""

_EXAMPLES = """\
examples:
  legoai export plan.tiny -o tiny-hf                                     the newest checkpoint of `legoai run`
  legoai export plan.tiny --checkpoint runs/tiny/checkpoints/step-200 -o tiny-hf
  legoai export plan.tiny -o tiny-hf --dtype bf16 --max-shard-size 2GB
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai export`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("file", metavar="FILE", help="the plan of the checkpoint, plan.NAME, or -")
    parser.add_argument("-o", "--output", metavar="FOLDER", type=Path, required=True,
                        help="the folder to make; it must not be there")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="PATH", type=Path,
                        help="a step-N folder, or a run's folder (default: where `legoai run FILE` saves)")  # fmt: skip
    parser.add_argument("--dtype", choices=tuple(TORCH_DTYPES),
                        help="of the weights (default: as the checkpoint has them)")  # fmt: skip
    parser.add_argument("--max-shard-size", metavar="SIZE", type=_size, default=5 * 10**9,
                        help="bytes in one file, unless a single tensor has more (default: 5GB)")  # fmt: skip
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Export; returns 1 where the plan has errors, or there is nothing to export."""
    if arguments.output == STANDARD_OUTPUT:
        raise WrongUsage("-o names a folder: a checkpoint is no text for standard output")
    source = source_of(arguments.file)
    linted = None if source is None else sound(source, arguments, "exported")
    if linted is None:
        return 1
    from legoai.runtime.errors import RunError

    assert linted.plan is not None
    assert linted.analysis is not None
    try:
        _export(linted.plan, linted.analysis, arguments)
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


@without_cpp_warnings()
def _export(plan: Plan, analysis: Analysis, arguments: Namespace) -> None:
    import torch

    from legoai.lowering.start import run_folder
    from legoai.runtime.device import Device
    from legoai.runtime.errors import RunError, RunErrorCode
    from legoai.runtime.process_group import process_group
    from legoai.runtime.published.export import WITH_ITS_PLAN, export
    from legoai.runtime.published.matching import check_map
    from legoai.runtime.published.saved_model import check_model
    from legoai.runtime.training.resume import named_checkpoint

    whole = _whole_model(plan, analysis)
    check_map(whole)
    fields = _fields(plan, analysis, whole)
    place: Path = arguments.checkpoint or run_folder(plan)
    if arguments.checkpoint is None and not place.exists():
        raise RunError(
            RunErrorCode.CHECKPOINT_MISSING,
            f"{plan.name} has not been run here: there is no folder {place}",
            help=f"train it first with `legoai run {arguments.file}`, or name another checkpoint by --checkpoint",
        )
    with process_group(Device.choose("cpu"), timeout_seconds=600):
        path, meta = named_checkpoint(place, option="--checkpoint", warn=lambda text: announce(f"warning: {text}"))
        check_model(path, meta, whole, others=False, strict=True, help=WITH_ITS_PLAN)
        found = export(
            path,
            arguments.output,
            whole,
            fields,
            dtype=None if arguments.dtype is None else getattr(torch, TORCH_DTYPES[arguments.dtype]),
            most_bytes=arguments.max_shard_size,
            beside=_beside(plan),
            say=announce,
        )
    held = f"{counted(found.tensors, 'tensor')} of {path}, {format_bytes(found.nbytes)}"
    print(f"wrote {held} in {counted(found.files, 'file')}, to {arguments.output}")


def _whole_model(plan: Plan, analysis: Analysis) -> WholeModel:
    import torch

    from legoai.runtime.published.whole_model import WholeModel
    from legoai.specs.models.build import build_model

    if plan.model.family == "python":
        announce(f"building the model with {plan.model.target}")
    add_author_folder(author_folder(plan.model.family, analysis.directory))
    with torch.device("meta"):
        return WholeModel.of(build_model(plan.model.source(), analysis.directory))


def _fields(plan: Plan, analysis: Analysis, whole: WholeModel) -> dict[str, Any]:
    """The fields of the model's config."""
    from legoai.runtime.errors import RunError, RunErrorCode
    from legoai.specs.models.manifests.cache import read_config
    from legoai.specs.published.configs import NotPublishedError, published_config

    if plan.model.family == "huggingface":
        assert plan.model.target is not None
        fields = {**read_config(analysis.directory / plan.model.target), **dict(plan.model.arguments)}
        return {"architectures": [whole.kind], **fields}
    try:
        if whole.config is None:
            raise NotPublishedError(f"its config is not known, as {whole.kind} comes from a factory")
        return published_config(whole.config)
    except NotPublishedError as error:
        raise RunError(RunErrorCode.NO_WEIGHT_MAP, f"the model of {plan.name} cannot be published: {error}") from None


def _beside(plan: Plan) -> Beside:
    """Sources of other files to publish: the tokenizer of the training, and the initial weights."""
    from legoai.runtime.data.tokens import file_of
    from legoai.runtime.published.beside import Beside

    tokenizer = None
    if plan.data is not None and plan.data.tokenizer:
        tokenizer = file_of(Path(plan.data.tokenizer))
        if not tokenizer.is_file():
            announce(f"warning: the tokenizer of {plan.name} is not added, as there is no file {tokenizer}")
    return Beside(tokenizer, None if plan.weights is None else Path(plan.weights.huggingface))


def _size(text: str) -> int:
    number = text.rstrip("BKMGTi")
    unit = UNITS.get(text[len(number) :].strip() or "B")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if unit is None or unit[0] != "bytes" or not 1 <= value * unit[1] < math.inf:
        raise ArgumentTypeError(f"expected a size, such as 5GB or 512MiB, not {text!r}")
    return int(value * unit[1])
