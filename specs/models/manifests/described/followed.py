"""Forward of a model on the meta device, and what is noted of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

from legoai.specs.models.manifests.changes import Changes, ChangesByDtype
from legoai.specs.models.manifests.described.flow import Call, FlowRecorder
from legoai.specs.models.manifests.described.forwards.attribute_reads import AttributeReads
from legoai.specs.models.manifests.described.forwards.drawn_on_host import (
    draws_of,
    numbers_near_one,
    states_of_generators,
)
from legoai.specs.models.manifests.described.forwards.failing_module import FailingModule
from legoai.specs.models.manifests.described.forwards.failing_operator import FailingOperator
from legoai.specs.models.manifests.described.forwards.last_layer import use_of_result
from legoai.specs.models.manifests.described.forwards.pieces_of_sequences import (
    PiecesOfSequences,
    of_other_sizes,
    pieces_of_sequences,
    token_ids,
)
from legoai.specs.models.manifests.described.forwards.plain_tensors import PlainTensors
from legoai.specs.models.manifests.described.forwards.step_changes import step_changes
from legoai.specs.models.manifests.described.forwards.trained_layers import layers_of_all_tokens
from legoai.specs.models.manifests.described.recorders.assigned_attributes import AssignedAttributes
from legoai.specs.models.manifests.described.recorders.changed_parameters import ChangedParameters
from legoai.specs.models.manifests.described.recorders.dtype_recorder import DtypeRecorder
from legoai.specs.models.manifests.described.recorders.functions import tensors_in
from legoai.specs.models.manifests.described.recorders.in_place import InPlaceRecorder
from legoai.specs.models.manifests.described.recorders.place_recorder import PlaceRecorder, Places, counted_dims
from legoai.specs.models.manifests.described.recorders.remembered_results import RememberedResults
from legoai.specs.models.manifests.described.recorders.shape_recorder import ShapeRecorder, followed_shapes
from legoai.specs.models.manifests.described.recorders.sparse_gradients import SparseGradients
from legoai.specs.models.manifests.described.recorders.updated_buffers import UpdatedBuffers
from legoai.specs.models.manifests.host_draws import HostDraws
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.models.manifests.mixed_dtypes import MixedDtypes
from legoai.specs.models.manifests.result import unfit_result
from legoai.specs.models.manifests.shapes import Shape, Sizes, other_sizes
from legoai.specs.models.manifests.values_read import reads_a_value
from legoai.specs.models.reads import Images, Reads, Tokens, reads_from
from legoai.specs.models.torch_internals import (
    autocast_without_device,
    compiled_run_eagerly,
    import_compiler,
    meta_device,
    tree_map,
)

_TRIED: Final[Sequence[Sizes]] = ((2, 8), (4, 128))
"""Samples and tokens that a model is given; the second is for windows, blocks and halved batches."""


@dataclass(frozen=True, slots=True)
class Followed:
    """One forward of a model on the meta device."""

    calls: Mapping[str, Call] = field(default_factory=dict)
    """The first call of every module, by its path."""
    shapes: Mapping[str, tuple[Shape | None, Shape | None]] = field(default_factory=dict)
    """What the noted modules take and give, in samples and tokens."""
    updated: Sequence[str] = ()
    """The buffers that forward updates."""
    updated_unsaved: Sequence[str] = ()
    """As `Manifest.updated_unsaved`."""
    changed_parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Paths of the parameters that a module's own forward changes, by its path."""
    pieces: PiecesOfSequences = field(default_factory=PiecesOfSequences)
    """What keeps the model from computing pieces of sequences."""
    counted_steps: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    """As `CountedPlaces.steps`, by the paths of modules."""
    changes: Mapping[str, ChangesByDtype] = field(default_factory=dict)
    """What the modules change in place, by path."""
    mixed_dtypes: Sequence[MixedDtypes] = ()
    """The operators that get tensors of two dtypes where parameters are in half precision."""
    layers_of_all_tokens: Collection[str] = ()
    """As :func:`layers_of_all_tokens`; none where forward draws random numbers on the host."""
    result_uses: Mapping[str, str] = field(default_factory=dict)
    """What forward does with the result of its last layer, by the layer's path, if it does more than to return it."""
    unfit: str | None = None
    """Why the loss cannot be computed from what forward returned, or None."""
    error: str | None = None
    """Why forward cannot be followed, or None."""
    shaped_by: str | None = None
    """The function at which it failed, if the shape of its result depends on values."""
    plain_tensors: Sequence[tuple[str, str, str]] = ()
    """As `LeftOnMeta.tensors`."""
    attribute_reads: Sequence[tuple[str, str, str]] = ()
    """Modules, each with another inside of it and the attribute of that which its forward reads."""
    step_changes: str | None = None
    """What differs between the steps of a training, or None; it is only looked for where that is asked for."""
    assigned: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Paths of the attributes of modules that the call of a module assigns, by its path."""
    sparse_gradients: Sequence[str] = ()
    """The parameters for which forward asks a sparse gradient."""
    graph_break: tuple[str, str] | None = None
    """As `Manifest.graph_break`."""
    host_draws: HostDraws | None = None
    """As `Manifest.host_draws`."""
    calls_compiled: bool = False
    """Whether forward calls what the model's author compiles by `torch.compile`."""


