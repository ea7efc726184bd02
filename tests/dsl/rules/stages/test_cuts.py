"""Stage boundaries of other authors' models: accepted where one tensor crosses, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis.stages.chain import CannotFollow, Chain
from legoai.dsl.lint import lint
from legoai.specs.models.inspect import inspect_model
from legoai.specs.models.manifests.shapes import words
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


class TokensFirst(Model):
    """Blocks take [length, batch, features]."""

    def forward(self, tokens):
        x = self.embed(tokens).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.out(x).transpose(0, 1)


class Turned(TokensFirst):
    def forward(self, tokens):
        return super().forward(tokens).transpose(0, 1)


class Sized(TokensFirst):
    """Runs at one size only, which it states."""

    def example_inputs(self):
        return (torch.zeros(2, 8, dtype=torch.int64),)

    def forward(self, tokens):
        assert tokens.shape == (2, 8)
        return super().forward(tokens)


class Flat(Model):
    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.out(x).view(*tokens.shape, -1)


class Heads(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(4))

    def forward(self, tokens):
        count, length = tokens.shape
        x = self.embed(tokens).view(count, length, 2, 4).transpose(1, 2).reshape(2 * count, length, 4)
        for block in self.blocks:
            x = block(x)
        return self.out(x.view(count, 2, length, 4).transpose(1, 2).reshape(count, length, 8))


class Summed(Model):
    """One token more than the text has goes through the blocks."""

    def forward(self, tokens):
        x = nn.functional.pad(self.embed(tokens), (0, 0, 1, 0))
        for block in self.blocks:
            x = block(x)
        return self.out(x[:, 1:])


class Pair(Block):
    def forward(self, x, *more):
        return super().forward(x), None


class Paired(Model):
    """Blocks return what goes on, and something else."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.out(x)


class Reads(Model):
    """The model's forward reads an attribute of its embedding."""

    def forward(self, tokens):
        return super().forward(tokens).to(self.tok.weight.dtype)


class ReadsBlock(Model):
    """It reads a number of its blocks, and of one that may not be there."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.scale = 1

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            assert not getattr(block, "missing", 0) and getattr(self.tok, "padding_idx", None) is None
            x = block(x) if block.scale else x
        return self.out(x)


class FallsBack(Model):
    """It multiplies by numbers of its blocks, and would by others."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.scale = 3.0

    def forward(self, tokens):
        result = super().forward(tokens)
        for block in self.blocks:
            assert getattr(block, "lin", None) is not None or not hasattr(self.tok, "none")
            result = result * getattr(block, "scale", 1.0)
        return result


class FallsBackOnce(Model):
    """One block of the last stage has the number."""

    def forward(self, tokens):
        self.blocks[3].scale = 3.0
        scale = max(getattr(block, "scale", 1.0) for block in self.blocks)
        return super().forward(tokens) * torch.tensor(scale)


class Asks(Model):
    def __init__(self):
        super().__init__()
        self.tok.extra = 2.0

    def forward(self, tokens):
        result = super().forward(tokens)
        return result * self.tok.extra if hasattr(self.tok, "extra") else result


class Tries(Model):
    def forward(self, tokens):
        try:
            factor = float(self.tok.embedding_dim)
        except AttributeError:
            factor = 1.0
        return super().forward(tokens) * factor


class SkipsOthers(Model):
    """Blocks without a layer are skipped; on other stages, these would pass on what they get."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if getattr(block, "lin", None) is None:
                continue
            x = block(x)
        return self.out(x) * 2


class SkipsAll(Model):
    """All blocks are skipped where one has no layer."""

    def forward(self, tokens):
        x = self.embed(tokens)
        if all(hasattr(block, "lin") for block in self.blocks):
            for block in self.blocks:
                x = block(x)
        return self.out(x)


class AsksClass(Model):
    def forward(self, tokens):
        factor = 2.0 if all(isinstance(block, Block) for block in self.blocks) else 1.0
        return super().forward(tokens) * factor


class SkipsOtherClasses(Model):
    """Only blocks are called; on other stages, the others would pass on what they get."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if isinstance(block, Block) else x
        return self.out(x)


def dtype_of(module):
    return module.weight.dtype


class ReadsByFunction(Model):
    def forward(self, tokens):
        return super().forward(tokens).to(dtype_of(self.tok))


class ReadsParameters(Model):
    def forward(self, tokens):
        return super().forward(tokens).to(next(self.tok.parameters()).dtype)


class ReadsVariables(Model):
    def forward(self, tokens):
        return super().forward(tokens) * vars(self.tok)["embedding_dim"]


class ReadsOwnParameters(Model):
    def forward(self, tokens):
        assert len(list(self.modules())) > len(list(self.blocks.children()))
        return super().forward(tokens).to(next(self.parameters()).dtype)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.ones(8), persistent=False)

    def forward(self, length):
        return self.values[:length]


