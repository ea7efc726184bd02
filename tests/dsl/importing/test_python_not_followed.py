"""Statements of a Python config of TorchTitan that are not followed: they are reported, and names keep a meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.texts.python_configs import HEAD, MADE, config_of, read

SILENT = {
    "not found": ("from torchtitan.models.llama3.config_registry import llama3_70b\n", "return llama3_70b()", "LP021"),
    "not found, changed": (
        "from elsewhere import llama3_70b\n", "config = llama3_70b()\nconfig.training = 7\nreturn config", "LP021",
    ),
    "partial": ("import functools\nmake = functools.partial(tiny, 7)\n", "return make()", "LP021"),
    "own trainer": (
        "class Mine(Trainer.Config):\n    training = TrainingConfig(steps=5)\n",
        "return Mine(model_spec=model_registry('8B'))", "LP021",
    ),
    "own training": (
        "class Mine(TrainingConfig):\n    steps: int = 5\n", "config.training = Mine()\nreturn config", "LP024",
    ),
    "no name": ("", f"return {MADE.replace('(', '(5, ', 1)}", "LP024"),
    "no name in a part": ("", "config.training = TrainingConfig(5)\nreturn config", "LP024"),
    "no model": ("", "return Trainer.Config(optimizer=default_adamw())", "LP023"),
    "given over": ("", "config.training = tweak(config)\nreturn config", "LP024"),
    "changed by another": ("", "ignored = tweak(config)\nreturn config", "LP024"),
    "changed by a method": ("", "config.training.halve()\nreturn config", "LP024"),
    "inner function": ("", "def inner():\n    config.training.steps = 5\ninner()\nreturn config", "LP021"),
    "default of a field": (
        "", "if config.activation_checkpoint is not None:\n    config.training.steps = 5\nreturn config", "LP021",
    ),
    "keywords that are no texts": ("", "return Trainer.Config(**{1: 2})", "LP021"),
    "changed constant": ("STEPS = 10\nSTEPS *= 2\n", "config.training.steps = STEPS\nreturn config", "LP024"),
    "conditional constant": (
        "STEPS = 10\nif os.environ:\n    STEPS = 5\n", "config.training.steps = STEPS\nreturn config", "LP024",
    ),
    "changed dictionary": ("S = {'n': 5}\nS['n'] = 7\n", "config.training.steps = S['n']\nreturn config", "LP024"),
    "changed list": ("S = []\nS.append(5)\n", "config.training.steps = len(S)\nreturn config", "LP024"),
    "shadowed": ("from foo import max\n", "config.training.steps = max(1, 2)\nreturn config", "LP024"),
}  # fmt: skip
"""What a file says beside a config, its function, and the code of the diagnostic: each is no plan of defaults."""


@pytest.mark.parametrize("case", SILENT)
def test_what_is_not_followed_is_reported(case: str):
    before, body, code = SILENT[case]
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    head = "" if "return Trainer.Config(" in body else f"    config = {MADE}\n"
    found = read(f"{HEAD}{before}def a() -> Trainer.Config:\n{head}{lines}", "a")
    assert [item.code for item in found.diagnostics] == [code]


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("@five\n", ""),
        ("", "a = None\n"),
        ("", "a = wrap(a)\n"),
        ("", "def a() -> Trainer.Config:\n    return 5\n"),
    ],
)
def test_a_function_is_what_its_name_means_last(before: str, body: str):
    text = f"{HEAD}{before}def a() -> Trainer.Config:\n    return {MADE}\n{body}"
    assert [item.code for item in read(text, "a").diagnostics] == ["LP021"]


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        ("import dataclasses\nother = dataclasses.replace(config, dump_folder='x')\nother.training.steps = 9", 9),
        ("import copy\nother = copy.copy(config)\nother.training.steps = 9", 9),
        ("import copy\nother = copy.deepcopy(config)\nother.training.steps = 9", 4),
        ("some = {'n': 1}\nsome.update(n=9)\nconfig.training.steps = some['n']", 9),
        ("some = [1]\nother = some\nother += [2]\nconfig.training.steps = len(some)", 2),
        ("some = other = []\nsome.append(1)\nconfig.training.steps = len(other)", 1),
        ("for i in range(3):\n    config.training.steps += i", 7),
        ("print(config)\nlogger.info('%s', config.training.steps)", 4),
    ],
)
def test_names_of_one_thing_change_together(body: str, steps: int):
    config = config_of(f"config.training.steps = 4\n{body}")
    assert config.diagnostics == []
    assert config.given["training.steps"] == steps


def test_defaults_and_constants_are_made_once():
    text = f"""{HEAD}
SOME = []
def grown(x=[]):
    x.append(1)
    SOME.append(1)
    return len(x)
def a() -> Trainer.Config:
    config = {MADE}
    grown()
    config.training.steps = grown() + len(SOME)
    return config
"""
    assert read(text, "a").given["training.steps"] == 4


def test_names_of_all_of_a_module_are_followed(tmp_path: Path):
    (tmp_path / "base.py").write_text(f"{HEAD}def base():\n    return {MADE}\n")
    found = read("from .base import *\ndef a():\n    return base()\n", "a", tmp_path / "runs.py")
    assert (found.diagnostics, found.given["model.flavor"]) == ([], "8B")
    assert read("from .base import base as a\n", "a", tmp_path / "runs.py").given["model.flavor"] == "8B"


@pytest.mark.parametrize(("operator", "steps"), [("is", 5), ("is not", 4)])
def test_identity_is_that_of_what_is_known(operator: str, steps: int):
    body = "config.compile = CompileConfig()\nother = config.compile\n"
    found = config_of(f"{body}config.training.steps = 5 if other {operator} config.compile else 4")
    assert found.given["training.steps"] == steps
    found = config_of(f"config.training.steps = 5 if config.loss {operator} None else 4")
    [problem] = found.diagnostics
    assert problem.message == "`training.steps` is not translated: its value is `config.loss`, which has its default"
