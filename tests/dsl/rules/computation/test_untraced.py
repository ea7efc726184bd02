"""Constructs that torch's compiler does not trace: backward hooks, assignments in a checkpoint, and reads of values."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from legoai.runtime import keep_outputs
from support.models.untraced import Block
from support.texts.rule_plans import codes

BLOCKS = "layers.* = aot_eager"
BREAKS = "layers.* = aot_eager(fullgraph = false)"
SAVED = "checkpoint { layers.* = selective([matmul]) }"

ASSIGNING = ("counter", "spectral_norm", "weight_norm", "number", "new", "tensor", "undone", "list")
TRACED = ("in_place", "parametrized", "same_number", "")


def model(what: str) -> str:
    return f'model python("support.models.untraced:build", what = "{what}")\n'


@pytest.mark.parametrize("hook", ["backward", "backward_pre", "backward_old"])
@pytest.mark.parametrize(
    ("owner", "compiled", "checkpoint", "is_refused"),
    [
        ("", BLOCKS, "", True),
        ("", BREAKS, "", False),
        ("", BLOCKS, "checkpoint { layers.* = full }", True),
        ("", "layers.*.inner = aot_eager", "", False),
        ("", "root = aot_eager", "", True),
        ("own_", BLOCKS, "", False),
        ("own_", BLOCKS, "checkpoint { layers.* = full }", False),
        ("own_", BLOCKS, "checkpoint { layers.* = budget(0.5) }", False),
        ("own_", BLOCKS, "checkpoint { layers.*.inner = full }", False),
        ("own_", BLOCKS, SAVED, True),
        ("own_", BREAKS, SAVED, False),
        ("own_", "root = aot_eager", "", True),
    ],
)
def test_backward_hooks_stay_outside_of_graphs(owner: str, compiled: str, checkpoint: str, is_refused: bool, hook: str):
    found = codes(f"{model(owner + hook)}{checkpoint}\ncompile {{ {compiled} }}")
    assert ("LP646" in found) is is_refused


@pytest.mark.parametrize("hook", ["backward", "backward_pre", "backward_old"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_torch_traces_of_backward_hooks(hook: str, *, checkpointed: bool):
    for owner in ("own_", ""):
        torch.compiler.reset()
        block = Block(owner + hook)
        if checkpointed:
            block = checkpoint_wrapper(block, context_fn=keep_outputs("matmul"))
        block.compile(backend="aot_eager", fullgraph=True)
        if owner and not checkpointed:
            block(torch.randn(2, 16, requires_grad=True)).sum().backward()
        else:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                block(torch.randn(2, 16, requires_grad=True))


@pytest.mark.parametrize("what", [*ASSIGNING, *TRACED])
def test_attributes_are_not_assigned_in_a_compiled_checkpoint(what: str):
    found = codes(f"{model(what)}{SAVED}\ncompile {{ {BLOCKS} }}")
    assert ("LP647" in found) is (what in ASSIGNING)


@pytest.mark.parametrize(
    ("compiled", "checkpoint", "is_refused"),
    [
        (BREAKS, SAVED, False),
        (BLOCKS, "", False),
        (BLOCKS, "checkpoint { layers.* = full }", False),
        (BLOCKS, "checkpoint { layers.* = budget(0.5) }", False),
        (BLOCKS, "checkpoint { layers.*.inner = full }", False),
        ("root = aot_eager", "checkpoint { layers.* = full }", True),
        ("layers.*.inner = aot_eager", SAVED, False),
    ],
)
def test_a_checkpoint_outside_of_the_graph_may_assign(compiled: str, checkpoint: str, is_refused: bool):
    found = codes(f"{model('counter')}{checkpoint}\ncompile {{ {compiled} }}")
    assert ("LP647" in found) is is_refused


def test_what_torch_traces_of_a_checkpoint():
    refused = []
    for what in (*ASSIGNING, *TRACED):
        torch.compiler.reset()
        block = checkpoint_wrapper(Block(what), context_fn=keep_outputs("matmul"))
        block.compile(backend="aot_eager", fullgraph=True)
        try:
            for _ in range(2):  # a number may differ from one call to the next
                block(torch.randn(2, 16, requires_grad=True)).sum().backward()
        except torch._dynamo.exc.Unsupported:
            refused.append(what)
    assert tuple(refused) == ASSIGNING


@pytest.mark.parametrize(
    ("what", "compiled", "is_refused"),
    [
        ("branch", BLOCKS, True),
        ("branch", "root = aot_eager", True),
        ("branch", BREAKS, False),
        ("branch", "layers.*.inner = aot_eager", False),
        ("assert", BLOCKS, False),
        ("guarded", BLOCKS, False),
        ("", BLOCKS, False),
    ],
)
def test_branches_on_values_break_graphs(what: str, compiled: str, is_refused: bool):
    assert ("LP648" in codes(f"{model(what)}compile {{ {compiled} }}")) is is_refused