class Harmless(Model):
    """What is read is on every stage, or is read by the module itself, or may be missing."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Called() for _ in range(4))
        self.table = Table()

    def forward(self, tokens):
        if hasattr(self.tok, "sparse"):
            assert tokens.dim() == 2
        length = self.table.values.shape[0]
        return super().forward(tokens) * self.table(length).mean()


class Called(Block):
    """A module with a call of its own, as those of transformers have."""

    def __init__(self):
        super().__init__()
        self.recomputes = False
        self.lin.register_forward_pre_hook(lambda module, given: None if module.weight.is_sparse else given)

    def __call__(self, *args):
        return None if self.recomputes else super().__call__(*args)


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
    assert (cut.before, cut.start) == ("blocks.1", "blocks.2")
    assert words(Chain.shape([cut])) == "[batch, length, 8]"
    assert {path: words(shape) for path, shape in chain.results(stages, cut.shape, sharded=False).items()} == {
        "pos": "[length, 8]"
    }
    assert words(chain.logits()) == "[batch, length, 16]"


def test_shape_is_known_after_many_blocks(chain_of):
    """More than the interpreter has frames for."""
    chain = chain_of("Deep")
    [cut] = chain.cuts(chain.stages("even", 2))
    assert (cut.before, words(cut.shape)) == ("blocks.99", "[batch, length, 8]")


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
        ("Reads", "the forward of `root` runs on every stage and reads `tok.weight`, which is on one"),
        ("ReadsBlock", "the forward of `root` runs on every stage and reads `blocks.0.scale`, which is on one"),
        ("FallsBack", r"`root` runs on every stage and reads `blocks\.0\.scale`"),
        ("FallsBackOnce", r"`root` runs on every stage and reads `blocks\.3\.scale`"),
        ("Asks", r"reads `tok\.extra`"),
        ("Tries", r"reads `tok\.embedding_dim`"),
        ("SkipsAll", r"reads `blocks\.0\.lin`"),
        ("AsksClass", r"reads `blocks\.0\.__class__`"),
        ("ReadsByFunction", r"reads `tok\.weight`"),
        ("ReadsParameters", r"reads `tok\.parameters`"),
        ("ReadsVariables", r"reads `tok\.__dict__`"),
        ("Backwards", "`blocks.0` lies on an earlier stage than `blocks.3`, and is called after it"),
        # Modules that placeholders cannot replace.
        ("Summed", r"`blocks\.0` does not return one tensor whose lengths are multiples of the batch and the length"),
        ("Paired", r"`blocks\.0` does not return one tensor"),
    ],
)
def test_cut_that_would_train_wrongly_is_refused(name: str, message: str, chain_of):
    chain = chain_of(name)
    with pytest.raises(CannotFollow, match=message):
        list(chain.cuts(chain.stages("even", 2)))


def test_attributes_that_every_stage_has_may_be_read(chain_of):
    chain = chain_of("Harmless")
    assert [cut.start for cut in chain.cuts(chain.stages("even", 2))] == ["blocks.2"]
    assert chain.manifest.attribute_reads == (("", "table", "values"),)


@pytest.mark.parametrize("name", ["SkipsOthers", "SkipsOtherClasses", "ReadsOwnParameters"])
def test_reads_with_a_fallback_that_computes_the_same_are_accepted(name: str, chain_of):
    chain = chain_of(name)
    assert [cut.start for cut in chain.cuts(chain.stages("even", 2))] == ["blocks.2"]
    assert chain.manifest.attribute_reads == ()


def test_cuts_of_different_shapes_are_refused(chain_of):
    chain = chain_of("Widens")
    with pytest.raises(CannotFollow, match=r"`blocks\.1` hands on \[batch, length, 32\], and `blocks\.0` .* 16\]"):
        Chain.shape(list(chain.cuts(chain.stages(["blocks.1", "blocks.2"], 3))))


@pytest.mark.parametrize(
    ("name", "crossing", "results"),
    [
        ("TokensFirst", "[length, batch, 8]", {"tok": "[batch, length, 8]", "pos": "[length, 8]"}),
        ("Flat", "[batch · length, 8]", {"tok": "[batch, length, 8]", "pos": "[length, 8]"}),
        ("Heads", "[2 · batch, length, 4]", {"tok": "[batch, length, 8]", "pos": "[length, 8]"}),
        ("Sized", "[length, batch, 8]", {"tok": "[batch, length, 8]", "pos": "[length, 8]"}),
    ],
)
def test_a_tensor_may_cross_in_any_layout(name: str, crossing: str, results: dict[str, str], chain_of):
    chain = chain_of(name)
    stages = chain.stages("even", 2)
    [cut] = chain.cuts(stages)
    assert words(cut.shape) == crossing
    assert {path: words(shape) for path, shape in chain.results(stages, cut.shape, sharded=False).items()} == results
    assert words(chain.logits()) == "[batch, length, 16]"


def test_whole_shapes_are_told_where_a_stage_may_receive_a_shard_of_another_layout(chain_of):
    for name, told in (("TokensFirst", {"tok", "pos", "blocks.0", "blocks.1"}), ("Model", {"pos"})):
        chain = chain_of(name)
        stages = chain.stages("even", 2)
        [cut] = chain.cuts(stages)
        assert chain.results(stages, cut.shape, sharded=True).keys() == told


def test_result_that_is_not_of_every_token_is_refused(chain_of):
    with pytest.raises(CannotFollow, match=r"the model returns \[length, batch, 16\], and the last stage has to"):
        chain_of("Turned").logits()


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
    configs = Path(__file__).parents[3] / "support" / "huggingface"
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
