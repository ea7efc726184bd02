"""Private names of torch for describing a model; all others are in :mod:`legoai.runtime.torch_internals`."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

# Hides what is done inside from modes and from subclasses of tensors.
from torch._C import DisableTorchFunction

# Whether a tensor is one of `torch.func`'s, as within `vmap`.
from torch._C._functorch import is_functorch_wrapped_tensor as is_transformed

# Class of `torch.ops.aten.add.Tensor`, for annotations.
from torch._ops import OpOverload

# Whether autocast of CUDA is turned off for want of a GPU.
from torch.cuda.amp import common as cuda_amp

# Holds whether a trace is in progress; what a trace cannot contain asks for it.
from torch.fx import _symbolic_trace as symbolic_trace

# Base class of batch normalisation in any number of dims.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# Base class of dropout in any number of dims, and of its variants.
from torch.nn.modules.dropout import _DropoutNd as Dropout

# The functions that make tensors on the device of a context.
from torch.utils._device import _device_constructors

# The documented way to observe operators below autograd; torch has it only under a private name.
from torch.utils._python_dispatch import TorchDispatchMode

# Nested arguments and results; only torch's own pytrees support the outputs of Hugging Face's models.
from torch.utils._pytree import tree_leaves, tree_map


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base class of modes that observe operators, also those of higher order."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise the first operator would import the compiler, whose definitions this and other modes would observe.
        return False


def import_compiler() -> None:
    """Import torch's compiler, as the first meta operator that is written in Python would.

    Within a dispatch mode that import fails half-way: the mode observes operators that the compiler defines.
    """
    import torch._dynamo  # noqa: F401


def meta_device() -> torch.device:
    """The meta device, as a context in which every constructor of torch makes its tensors there.

    torch looks its constructors up at the first such context of a process. `from_pretrained` of transformers 5 opens
    one while it replaces `torch.linspace`; if that was the first, `torch.linspace` would make tensors on the cpu later.
    """
    _device_constructors.cache_clear()
    _device_constructors()  # before a factory calls `from_pretrained`
    return torch.device("meta")


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that a storage has alone while it lives, also on the meta device, where its address is 0."""
    key: int = storage._cdata
    return key


def storage_of(tensor: torch.Tensor) -> int:
    """The key of a tensor's storage; a number of its own where it has none: a sparse tensor, one within `vmap`."""
    try:
        return storage_key(tensor.untyped_storage())
    except NotImplementedError:
        return -id(tensor)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether something is called with a module's arguments, results or gradients, or those of its own parameters."""
    own = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(own) or any(map(has_gradient_hooks, module.parameters(recurse=False)))


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether something is called with the gradients of a module's results or inputs."""
    return bool(module._backward_pre_hooks or module._backward_hooks)


def why_not_one_graph(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why torch's compiler does not trace the call of a module as one graph; None where it does."""
    import torch._dynamo

    def called() -> Any:
        return module(*args, **kwargs)

    try:
        with torch.no_grad():
            torch.compile(called, backend="eager", fullgraph=True)()
    except torch._dynamo.exc.Unsupported as error:
        return str(error).partition("\n")[0]
    except Exception:  # on the meta device the graph may fail where it would not in a run
        return None
    return None


def whole_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which this one is a view; None where it is not a view."""
    with DisableTorchFunction():  # otherwise a mode would observe it as an operation of the model
        return tensor._base


@contextlib.contextmanager
def attributes_hidden(hides: Callable[[torch.nn.Module, str, FrameType | None], bool]) -> Iterator[None]:
    """Let modules have no attributes of some names, as placeholders of theirs have none.

    Args:
        hides: called with a module, the name of an attribute that is read, and the frame that reads it.
    """
    module_class = torch.nn.Module
    get_other = module_class.__getattr__  # parameters, buffers and modules

    def attribute(module: torch.nn.Module, name: str) -> Any:
        if hides(module, name, _caller()):
            raise AttributeError(name)
        return object.__getattribute__(module, name)

    def other_attribute(module: torch.nn.Module, name: str) -> Any:
        if hides(module, name, _caller()):  # Python looks here next
            raise AttributeError(name)
        return get_other(module, name)

    module_class.__getattribute__ = attribute  # type: ignore[assignment]
    module_class.__getattr__ = other_attribute  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module_class.__getattribute__
        module_class.__getattr__ = get_other  # type: ignore[method-assign]


@contextlib.contextmanager
def assignments_noted(note: Callable[[torch.nn.Module, str, Any], None]) -> Iterator[None]:
    """Call a function before an attribute of a module is assigned, with the module, the name and the value."""
    module_class = torch.nn.Module
    assign = module_class.__setattr__

    def noted(module: torch.nn.Module, name: str, value: Any) -> None:
        note(module, name, value)
        assign(module, name, value)

    module_class.__setattr__ = noted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        module_class.__setattr__ = assign  # type: ignore[method-assign]


def _caller() -> FrameType | None:
    """Return the frame that called the function which calls this one."""
    frame = inspect.currentframe()
    return None if frame is None or frame.f_back is None else frame.f_back.f_back


@contextlib.contextmanager
def autocast_without_device() -> Iterator[None]:
    """Let `torch.autocast` be made and entered for a GPU that is not there, and for the meta device as for a GPU.

    It does nothing with tensors on the meta device.
    """
    made, absent, has_bf16 = (
        torch.autocast.__init__,
        cuda_amp.amp_definitely_not_available,
        torch.cuda.is_bf16_supported,
    )

    def make(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        made(self, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = make  # type: ignore[method-assign]
    cuda_amp.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    try:
        yield
    finally:
        torch.autocast.__init__ = made  # type: ignore[method-assign]
        cuda_amp.amp_definitely_not_available = absent
        torch.cuda.is_bf16_supported = has_bf16


@contextlib.contextmanager
def compiled_run_eagerly(note: Callable[[], None]) -> Iterator[None]:
    """Run what `torch.compile` compiled as it was written, and call a function at each such call.

    A stance `force_eager` of `torch.compiler.set_stance` does the first, and says nothing of what it met.
    """
    from torch._dynamo import eval_frame

    before = eval_frame._callback_from_stance

    def eager(callback: Any) -> Any:
        if callback not in (None, False):
            note()
        return None

    eval_frame._callback_from_stance = eager
    try:
        yield
    finally:
        eval_frame._callback_from_stance = before


@contextlib.contextmanager
def as_if_traced() -> Iterator[None]:
    """Let functions compiled by `torch.compile` fail, as within a trace by `make_fx`."""
    before = symbolic_trace._is_fx_tracing_flag
    symbolic_trace._is_fx_tracing_flag = True
    try:
        yield
    finally:
        symbolic_trace._is_fx_tracing_flag = before


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether something is called with a parameter's gradient: by `register_hook`, or after it is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


# The functions that a torch-function mode receives for `tensor.is_meta` and `tensor.device`.
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
DEVICE_OF = torch.Tensor.device.__get__

__all__ = [
    "DEVICE_OF",
    "IS_META",
    "BatchNorm",
    "DisableTorchFunction",
    "Dropout",
    "OpOverload",
    "OperatorMode",
    "as_if_traced",
    "assignments_noted",
    "attributes_hidden",
    "autocast_without_device",
    "compiled_run_eagerly",
    "has_backward_hooks",
    "has_gradient_hooks",
    "has_hooks",
    "import_compiler",
    "is_transformed",
    "meta_device",
    "storage_key",
    "storage_of",
    "tree_leaves",
    "tree_map",
    "whole_of",
    "why_not_one_graph",
]
