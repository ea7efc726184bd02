"""Configs that are Python functions: read without being run, as Python itself evaluates them."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from legoai.dsl.importing.config import Config
from legoai.dsl.importing.formats import AUGUST_2026, FEBRUARY_2026
from legoai.dsl.importing.python_config import read_python
from legoai.dsl.importing.python_modules import Module, Modules
from legoai.dsl.importing.python_reader import Reader
from legoai.dsl.importing.python_values import Made, Unread
from legoai.dsl.importing.translation import Imported, translated
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.texts.python_configs import HEAD, config_of, read

RUNS = Path(__file__).parent / "configs" / "my_runs.py"
DEVICES = {"llama3_8b": 8, "llama3_70b_of_256": 256, "llama3_405b_in_float8": 512}
"""Of the functions; the others have 64."""


def functions() -> list[str]:
    """The configs of the file, in its order."""
    module = Module.of(RUNS.read_text(), "my_runs.py", RUNS)
    return [name for name in module.functions if not name.startswith("_")]


def imported(config: Config, devices: int = 8) -> Imported:
    cluster = "h100_sxm" if devices == 8 else f"h100_sxm(hosts = {devices // 8}, fabric = infiniband_ndr)"
    return translated(config, plan="some", cluster=cluster, devices=devices)


@pytest.mark.parametrize("function", functions())
def test_config_becomes_a_clean_plan(function: str, golden: Callable[[Path, str], None]):
    found = imported(read_python(RUNS.read_text(), RUNS.name, RUNS, function), DEVICES.get(function, 64))
    assert found.diagnostics == ()
    assert found.text is not None
    golden(RUNS.with_name(f"python_{function}.plan"), found.text)
    linted = lint(found.text, "some.plan", directory=Path())
    assert [item.message for item in linted.diagnostics if item.severity != "advice"] == []
    assert lower(linted.analysis).text


class Recorded(types.SimpleNamespace):
    """What replaces a class of TorchTitan: it keeps what it is called with, and makes fields that are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Recorded()
        setattr(self, name, made)
        return made

    def __call__(self, *arguments: Any, **options: Any) -> Recorded:
        return Recorded(**({"arguments": list(arguments)} if arguments else {}), **options)


def run(text: str) -> dict[str, Any]:
    """The names of a file that Python executes, with recorders in place of TorchTitan."""
    real = builtins.__import__

    def imports(name: str, *rest: Any) -> Any:
        if name == "dataclasses":  # which are recorders here
            return types.SimpleNamespace(replace=lambda of, **fields: Recorded(**{**vars(of), **fields}))
        if not name.startswith("torchtitan"):
            return real(name, *rest)
        # A name that begins with a letter is a module or class; each file has recorders of its own.
        return types.SimpleNamespace(**{one: _namespace() for one in rest[2] or ()})

    names: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": imports}}
    exec(compile(text, "runs.py", "exec"), names)
    return names


def _namespace() -> Any:
    """A class or module: its attributes are the same again, and each call makes a new record."""

    class Namespace:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *arguments: Any, **options: Any) -> Recorded:
            return Recorded()(*arguments, **options)

        def __or__(self, other: Any) -> Any:
            return self

    return Namespace()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config by path, as Python made it, or as it was read."""
    if isinstance(value, Recorded):
        for name, held in vars(value).items():
            yield from leaves(held, f"{path}.{name}")
    elif isinstance(value, Made):
        if value.arguments:
            yield from leaves(value.arguments, f"{path}.arguments")
        for name, held in value.options.items():
            yield from leaves(held, f"{path}.{name}")
    elif isinstance(value, dict):
        for name, held in value.items():
            yield from leaves(held, f"{path}[{name!r}]")
    elif isinstance(value, list | tuple):
        yield path, len(value)
        for number, held in enumerate(value):
            yield from leaves(held, f"{path}[{number}]")
    else:
        yield path, value


@pytest.mark.parametrize("function", functions())
def test_values_are_those_that_python_computes(function: str):
    text = RUNS.read_text()
    expected = dict(leaves(run(text)[function]()))
    reader = Reader(Modules(Module.of(text, "my_runs.py", None)))
    found = dict(leaves(reader.call(function)))
    assert found == expected
    assert not any(isinstance(value, Unread) for value in found.values())
    assert not reader.skipped


def test_nothing_is_run(tmp_path: Path):
    ran = tmp_path / "ran"
    text = f"""{HEAD}
