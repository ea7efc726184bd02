"""Construction of models in a program: built-in, factories, and `transformers`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import LoweringError, Program, lower
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource
from support.texts.plans import lowered, refusals, resolved
from support.training.meshed import TRAINING
from support.training.staged import PLAIN_DOUBLE, TOLERANCE, assert_close, train

OTHERS = """\
plan theirs
model   python("support.models.factories:build", dim = 32, depth = 5)
cluster cpu(devices = 4)
"""
BATCH = "batch (global = 8, micro = 2, seq_len = 32)\n"


def test_factory_is_imported_and_called_with_plan_arguments():
    text = lowered(OTHERS + BATCH).text
    assert "from support.models.factories import build\n" in text
    assert "    return build(depth=5, dim=32)  # tiny.plan:2\n" in text
    assert (
        """        factory='python("support.models.factories:build", depth = 5, dim = 32)',  # tiny.plan:2\n""" in text
    )


def test_factory_with_a_program_name_is_qualified_by_module():
    text = lowered(OTHERS.replace("support.models.factories:build", "support.models.factories:trainer") + BATCH).text
    assert "import support.models.factories\n" in text
    assert "    return support.models.factories.trainer(depth=5, dim=32)" in text
    text = lowered(OTHERS.replace("support.models.factories:build", "support.models.factories:Zoo.small") + BATCH).text
    assert "from support.models.factories import Zoo\n" in text
    assert "    return Zoo.small(depth=5, dim=32)" in text


def test_keyword_argument_layouts_are_named():
    text = lowered(f"{OTHERS}{BATCH}mesh (tp = 4)\n{MIXERS}precision (param = fp32)").text
    assert 'input_kwarg_layouts={"hidden": Replicate()}' in text
    assert 'desired_input_kwarg_layouts={"hidden": Replicate()}' in text
    assert "input_layouts=(" not in text


MIXERS = """\
shard on tp {
  blocks.*.mixer          = inputs(from = replicate, to = replicate)
  blocks.{0, 2, 4}.mixer.up   = colwise(input = replicate)
  blocks.{0, 2, 4}.mixer.down = rowwise
}
"""


def test_factory_model_on_a_mesh_equals_one_process(gloo, data):
    [alone] = gloo(1)(train, lowered(f"{OTHERS}{TRAINING}{PLAIN_DOUBLE}").text, data)
    meshes = [
        """\
mesh (dp_shard = 4)
fsdp on dp_shard { blocks.* = unit, blocks.{1, 4}.mixer = unit, head = unit }
checkpoint { blocks.{1..3} = full, blocks.4.mixer = full }
precision (master = fp64, param = fp64, reduce = fp64)
""",
        """\
mesh (dp_shard = 2, tp = 2)
shard on tp {
  blocks.{0, 2, 4}.mixer.up   = colwise
  blocks.{0, 2, 4}.mixer.down = rowwise
}
fsdp on dp_shard { blocks.* = unit }
precision (master = fp64, param = fp64, reduce = fp64)
""",
    ]
    for mesh in meshes:
        for result in gloo(4)(train, lowered(f"{OTHERS}{TRAINING}{mesh}").text, data):
            assert_close(result, alone, TOLERANCE)


def test_program_states_the_inputs_of_an_image_model():
    text = lowered('plan images\nmodel vit("tiny")\ncluster cpu(devices = 1)\nbatch (global = 8, micro = 4)').text
    assert "from legoai.specs.models.reads import Images\n" in text
    assert "reads=Images(channels=3, height=32, width=32, classes=10)" in text
    assert "seq_len" not in text


def test_pipeline_of_an_image_model_is_refused():
    plan = 'plan images\nmodel vit("tiny")\ncluster cpu(devices = 2)\nbatch (global = 8, micro = 4)\nmesh (pp = 2)'
    [diagnostic] = refusals(f"{plan}\npipeline on pp")
    assert (diagnostic.code, diagnostic.label.span.line) == ("LP010", 6)
    assert "the model reads something else" in diagnostic.message


TOKENS: dict[str, object] = {"kind": "tokens"}
HUGGING_FACE = f'plan hf\nmodel huggingface("config.json", hidden_size = 48)\ncluster cpu(devices = 1)\n{BATCH}'


def test_config_file_fields_are_written_into_the_program(tmp_path: Path):
    text = lower_hugging_face(tmp_path, "transformers.models.llama.modeling_llama.LlamaForCausalLM").text
    assert "from legoai.specs.models.huggingface import language_model\n" in text
    assert '"hidden_size": 48,' in text
    assert '"rope_scaling": None' in text
    assert '"architectures": ["LlamaForCausalLM"],' in text
    assert "config.json" not in text


def test_hugging_face_model_of_unknown_task_is_refused(tmp_path: Path):
    with pytest.raises(LoweringError, match="LP010 it is not known what `BertForMaskedLM` is trained on"):
        lower_hugging_face(tmp_path, "transformers.models.bert.modeling_bert.BertForMaskedLM", reads=None)


def test_model_of_unknown_task_is_not_said_to_read_something_else(tmp_path: Path):
    statements = "mesh (pp = 2)\npipeline on pp (split = [layers.1])\n"
    with pytest.raises(LoweringError) as caught:
        lower_hugging_face(tmp_path, "transformers.BertForMaskedLM", reads=None, statements=statements)
    assert not any("reads something else" in item.message for item in caught.value.diagnostics)


def test_hugging_face_image_model_uses_transformers_model(tmp_path: Path):
    images = {"kind": "images", "channels": 3, "height": 32, "width": 16, "classes": 7}
    text = lower_hugging_face(tmp_path, "transformers.ViTForImageClassification", reads=images).text
    assert "from legoai.specs.models.huggingface import transformers_model\n" in text
    assert "reads=Images(channels=3, height=32, width=16, classes=7)" in text


def test_missing_config_file_is_refused(tmp_path: Path):
    with pytest.raises(LoweringError, match=r"LP\d+ cannot read .*other\.json") as caught:
        lower_hugging_face(tmp_path, "transformers.LlamaForCausalLM", name="other.json")
    [diagnostic] = caught.value.diagnostics
    assert diagnostic.label.span.line == 2 and diagnostic.help


def lower_hugging_face(
    folder: Path,
    model_class: str,
    *,
    name: str = "config.json",
    reads: dict[str, object] | None = TOKENS,
    statements: str = "",
) -> Program:
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "rope_scaling": None}
    (folder / "config.json").write_text(json.dumps(fields))
    tiny = load_manifest(ModelSource(kind="builtin", target="llama3", preset="tiny"), base_directory=".")
    manifest = Manifest.from_json(
        json.dumps({**json.loads(tiny.to_json()), "model_class": model_class, "reads": reads})
    )
    plan = resolved(HUGGING_FACE.replace("config.json", name) + statements)
    return lower(Analysis(plan, manifest, folder, file="hf.plan"))


def test_preset_dimensions_are_written_into_the_program():
    text = lowered(f'plan big\nmodel llama3("8b", n_layers = 2)\ncluster h100_sxm\n{BATCH}').text
    assert "        n_layers=2,\n" in text
    assert "        hidden_dim=14336,\n" in text
    assert "8b" not in text


def test_lowering_imports_no_torch():
    code = "import sys; from support.texts.plans import FULL, lowered; lowered(FULL);sys.exit('torch' in sys.modules)"
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 0
