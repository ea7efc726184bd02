"""Linear layers through which every token of a micro batch goes in training, in forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests.described.forwards.pieces_of_sequences import of_other_sizes, token_ids
from legoai.specs.models.manifests.described.recorders.functions import tensors_in
from legoai.specs.models.torch_internals import has_hooks


def layers_of_all_tokens(model: nn.Module, inputs: tuple[Any, ...]) -> frozenset[str]:
    """Return the paths of the linear layers that take all tokens in one call, and give both gradients back.

    Such a call computes three products: the result, and the gradients of the input and of the weight. Nothing is said
    of layers that compute otherwise than `nn.Linear`, within `torch.autocast`, or with frozen weights.

    Args:
        model: on the meta device; a step of training is run at two sizes of its tokens, without an update.
        inputs: of its forward.
    """
    ids = token_ids(inputs)
    if ids is None:
        return frozenset()
    others = of_other_sizes(inputs, (ids.shape[0], ids.shape[1]))
    try:
        first, second = (_take_all(model, given) for given in (inputs, others))
    except Exception:  # its backward fails on the meta device, or it runs at one size alone
        return frozenset()
    return frozenset(first & second)


def _take_all(model: nn.Module, inputs: tuple[Any, ...]) -> set[str]:
    """Return the paths of those that do so in a step of these inputs."""
    ids, found, handles = token_ids(inputs), set[str](), list[RemovableHandle]()
    assert ids is not None
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.Linear)
            and type(module).forward is nn.Linear.forward
            and module.weight.requires_grad
            and not has_hooks(module)
        ):

            def note(layer: nn.Linear, args: tuple[Any, ...], result: torch.Tensor, path: str = path) -> None:
                [taken] = args
                takes_all = taken.numel() == ids.numel() * layer.in_features
                if takes_all and taken.requires_grad and result.requires_grad and not _casts():
                    result.register_hook(lambda _: found.add(path))  # type: ignore[no-untyped-call]

            handles.append(module.register_forward_hook(note))
    try:
        with torch.enable_grad():
            [logits] = tensors_in(model(*inputs))
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(logits.sum(), trained, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _casts() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