import os
open({str(ran)!r}, "w").write("at import")
def a() -> Trainer.Config:
    os.system("touch {ran}")
    config = Trainer.Config(
        model_spec=model_registry("8B"), optimizer=default_adamw(), dump_folder=open({str(ran)!r}, "w").name
    )
    config.training.steps = __import__("os").system("touch {ran}")
    return config
"""
    found = read(text, path=tmp_path / "runs.py")
    assert not ran.exists()
    assert [item.code for item in found.diagnostics] == ["LP024"]
    assert "`training.steps` is not translated: its value is " in found.diagnostics[0].message


BASE = """\
from dataclasses import dataclass
from torchtitan.trainer import Trainer
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TrainingConfig
from . import model_registry
ROWS = 4
def llama3_8b(steps=1000) -> Trainer.Config:
    training = TrainingConfig(steps=steps)
    return Trainer.Config(model_spec=model_registry("8B"), optimizer=default_adamw(), training=training)
"""


@pytest.mark.parametrize(
    "runs",
    [
        "from torchtitan.models.llama3.config_registry import llama3_8b, ROWS\n"
        "def mine():\n    config = llama3_8b(7 * ROWS)\n    return config\n",
        "from torchtitan.models.llama3 import config_registry as base\n"
        "def mine():\n    config = base.llama3_8b(7 * base.ROWS)\n    return config\n",
        "import torchtitan.models.llama3.config_registry as base\n"
        "def mine():\n    config = base.llama3_8b(steps=28)\n    return config\n",
        "from .more import *\nfrom .more import other\ndef mine():\n    return other(steps=28)\n",
    ],
)
def test_configs_of_other_files_are_followed(tmp_path: Path, runs: str):
    package = tmp_path / "torchtitan" / "models" / "llama3"
    package.mkdir(parents=True)
    (package / "config_registry.py").write_text(BASE)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "more.py").write_text("from torchtitan.models.llama3.config_registry import llama3_8b as other\n")
    found = read(runs, "mine", recipes / "runs.py")
    assert found.diagnostics == []
    assert found.given == {
        "model.name": "llama3", "model.flavor": "8B", "training.steps": 28, "training.seq_len": 2048,
        "training.local_batch_size": 8,
    }  # fmt: skip
    assert found.places["training.steps"].file.endswith("config_registry.py")
    assert found.files[found.places["training.steps"].file] == BASE


def test_value_that_a_followed_file_computes_is_reported_there(tmp_path: Path):
    (tmp_path / "base.py").write_text(f"{HEAD}def base():\n    while True:\n        pass\n")
    found = read("from .base import base\ndef mine():\n    return base()\n", "mine", tmp_path / "runs.py")
    assert [item.code for item in found.diagnostics] == ["LP021"]
    assert "made by `base`, which is not followed: a statement `while`" in found.diagnostics[0].message
    assert "base.py:5:5" in found.diagnostics[0].message


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("def a(:\n", None, "`runs.py` is no Python: "),
        ("x = '\0'\n", None, "`runs.py` is no Python"),
        ("", None, "`runs.py` has 0 configs: name one with --config"),
        (f"{HEAD}def a() -> Trainer.Config: ...\ndef b() -> Trainer.Config: ...\n", None, "`runs.py` has 2 configs"),
        ("def a() -> Config: ...\n", "b", "`runs.py` has no function `b`"),
        ("def a(x) -> Config: return 1\n", "a", "`a` cannot be followed without running it: `a` has the argument `x`"),
        ("def a() -> Config: return a()\n", "a", "`a` returns a value that is made by `a`, which is not followed"),
        ("def a() -> Config: return 5\n", "a", "`a` returns no config"),
        ("def a() -> Config: pass\n", "a", "`a` returns no config"),
        ("def a() -> Config:\n    while 1: pass\n", "a", "a statement `while` is not evaluated"),
        ("def a() -> Config:\n    if f(): return 1\n", "a", "`f()` is `f(…)`, which is not evaluated"),
        (
            "def a() -> Config:\n    x = [1]\n    for i in x: x.append(i)\n",
            "a",
            "a list that is too long",
        ),
        ("def a() -> Config:\n    return " + "(" * 90 + ")" * 90, "a", "`a` returns no config"),
        ("def a() -> Config:\n    return " + "-" * 5000 + "1", "a", "nested too deeply"),
        ("x = y\ny = x\ndef a() -> Config:\n    return x\n", "a", "a constant is defined by itself"),
        ("def a() -> Config:\n    x = [1]\n    x.append(x)\n    return x == x\n", "a", "nested too deeply"),
    ],
)
def test_file_without_a_config_is_reported(text: str, function: str | None, message: str):
    found = read(text, function)
    assert [item.code for item in found.diagnostics] == ["LP021"]
    assert message in found.diagnostics[0].message
    assert imported(found).text is None


@pytest.mark.parametrize(
    "body",
    [
        "x = [1]\n" + "x = [x, x]\n" * 40 + "config.training.steps = x",
        "x = [1]\n" + "x = {1: x, 2: x}\n" * 40 + "config.dump_folder = x == x",
        "config.dump_folder = " + "1 + " * 900 + "1",
        "config.dump_folder = 'x' * 10**12",
        "config.dump_folder = 'x' * 10000000000",
        "config.dump_folder = '%099999999999d' % 5",
        "config.training.steps = 9**9**9",
        "x = 'y'\nfor i in [1, 2, 3, 4, 5, 6, 7, 8, 9]:\n    x = x + x + x + x\nconfig.dump_folder = x",
        "x = [1]\nfor i in [1, 2, 3, 4, 5, 6, 7, 8, 9]:\n    x = x + x + x + x\nconfig.dump_folder = x",
        "x = list(range(10**12))",
        "x = 1 / 0",
        "x = {}[1]",
        "x = int('9' * 10000)",
        "x = [*5]",
        "x, y = 5",
        "x = [1, 2][7]",
        "del config.training",
        "config = {**config}",
    ],
)
def test_hostile_statement_ends(body: str):
    imported(config_of(body))


@pytest.mark.parametrize(
    ("body", "code", "message", "place"),
    [
        ("config.training.stepz = 5", "LP022", "TorchTitan has no option `training.stepz`",
         "config.training.stepz = 5"),
        ("config.trainer = 5", "LP022", "TorchTitan has no option `trainer`", "config.trainer = 5"),
        ("config.training.steps = '5'", "LP023", "`training.steps` takes a whole number, not `\"5\"`",
         "config.training.steps = '5'"),
        ("config.training.steps = f()", "LP024",
         "`training.steps` is not translated: its value is `f(…)`, which is not evaluated",
         "config.training.steps = f()"),
        ("config.training.steps = len(x)", "LP024",
         "`training.steps` is not translated: its value is `x`, which is not evaluated",
         "config.training.steps = len(x)"),
        ("config.training.num_tokens_per_microbatch_per_dp_rank = 3000", "LP023",
         "3000 tokens are no whole number of sequences of 2048 (`training.max_context_length`)",
         "config.training.num_tokens_per_microbatch_per_dp_rank = 3000"),
        ("config.training.max_context_length = -1", "LP023",
         "`training.max_context_length` takes a whole number of at least 1; this is `-1`",
         "config.training.max_context_length = -1"),
        ("config.training.seq_len = 4096\nconfig.training.max_context_length = 4096", "LP023",
         "`training.max_context_length` is an option of August 2026, beside others that were gone by then",
         "config.training.max_context_length = 4096"),
        ("config.model_spec = model_registry('9B')", "LP025", "the flavour `9B` of `llama3` is no built-in of LegoAI",
         "config.model_spec = model_registry('9B')"),
        ("config.model_spec = None", "LP023", "the model is named by a call of `model_registry`",
         "config.model_spec = None"),
        ("config.model_spec = model_registry('8B', converters=[LoRAConverter.Config(rank=8)])", "LP024",
         "`model_spec.converters` is not translated: no statement converts a model by `LoRAConverter`",
         "converters=[LoRAConverter.Config(rank=8)]"),
        ("config.loss = MTPLoss.Config()", "LP024",
         "`loss` is not translated: its value is `MTPLoss.Config`; plans have cross entropy",
         "config.loss = MTPLoss.Config()"),
        ("config.activation_checkpoint = MyAC.Config()", "LP024",
         "`activation_checkpoint` is not translated: its value is `MyAC.Config`, which plans do not have",
         "config.activation_checkpoint = MyAC.Config()"),
        ("torchtitan.fuse(config)", "LP024",
         "`torchtitan.fuse(…)` is not translated: it is not followed: nothing of a config is run",
         "torchtitan.fuse(config)"),
        ("config.override.imports.append('mine')", "LP024",
         "`config.override.imports.append('mine')` is not translated: it is not followed",
         "config.override.imports.append('mine')"),
        ("config.override.imports = ['mine']", "LP024",
         "`override.imports` is not translated: modules of TorchTitan are not replaced",
         "config.override.imports = ['mine']"),
        ("config.parallelism = make()\nconfig.parallelism.tensor_parallel_degree = 3", "LP023",
         "degrees of pp = 1, dp_replicate = 1, dp_shard = -1, cp = 1, tp = 3 do not make 8 devices", ""),
    ],
)  # fmt: skip
def test_error_is_reported_at_its_span(body: str, code: str, message: str, place: str):
    config = config_of(body)
    found = imported(config)
    assert [item.code for item in found.diagnostics] == [code]
    assert message in found.diagnostics[0].message
    span = found.diagnostics[0].label.span
    assert config.lines.text[span.start : span.end] == place
    assert (found.text is None) == (code not in ("LP022", "LP024"))
    assert any(item.changes for item in found.unused) == (code in ("LP022", "LP024"))


def test_every_option_changes_the_plan_or_is_listed():
    values: dict[str, Any] = {
        "activation_checkpoint.selective_ac_option": "3",
        "compile.backend": "aot_eager",
        "compile.components": ["loss"],
        "parallelism.pipeline_parallel_schedule": "GPipe",
        "validation.steps": 7,
        "validation.enable": False,
        "training.max_norm": 0.5,
        "parallelism.data_parallel_shard_degree": 4,
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.context_parallel_degree": 2,
        "parallelism.pipeline_parallel_degree": 2,
        "checkpoint.initial_load_path": "x",
        "checkpoint.enable": False,
        "debug.seed": 5,
    }
    sections = {"profiling": "profiler", "validation": "validator"}
    sections |= {name: name for name in ("metrics", "lr_scheduler", "training", "parallelism", "checkpoint", "compile")}
    sections |= {name: name for name in ("comm", "debug", "override")}
    counted = {"training.local_batch_size", "training.global_batch_size", "training.seq_len"}
    base = imported(config_of("config.checkpoint.enable = True\nconfig.validator.enable = True")).text
    tried = 0
    for name, key in AUGUST_2026.keys.items():
        section, _, last = name.partition(".")
        if section not in sections or name in counted or "." in last:
            continue
        other = {"boolean": not key.default, "integer": 3, "number": 0.25, "texts": ["x"], "text": "x"}
        value = values.get(name, key.choices[-1] if key.choices else other.get(key.type))
        if value is None or value == key.default:
            continue
        body = f"config.checkpoint.enable = True\nconfig.validator.enable = True\n" \
            f"config.{sections[section]}.{last} = {value!r}"  # fmt: skip
        found = imported(config_of(body))
        listed = any(item.name == f"{sections[section]}.{last}" for item in found.unused)
        assert listed or found.text != base or found.text is None, name
        tried += 1
    assert tried > 100


def test_older_names_make_a_config_of_february():
    recomputed = "config.activation_checkpoint = ActivationCheckpointConfig(mode='selective')"
    found = config_of(f"config.training = TrainingConfig(local_batch_size=2, seq_len=4096)\n{recomputed}")
    assert found.format is FEBRUARY_2026
    made = imported(found).text or ""
    assert "batch   (global = 16, micro = 2, seq_len = 4096)" in made
    assert "checkpoint { layers.* = every(2) }" in made
    assert "as TorchTitan of February 2026 (commit 9810191bb) reads it" in made


def test_settings_replace_what_the_function_says():
    config = config_of(
        "config.training.steps = 10\nconfig.compile.components = ['loss']",
        training__steps="70", parallelism__tensor_parallel_degree="2", compile__enable="true",
        compile__components="model,loss", profiler__enable_profiling="True", training__max_context_length="4096",
        activation_checkpoint__mode="full",
    )  # fmt: skip
    assert config.diagnostics == []
    assert config.given == {
        "model.name": "llama3", "model.flavor": "8B", "training.steps": 70, "parallelism.tensor_parallel_degree": 2,
        "compile.enable": True, "compile.components": ["model", "loss"], "profiling.enable_profiling": True,
        "training.seq_len": 4096, "training.local_batch_size": 4, "activation_checkpoint.mode": "full",
    }  # fmt: skip
    more = {"model_spec__flavor": "70B", "loss__num_chunks": "4", "activation_checkpoint": "none"}
    config = config_of("pass", **more)
    assert config.diagnostics == []
    found = {name: config.given[name] for name in ("model.flavor", "loss.num_chunks", "activation_checkpoint.mode")}
    assert list(found.values()) == ["70B", 4, "none"]
    [problem] = config_of("pass", training__stepz="1").diagnostics
    assert problem.message == "TorchTitan has no option `training.stepz`"
    config = config_of("pass", training__steps="many")
    [problem] = config.diagnostics
    assert problem.message == '`training.steps` takes a whole number, not `"many"`'
    assert config.settings[problem.label.span.file] == "training.steps=many"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("training.global_batch_size", "LP022"), ("parallelism.pipeline_parallel_microbatches", "LP022"),
        ("parallelism.enable_async_tensor_parallel", "LP022"), ("parallelism.disable_loss_parallel", "LP022"),
        ("validator.seq_len", "LP022"), ("training.num_tokens_per_train_step", None),
    ],
)  # fmt: skip
def test_a_setting_is_a_field_of_the_time_of_the_config(path: str, code: str | None):
    found = config_of("config.compile.enable = False", **{path.replace(".", "__"): "16384"})
    assert [item.code for item in found.diagnostics] == ([code] if code else [])


@pytest.mark.parametrize(("value", "balance"), [("None", "none"), ("'headtail'", "head_tail")])
def test_none_is_a_value_where_it_is_not_the_default(value: str, balance: str):
    parallel = f"ParallelismConfig(context_parallel_degree=2, context_parallel_load_balancer={value})"
    found = imported(config_of(f"config.parallelism = {parallel}"))
    assert found.diagnostics == ()
    assert f"balance = {balance})" in found.text
    [problem] = config_of("config.training.steps = None").diagnostics
    assert problem.message == "`training.steps` takes a whole number, not `None`"


@pytest.mark.parametrize(("degree", "idle"), [(2, []), (1, ["parallelism.num_pp_microbatches"])])
def test_micro_batches_of_a_pipeline_are_listed_only_without_one(degree: int, idle: list[str]):
    parallel = f"ParallelismConfig(pipeline_parallel_degree={degree}, num_pp_microbatches=4)"
    training = "TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2048)"
    found = imported(config_of(f"config.parallelism = {parallel}\nconfig.training = {training}"))
    assert found.diagnostics == ()
    assert [item.name for item in found.unused] == idle
    assert f"(global = {16 if degree == 2 else 8}, micro = 1, seq_len = 2048)" in found.text


@pytest.mark.parametrize("pp", [1, 2])
def test_replicas_of_august_have_units_of_blocks(pp: int):
    degrees = f"pipeline_parallel_degree={pp}, data_parallel_replicate_degree={8 // pp}, data_parallel_shard_degree=1"
    model = "config.model_spec = model_registry('debugmodel')\n"
    found = imported(config_of(f"{model}config.parallelism = ParallelismConfig({degrees}, num_pp_microbatches=8)"))
    assert found.text is not None
    assert "replicate on dp_replicate\n" in found.text
    linted = lint(found.text, "some.plan", directory=Path())
    assert [item.code for item in linted.diagnostics if item.severity == "error"] == []
    assert any("gradients of each block" in note for note in found.notes) == (pp == 1)


@pytest.mark.parametrize(
    ("model", "shared"),
    [("'8B'", False), ("'8B', attn_backend='sdpa'", True), ("'8B', attn_backend='varlen'", False)],
)
def test_documents_of_a_row_are_noted_where_torchtitan_masks_them(model: str, shared: bool):
    found = imported(config_of(f"config.model_spec = model_registry({model})"))
    assert any("between the documents" in note for note in found.notes) is not shared
