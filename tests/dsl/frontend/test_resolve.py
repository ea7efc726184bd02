"""Resolution applies bases, variants, `let` and defaults, records the origin of each value, and hashes plans."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend.parse import parse
from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.optimizer import AdamW
from legoai.specs.plan import Plan
from legoai.specs.span import Origin
from support import VALID_PLANS, WORKED_PLANS

HEAD = 'plan a\nmodel llama3("tiny")\ncluster cpu(devices = 4)\nbatch (global = 4, micro = 1, seq_len = 64)\n'
PLANS = WORKED_PLANS + VALID_PLANS


def resolution(text: str, directory: Path = Path(), **options: Any) -> Resolution:
    return resolve(text, "t.plan", directory=directory, **options)


def plan_of(text: str, directory: Path = Path(), **options: Any) -> Plan:
    found = resolution(text, directory, **options)
    assert found.diagnostics == []
    assert found.plan is not None
    return found.plan


def codes(text: str, directory: Path = Path(), **options: Any) -> list[str]:
    return [item.code for item in resolution(text, directory, **options).diagnostics]


def written(origin: Origin, text: str) -> str:
    """The characters that a value came from."""
    assert origin.span is not None
    return text[origin.span.start : origin.span.end]


class TestDefaultsAndProvenance:
    def test_a_plan_needs_four_statements_and_has_defaults_for_the_rest(self):
        plan = plan_of(HEAD)
        assert plan.mesh.world_size == 1
        assert plan.precision.param == "bf16"
        assert isinstance(plan.optimizer.algorithm, AdamW)
        assert plan.fsdp is None
        assert codes("plan a\n") == ["LP202"]

    def test_each_value_knows_where_it_stands_and_who_decided_it(self):
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

    def test_statements_axes_rules_and_arguments_know_where_they_stand(self):
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
    def test_a_hole_cannot_be_mistaken_for_a_value(self):
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
    def test_domains_and_answers_must_agree(self, hole: str):
        assert codes(HEAD + f"mesh (tp = {hole})\n") == ["LP220"]


class TestLet:
    def test_a_name_may_stand_for_any_value(self):
        text = HEAD + "let opt = adamw(lr = 1e-3)\nlet same = opt\nlet flag = true\nlet long = 64 * 2\n"
        plan = plan_of(text + "optimizer same\ncheckpoint (preserve_rng = flag)\nmesh (tp = long / 64)\n")
        assert plan.optimizer.algorithm == AdamW(lr=1e-3)
        assert plan.mesh.tp == 2

    def test_where_names_are_written_does_not_matter(self):
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
    def test_an_end_that_is_no_number_is_a_mistake(self, path: str, code: str, place: str):
        text = HEAD + f"let n = 4\ncheckpoint {{ {path} = full, layers.{{0..n}} = none }}\n"
        (found,) = resolution(text).diagnostics
        assert found.code == code
        span = found.label.span
        assert text[span.start : span.end].startswith(place[:2]) or place == "..}"

    def test_it_is_laid_out_as_written(self):
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
    def test_it_is_what_the_other_axes_leave(self, cluster: str, mesh: str, axis: str, size: int):
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
    def test_it_must_be_one_whole_number(self, mesh: str, code: str):
        assert codes(HEAD + f"mesh ({mesh})\n") == [code]

    def test_it_is_open_where_another_axis_is(self):
        assert isinstance(plan_of(HEAD + "mesh (dp_shard = rest, tp = auto)\n").mesh.dp_shard, Hole)


class TestDuplicates:
    @pytest.mark.parametrize(
        "pair",
        [
            "mesh (tp = 2)\nmesh (pp = 2)\n",
            "let a = 1\nlet a = 2\nmesh (tp = a)\n",
            "require mfu >= 40%\nrequire mfu > 50%\n",
            "minimize step_time\nmaximize mfu\n",
            "shard on tp { output = colwise }\nshard on tp { norm = sequence }\n",
            "variant v { mesh (tp = 2) }\nvariant v { mesh (tp = 4) }\n",
        ],
    )
    def test_one_thing_is_decided_once_in_a_file(self, pair: str):
        found = resolution(HEAD + pair).diagnostics
        assert [item.code for item in found] == ["LP203"]
        [other] = found[0].others
        assert other.span.line == 5
        assert found[0].label.span.line == 6

    @pytest.mark.parametrize(
        "pair",
        [
            "require peak_memory <= 1GiB\nrequire peak_memory >= 1MiB\n",
            "shard on tp { output = colwise }\nshard on ep { layers = experts }\n",
        ],
    )
    def test_what_only_looks_alike_may_stand_twice(self, pair: str):
        assert codes(HEAD + pair) == []


class TestExtends:
    def write(self, folder: Path, **texts: str) -> None:
        for name, text in texts.items():
            (folder / f"{name}.plan").write_text(text, encoding="utf-8")

    def test_later_statements_replace_like_ones_of_the_base(self, tmp_path: Path):
        self.write(tmp_path, base=HEAD + "let n = 2\nmesh (tp = n)\nclip (norm = 1)\n")
        plan = plan_of('plan b\nextends "base.plan"\nlet n = 4\nclip (norm = 2)\n', tmp_path)
        assert (plan.name, plan.mesh.tp) == ("b", 4)
        assert plan.clip is not None
        assert plan.clip.norm == 2
        assert plan.clip.origin("norm").span is not None
        assert plan.model.origin("family").span is not None
        assert plan.model.origin("family").span.file.endswith("base.plan")

    def test_bases_are_found_beside_the_plan_that_names_them(self, tmp_path: Path):
        (tmp_path / "deep").mkdir()
        self.write(tmp_path, top=HEAD)
        self.write(tmp_path / "deep", middle='plan m\nextends "../top.plan"\nmesh (tp = 2)\n')
        assert plan_of('plan b\nextends "deep/middle.plan"\n', tmp_path).mesh.tp == 2

    def test_a_plan_that_extends_itself_or_nothing_is_a_finding(self, tmp_path: Path):
        self.write(tmp_path, a='plan a\nextends "b.plan"\n', b='plan b\nextends "a.plan"\n')
        assert "LP214" in codes('plan c\nextends "a.plan"\n', tmp_path)
        assert "LP214" in codes(HEAD + 'extends "missing.plan"\n', tmp_path)
        (tmp_path / "binary.plan").write_bytes(b"\xff\xfe\x00")
        assert "LP214" in codes(HEAD + 'extends "binary.plan"\n', tmp_path)
        assert codes(HEAD + "extends base\n", tmp_path) == ["LP214"]

    def test_a_long_chain_is_no_circle(self, tmp_path: Path):
        self.write(tmp_path, p0=HEAD)
        for index in range(1, 60):
            self.write(tmp_path, **{f"p{index}": f'plan p\nextends "p{index - 1}.plan"\n'})
        for length in (20, 21, 59):
            assert codes(f'plan b\nextends "p{length}.plan"\n', tmp_path) == []

    def test_a_chain_without_end_is_a_finding(self, tmp_path: Path):
        def read(path: Path) -> str:
            return f'plan p\nextends "p{int(path.stem[1:]) + 1}.plan"\n'

        found = resolve('plan b\nextends "p0.plan"\n', "b.plan", directory=tmp_path, read=read).diagnostics
        assert found[0].code == "LP214"
        assert "more than 100" in found[0].message

    def test_a_circle_of_two_is_one_finding(self, tmp_path: Path):
        self.write(tmp_path, a=HEAD + 'extends "b.plan"\n', b='plan b\nextends "a.plan"\nclip (norm = 1)\n')
        text = (tmp_path / "a.plan").read_text()
        assert codes(text, tmp_path) == ["LP214"]

    def test_bases_that_agree_are_joined(self, tmp_path: Path):
        self.write(
            tmp_path,
            a=HEAD + "clip (norm = 1)\n",
            b="plan b\nclip (norm   = 1)\nmesh (tp = 2)\n",
            c='plan c\nextends "a.plan"\n',
        )
        for bases in (("a", "b"), ("b", "a"), ("a", "c"), ("c", "b", "a")):
            text = "plan x\n" + "".join(f'extends "{name}.plan"\n' for name in bases)
            found = resolution(text, tmp_path)
            assert found.diagnostics == []
            assert found.plan is not None
            assert found.plan.clip is not None

    @pytest.mark.parametrize(
        ("first", "second", "what"),
        [
            ("clip (norm = 1)", "clip (norm = 2)", "clip"),
            ("let n = 1", "let n = 2", "let n"),
            ("require mfu >= 10%", "require mfu >= 20%", "require mfu"),
            ("minimize step_time", "maximize mfu", "objective"),
            ("variant v { clip (norm = 1) }", "variant v { clip (norm = 2) }", "variant v"),
            ("shard on tp { output = colwise }", "shard on tp { output = rowwise }", "shard tp"),
        ],
    )
    def test_bases_that_disagree_need_a_decision(self, tmp_path: Path, first: str, second: str, what: str):
        self.write(tmp_path, a=HEAD + first + "\n", b=f"plan b\n{second}\n", c='plan c\nextends "b.plan"\n')
        for other in ("b", "c"):
            text = f'plan x\nextends "a.plan"\nextends "{other}.plan"\n'
            [found] = resolution(text, tmp_path).diagnostics
            assert (found.code, found.message) == ("LP224", f"the base plans decide `{what}` differently")
            assert codes(f"{text}{first}\n", tmp_path) == []
            assert codes(f"{text}{second}\n", tmp_path) == []

    def test_what_a_plan_takes_away_its_bases_may_disagree_about(self, tmp_path: Path):
        self.write(tmp_path, a=HEAD + "clip (norm = 1)\n", b="plan b\nclip (norm = 2)\n")
        plan = plan_of('plan x\nextends "a.plan"\nextends "b.plan"\nunset clip\n', tmp_path)
        assert plan.clip is None

    def test_a_base_that_is_overridden_in_one_of_two_is_a_disagreement(self, tmp_path: Path):
        self.write(
            tmp_path,
            root=HEAD + "clip (norm = 1)\n",
            a='plan a\nextends "root.plan"\nclip (norm = 2)\n',
            b='plan b\nextends "root.plan"\n',
        )
        assert codes('plan x\nextends "a.plan"\nextends "b.plan"\n', tmp_path) == ["LP224"]

    def test_a_base_is_extended_once(self, tmp_path: Path):
        self.write(tmp_path, a=HEAD)
        assert codes('plan x\nextends "a.plan"\nextends "a.plan"\n', tmp_path) == ["LP203"]

    def test_a_mistake_in_the_base_is_shown_in_the_base(self, tmp_path: Path):
        self.write(tmp_path, base=HEAD + "mesh (tp = x)\n")
        found = resolution('plan b\nextends "base.plan"\n', tmp_path)
        assert [item.code for item in found.diagnostics] == ["LP209"]
        assert found.diagnostics[0].label.span.file in found.files


class TestVariants:
    TEXT = HEAD + "let n = 2\nmesh (tp = n)\nvariant wide {\n  let n = 4\n  clip (norm = 1)\n}\n"

    def test_a_variant_replaces_and_adds_statements_when_it_is_chosen(self):
        assert plan_of(self.TEXT).mesh.tp == 2
        wide = plan_of(self.TEXT, variant="wide")
        assert (wide.mesh.tp, wide.variant) == (4, "wide")
        assert wide.clip is not None

    def test_an_unknown_variant_is_a_finding_with_the_known_ones(self):
        found = resolution(self.TEXT, variant="wid").diagnostics
        assert [item.code for item in found] == ["LP215"]
        assert "did you mean `wide`?" in found[0].help

    @pytest.mark.parametrize("inner", ["plan b", 'extends "base.plan"', "variant deeper { clip (norm = 2) }"])
    @pytest.mark.parametrize("chosen", [None, "wide"])
    def test_what_belongs_to_a_whole_plan_cannot_stand_in_a_variant(self, inner: str, chosen: str | None):
        text = self.TEXT.replace("clip (norm = 1)", f"clip (norm = 1)\n  {inner}")
        found = resolution(text, variant=chosen)
        [diagnostic] = found.diagnostics
        assert (diagnostic.code, diagnostic.message) == (
            "LP218",
            f"`{inner.split()[0]}` cannot stand inside of a variant",
        )
        assert [text[label.span.start : label.span.end] for label in diagnostic.others] == ["wide"]
        assert found.plan is not None
        assert found.plan.name == "a"

    def test_a_setting_wins_over_a_variant(self):
        assert plan_of(self.TEXT, variant="wide", settings={"n": "1"}).mesh.tp == 1


class TestUnset:
    BASE = (
        HEAD + "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\nclip (norm = 1)\n"
        "require peak_memory <= 1GiB\nrequire mfu >= 40%\nminimize step_time\n"
    )

    def variant(self, body: str, base: str = BASE) -> Plan:
        return plan_of(f"{base}variant v {{\n{body}\n}}\n", variant="v")

    def test_a_variant_takes_statements_away(self):
        plan = self.variant("unset clip\nunset require peak_memory\nunset minimize")
        assert plan.clip is None
        assert [item.metric for item in plan.require] == ["mfu"]
        assert plan.objective is None
        assert self.variant("unset require").require == ()
        assert self.variant("unset mesh").mesh.world_size == 1

    def test_fsdp_becomes_ddp(self):
        plan = self.variant("unset fsdp\nmesh (dp_replicate = 2)\nreplicate on dp_replicate")
        direct = plan_of(HEAD + "mesh (dp_replicate = 2)\nreplicate on dp_replicate\nclip (norm = 1)\n")
        assert plan.fsdp is None
        assert plan.digest == direct.digest

    def test_an_extending_plan_takes_statements_of_any_base_away(self, tmp_path: Path):
        (tmp_path / "base.plan").write_text(self.BASE + "let n = 2\nvariant old { clip (norm = 2) }\n")
        (tmp_path / "middle.plan").write_text('plan m\nextends "base.plan"\nunset clip\nclip (norm = 3)\n')
        found = resolution(
            'plan b\nextends "middle.plan"\nunset clip\nunset fsdp\nunset let n\nunset variant old\n', tmp_path
        )
        assert found.diagnostics == []
        assert found.plan is not None
        assert (found.plan.clip, found.plan.fsdp) == (None, None)
        assert not found.variants
        assert not found.scope.names

    def test_one_of_several_axes_is_taken_away(self):
        text = HEAD + "shard on tp { output = colwise }\nshard on ep { layers = experts }\n"
        assert [item.axes for item in self.variant("unset shard on ep", text).shard] == [("tp",)]
        assert self.variant("unset shard", text).shard == ()

    def test_what_is_taken_away_may_be_written_anew(self):
        plan = self.variant("unset fsdp\nfsdp on dp_shard { layers.0 = unit }")
        assert plan.fsdp is not None
        assert [rule.path for rule in plan.fsdp.rules] == ["layers.0"]

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            ("unset offload", "LP223"),
            ("unset model", "LP223"),
            ("unset plan", "LP223"),
            ("unset clipp", "LP223"),
            ("unset let", "LP223"),
            ("unset clip norm", "LP223"),
            ("unset fsdp on dp_replicate", "LP223"),
            ("unset maximize", "LP223"),
            ("clip (norm = 2)\nunset clip", "LP203"),
            ("fsdp on dp_shard { root = unset }", "LP223"),
        ],
    )
    def test_taking_away_what_is_not_there_is_a_mistake(self, body: str, code: str):
        assert codes(f"{self.BASE}variant v {{\n{body}\n}}\n", variant="v") == [code]

    def test_a_plan_does_not_take_its_own_statements_away(self):
        assert codes(self.BASE + "unset clip\n") == ["LP203"]
        assert codes(HEAD + "unset clip\n") == ["LP223"]

    def test_it_is_laid_out_without_padding(self):
        text = "plan a\n\nunset shard on tp,ep\nunset   require  mfu\nclip   (norm = 1)\n"
        assert (
            format_text(text, "t.plan").text == "plan a\n\nunset shard on tp, ep\nunset require mfu\nclip (norm = 1)\n"
        )


class TestRulesOfVariants:
    BASE = HEAD + "checkpoint (preserve_rng = true) { layers.* = full, layers.{0,1} = none, layers.2 = none }\n"

    def rules(self, body: str) -> dict[str, str]:
        plan = plan_of(f"{self.BASE}variant v {{ {body} }}\n", variant="v")
        assert plan.checkpoint is not None
        return {rule.path: rule.treatment.name for rule in plan.checkpoint.rules}

    def test_rules_replace_those_of_the_same_path_and_stand_beside_the_others(self):
        assert self.rules("checkpoint { layers.{0, 1} = full, layers.3 = none }") == {
            "layers.*": "full", "layers.{0, 1}": "full", "layers.2": "none", "layers.3": "none",
        }  # fmt: skip

    def test_a_rule_is_taken_away(self):
        assert self.rules("checkpoint { layers.2 = unset }") == {"layers.*": "full", "layers.{0, 1}": "none"}

    def test_options_that_the_variant_does_not_name_stay(self):
        text = f"{self.BASE}variant v {{ checkpoint {{ layers.2 = full }} }}\n"
        checkpoint = plan_of(text, variant="v").checkpoint
        assert checkpoint is not None
        assert checkpoint.preserve_rng is True
        changed = plan_of(
            text.replace("checkpoint { layers.2", "checkpoint (preserve_rng = false) { layers.2"), variant="v"
        )
        assert changed.checkpoint is not None
        assert changed.checkpoint.preserve_rng is False
        assert len(changed.checkpoint.rules) == 3

    def test_a_statement_without_rules_or_on_other_axes_replaces_the_whole(self):
        assert self.rules("checkpoint (preserve_rng = false)") == {}
        text = HEAD + "fsdp on dp_shard { layers.* = unit, root = unit }\n"
        plan = plan_of(text + "variant v { fsdp on cp { layers.0 = unit } }\n", variant="v")
        assert plan.fsdp is not None
        assert [rule.path for rule in plan.fsdp.rules] == ["layers.0"]

    def test_extending_plans_replace_whole_statements(self, tmp_path: Path):
        (tmp_path / "base.plan").write_text(self.BASE)
        plan = plan_of('plan b\nextends "base.plan"\ncheckpoint { layers.0 = full }\n', tmp_path)
        assert plan.checkpoint is not None
        assert [rule.path for rule in plan.checkpoint.rules] == ["layers.0"]

    def test_unset_is_no_treatment_outside_of_a_variant(self):
        assert codes(HEAD + "checkpoint { layers.* = unset }\n") == ["LP208"]


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

    def test_what_is_trained_changes_the_digest(self):
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
    @settings(max_examples=30, deadline=None)
    def test_the_order_of_statements_and_rules_does_not_change_the_digest(self, chance: random.Random):
        first, *rest = [self.RICH[item.span.start : item.span.end] for item in parse(self.RICH, "t").file.statements]
        chance.shuffle(rest)
        text = "\n".join([first, *rest])
        rules = ["  layers.*.attention.{wq,wk} = colwise", "  output = colwise"]
        chance.shuffle(rules)
        text = text.replace("  layers.*.attention.{wq,wk} = colwise\n  output = colwise", "\n".join(rules))
        assert plan_of(text).digest == plan_of(self.RICH).digest

    @pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
    def test_worked_plans_resolve_and_keep_their_identity_without_comments(self, path: Path):
        text = path.read_text(encoding="utf-8")
        plan = plan_of(text, path.parent)
        bare = "\n".join(line.split("  #")[0] for line in text.split("\n") if not line.startswith("#"))
        assert plan_of(bare, path.parent).digest == plan.digest
        assert plan.digest.startswith("sha256:")


@pytest.mark.parametrize("inner", ["plan other", 'extends "base.plan"', "variant deeper { }"])
def test_a_variant_holds_no_statement_of_a_whole_plan(inner):
    text = HEAD + f"variant long {{\n  {inner}\n}}\n"
    for variant in (None, "long"):
        (diagnostic,) = resolve(text, "test.plan", directory=Path(), variant=variant).diagnostics
        assert diagnostic.code == "LP218"
        assert diagnostic.label.span.line == text.count("\n", 0, text.index(inner)) + 1


def test_what_a_named_file_holds_is_part_of_the_plans_identity(tmp_path: Path) -> None:
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


def test_plans_that_name_no_file_keep_their_identity(tmp_path: Path) -> None:
    text = 'plan a\nmodel llama3("tiny")\ncluster cpu\nbatch (global = 8, micro = 1, seq_len = 16)\n'
    plan = resolve(text, "a.plan", directory=tmp_path).plan
    assert plan is not None
    assert plan.files == () and "files" not in plan.canonical()
