"""Data flow of a model's forward, traced from module to module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from legoai.specs.dtypes import TORCH_DTYPES
from legoai.specs.models.manifests.attention_call import AttentionCall
from legoai.specs.models.manifests.described.recorders.feature_uses import FeaturesOf
from legoai.specs.models.manifests.described.recorders.functions import function_name, operation_of, tensors_in, writes
from legoai.specs.models.manifests.feature_use import FeatureUse
from legoai.specs.models.manifests.manifest import Step, StepOp
from legoai.specs.models.random_operators import RandomOperators
from legoai.specs.models.torch_internals import whole_of

_CONSTANT: tuple[StepOp, str] = ("other", "constant")
_DTYPES: Final = {of_torch: name for name, of_torch in TORCH_DTYPES.items()}


@dataclass(slots=True)
class Call:
    """Inputs, operations and outputs of one call of a module's forward; see `ModuleInfo` for the fields."""

    inputs: tuple[str, ...]
    keyword_inputs: tuple[str, ...]
    flow: tuple[Step, ...] = ()
    outputs: tuple[int, ...] = ()
    random: bool = False
    feature_uses: tuple[FeatureUse, ...] = ()
    attention_calls: tuple[AttentionCall, ...] = ()
    made: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Identities of the tensors that each step returned or changed."""


@dataclass(slots=True)
class _Frame:
    """A forward that is being executed."""

    path: str
    call: Call
    steps: list[Step] = field(default_factory=list)
    step_of: dict[int, int] = field(default_factory=dict)
    """The step that produced each tensor, by the tensor's identity."""
    made: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Identities of the tensors of each step."""
    wholes: dict[int, int] = field(default_factory=dict)
    """The step that produced all features of a layer, by the storage that has them."""
    feature_uses: list[FeatureUse] = field(default_factory=list)
    draws: bool = False
    """Whether it, or a forward that it called, drew random numbers."""

    def append(self, op: StepOp, name: str, inputs: tuple[int, ...]) -> int:
        self.steps.append(Step(op, name, inputs))
        return len(self.steps) - 1


class FlowRecorder(TorchFunctionMode):
    """Records, while active, the first call of every module of a model.

    Tensors are kept alive until the recorder is deleted, so that identities stay unique: record on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}
        self.linear_results: dict[int, str] = {}
        """The linear layer that returned each tensor last, by the tensor's identity."""
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._owned = {id(tensor): (op, path) for tensor, op, path in _owned_tensors(model)}
        self._frames: list[_Frame] = []
        self._kept: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []
        self._features = FeaturesOf()
        self._random_operators = RandomOperators(self._draw)

    def __enter__(self) -> FlowRecorder:
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter_module, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave_module, with_kwargs=True))
        self._random_operators.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._random_operators.__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function and note it in the innermost forward."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self._frames:
            _note_attention(self._frames[-1].call, _attention_call(*args, **kwargs))
        made = tensors_in(result)
        written: list[torch.Tensor] = []
        if writes(func) and isinstance(args[0], torch.Tensor):
            # With a part its whole is changed: `x[:, :4].copy_(y)`.
            written = [tensor for tensor in (args[0], whole_of(args[0])) if tensor is not None]
        if (made or written) and self._frames:
            frame = self._frames[-1]
            name = function_name(func)
            op = operation_of(name)
            step = frame.append(op, name, self._sources(frame, (args, kwargs, written)))
            uses = self._features.used(name, args, kwargs, made)
            if all(key in frame.wholes for key, _ in uses):
                frame.feature_uses += [FeatureUse(step, frame.wholes[key], used) for key, used in uses]
            self._features.made_by(op, tensors_in((args, kwargs)), made)
            self._made(frame, [*made, *written], step)
        return result

    def _draw(self) -> None:
        """Note that the innermost forward draws random numbers."""
        if self._frames:
            self._frames[-1].draws = self._frames[-1].call.random = True

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = _positional_names(module, len(args))
        by_keyword = {name: value for name, value in _by_signature(module, kwargs) if tensors_in(value)}
        frame = _Frame(self._paths[module], Call(inputs=names, keyword_inputs=tuple(by_keyword)))
        for name, value in [*zip(names, args, strict=True), *by_keyword.items()]:
            for tensor in tensors_in(value):
                self._made(frame, [tensor], frame.append("input", name, ()))
        self._frames.append(frame)

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        frame = self._frames.pop()
        if frame.path not in self.calls:
            outputs = self._sources(frame, result)
            _prune(frame, outputs)
            self.calls[frame.path] = frame.call
        self.calls[frame.path].random |= frame.call.random
        for attention in frame.call.attention_calls:
            _note_attention(self.calls[frame.path], attention)
        if isinstance(module, nn.Linear):
            self._features.made_by_layer(result)
            self.linear_results[id(result)] = frame.path
        if self._frames:
            caller = self._frames[-1]
            caller.draws |= frame.draws
            sources = self._sources(caller, (args, [value for _, value in _by_signature(module, kwargs)]))
            prefix = f"{caller.path}." if caller.path else ""
            if frame.path.startswith(prefix):
                step = caller.append("call", frame.path.removeprefix(prefix), sources)
            else:
                step = caller.append("other", type(module).__name__, sources)
                caller.call.random |= frame.draws  # of a module that is not below the caller
            self._made(caller, tensors_in(result), step)

    def _made(self, frame: _Frame, tensors: list[torch.Tensor], step: int) -> None:
        self._kept += tensors
        frame.made[step] = tuple(map(id, tensors))
        for tensor in tensors:
            frame.step_of[id(tensor)] = step
            if (key := self._features.whole(tensor)) is not None:
                frame.wholes[key] = step

    def _sources(self, frame: _Frame, values: Any) -> tuple[int, ...]:
        """Return the steps of `frame` that produced the tensors in `values`, each once."""
        steps: dict[int, None] = {}
        for tensor in tensors_in(values):
            step = frame.step_of.get(id(tensor))
            if step is None:
                step = self._first_use(frame, tensor)
            steps[step] = None
        return tuple(steps)

    def _first_use(self, frame: _Frame, tensor: torch.Tensor) -> int:
        """Record a tensor without a step: a parameter, a buffer, or one from outside the forward."""
        op, path = self._owned.get(id(tensor), _CONSTANT)
        prefix = f"{frame.path}." if frame.path else ""
        step = frame.append(op, path.removeprefix(prefix), ())
        self._made(frame, [tensor], step)
        return step


