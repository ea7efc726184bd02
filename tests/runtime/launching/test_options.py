"""The command line of a lowered program."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from legoai.runtime import RunOptions
from legoai.runtime.launching.options import parse_options


def parse(*argv: str) -> RunOptions:
    return parse_options(argv, plan="tiny", steps=300)


def test_defaults_come_from_the_plan_and_run_options():
    options = parse()
    assert options.steps == 300 and options.out == Path("runs/tiny")
    defaults = RunOptions()
    for option in fields(RunOptions):
        if option.name not in ("steps", "out"):
            assert getattr(options, option.name) == getattr(defaults, option.name), option.name


def test_every_run_option_has_a_flag_and_documentation(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in fields(RunOptions):
        name = option.name.replace("_", "-")
        assert f"--{name} " in text or f"--{name}, " in text
        assert f"{option.name}:" in RunOptions.__doc__


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "0 is not positive"),
        (["--steps", "many"], "'many' is not a whole number"),
        (["--keep", "-1"], "-1 is negative"),
        (["--seed", str(2**64)], "is not below 2**64"),
        (["--timeout", "nan"], "not a positive number of seconds"),
        (["--on-nan", "pray"], "invalid choice"),
        (["--stepz", "3"], "unrecognized arguments"),
    ],
)
def test_wrong_usage_exits_with_status_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_and_messages_name_the_given_command(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--help"], plan="tiny", usage="legoai run plan.tiny --", steps=40, save_every=7)
    text = capsys.readouterr().out
    assert text.startswith("usage: legoai run plan.tiny -- [OPTION ...]\n") and "torchrun" not in text
    assert "(default: 40)" in text
    assert "(default: 7)" in text and "default: None" not in text and "SUPPRESS" not in text
    with pytest.raises(SystemExit):
        parse_options(["--stepz"], plan="tiny", usage="legoai run plan.tiny --")
    assert "legoai run plan.tiny --: error: unrecognized arguments: --stepz" in capsys.readouterr().err
