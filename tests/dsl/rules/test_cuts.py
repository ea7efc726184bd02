"""Stage boundaries of other authors' models: accepted where one tensor crosses, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis.stages.chain import CannotFollow, Chain
from legoai.dsl.lint import lint
from legoai.specs.models.inspect import inspect_model
from legoai.specs.models.source import ModelSource

MODELS = '''
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x, *more):
        return x + self.lin(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(16, 8)
        self.pos = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(8, 16)

    def embed(self, tokens):
        return self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Deep(Model):
    """Only the embedding says how many features there are: a block may take any."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixes() for _ in range(200))


class Mixes(Block):
    def forward(self, x, *more):
        return x + self.lin(x).roll(1, -1)


class Skips(Model):
    """The last block takes what the first gave, too."""

    def forward(self, tokens):
        first = x = self.blocks[0](self.embed(tokens))
        for block in self.blocks[1:]:
            x = block(x, first)
        return self.out(x)


class Scales(Model):
    """Between two blocks something is computed."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x * 2)
        return self.out(x)


class Masks(Model):
    """Every block looks at the tokens."""

    def forward(self, tokens):
        mask = (tokens != 0).to(torch.float32)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x)


class Owns(Model):
    """A parameter lies in no module."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, tokens):
        x = self.embed(tokens) + self.bias
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Twice(Model):
    """The blocks are gone through twice."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.out(x)


class Backwards(Model):
    """The blocks are called from the last to the first."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in list(self.blocks)[::-1]:
            x = block(x)
        return self.out(x)


class Wide(Block):
    def forward(self, x, *more):
        return torch.cat([x, self.lin(x)], -1)


class Widens(Model):
    """Every block gives twice as many features as it takes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wide(8 * 2**index) for index in range(4))
        self.out = nn.Linear(128, 16)


class Inside(Model):
    """A part of a block is called without the block."""

    def forward(self, tokens):
        x = self.blocks[0].lin(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.out(x)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    (folder / "models_to_cut.py").write_text(MODELS)
    return folder


@pytest.fixture(scope="module")
def chain_of(folder):
    def chain(name: str) -> Chain:
        return Chain(inspect_model(ModelSource(kind="python", target=f"models_to_cut:{name}", arguments={}), folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield chain


def test_a_chain_is_cut_between_its_blocks(chain_of):
    chain = chain_of("Model")
    stages = chain.stages("even", 2)
    assert stages == (("tok", "pos", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "out"))
    [cut] = chain.cuts(stages)
    assert (cut.before, cut.start, cut.width) == ("blocks.1", "blocks.2", 8)
    assert Chain.width([cut]) == 8


def test_feature_width_is_propagated_through_many_blocks(chain_of):
    """More than the interpreter has frames for."""
    chain = chain_of("Deep")
    [cut] = chain.cuts(chain.stages("even", 2))
    assert (cut.before, cut.width) == ("blocks.99", 8)


def test_stages_are_counted_from_the_embedding(chain_of):
    with pytest.raises(CannotFollow, match=r"what `blocks\.0` takes does not come straight from a module"):
        list(chain_of("Model").cuts(chain_of("Model").stages(["blocks.0"], 2)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Skips", "`blocks.2` takes what `blocks.0` computes, besides what `blocks.2` takes"),
        ("Scales", "what `blocks.2` takes does not come straight from a module of the stage before"),
        ("Masks", "takes what the forward of `root` computes"),
        ("Owns", "`bias` is a parameter of a module that would be on every stage"),
        ("Twice", "`blocks.0` is called 2 times in one forward"),
        ("Backwards", "`blocks.0` lies on an earlier stage than `blocks.3`, and is called after it"),
    ],
)
def test_cut_that_would_train_wrongly_is_refused(name: str, message: str, chain_of):
    chain = chain_of(name)
    with pytest.raises(CannotFollow, match=message):
        list(chain.cuts(chain.stages("even", 2)))


def test_cut_with_unknown_feature_width_is_refused(chain_of):
    chain = chain_of("Widens")
    with pytest.raises(CannotFollow, match=r"how many features `blocks\.1` hands on cannot be told"):
        Chain.width(list(chain.cuts(chain.stages("even", 2))))


def test_call_into_a_block_is_refused(chain_of):
    with pytest.raises(CannotFollow, match=r"`blocks\.0\.lin` is called by itself, without `blocks\.0`"):
        chain_of("Inside")


PLAN = """plan theirs
model   python("models_to_cut:Skips")
cluster cpu(devices = 2)
batch   (global = 8, micro = 2, seq_len = 16)
mesh    (pp = 2)
pipeline on pp (schedule = GPipe, split = [blocks.2])
"""


def test_the_linter_names_the_line_and_the_module(folder: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    found = [item for item in lint(PLAN, "theirs.plan", directory=folder).diagnostics if item.severity == "error"]
    assert [(item.code, item.label.span.line) for item in found] == [("LP518", 6)]
    assert "`blocks.0`" in found[0].message


def test_single_stage_needs_no_cut():
    configs = Path(__file__).parents[2] / "support" / "huggingface"
    text = """\
plan one
model huggingface("llama.json")
cluster cpu(devices = 2)
batch (global = 8, micro = 1, seq_len = 64)
mesh (pp = 2)
pipeline on pp (schedule = 1F1B, stages = 1)
"""
    found = lint(text, "one.plan", directory=configs)
    assert found.has_errors
    assert not any(item.code == "LP518" for item in found.diagnostics)