@numbers_near_one()
@autocast_without_device()
def follow(
    model: nn.Module,
    noted: Mapping[str, nn.Module],
    routed: Sequence[nn.Module],
    around: Collection[str],
    outside: Collection[str],
    *,
    steps: bool,
) -> Followed:
    """Run a model's forward, and note what happens in it.

    Some models take only some sizes, such as multiples of 16 tokens, and some kernels exist on the meta device for bf16
    only: a model that fails is given other inputs, then cast to bf16 and tried again.

    Args:
        model: on the meta device.
        noted: the modules, by path, whose shapes are recorded too.
        routed: the modules that send tokens to experts.
        around: paths of those whose reads of attributes of modules inside are recorded.
        outside: paths of the modules around repeated blocks.
        steps: whether to look for what differs between steps.
    """
    import_compiler()
    errors: dict[Sizes | None, Exception] = {}
    failing, plain, failing_module = FailingOperator(), PlainTensors(model), FailingModule(model, outside)
    given = (None,) if callable(getattr(model, "example_inputs", None)) else _TRIED
    remembered = RememberedResults()
    for dtype, sizes in itertools.product((None, torch.bfloat16), given):
        with meta_device(), remembered:
            try:
                inputs = _inputs(model, sizes)
                if dtype is not None:
                    model.to(dtype)
                    inputs = tree_map(functools.partial(_cast, dtype=dtype), inputs)
                plain.read_by(inputs)
                before, compiled = states_of_generators(), list[None]()
                with (
                    torch.no_grad(),
                    failing,
                    failing_module,
                    SparseGradients(model) as sparse,
                    AssignedAttributes(model) as assigned,
                    UpdatedBuffers(model, inputs) as updated,
                    ChangedParameters(model) as changed,
                    InPlaceRecorder(model) as in_place,  # before others, which thereby see the results of casts
                    FlowRecorder(model) as recorder,
                    PlaceRecorder(model, inputs) as places,
                    ShapeRecorder(noted) as shapes,
                    compiled_run_eagerly(functools.partial(compiled.append, None)),
                ):
                    result = model(*inputs)
                drawn = tuple(name for name, state in states_of_generators().items() if before.get(name) != state)
                reads = reads_of(model)
                unfit = None if reads is None else unfit_result(reads, inputs, result)
                # What is compiled is known now. Each mode below would let it be compiled anew, for seconds.
                with compiled_run_eagerly(lambda: None):
                    changes, mixed = _in_half_precision(model, inputs, in_place.changes)
                    by_sizes, counted = _of_sizes(model, inputs, noted, shapes, places)
                    found = Followed(
                        calls=recorder.calls,
                        shapes=by_sizes,
                        counted_steps={
                            path: counted_dims(counted, call.made) for path, call in recorder.calls.items() if counted
                        },
                        updated=updated.names,
                        updated_unsaved=updated.unsaved,
                        changed_parameters=changed.by_module,
                        pieces=pieces_of_sequences(model, inputs, routed),
                        changes=changes,
                        mixed_dtypes=mixed,
                        layers_of_all_tokens=layers_of_all_tokens(model, inputs) if noted and not drawn else (),
                        result_uses=_result_uses(model, inputs, result, recorder.linear_results),
                        unfit=unfit,
                        plain_tensors=tuple(plain.read),
                        attribute_reads=_attribute_reads(model, inputs, around),
                        assigned=assigned.by_module,
                        sparse_gradients=sparse.names,
                        host_draws=draws_of(model, inputs, drawn) if drawn else None,
                        calls_compiled=bool(compiled),
                    )
                if not steps or unfit is not None:
                    return found
                return replace(found, step_changes=step_changes(model, inputs))
            except Exception as raised:
                failing_module.note(raised)
                errors.setdefault(sizes, raised)
    with meta_device():
        graph_break = failing_module.graph_break()
    # Reasons that differ by numbers are one.
    reasons = {re.sub(r"\d+", "", reason): reason for reason in map(_reason, reversed(errors.values()))}
    is_authors = not type(model).__module__.startswith("transformers.")
    reads_values = all(map(reads_a_value, reasons.values()))  # no other inputs would help
    can_be_told = is_authors and not hasattr(model, "example_inputs") and not reads_values
    tried = " and ".join(f"{samples} samples of {tokens}" for samples, tokens in _TRIED)
    advice = f" ({tried} tokens were tried); a method example_inputs() may say what it takes" if can_be_told else ""
    return Followed(
        error=f"forward failed on the meta device: {'; '.join(reversed(reasons.values()))}{advice}",
        shaped_by=failing.shaped_by,
        graph_break=graph_break,
        unfit=_unfit_by_values(model),
        plain_tensors=tuple(plain.read),
    )


