"""Stage boundaries of other authors' models: accepted where one tensor crosses, and refused elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from legoai.dsl.analysis.stages.chain import CannotFollow, Chain
from legoai.dsl.lint import lint
from legoai.specs.models.inspect import inspect_model
from legoai.specs.models.manifests.shapes import words
from legoai.specs.models.source import ModelSource
from support.texts.rule_plans import codes, diagnostics

MODELS = Path(__file__).parents[3] / "support" / "models" / "models_to_cut.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    shutil.copy(MODELS, folder)
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


ALTERNATING = """
from torch import nn


class Mixer(nn.Sequential):
    pass


class FeedForward(nn.Sequential):
    pass


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.feed_forward = Mixer(nn.Linear(16, 16)), FeedForward(nn.Linear(16, 16))

    def forward(self, x):
        return self.feed_forward(self.mixer(x))


class Net(nn.Module):
    def __init__(self, paired):
        super().__init__()
        apart = [kind(nn.Linear(16, 16)) for _ in range(2) for kind in (Mixer, FeedForward)]
        self.embed, self.layers = nn.Embedding(256, 16), nn.ModuleList([Pair(), Pair()] if paired else apart)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


@pytest.mark.parametrize(
    ("split", "code"), [("even", "LP505"), ("[layers.2]", "LP507"), ("[layers]", "LP518"), ("[2, 2]", "LP520")]
)
def test_elements_of_several_classes_are_told_to_be_no_blocks(split: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(ALTERNATING)
    plan = (
        'model python("net:Net", paired = {})\ncluster cpu(devices = 2)\nmesh (pp = 2)\npipeline on pp (split = {})\n'
    )
    [found] = [item for item in diagnostics(plan.format("false", split), tmp_path) if item.code.startswith("LP5")]
    assert found.code == code
    assert found.help[0].startswith("stages begin with blocks, and the elements of `layers` are of several classes ")
    assert found.help[0].endswith("(`Mixer` and `FeedForward`): give it elements of one class, such as a module that "
                                  "holds one of each")  # fmt: skip
    assert not codes(plan.format("true", "[1, 1]"), tmp_path) & {"LP505", "LP507", "LP518", "LP520"}
