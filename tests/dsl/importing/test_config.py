"""Diagnostics of wrong configs, at their spans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legoai.dsl.importing.config import read_config
from legoai.dsl.importing.keys import KEYS
from legoai.dsl.importing.translation import Imported, translated
from legoai.dsl.lint import lint
from support.texts.importing import import_config


def imported(text: str, devices: int = 8) -> Imported:
    return import_config(text, "some.toml", plan="some", cluster="h100_sxm", devices=devices)


def underlined(text: str, found: Imported) -> list[str]:
    return [text[item.label.span.start : item.label.span.end] for item in found.diagnostics]


@pytest.mark.parametrize(
    ("text", "code", "message", "place"),
    [
        ("[training\n", "LP021", "`some.toml` is no TOML: expected ']' at the end of a table declaration", "\n"),
        ("[training]\nsteps = \n", "LP021", "`some.toml` is no TOML: invalid value", "\n"),
        ("steps = 5\n", "LP022", "TorchTitan has no option `steps`", "steps = 5"),
        ("[training]\nstepz = 5 # few\n", "LP022", "TorchTitan has no option `training.stepz`", "stepz = 5"),
        ("[new.section]\nx = 1\n", "LP022", "TorchTitan has no option `new.section.x`", "x = 1"),
        ('[training]\nsteps = "5"\n', "LP023", "`training.steps` takes a whole number, not `\"5\"`", 'steps = "5"'),
        ("[training]\nsteps = true\n", "LP023", "`training.steps` takes a whole number, not `true`", "steps = true"),
        ("[training]\nsteps = 0\n", "LP023", "`training.steps` takes at least 1, not `0`", "steps = 0"),
        ("[training]\nmax_norm = inf\n", "LP023", "`training.max_norm` takes a number, not `inf`", "max_norm = inf"),
        ("[training]\nmax_norm = 0\n", "LP023", "gradients are clipped to a norm above 0", "max_norm = 0"),
        ("[optimizer]\nbeta1 = 2\n", "LP023", "`optimizer.beta1` takes at most 1, not `2`", "beta1 = 2"),
        ('[optimizer]\nname = "Lion"\n', "LP023",
         "`optimizer.name` takes one of `\"Adam\"`, `\"AdamW\"`, not `\"Lion\"`",
         'name = "Lion"'),
        ('[model]\nconverters = "float8"\n', "LP023", "`model.converters` takes a list of texts, not `\"float8\"`",
         'converters = "float8"'),
        ("[training]\nbatch_size = 1\nlocal_batch_size = 2\n", "LP023",
         "`training.local_batch_size` is another name of `training.batch_size`, which is given too",
         "local_batch_size = 2"),
        ("[training]\nglobal_batch_size = 65\n", "LP023",
         "a global batch of 65 is no multiple of 8 for each of 8 data-parallel ranks", "global_batch_size = 65"),
        ("[parallelism]\ndata_parallel_shard_degree = 3\n", "LP023",
         "degrees of pp = 1, dp_replicate = 1, dp_shard = 3, cp = 1, tp = 1 do not make 8 devices",
         "data_parallel_shard_degree = 3"),
        ("[parallelism]\ndata_parallel_shard_degree = 0\n", "LP023",
         "degrees of pp = 1, dp_replicate = 1, dp_shard = 0, cp = 1, tp = 1 do not make 8 devices",
         "data_parallel_shard_degree = 0"),
        ("[parallelism]\ntensor_parallel_degree = 3\n", "LP023",
         "degrees of pp = 1, dp_replicate = 1, dp_shard = -1, cp = 1, tp = 3 do not make 8 devices", ""),
        ("[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true\n", "LP023",
         "asynchronous tensor parallelism needs compilation", "enable_async_tensor_parallel = true"),
        ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "Mine"\n', "LP023",
         "plans have no schedule `Mine`", 'pipeline_parallel_schedule = "Mine"'),
        ("[parallelism]\npipeline_parallel_degree = 8\npipeline_parallel_first_stage_less_layers = 2\n",
         "LP023", "6 blocks do not make such stages on 8 ranks",
         "pipeline_parallel_degree = 8"),
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 3\n",
         "LP023", "6 blocks, with 1 and 1 for embedding and output, count as 8: 3 on a stage make 3 stages, "
         "no multiple of 2 ranks", "pipeline_parallel_layers_per_stage = 3"),
        ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_split_points = ["a) b"]\n', "LP023",
         "each stage begins with a module, named as `layers.4`", 'pipeline_parallel_split_points = ["a) b"]'),
        ('[activation_checkpoint]\nselective_ac_option = "some"\n', "LP023",
         "`some` is neither `op` nor the number of a stride", 'selective_ac_option = "some"'),
        ('[model]\nname = "llama4"\nflavor = "17bx16e"\n', "LP025", "`llama4` of TorchTitan is no built-in of LegoAI",
         'name = "llama4"'),
        ('[model]\nflavor = "8B_flex"\n', "LP025", "the flavour `8B_flex` of `llama3` is no built-in of LegoAI",
         'flavor = "8B_flex"'),
        ("[optimizer]\nearly_step_in_backward = true\n", "LP024",
         "`optimizer.early_step_in_backward` is not translated: optimizers step after the backward pass",
         "early_step_in_backward = true"),
        ("[training]\ndeterministic = true\n", "LP024",
         "`training.deterministic` is not translated: it is `--deterministic` of `legoai run`", "deterministic = true"),
    ],
)  # fmt: skip
def test_error_is_reported_at_its_span(text: str, code: str, message: str, place: str):
    found = imported(text)
    assert [(item.code, item.message) for item in found.diagnostics] == [(code, message)]
    assert underlined(text, found) == [place]
    assert (found.text is None) == (code not in ("LP022", "LP024"))
    assert any(item.changes for item in found.unused) == (code in ("LP022", "LP024"))


@pytest.mark.parametrize(
    "text",
    [
        f"[job]\nx = {'[' * 100_000}",
        f"[training]\nsteps = {'9' * 5000}\n",
        f"[training]\nsteps = {2**63}\n",
        f"[optimizer]\nlr = {10**400}\n",
        "[optimizer]\nlr = nan\n",
        "[job]\ndescription = 1979-05-27\n",
        f"[parallelism]\npipeline_parallel_degree = {2**62}\n",
        f"[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 1\n"
        f"pipeline_parallel_last_stage_less_layers = {2**62}\n",
        "[activation_checkpoint]\nselective_ac_option = '²'\n",
        f"[activation_checkpoint]\nselective_ac_option = '{'9' * 5000}'\n",
    ],
    ids=lambda text: text[:40].replace("\n", " "),
)
def test_impossible_config_is_reported(text: str):
    found = imported(text)
    assert found.text is None
    assert found.diagnostics


@pytest.mark.parametrize(
    ("entry", "message", "help"),
    [
        ('seq_len = "2048"', 'a whole number, not `"2048"`', ["write `2048` without quotes"]),
        ('seq_len = "long"', 'a whole number, not `"long"`', []),
        ('seq_len = "2e3"', 'a whole number, not `"2e3"`', []),
        ('max_norm = "1e-1"', 'a number, not `"1e-1"`', ["write `0.1` without quotes"]),
        ('mixed_precision_param = true', 'a text, not `true`', []),
        ('seq_len = ["2048", 1]', 'a whole number, not `["2048", 1]`', []),
        (f"seq_len = {2**63}", f"at most {2**63 - 1}, not `{2**63}`", []),
        (f"steps = {-2**63}", f"at least 1, not `{-2**63}`", []),
    ],
)  # fmt: skip
def test_wrong_value_is_shown_as_the_file_writes_it(entry: str, message: str, help: list[str]):
    [found] = imported(f"[training]\n{entry}\n").diagnostics
    assert (found.message, list(found.help)) == (f"`training.{entry.split()[0]}` takes {message}", help)


def test_boolean_in_quotes_is_suggested_without_them():
    [found] = imported('[compile]\nenable = "True"\n').diagnostics
    assert found.help == ("write `true` without quotes",)


def test_a_mistyped_option_is_suggested():
    [found] = imported("[training]\nstepz = 5\n").diagnostics
    assert "training.steps" in " ".join(found.help)


def test_all_errors_are_reported_at_once():
    found = imported("[training]\nsteps = 0\nseq_len = 'x'\n[optimiser]\nlr = 1\n")
    assert [item.code for item in found.diagnostics] == ["LP023", "LP023", "LP022"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "[training]\n", "\n\n[model]\n[parallelism]\n"])
def test_empty_config_gives_torchtitan_defaults(text: str):
    found = imported(text)
    assert found.diagnostics == ()
    assert found.unused == ()
    assert f"seq_len = {KEYS['training.seq_len'].default}" in found.text
    assert "batch   (global = 64, micro = 8" in found.text
    assert f"lr = {8e-4:.0e}".replace("e-0", "e-") in found.text


@pytest.mark.parametrize("name", ["two\nlines.toml", "a # b.toml", "\x07.toml", "ü.toml"])
def test_any_file_name_is_quoted_in_the_comment(name: str):
    found = import_config("", name, plan="some", cluster="h100_sxm", devices=8)
    assert found.text.startswith("# From ")
    assert found.text.splitlines()[1] == "plan some"


@pytest.mark.parametrize("lr", ["1.23456789012e-5", "3.3333333333333335e-3", "2e-05", "0.0003", "5e-324", "0.25"])
def test_numbers_read_back_to_the_same(lr: str):
    text = imported(f"[optimizer]\nlr = {lr}\n").text
    assert text is not None
    plan = lint(text, "some.plan", directory=Path()).analysis.plan
    assert plan.optimizer.algorithm.lr == float(lr)
    assert len(re.search(r"lr = ([^,]+),", text)[1]) <= len(lr)


def test_selective_checkpointing_keeps_what_tensor_parallelism_scatters():
    text = '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\n'
    own, split = imported(text).text, imported(f"{text}[parallelism]\ntensor_parallel_degree = 2\n").text
    assert own is not None and split is not None
    assert "selective([attention, alternate_matmul])" in own
    assert '[attention, alternate_matmul, "_c10d_functional.reduce_scatter_tensor.default"]' in split
    assert "collective" not in split
    assert not lint(split, "some.plan", directory=Path()).has_errors


def test_quoted_and_dotted_keys_are_equivalent():
    text = 'training.steps = 7\n[ "parallelism" ]\n"tensor_parallel_degree" = 3\n'
    found = imported(text)
    [diagnostic] = found.diagnostics
    assert "tp = 3" in diagnostic.message
    assert "\nsteps     7\n" in imported("training.steps = 7\n").text  # all of them warm up


@pytest.mark.parametrize(
    ("training", "validation", "batches", "noted"),
    [
        ("local_batch_size = 8", "steps = 100", "100", []),  # of 8 samples by default
        ("local_batch_size = 1", "steps = 100", "800", []),
        ("local_batch_size = 4", "steps = 3\nlocal_batch_size = 2", "2",
         ["TorchTitan validates on 6 samples of each data-parallel rank, 3 times 2; here 2 micro batches of 4 make 8"]),
        ("local_batch_size = 4", "steps = -1\nlocal_batch_size = 2", None, []),
    ],
)  # fmt: skip
def test_validations_have_the_samples_of_torchtitan_steps(
    training: str, validation: str, batches: str | None, noted: list[str]
):
    text = f"[training]\n{training}\n[validation]\nenable = true\nfreq = 50\n{validation}\n"
    found = imported(text)
    assert found.text is not None
    written = re.search(r"evaluate\s+\(every = 50(?:, batches = (\d+))?\)", found.text)
    assert written is not None
    assert written[1] == batches
    assert [note for note in found.notes if "validates" in note] == noted
    assert [item.name for item in found.unused if item.changes] == ([] if batches else ["validation.steps"])


def test_validations_of_a_pipeline_count_its_micro_batches():
    text = "[training]\nlocal_batch_size = 8\n[validation]\nenable = true\nsteps = 100\n[parallelism]\n"
    found = imported(text + "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2\n")
    assert found.text is not None
    assert "batches = 400" in found.text


SAVED = '[model]\nhf_assets_path = "hf/Llama"\n[checkpoint]\nenable = true\n'


@pytest.mark.parametrize(
    ("more", "folder", "lost"),
    [
        ("initial_load_in_hf = true", "hf/Llama", []),
        ('initial_load_in_hf = true\ninitial_load_path = "old \\"one\\""', 'old \\"one\\"', []),
        ("initial_load_in_hf = true\ninitial_load_in_hf_quantized = true", "hf/Llama",
         ["checkpoint.initial_load_in_hf_quantized"]),
        ('initial_load_path = "old/step-10"', None, ["checkpoint.initial_load_path"]),
        ('initial_load_path = "old/step-10"\ninitial_load_model_only = false', None,
         ["checkpoint.initial_load_path", "checkpoint.initial_load_model_only"]),
        ("enable = false\ninitial_load_in_hf = true", None, []),
        ('enable = false\ninitial_load_path = "old/step-10"', None, []),
        ("create_seed_checkpoint = true", None, ["checkpoint.create_seed_checkpoint"]),
    ],
)  # fmt: skip
def test_a_training_starts_with_the_weights_of_torchtitan(more: str, folder: str | None, lost: list[str]):
    head = SAVED.replace("enable = true\n", "") if more.startswith("enable") else SAVED
    found = imported(head + more + "\n")
    assert found.text is not None
    written = re.search(r"^weights +\(huggingface = \"(.*)\"\)$", found.text, re.MULTILINE)
    assert (written and written[1]) == folder
    assert [item.name for item in found.unused if item.changes] == lost
    assert [item.code for item in found.diagnostics] == ["LP024"] * len(lost)
    assert not lint(found.text, "some.plan", directory=Path()).has_errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("initial_load_in_hf = true\ninitial_load_model_only = false",
         "weights of Hugging Face have no state of an optimizer"),
        ("initial_load_in_hf_quantized = true", "quantized weights are read in Hugging Face's layout"),
    ],
)  # fmt: skip
def test_weights_that_torchtitan_refuses_are_refused(more: str, message: str):
    [found] = imported(f"{SAVED}{more}\n").diagnostics
    assert (found.code, found.message) == ("LP023", message)


def test_a_config_that_only_loads_saves_nothing():
    saved, loaded = (imported(SAVED + more).text for more in ("", "load_only = true\n"))
    assert re.search("^save ", saved, re.MULTILINE)
    assert not re.search("^save ", loaded, re.MULTILINE)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("parallelism.context_parallel_load_balancer", "balance = none"),
        ("lr_scheduler.decay_ratio", "linear(warmup = 200, steps = 10000)"),
        ("parallelism.pipeline_parallel_schedule_csv", "balance = head_tail"),
        ("parallelism.pipeline_parallel_layers_per_stage", "balance = head_tail"),
        ("training.dataset_path", "balance = head_tail"),
    ],
)
def test_none_is_set_where_an_option_may_be_none(path: str, wanted: str):
    text = "[parallelism]\ncontext_parallel_degree = 2\n[lr_scheduler]\ndecay_ratio = 0.3\n"
    config = read_config(text, "some.toml", {path: "None"})
    found = translated(config, plan="some", cluster="h100_sxm", devices=8)
    assert found.diagnostics == ()
    assert wanted in found.text


def test_none_is_no_value_of_other_options():
    [found] = read_config("", "some.toml", {"training.steps": "None"}).diagnostics
    assert found.message == '`training.steps` takes a whole number, not `"None"`'


def test_validations_of_another_sequence_length_are_reported():
    text = "[training]\nseq_len = 4096\n[validation]\nenable = true\nsteps = 10\n"
    assert [note for note in imported(text).notes if "validates on sequences of 2048 by default" in note]
    found = imported(f"{text}seq_len = 1024\n")
    assert [item.name for item in found.unused if item.changes] == ["validation.seq_len"]
    same = imported(f"{text}seq_len = 4096\n")
    assert same.diagnostics == ()
    assert not [note for note in same.notes if "validates" in note]


def test_recomputation_to_the_end_of_a_block_is_noted_where_it_happens():
    full = "[activation_checkpoint]\nmode = 'full'\n"
    said = [
        any("recomputes a block to its end" in note for note in imported(text).notes)
        for text in (
            full,
            f"{full}early_stop = true\n",
            f"{full}[compile]\nenable = true\n",
            full.replace("full", "none"),
        )
    ]
    assert said == [True, False, False, False]
    assert imported(f"{full}early_stop = true\n").diagnostics == ()