_SMALL: Final = 20_000_000
"""Most parameters of a model whose forward is called on the CPU."""


def _unfit_by_values(model: nn.Module) -> str | None:
    """Return why the loss cannot be computed from what a forward returns that fails on the meta device.

    Forward may need values: it is called on the CPU, where parameters and floating-point buffers have random ones.
    Nothing is known of a large model, or of one that fails there too.
    """
    reads = reads_of(model)
    if reads is None or sum(parameter.numel() for parameter in model.parameters()) > _SMALL:
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            copied = copy.deepcopy(model).to_empty(device="cpu").float()
            for tensor in (*copied.parameters(), *copied.buffers()):
                tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.zero_()
            inputs = _inputs(copied, None if callable(getattr(copied, "example_inputs", None)) else _TRIED[0])
            result = copied(*inputs)
    except Exception:
        return None
    return None if isinstance(result, torch.Tensor) else unfit_result(reads, inputs, result)  # values may choose shapes


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' ...')}"


def _of_sizes(
    model: nn.Module,
    inputs: tuple[Any, ...],
    noted: Mapping[str, nn.Module],
    first: ShapeRecorder,
    first_places: PlaceRecorder,
) -> tuple[dict[str, tuple[Shape | None, Shape | None]], Places | None]:
    """Run a model of token ids at another size; return what modules take and give by samples and tokens, and count."""
    ids = token_ids(inputs)
    if not noted or ids is None:
        return {}, None
    sizes = ids.shape[0], ids.shape[1]
    given = of_other_sizes(inputs, sizes)
    try:
        with torch.no_grad(), ShapeRecorder(noted) as second, PlaceRecorder(model, given) as places:
            model(*given)
    except Exception:  # it may have a size of its own, for which it states `example_inputs`
        return followed_shapes(first, None, sizes), None
    return followed_shapes(first, second, sizes), Places(first_places, places, sizes, other_sizes(sizes))


def _in_half_precision(
    model: nn.Module, inputs: tuple[Any, ...], first: Mapping[str, Changes]
) -> tuple[dict[str, ChangesByDtype], tuple[MixedDtypes, ...]]:
    """Return what the modules change in place, and the operators that get tensors of two dtypes.

    A mixed-precision policy leaves buffers as they are. Where forward does not take them so, they are cast too; where
    it does not run in bf16 at all, nothing else is known.

    Args:
        model: whose forward is run once more, with parameters in bf16.
        inputs: of the forward.
        first: what the modules changed in a forward before.
    """
    second, mixed = first, tuple[MixedDtypes, ...]()
    for tensors in ([*model.parameters()], [*model.parameters(), *model.buffers()]):
        given = tree_map(functools.partial(_cast, dtype=torch.bfloat16), inputs)
        try:
            with (
                torch.no_grad(),
                _in_bf16(tensors),
                DtypeRecorder(model) as dtypes,
                InPlaceRecorder(model) as recorder,
            ):
                model(*given)
        except Exception:
            continue
        second, mixed = recorder.changes, tuple(dtypes.mixed)
        break
    none = Changes()
    changes = {path: ChangesByDtype(first.get(path, none), second.get(path, none)) for path in {**first, **second}}
    return changes, mixed


