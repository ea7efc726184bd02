"""Loops over repeated blocks reach exactly the modules that the plan assigns, whatever holds the blocks."""

from __future__ import annotations

import random
from collections import OrderedDict
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.emit.base import Lowering
from legoai.lowering.emit.blocks import blocks_of, expand, expression, group, replacement
from legoai.lowering.emit.code import Function, Line, Writer, call
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.manifest import Manifest
from support.texts.plans import resolved


class Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = Leaf(), Leaf()
        self.experts = nn.ModuleList([Leaf(), Leaf()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(self.wq(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Inner(), Leaf()
        self.add_module("odd-name", Leaf())
        self.add_module("class", Leaf())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attention(x))


class OwnList(nn.ModuleList):
    """A list of another class than torch's, of which nothing is known but its modules."""


class Model(nn.Module):
    def __init__(self, blocks: nn.Module, tower: nn.Module | None = None) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(8, 2)
        self.layers = blocks
        if tower is not None:
            self.towers = tower
        self.norm = Leaf()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embeddings(tokens))


def blocks(count: int = 5) -> list[nn.Module]:
    return [Block() for _ in range(count)]


MODELS = {
    "ModuleDict": lambda: Model(nn.ModuleDict({str(index): block for index, block in enumerate(blocks())})),
    "named ModuleDict": lambda: Model(
        nn.ModuleDict(dict(zip(("low", "middle", "high", "top"), blocks(), strict=False)))
    ),
    "ModuleList": lambda: Model(nn.ModuleList(blocks())),
    "Sequential": lambda: Model(nn.Sequential(*blocks())),
    "another class": lambda: Model(OwnList(blocks())),
    "two lists": lambda: Model(nn.ModuleList(blocks()), nn.Sequential(*blocks(3))),
    "the model is the list": lambda: nn.Sequential(*blocks()),
}


@cache
def manifest_of(kind: str) -> Manifest:
    with torch.device("meta"):
        return describe(MODELS[kind](), kind)


PLAN = resolved(
    'plan any\nmodel llama3("tiny")\ncluster cpu\nbatch (global = 1, micro = 1, seq_len = 8)\nmesh (dp_shard = 1)\n'
    "optimizer adamw(lr = 1e-3)\n"
)
"""Groups need a model alone."""


def lowering_of(manifest: Manifest) -> Lowering:
    return Lowering(Analysis(PLAN, manifest))


@st.composite
def assignments(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A model and a treatment for some of its modules, equal for many blocks as rules assign them."""
    kind = draw(st.sampled_from(list(MODELS)))
    manifest = manifest_of(kind)
    generator = random.Random(draw(st.integers(0, 10**6)))
    relative = {
        path: generator.randrange(4) for path in ("", "attention", "attention.wq", "norm", "attention.experts.1")
    }
    assigned = {}
    for listed in manifest.block_lists:
        for name in listed.names:
            for path, treatment in relative.items():
                if treatment and generator.random() < 0.9:
                    prefix = f"{listed.path}." if listed.path else ""
                    assigned[f"{prefix}{name}" + (f".{path}" if path else "")] = treatment
    for path in generator.sample(list(manifest.modules), 3):
        assigned.setdefault(path, generator.randrange(4))
    order = {path: place for place, path in enumerate(manifest.modules)}
    return kind, dict(sorted(assigned.items(), key=lambda item: order[item[0]]))


@settings(max_examples=200)
@given(assignments())
def test_expanded_groups_equal_the_assignment(drawn: tuple[str, dict[str, int]]):
    kind, assigned = drawn
    groups = group(assigned, manifest_of(kind).block_lists)
    assert expand(groups) == assigned
    keys = [(item.blocks.path, item.members) for item in groups if item.blocks is not None]
    assert len(keys) == len(set(keys)), "equally treated blocks are in one group"


@settings(max_examples=150)
@given(assignments())
def test_emitted_loops_reach_assigned_modules_children_first(drawn: tuple[str, dict[str, int]]):
    kind, assigned = drawn
    manifest = manifest_of(kind)
    statements = []
    for item in lowering_of(manifest).groups(assigned):
        over = blocks_of(item, manifest)
        statements += over.loop(
            [
                Line(
                    call(
                        "hit",
                        expression(manifest, whole(over.base, path), base=over.base, block=over.block),
                        str(value),
                    )
                )
                for path, value in item.members
            ]
        )
    with torch.device("meta"):
        model = MODELS[kind]()
    names = {id(module): path for path, module in model.named_modules()}
    hits: dict[str, int] = {}
    run(statements, model, hit=lambda module, value: hits.__setitem__(names[id(module)], value))
    assert hits == assigned
    order = list(hits)
    for path in order:
        above = path.rpartition(".")[0]
        while above or path:
            if above in hits:
                assert order.index(path) < order.index(above)
            if not above:
                break
            above = above.rpartition(".")[0]


@settings(max_examples=150)
@given(assignments())
def test_only_assigned_modules_are_replaced(drawn: tuple[str, dict[str, int]]):
    kind, assigned = drawn
    manifest = manifest_of(kind)
    assigned = {path: value for path, value in assigned.items() if path and manifest.modules[path].kind != "container"}
    statements = []
    for item in lowering_of(manifest).groups(assigned):
        over = blocks_of(item, manifest, replace=any(not path for path, _ in item.members))
        body = []
        for path, _ in item.members:
            module = expression(manifest, whole(over.base, path), base=over.base, block=over.block)
            body.append(replacement(module if path else over.place, call("Wrapped", module)))
        statements += over.loop(body)
    with torch.device("meta"):
        model = MODELS[kind]()
    run(statements, model, Wrapped=Wrapped)
    found = {
        path.replace("inside.", "").removesuffix(".inside") for path, m in model.named_modules() if type(m) is Wrapped
    }
    assert found == set(assigned)


class Wrapped(nn.Module):
    """Like `CheckpointWrapper`: delegates missing attributes to the wrapped module."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside


def whole(base: str, path: str) -> str:
    return f"{base}.{path}" if base and path else base or path


def run(statements: list, model: nn.Module, **names: object) -> None:
    writer = Writer()
    writer.function(Function("apply(model) -> None", (*statements, Line("None"))))
    namespace = dict(names)
    exec("\n".join(writer.text), namespace)
    namespace["apply"](model)


def header(kind: str, indices: tuple[int, ...], *, replace: bool = False) -> str:
    manifest = manifest_of(kind)
    listed = manifest.block_lists[0]
    prefix = f"{listed.path}." if listed.path else ""
    (item,) = group({f"{prefix}{listed.names[index]}": 1 for index in indices}, manifest.block_lists)
    return str(blocks_of(item, manifest, replace=replace).header)


@pytest.mark.parametrize(
    ("kind", "indices", "expected"),
    [
        ("ModuleDict", (0, 1, 2, 3, 4), "for layer in model.layers.values()"),
        ("ModuleDict", (0, 1, 2), "for index in range(3)"),
        ("ModuleDict", (1, 2, 3), "for index in range(1, 4)"),
        ("ModuleDict", (0, 2, 4), "for index in range(0, 5, 2)"),
        ("ModuleDict", (0, 3), "for index in (0, 3)"),
        ("ModuleDict", (0, 1, 4), "for index in (0, 1, 4)"),
        ("named ModuleDict", (1, 3), 'for name in ("middle", "top")'),
        ("ModuleList", (0, 1, 2, 3, 4), "for layer in model.layers"),
        ("Sequential", (0, 1, 2, 3, 4), "for layer in model.layers"),
        ("the model is the list", (0, 1, 2, 3, 4), "for block in model"),
        ("another class", (0, 1, 2, 3, 4), "for index in range(5)"),
    ],
)
def test_loop_headers_are_idiomatic(kind: str, indices: tuple[int, ...], expected: str):
    assert header(kind, indices) == expected


@pytest.mark.parametrize(
    ("order", "names", "expected"),
    [
        ("ABA", None, (0, 1)),
        ("AAB", None, (0, 2)),
        ("AABC", None, (0, 2, 3)),
        ("ABA", ["first", "second", "third"], ("first", "second")),
    ],
)
def test_block_at_several_places_of_its_list_is_reached_once(order: str, names: list[str] | None, expected: tuple):
    with torch.device("meta"):
        made = {letter: nn.Sequential(nn.Linear(2, 2)) for letter in order}
        held = [made[letter] for letter in order]
        named = OrderedDict(zip(names or (), held, strict=False))
        model = Model(nn.Sequential(named) if named else nn.ModuleList(held))
    manifest = describe(model, "model")
    listed = manifest.block_lists[0]
    assert listed.names == tuple(map(str, expected))
    (item,) = group(dict.fromkeys(listed.paths, 1), manifest.block_lists)
    reached: list[nn.Module] = []
    loop = blocks_of(item, manifest)
    run(loop.loop([Line(call("note", loop.block))]), model, note=reached.append)
    assert reached == list(made.values())
    for path in listed.paths:
        assert eval(expression(manifest, path), {"model": model}) is model.get_submodule(path)


def test_replacing_loops_have_the_key():
    everything = (0, 1, 2, 3, 4)
    assert header("ModuleDict", everything, replace=True) == "for name, layer in model.layers.items()"
    assert header("ModuleList", everything, replace=True) == "for index, layer in enumerate(model.layers)"
