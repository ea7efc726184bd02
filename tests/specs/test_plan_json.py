"""A plan's canonical JSON is read back as the same plan, and nothing else is read as one."""

import copy
import json

import pytest

from legoai.dsl.frontend.resolve import resolve
from legoai.specs.directives import FAMILIES, family
from legoai.specs.plan_json import PlanJsonError, read_plan, schema
from support import ROOT

PLANS = ROOT / "plans"


def plans():
    for path in sorted(PLANS.glob("*.plan")):
        text = path.read_text()
        variants = resolve(text, path.name, directory=PLANS).variants
        for variant in (None, *variants):
            plan = resolve(text, path.name, directory=PLANS, variant=variant).plan
            assert plan is not None
            yield pytest.param(plan, id=f"{path.stem}-{variant or 'base'}")


@pytest.mark.parametrize("plan", list(plans()))
def test_worked_plan_json_round_trip(plan):
    assert read_plan(plan.canonical_json()).digest == plan.digest


def test_file_digests_survive_a_json_round_trip(tmp_path):
    (tmp_path / "order.csv").write_text("0F0,0B0\n1F0,1B0\n")
    text = (PLANS / "tiny.plan").read_text() + '\npipeline on pp (schedule = csv("order.csv"))\n'
    plan = resolve(text, "tiny.plan", directory=tmp_path).plan
    assert dict(plan.files).keys() == {"order.csv"}
    assert read_plan(plan.canonical_json()).files == plan.files


@pytest.fixture
def tiny():
    return resolve((PLANS / "tiny.plan").read_text(), "tiny.plan", directory=PLANS).plan.canonical()


def wrong(body, *path, value):
    damaged = copy.deepcopy(body)
    inner = damaged
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(damaged)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("batch", "global"), 0, "batch.global: Input should be greater than or equal to 1"),
        (("batch", "global"), "many", "batch.global: Input should be a valid integer"),
        (("batch", "glob"), 4, "batch.glob: Extra inputs are not permitted"),
        (("cluster", "device"), "h1000", "expected a device"),
        (("fsdp", "on"), ["tp"], "fsdp.on.0"),
        (("checkpoint", "rules", 0, "treatment"), "partial", "checkpoint.rules.0"),
        (("optimizer", "algorithm", "betas"), [0.9], "at least 2 items"),
        (("format",), 1, "format: Input should be 2"),
        (("defaults",), 0, "defaults: Input should be 2"),
    ],
)
def test_invalid_plan_json_is_refused_with_its_path(tiny, path, value, words):
    with pytest.raises(PlanJsonError, match=r".") as caught:
        read_plan(wrong(tiny, *path, value=value))
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000])
def test_text_that_is_not_plan_json_is_refused(text):
    with pytest.raises(PlanJsonError):
        read_plan(text)


def test_the_schema_describes_every_option():
    definitions = schema()["$defs"]
    for keyword in FAMILIES:
        declared = family(keyword)
        properties = definitions[declared.__name__]["properties"]
        assert {item.name for item in declared.options} <= set(properties)
        for item in declared.options:
            assert properties[item.name]["description"] == item.doc
