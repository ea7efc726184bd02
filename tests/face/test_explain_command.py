"""`legoai explain` prints pages, references, defaults and the treatments of a module."""

from pathlib import Path

import pytest

from legoai.dsl.reporting.reference import OWN_STATEMENTS
from legoai.dsl.reporting.topics import found, topics
from legoai.specs.cluster import device_names, fabric_names
from legoai.specs.directives import FAMILIES
from legoai.specs.directives.mesh import AXES
from legoai.specs.directives.require import METRICS
from support.commands.command_line import (
    called,
    here,  # noqa: F401
)


def test_explain_prints_the_page_of_a_code_and_of_a_slug(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "explain", "lp210")
    assert status == 0
    assert out.startswith("LP210 no-such-path (error)\n")
    assert called(capsys, "explain", "no-such-path")[1] == out


@pytest.mark.parametrize("keyword", ["fsdp", "batch", "optimizer", "let", "require"])
def test_explain_prints_the_reference_of_a_statement(keyword: str, capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "explain", keyword)
    assert status == 0
    assert out.startswith(f"`{keyword} ")
    assert max(map(len, out.splitlines())) <= 100


def test_explain_lists_defaults_of_the_language_and_of_a_plan(capsys: pytest.CaptureFixture[str]):
    _, everything, _ = called(capsys, "explain", "defaults")
    assert "backend       = eager\n" in everything
    status, own, _ = called(capsys, "explain", "defaults", "--plan", "good.plan")
    assert status == 0
    assert 0 < len(own.splitlines()) < len(everything.splitlines())


def test_explain_names_the_deciding_line(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "explain", "layers.0.attention.wq", "--plan", "plan.good")
    assert status == 0
    assert "in the unit layers.0" in out
    assert "good.plan:8" in out
    assert "did you mean `attention`?" in called(capsys, "explain", "layers.0.atention", "--plan", "good.plan")[2]


def test_explain_works_for_a_plan_with_errors(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "explain", "norm", "--plan", "bad.plan")
    assert status == 0
    assert out
    assert "bad.plan has errors" in err
    Path("bad.plan").write_text("plan x\n", encoding="utf-8")
    status, out, err = called(capsys, "explain", "norm", "--plan", "bad.plan")
    assert (status, out) == (1, "")
    assert "error[LP202]" in err


@pytest.mark.parametrize(
    ("option", "code"),
    [(("--variant", "NOPE"), "LP215"), (("--set", "NOPE=1"), "LP209"), (("--set", "NOPE=1 +"), "LP102")],
)
@pytest.mark.parametrize("subject", ["norm", "defaults"])
def test_explain_refuses_another_plan_than_was_asked_for(
    subject: str, option: tuple[str, str], code: str, capsys: pytest.CaptureFixture[str]
):
    status, out, err = called(capsys, "explain", subject, "--plan", "good.plan", *option)
    assert (status, out) == (1, "")
    assert f"error[{code}]" in err and "good.plan is not explained: 1 error" in err


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("dp_shard", ["`mesh (dp_shard = …)`", "`fsdp on dp_shard`"]),
        ("ep", ["`shard on ep`"]),
        ("llama3", ["`8b`: dim = 4096", "`n_kv_heads`: number of key/value heads"]),
        ('llama3("8b")', ["`dim = 4096`: width of the residual stream", "`rope_scaling = 8`"]),
        ("LLAMA3(70B)", ["`dim = 8192`"]),
        ("8x7b", ['`model mixtral("8x7b")`', "`n_experts = 8`"]),
        ("h100_sxm", ["memory: 79.2 GiB, 3.35 TB/s", "bf16 989.4", "nvlink4", "Sources:"]),
        ("cpu", ["`cluster cpu(devices = …)`"]),
        ("infiniband_ndr", ["50 GB/s in each direction", "2.7us", "source: "]),
        ("colwise", ["a rule of `shard`", "`loss_parallel`: "]),
        ("units", ["`prefetch` of `comm`", "`forward`: "]),
        ("none", ["a rule of `fsdp`", "a rule of `checkpoint`", "a rule of `precision`"]),
        ("peak_memory", ["`require peak_memory <= VALUE`", "`minimize peak_memory`", "in bytes"]),
        ("mfu", ["`require mfu >= VALUE`"]),
        ("reshard", ["`unit(reshard = …)`", "ZeRO-2"]),
        ("after_backward", ["a value of `unit(reshard = …)`"]),
        ("Interleaved1F1B", ["a value of `pipeline (schedule = …)`"]),
        ("flash", ["a value of `attention KERNEL`"]),
        ("optimizer", ["`optimizer ALGORITHM {", "`offload (optimizer = …)`"]),
        ("hosts", ["`cluster DEVICE(hosts = …)`"]),
    ],
)
def test_explain_covers_every_name_of_the_language(subject: str, words: list[str], capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "explain", subject)
    assert (status, err) == (0, "")
    for word in words:
        assert word in out
    assert max(map(len, out.splitlines())) <= 140


def test_every_topic_is_listed_and_has_a_page(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "explain", "--list")
    assert status == 0
    for item in topics():
        assert f"  {item.name} " in out
        assert item.page().strip()
        assert item in found(item.name)
        assert item.summary
    named = {item.name for item in topics()}
    assert {"auto", "in", "on", "rest", "root", "true", "false", "standard", "blocks"} <= named
    assert {*FAMILIES, *OWN_STATEMENTS, *AXES, *METRICS, *device_names(), *fabric_names()} <= named


@pytest.mark.parametrize(
    "argv", [[], ["--list", "fsdp"], ["--list", "--plan", "good.plan"], ["colwis"], ["llama3(9b)"]], ids=" ".join
)
def test_explain_of_nothing_is_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "explain", *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") <= 3


def test_explain_says_what_a_code_of_a_run_is(capsys: pytest.CaptureFixture[str]):
    assert called(capsys, "explain", "run020")[1].startswith("RUN020 is a failure of a run (checkpoint missing);")
    assert called(capsys, "explain", "RUN999")[0] == 2
