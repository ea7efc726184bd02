"""Resolution: defaults, holes, `let` names, the origin of each value, and digests of plans."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.resolve import resolve
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.optimizer import AdamW
from support import VALID_PLANS, WORKED_PLANS
from support.texts.resolution import HEAD, codes, plan_of, resolution, written

PLANS = WORKED_PLANS + VALID_PLANS


class TestDefaultsAndProvenance:
    def test_a_plan_needs_four_statements_and_has_defaults_for_the_rest(self):
        plan = plan_of(HEAD)
        assert plan.mesh.world_size == 1
        assert plan.precision.param == "bf16"
        assert isinstance(plan.optimizer.algorithm, AdamW)
        assert plan.fsdp is None
        assert codes("plan a\n") == ["LP202"]

    def test_each_value_records_its_span_and_decider(self):
        text = HEAD + "let n = 2\nmesh (tp = n, pp = auto in [1, 2] -> 2, cp = 1)\n"
        mesh = plan_of(text).mesh
        assert {axis: mesh.origin(axis).decider for axis in ("tp", "pp", "cp", "ep")} == {
            "tp": "human", "pp": "solver", "cp": "human", "ep": "default",
        }  # fmt: skip
        assert [written(mesh.origin(axis), text) for axis in ("tp", "pp", "cp")] == ["2", "2", "1"]
        set_by_hand = plan_of(text, settings={"n": "4"}).mesh
        assert set_by_hand.tp == 4
        assert set_by_hand.origin("tp").decider == "command line"
        assert set_by_hand.origin("ep").span is None

    def test_statements_axes_rules_and_arguments_record_their_spans(self):
        text = HEAD + "fsdp on dp_shard (backend = graph) {\n  layers.* = unit(reshard = never)\n}\n"
        fsdp = plan_of(text).fsdp
        assert fsdp is not None
        assert written(fsdp.origin("keyword"), text) == "fsdp"
        assert written(fsdp.origin("axes"), text) == "dp_shard"
        assert written(fsdp.origin("backend"), text) == "graph"
        [rule] = fsdp.rules
        assert written(rule.origin, text) == "layers.* = unit(reshard = never)"
        assert written(rule.path_origin, text) == "layers.*"
        assert written(rule.treatment.origin("reshard"), text) == "never"

    def test_values_may_be_given_by_position(self):
        assert plan_of(HEAD + "optimizer adamw(3e-4, [0.9, 0.95])\n") == plan_of(
            HEAD + "optimizer adamw(lr = 3e-4, betas = [0.9, 0.95])\n"
        )


class TestHoles:
    def test_reading_an_open_hole_raises(self):
        plan = plan_of(HEAD + "mesh (tp = auto in [1, 2, 4])\nattention auto\n")
        assert isinstance(plan.mesh.tp, Hole)
        assert plan.mesh.tp.domain == (1, 2, 4)
        with pytest.raises(Undecided):
            _ = plan.mesh.world_size
        assert [found.what for found in plan.holes()] == ["`tp`", "`kernel`"]

    def test_a_rule_may_be_a_hole(self):
        (found,) = plan_of(HEAD + "checkpoint { layers.* = auto }\n").holes()
        assert found.what == "the treatment of `layers.*`"
        assert found.origin.span is not None

    def test_an_answer_fills_the_hole(self):
        assert plan_of(HEAD + "mesh (tp = auto in 1..4 -> 2)\n").mesh.tp == 2
        assert plan_of(HEAD + "mesh (tp = auto -> 2)\n").digest == plan_of(HEAD + "mesh (tp = 2)\n").digest

    @pytest.mark.parametrize("hole", ["auto in [1, 2] -> 4", "auto in []", "auto in 4..1"])
    def test_answer_outside_of_its_domain_is_an_error(self, hole: str):
        assert codes(HEAD + f"mesh (tp = {hole})\n") == ["LP220"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("hf:a/b@main:en:train[:10%]", []),
        ("hf:a/b::test", []),
        ("a@b@c", []),
        ("of two\nlines", []),
        ("hf:", ["LP207"]),
        ("hf::x", ["LP207"]),
        ("hf:a@b@c", ["LP207"]),
    ],
)
def test_address_of_a_dataset_has_its_form(source: str, found: list[str]):
    assert codes(HEAD + f"data (source = {json.dumps(source)})\n") == found


class TestLet:
    def test_let_names_may_hold_any_value(self):
        text = HEAD + "let opt = adamw(lr = 1e-3)\nlet same = opt\nlet flag = true\nlet long = 64 * 2\n"
        plan = plan_of(text + "optimizer same\ncheckpoint (preserve_rng = flag)\nmesh (tp = long / 64)\n")
        assert plan.optimizer.algorithm == AdamW(lr=1e-3)
        assert plan.mesh.tp == 2

    @pytest.mark.parametrize("option", ["warmup", "decay"])
    @pytest.mark.parametrize(
        ("value", "refused"),
        [("1.0", "1.0"), ("1e0", "1e0"), ("x", "1.0"), ("1", ""), ("100%", ""), ("0.99", ""), ("2.0", "")],
    )
    def test_one_in_the_form_of_a_fraction_may_be_no_number(self, option: str, value: str, refused: str):
        """`0.99` is nearly all steps, and `1` is one step."""
        other = "" if option == "decay" else ", decay = 0%"
        text = f"{HEAD}let x = 1.0\nschedule wsd(steps = 100, {option} = {value}{other})\n"
        found = [item for item in resolution(text).diagnostics if item.code == "LP207"]
        assert [item.message for item in found] == [f"`{refused}` could be the number 1 or the fraction 100%"] * bool(
            refused
        )

    def test_order_of_let_statements_is_irrelevant(self):
        assert plan_of(HEAD + "mesh (tp = n)\nlet n = 2\n").mesh.tp == 2

    def test_a_model_takes_names_for_its_dimensions(self):
        assert plan_of(HEAD.replace('"tiny"', '"tiny", n_layers = n') + "let n = 1 + 1\n").model.arguments == {
            "n_layers": 2
        }


class TestRanges:
    def test_the_ends_of_a_range_are_computed(self):
        text = (
            HEAD + "let n = 4\ncheckpoint { layers.{0..n // 2 - 1} = full, layers.{ min(n, 2) .. n - 1 }.* = none }\n"
        )
        checkpoint = plan_of(text).checkpoint
        assert checkpoint is not None
        assert [rule.path for rule in checkpoint.rules] == ["layers.{0..1}", "layers.{2..3}.*"]
        assert written(checkpoint.rules[0].path_origin, text) == "layers.{0..n // 2 - 1}"
        assert plan_of(text, settings={"n": "8"}).checkpoint.rules[0].path == "layers.{0..3}"  # type: ignore[union-attr]

    def test_a_domain_may_be_computed(self):
        tp = plan_of(HEAD + "let n = 4\nmesh (tp = auto in 1..n * 2 -> n)\n").mesh
        assert tp.tp == 4
        hole = plan_of(HEAD + "let n = 4\nmesh (tp = auto in n..n * 2)\n").mesh.tp
        assert isinstance(hole, Hole)
        assert hole.domain == range(4, 9)

    @pytest.mark.parametrize(
        ("path", "code", "place"),
        [
            ("layers.{0..m}", "LP209", "m"),
            ("layers.{0..n / 3}", "LP106", "n / 3"),
            ("layers.{0..n - 9}", "LP106", "n - 9"),
            ("layers.{0..1GiB}", "LP106", "1GiB"),
            ("layers.{n..0}", "LP106", "layers.{n..0}"),
            ("layers.{0..}", "LP106", "..}"),
            ("layers.{0..*}", "LP106", "*"),
            ("layers.{0..1 / 0}", "LP217", "1 / 0"),
        ],
    )
    def test_non_numeric_range_end_is_an_error(self, path: str, code: str, place: str):
        text = HEAD + f"let n = 4\ncheckpoint {{ {path} = full, layers.{{0..n}} = none }}\n"
        (found,) = resolution(text).diagnostics
        assert found.code == code
        span = found.label.span
        assert text[span.start : span.end].startswith(place[:2]) or place == "..}"

    def test_range_expression_is_formatted(self):
        text = "checkpoint { layers.{ 0 ..min(n,2)-1 } = full }\n"
        assert format_text(text, "t.plan").text == "checkpoint { layers.{0..min(n, 2)-1} = full }\n"


class TestRest:
    @pytest.mark.parametrize(
        ("cluster", "mesh", "axis", "size"),
        [
            ("cpu(devices = 8)", "dp_shard = rest", "dp_shard", 8),
            ("cpu(devices = 8)", "dp_shard = rest, tp = 2", "dp_shard", 4),
            ("cpu(devices = 8)", "dp_shard = rest, tp = 8", "dp_shard", 1),
            ("h100_sxm(hosts = 4, fabric = infiniband_ndr)", "pp = 2, cp = rest, tp = 8", "cp", 2),
            ("cpu(devices = 8)", "dp_shard = rest, ep = 4", "dp_shard", 8),
            ("cpu(devices = n * 2)", "tp = rest, dp_shard = n", "tp", 2),
        ],
    )
    def test_rest_is_the_size_left_by_the_other_axes(self, cluster: str, mesh: str, axis: str, size: int):
        text = HEAD.replace("cpu(devices = 4)", cluster) + f"let n = 4\nmesh ({mesh})\n"
        plan = plan_of(text)
        assert plan.mesh.size(axis) == size
        assert written(plan.mesh.origin(axis), text) == "rest"
        assert plan.digest == plan_of(text.replace("rest", str(size))).digest

    @pytest.mark.parametrize(
        ("mesh", "code"),
        [
            ("dp_shard = rest, tp = 3", "LP225"),
            ("dp_shard = rest, tp = 8", "LP225"),
            ("dp_shard = rest, tp = rest", "LP225"),
            ("ep = rest", "LP209"),
            ("tp = auto in [1, rest]", "LP209"),
            ("tp = rest * 2", "LP209"),
        ],
    )
    def test_rest_must_be_a_whole_number(self, mesh: str, code: str):
        assert codes(HEAD + f"mesh ({mesh})\n") == [code]

    def test_rest_is_open_while_another_axis_is(self):
        assert isinstance(plan_of(HEAD + "mesh (dp_shard = rest, tp = auto)\n").mesh.dp_shard, Hole)


class TestDuplicates:
    @pytest.mark.parametrize(
        "pair",
        [
            "mesh (tp = 2)\nmesh (pp = 2)\n",
            "let a = 1\nlet a = 2\nmesh (tp = a)\n",
            "require mfu >= 40%\nrequire mfu > 50%\n",
            "require recompute <= 1ms\nrequire recompute < 2s / 4\n",
            "require recompute <= 1%\nrequire recompute <= 0.02\n",
            "minimize step_time\nmaximize mfu\n",
            "shard on tp { output = colwise }\nshard on tp { norm = sequence }\n",
            "variant v { mesh (tp = 2) }\nvariant v { mesh (tp = 4) }\n",
        ],
    )
    def test_duplicate_decision_is_an_error(self, pair: str):
        found = resolution(HEAD + pair).diagnostics
        assert [item.code for item in found] == ["LP203"]
        [other] = found[0].others
        assert other.span.line == 5
        assert found[0].label.span.line == 6

    @pytest.mark.parametrize(
        "pair",
        [
            "require peak_memory <= 1GiB\nrequire peak_memory >= 1MiB\n",
            "require recompute <= 1.6%\nrequire recompute <= 1881us\n",
            "require exposed_comm <= 0.2\nrequire exposed_comm <= min(1s, 3 * 10ms)\n",
            "shard on tp { output = colwise }\nshard on ep { layers = experts }\n",
        ],
    )
    def test_similar_but_distinct_statements_may_coexist(self, pair: str):
        assert codes(HEAD + pair) == []


class TestIdentity:
    RICH = (
        HEAD + "let n = 2\nlet rate = 3e-4\nmesh (tp = n, dp_shard = n)\noptimizer adamw(lr = rate)\n"
        "shard on tp {\n  layers.*.attention.{wq,wk} = colwise\n  output = colwise\n}\n"
        "fsdp on dp_shard { layers.* = unit }\n"
    )

    def test_formatting_comments_and_names_of_lets_do_not_change_the_digest(self):
        digest = plan_of(self.RICH).digest
        formatted = format_text(self.RICH, "t.plan").text
        assert formatted is not None
        assert plan_of(formatted).digest == digest
        assert plan_of(self.RICH.replace("\n", "  # why\n")).digest == digest
        assert plan_of(self.RICH.replace("rate", "speed")).digest == digest
        assert plan_of(self.RICH.replace("= rate", "= 0.0003")).digest == digest
        assert plan_of(self.RICH + "require mfu >= 40%\nminimize step_time\n").digest == digest

    @pytest.mark.parametrize("held", ["offload (activations = auto)", "comm (reorder = auto)", "comm (unshard = auto)"])
    def test_open_plan_with_a_memory_limit_has_a_digest(self, held: str):
        assert plan_of(f"{self.RICH}{held}\nrequire peak_memory <= 9GiB\n").digest.startswith("sha256:")

    def test_training_settings_change_the_digest(self):
        digests = {
            plan_of(text).digest
            for text in (
                self.RICH, self.RICH.replace("= 2", "= 1"), self.RICH.replace("3e-4", "3e-5"),
                self.RICH + "clip (norm = 1)\n", self.RICH.replace("output = colwise", "output = rowwise"),
                self.RICH.replace("plan a", "plan b"),
            )
        }  # fmt: skip
        assert len(digests) == 6

    @given(st.randoms(use_true_random=False))
    @settings(max_examples=30)
    def test_the_order_of_statements_and_rules_does_not_change_the_digest(self, chance: random.Random):
        first, *rest = [self.RICH[item.span.start : item.span.end] for item in parse(self.RICH, "t").file.statements]
        chance.shuffle(rest)
        text = "\n".join([first, *rest])
        rules = ["  layers.*.attention.{wq,wk} = colwise", "  output = colwise"]
        chance.shuffle(rules)
        text = text.replace("  layers.*.attention.{wq,wk} = colwise\n  output = colwise", "\n".join(rules))
        assert plan_of(text).digest == plan_of(self.RICH).digest

    @pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
    def test_worked_plan_digest_ignores_comments(self, path: Path):
        text = path.read_text(encoding="utf-8")
        plan = plan_of(text, path.parent)
        bare = "\n".join(line.split("  #")[0] for line in text.split("\n") if not line.startswith("#"))
        assert plan_of(bare, path.parent).digest == plan.digest
        assert plan.digest.startswith("sha256:")


def test_content_of_a_named_file_changes_the_digest(tmp_path: Path) -> None:
    text = """plan ordered
model   llama3("tiny")
cluster cpu(devices = 2)
batch   (global = 8, micro = 1, seq_len = 16)
mesh    (pp = 2)
pipeline on pp (schedule = csv("order.csv"))
"""

    def digest() -> str:
        plan = resolve(text, "ordered.plan", directory=tmp_path).plan
        assert plan is not None
        return plan.digest

    missing = digest()
    (tmp_path / "order.csv").write_text("0F0,0B0\n1F0,1B0\n")
    first = digest()
    (tmp_path / "order.csv").write_text("0F0,0B0\n1F0,1B0,\n")
    assert len({missing, first, digest()}) == 3
    (tmp_path / "order.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert digest() == first


def test_digest_without_named_files_has_no_file_entry(tmp_path: Path) -> None:
    text = 'plan a\nmodel llama3("tiny")\ncluster cpu\nbatch (global = 8, micro = 1, seq_len = 16)\n'
    plan = resolve(text, "a.plan", directory=tmp_path).plan
    assert plan is not None
    assert plan.files == () and "files" not in plan.canonical()
