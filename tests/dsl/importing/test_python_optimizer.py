"""Optimizers of configs in Python: groups have constants of their own, and what they do not say is torch's default."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from legoai.dsl.importing.python_optimizer import _DECAY, _DEFAULTS
from legoai.dsl.importing.translation import translated
from support.texts.python_configs import HEAD, config_of, read


def groups(*others: str, name: str = "AdamW", constants: str = "{}", more: str = "") -> str:
    """A statement that gives the config an optimizer of these groups."""
    last = f"ParamGroupConfig(pattern='.*', optimizer_name='{name}', optimizer_kwargs={constants})"
    return f"config.optimizer = OptimizersContainer.Config(param_groups=[{', '.join([*others, last])}]{more})"


def imported(body: str, **settings: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """The statement of the optimizer, codes and messages of diagnostics, and the marked texts."""
    config = config_of(body, **settings)
    found = translated(config, plan="some", cluster="h100_sxm", devices=8)
    statement = re.search(r"^optimizer .*$", found.text or "", re.MULTILINE)
    marked = [config.lines.text[item.label.span.start : item.label.span.end] for item in found.diagnostics]
    return statement[0] if statement else "", [(item.code, item.message) for item in found.diagnostics], marked


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_constants_that_a_group_does_not_say_are_those_of_torch(name: str):
    defaults = {one.name: one.default for one in inspect.signature(getattr(torch.optim, name)).parameters.values()}
    written = {**_DEFAULTS, "weight_decay": _DECAY[name], "betas": (0.9, 0.999)}
    assert written == {key: defaults[key] for key in written}
    statement, diagnostics, _ = imported(groups(name=name, constants="{'eps': 1e-6}"))
    assert diagnostics == []
    decay = float(defaults["weight_decay"])
    constants = f"lr = 1e-3, betas = [0.9, 0.999], eps = 1e-6, weight_decay = {decay}"
    assert statement == f"optimizer {name.lower()}({constants}, fused = true)"


def test_constants_of_the_usual_optimizer_are_those_of_torchtitan():
    statement, diagnostics, _ = imported("config.optimizer = default_adamw(1e-4, weight_decay=0.05)")
    assert diagnostics == []
    assert statement == "optimizer adamw(lr = 1e-4, betas = [0.9, 0.95], weight_decay = 0.05, fused = true)"


@pytest.mark.parametrize(
    "body",
    [
        "config.optimizer = OptimizersContainer.Config()",
        "config.optimizer = OptimizersContainer.Config(param_groups=[])",
        "config.optimizer = OptimizersContainer.Config(implementation='foreach')",
    ],
)
def test_an_optimizer_without_groups_is_refused(body: str):
    _, diagnostics, _ = imported(body)
    assert diagnostics == [("LP023", "no parameter has an optimizer: `param_groups` is not given")]


def test_a_config_without_an_optimizer_is_refused():
    found = read(f"{HEAD}def a() -> Trainer.Config:\n    return Trainer.Config(model_spec=model_registry('8B'))\n")
    assert [item.message for item in found.diagnostics] == [
        "no parameter has an optimizer: `param_groups` is not given"
    ]


@pytest.mark.parametrize(
    ("body", "code", "message", "place"),
    [
        (groups("ParamGroupConfig(pattern='norm', optimizer_name='AdamW')"), "LP024",
         "`optimizer.param_groups` is not translated: write a rule of `optimizer`", None),
        (groups(constants="{'amsgrad': True}"), "LP024",
         "`optimizer.amsgrad` is not translated: `adam` and `adamw` have no such form",
         "optimizer_kwargs={'amsgrad': True}"),
        (groups(constants="{'nesterov': True}"), "LP022", "TorchTitan has no option `optimizer.nesterov`", None),
        (groups(constants="made()"), "LP024", "`optimizer.optimizer_kwargs` is not translated", None),
        (groups(constants="{'betas': made()}"), "LP024", "`optimizer.betas` is not translated", None),
        (groups(more=", implementation='fused_opt_states_bf16'"), "LP024",
         "`optimizer.implementation` is not translated: moments have the dtype of the parameters",
         "implementation='fused_opt_states_bf16'"),
        (groups(more=", optimizer_factory_kwargs_by_name={'AdamW': {'lr': 1}}"), "LP024",
         "`optimizer.optimizer_factory_kwargs_by_name` is not translated", None),
        ("config.optimizer = OptimizersContainer.Config(param_groups=[ParamGroupConfig(pattern='.*')])", "LP023",
         "`optimizer.name` takes a text, not `None`", None),
        ("config.optimizer = muon(lr=1)", "LP024", "`optimizer` is not translated: its value is `muon(…)`", None),
        ("config.optimizer.lr = 1e-5", "LP022", "TorchTitan has no option `optimizer.lr`",
         "config.optimizer.lr = 1e-5"),
        ("config.optimizer = default_adamw(fused=True, foreach=True)", "LP024",
         "`optimizer.fused` is not translated: its value is `fused` and `foreach` at once, which torch refuses", None),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_say_of_an_optimizer_is_reported(body: str, code: str, message: str, place: str | None):
    _, [(found, said)], [marked] = imported(body)
    assert found == code
    assert message in said
    assert place in (None, marked)


def test_a_setting_is_a_field_and_no_argument_of_the_usual_optimizer():
    statement, diagnostics, _ = imported("config.optimizer = default_adamw(lr=3e-4)", optimizer__lr="1e-3")
    assert diagnostics == [("LP022", "TorchTitan has no option `optimizer.lr`")]
    assert "lr = 3e-4" in statement
    statement, diagnostics, _ = imported("pass", optimizer__implementation="foreach")
    assert diagnostics == []
    assert statement.endswith("fused = false)")


@pytest.mark.parametrize(
    ("arguments", "implementation", "way"),
    [
        ("fused=True", "fused", "fused"),
        ("fused=False", "fused", "for-loop"),
        ("fused=False, foreach=True", "fused", "foreach"),
        ("foreach=False", "fused", "fused"),
        ("fused=None, foreach=None", "fused", "foreach"),
        ("fused=False", "foreach", "foreach"),
        ("fused=True, foreach=False", "foreach", "fused"),
        ("foreach=False", "foreach", "for-loop"),
        ("amsgrad=False", "for-loop", "for-loop"),
    ],
)
def test_a_group_decides_how_updates_are_implemented(arguments: str, implementation: str, way: str):
    body = f"config.optimizer = default_adamw({arguments})\nconfig.optimizer.implementation = '{implementation}'"
    statement, diagnostics, _ = imported(body)
    assert statement.endswith(f"fused = {str(way == 'fused').lower()})")
    name = "implementation" if "amsgrad" in arguments else arguments.partition("=")[0]
    reason = "is not translated: updates are fused, or made for lists of parameters"
    assert diagnostics == ([("LP024", f"`optimizer.{name}` {reason}")] if way == "for-loop" else [])