def _result_uses(model: nn.Module, inputs: tuple[Any, ...], result: Any, layers: Mapping[int, str]) -> dict[str, str]:
    """Return what a forward does with the result of the layer that made its own result, by the layer's path."""
    returned = tensors_in(result)
    path = layers.get(id(returned[0])) if len(returned) == 1 else None
    layer = None if path is None else model.get_submodule(path)
    if path is None or not isinstance(layer, nn.Linear):
        return {}
    try:
        use = use_of_result(model, inputs, layer)
    except Exception:  # its training or its evaluation fails, whatever computes the layer
        return {}
    return {path: use} if use else {}


def _attribute_reads(
    model: nn.Module, inputs: tuple[Any, ...], around: Collection[str]
) -> Sequence[tuple[str, str, str]]:
    reads = AttributeReads(model, around)
    if around:
        reads.read_by(inputs)
    return reads.found


@contextlib.contextmanager
def _in_bf16(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give floating-point tensors of a model another dtype for a while."""
    before = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
    try:
        for tensor, data in before:
            tensor.data = data.to(torch.bfloat16)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _cast(value: Any, *, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _inputs(model: nn.Module, sizes: Sizes | None) -> tuple[Any, ...]:
    """Return inputs of the kind that the model's `reads` states; without sizes its own `example_inputs()`."""
    if sizes is None:
        method: Any = model.example_inputs
        return tuple(method())
    shapes = (reads_of(model) or Tokens()).inputs(*sizes)
    return tuple(torch.zeros(item.shape, dtype=None if item.floating else torch.int64) for item in shapes)


def require_positions_for_inputs(model: nn.Module) -> None:
    """Check that forward takes by position what a run passes so.

    Raises:
        ManifestError: it takes fewer arguments by position, such as none but keywords.
    """
    reads, parameters = reads_of(model), inspect.signature(model.forward).parameters.values()
    given = 0 if reads is None else len(reads.inputs(*_TRIED[0]))
    taken = sum(item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD) for item in parameters)
    if taken < given and all(item.kind is not item.VAR_POSITIONAL for item in parameters):
        raise ManifestError(
            "not_a_module",
            f"training passes {given} input{'s' if given > 1 else ''} by position, and the forward of "
            f"{type(model).__name__} takes {taken or 'none'} so",
            "give forward parameters that no `*` precedes, as in `def forward(self, tokens)`",
        )


def reads_of(model: nn.Module) -> Reads | None:
    """Return the model's inputs and outputs by its own `reads`; see `legoai.specs.models.reads`."""
    declared = inspect.getattr_static(type(model), "reads", None)
    if isinstance(declared, property) and declared.fget is not None:
        told = _computed(model, declared.fget)
    else:
        told = getattr(model, "reads", _UNTOLD)
    if told is None:
        return None
    if told is not _UNTOLD:
        try:
            return reads_from(told)
        except ValueError as error:
            raise ManifestError("not_a_module", f"{type(model).__name__}: {error}") from error
    # Models of timm have a config: `input_size` is (channels, height, width).
    pretrained: Any = getattr(model, "pretrained_cfg", None)
    size = pretrained.get("input_size") if isinstance(pretrained, Mapping) else None
    classes = getattr(model, "num_classes", None)
    if size is None or not isinstance(classes, int) or classes < 1:
        return Tokens()
    channels, height, width = map(int, size)
    return Images(channels=channels, height=height, width=width, classes=classes)


_UNTOLD = object()


def _computed(model: nn.Module, told: Callable[[Any], Any]) -> Any:
    """Return the value of a property, whose `AttributeError` a module would take for a missing attribute."""
    try:
        return told(model)
    except AttributeError as error:
        raise ManifestError("not_a_module", f"{type(model).__name__}: its `reads` fails: {error}") from error