def _attention_call(  # noqa: PLR0917 (PyTorch's own signature)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Describe a call of `scaled_dot_product_attention` by its arguments."""
    casts = ""
    if torch.is_autocast_enabled("cuda"):
        casts = _DTYPES[str(torch.get_autocast_dtype("cuda")).removeprefix("torch.")]
    return AttentionCall(tuple(query.shape), tuple(key.shape), attn_mask is not None, dropout_p > 0, enable_gqa, casts)


def _note_attention(call: Call, attention: AttentionCall) -> None:
    if attention not in call.attention_calls:
        call.attention_calls += (attention,)


def _owned_tensors(model: nn.Module) -> Iterator[tuple[torch.Tensor, StepOp, str]]:
    for path, parameter in model.named_parameters():
        yield parameter, "parameter", path
    for path, buffer in model.named_buffers():
        yield buffer, "buffer", path


def _positional_names(module: nn.Module, count: int) -> tuple[str, ...]:
    """Return the parameter names of `module.forward` for its first `count` positional arguments."""
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{index}" for index in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return tuple(names[:count])


def _by_signature(module: nn.Module, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Order keyword arguments as `module.forward` declares them; callers may pass them on in any order."""
    declared = list(inspect.signature(module.forward).parameters)
    place = {name: index for index, name in enumerate(declared)}
    return sorted(kwargs.items(), key=lambda item: (place.get(item[0], len(declared)), item[0]))


def _prune(frame: _Frame, outputs: tuple[int, ...]) -> None:
    """Give a call its inputs, calls, and steps that lead to a call or an output; renumber the rest."""
    steps, needed, call = frame.steps, set(outputs), frame.call
    for index in range(len(steps) - 1, -1, -1):
        if index in needed or steps[index].op in ("input", "call"):
            needed.add(index)
            needed.update(steps[index].inputs)
    number = {index: place for place, index in enumerate(sorted(needed))}
    call.flow = tuple(
        Step(steps[index].op, steps[index].name, tuple(number[source] for source in steps[index].inputs))
        for index in number
    )
    call.outputs = tuple(number[index] for index in outputs)
    call.feature_uses = tuple(
        FeatureUse(number[use.step], number[use.whole], use.used)
        for use in frame.feature_uses
        if use.step in number and use.whole in number
    )
    call.made = {number[index]: tensors for index, tensors in frame.made.items() if index in number}
