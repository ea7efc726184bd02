"""Merging of base plans and variants: replaced, disagreeing and unset statements and rules."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.frontend.statements import merge
from legoai.dsl.lint import lint
from legoai.specs.plan import Plan
from support.texts.resolution import HEAD, codes, plan_of, resolution


class TestExtends:
    def write(self, folder: Path, **texts: str) -> None:
        for name, text in texts.items():
            (folder / f"{name}.plan").write_text(text, encoding="utf-8")

    def test_statements_replace_those_of_the_base(self, tmp_path: Path):
        self.write(tmp_path, base=HEAD + "let n = 2\nmesh (tp = n)\nclip (norm = 1)\n")
        plan = plan_of('plan b\nextends "base.plan"\nlet n = 4\nclip (norm = 2)\n', tmp_path)
        assert (plan.name, plan.mesh.tp) == ("b", 4)
        assert plan.clip is not None
        assert plan.clip.norm == 2
        assert plan.clip.origin("norm").span is not None
        assert plan.model.origin("family").span is not None
        assert plan.model.origin("family").span.file.endswith("base.plan")

    def test_base_paths_are_relative_to_the_extending_plan(self, tmp_path: Path):
        (tmp_path / "deep").mkdir()
        self.write(tmp_path, top=HEAD)
        self.write(tmp_path / "deep", middle='plan m\nextends "../top.plan"\nmesh (tp = 2)\n')
        assert plan_of('plan b\nextends "deep/middle.plan"\n', tmp_path).mesh.tp == 2

    def test_cyclic_or_unreadable_base_is_reported(self, tmp_path: Path):
        self.write(tmp_path, a='plan a\nextends "b.plan"\n', b='plan b\nextends "a.plan"\n')
        assert "LP214" in codes('plan c\nextends "a.plan"\n', tmp_path)
        assert codes('plan c\nextends "missing.plan"\n', tmp_path) == ["LP214"]  # which statements lack is unknown
        assert "LP214" in codes(HEAD + 'extends "missing.plan"\n', tmp_path)
        (tmp_path / "binary.plan").write_bytes(b"\xff\xfe\x00")
        assert "LP214" in codes(HEAD + 'extends "binary.plan"\n', tmp_path)
        assert codes(HEAD + "extends base\n", tmp_path) == ["LP214"]

    def test_moved_base_is_looked_for_in_the_project(self, tmp_path: Path):
        for folder in ("plans/common/deep", "teams", ".git"):
            (tmp_path / folder).mkdir(parents=True)
        self.write(tmp_path / "plans" / "common", base=HEAD, exp=HEAD)
        self.write(tmp_path / "plans" / "common" / "deep", base=HEAD)
        teams = tmp_path / "teams"

        def helps(base: str, name: str = "child.plan", **more: Any) -> list[str]:
            text = f'plan child\nextends "{base}"\nlet rate = 1e-3\nunset clip\n'
            (teams / name).write_text(text, encoding="utf-8")
            [found] = lint(text, str(teams / name), directory=teams, **more).diagnostics
            assert found.code == "LP214", "nothing that the base may use or have"
            return list(found.help)

        near, deep = "did you mean `../plans/common/base.plan`?", "did you mean `../plans/common/deep/base.plan`?"
        assert helps("../plans/base.plan") == helps("../plans/base.plan", "base.plan") == [near, deep]
        assert helps("../plans/common/exq.plan") == ["did you mean `../plans/common/exp.plan`?"]
        assert helps("../plans/other.plan") == []
        (tmp_path / ".git").rmdir()
        (teams / "base.plan").unlink()
        assert helps("../plans/base.plan") == [near, deep]

        def of_a_revision(path: Path) -> str:
            raise FileNotFoundError(errno.ENOENT, "the revision has no such file", str(path))

        assert helps("../plans/base.plan", read=of_a_revision) == []

    def test_long_base_chain_is_accepted(self, tmp_path: Path):
        self.write(tmp_path, p0=HEAD)
        for index in range(1, 60):
            self.write(tmp_path, **{f"p{index}": f'plan p\nextends "p{index - 1}.plan"\n'})
        for length in (20, 21, 59):
            assert codes(f'plan b\nextends "p{length}.plan"\n', tmp_path) == []

    def test_endless_base_chain_is_reported(self, tmp_path: Path):
        def read(path: Path) -> str:
            return f'plan p\nextends "p{int(path.stem[1:]) + 1}.plan"\n'

        found = resolve('plan b\nextends "p0.plan"\n', "b.plan", directory=tmp_path, read=read).diagnostics
        assert found[0].code == "LP214"
        assert "more than 100" in found[0].message

    def test_cycle_of_two_plans_is_reported_once(self, tmp_path: Path):
        self.write(tmp_path, a=HEAD + 'extends "b.plan"\n', b='plan b\nextends "a.plan"\nclip (norm = 1)\n')
        text = (tmp_path / "a.plan").read_text()
        assert codes(text, tmp_path) == ["LP214"]

    def test_agreeing_bases_are_merged(self, tmp_path: Path):
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
    def test_disagreeing_bases_need_a_decision(self, tmp_path: Path, first: str, second: str, what: str):
        self.write(tmp_path, a=HEAD + first + "\n", b=f"plan b\n{second}\n", c='plan c\nextends "b.plan"\n')
        for other in ("b", "c"):
            text = f'plan x\nextends "a.plan"\nextends "{other}.plan"\n'
            [found] = resolution(text, tmp_path).diagnostics
            assert (found.code, found.message) == ("LP224", f"the base plans decide `{what}` differently")
            assert codes(f"{text}{first}\n", tmp_path) == []
            assert codes(f"{text}{second}\n", tmp_path) == []

    def test_bound_in_another_dimension_replaces_nothing(self, tmp_path: Path):
        base = HEAD + "let most = 1ms\nrequire recompute <= most\nrequire exposed_comm <= 5%\n"
        self.write(tmp_path, a=base)
        text = 'plan x\nextends "a.plan"\nrequire recompute <= 2%\nvariant v { require recompute <= 3ms }\n'

        def bounds(**options: str) -> list[tuple[str, float, str]]:
            found = plan_of(text, tmp_path, **options).require
            return [(item.metric, item.bound, item.dimension) for item in found]

        share = ("recompute", pytest.approx(0.02), "fraction")
        others = [("exposed_comm", pytest.approx(0.05), "fraction"), share]
        assert bounds() == [("recompute", pytest.approx(1e-3), "seconds"), *others]
        assert bounds(variant="v") == [("recompute", pytest.approx(3e-3), "seconds"), *others]

    @pytest.mark.parametrize("order", [1, -1])
    @pytest.mark.parametrize("how", ["variant", "extends", "settings"])
    def test_bound_that_a_let_gives_the_dimension_of_another_is_not_lost(self, tmp_path: Path, how: str, order: int):
        bounds = ["require recompute <= 1%\n", "require recompute <= most\n"][::order]
        text = HEAD + "let most = 1ms\n" + "".join(bounds)
        options: dict[str, object] = {}
        self.write(tmp_path, a=text)
        if how == "variant":
            text, options = text + "variant v { let most = 90% }\n", {"variant": "v"}
        elif how == "extends":
            text = 'plan x\nextends "a.plan"\nlet most = 90%\n'
        else:
            options = {"settings": {"most": "90%"}}
        [found] = resolution(text, tmp_path, **options).diagnostics
        message = "`require recompute` is decided twice: both bounds are a fraction here"
        assert (found.code, found.message) == ("LP203", message)
        before = HEAD.count("\n") + 1
        assert [found.label.span.line - before, found.others[0].span.line - before] == [2, 1]

    def test_bound_replaces_what_has_its_dimension_where_it_is_written(self, tmp_path: Path):
        base = HEAD + "let most = 1ms\nrequire recompute <= 1%\nvariant v { require recompute <= most }\n"
        self.write(tmp_path, a=base, b=HEAD + "let most = 1ms\nrequire recompute <= most\n")
        assert [item.bound for item in plan_of(base, tmp_path, variant="v").require] == [0.01, 1e-3]
        text = 'plan x\nextends "a.plan"\nlet most = 90%\n'
        assert codes(text, tmp_path, variant="v") == ["LP203"]
        text = 'plan x\nextends "b.plan"\nlet most = 90%\nrequire recompute <= 2ms\n'
        assert [item.bound for item in plan_of(text, tmp_path).require] == [2e-3]

    def test_bound_without_a_dimension_is_like_an_equal_one_only(self, tmp_path: Path):
        self.write(tmp_path, a=HEAD + "require recompute <= most\n", b=HEAD + "require recompute <= most\n")
        both = 'plan x\nextends "a.plan"\nextends "b.plan"\n'
        plan = plan_of(both + "let most = 2ms\nrequire recompute <= 1%\n", tmp_path)
        assert [item.bound for item in plan.require] == [2e-3, 0.01]
        assert codes(both + "let most = 2%\nrequire recompute <= 1%\n", tmp_path) == ["LP203"]
        seconds = "let seconds = nope\nrequire recompute <= seconds\nrequire recompute <= 2s\n"
        assert codes(HEAD + seconds, tmp_path) == ["LP209"]
        assert codes(HEAD + "require recompute <= 2GiB\nrequire recompute <= 2%\n", tmp_path) == ["LP207"]

    def test_unset_statement_settles_disagreeing_bases(self, tmp_path: Path):
        self.write(tmp_path, a=HEAD + "clip (norm = 1)\n", b="plan b\nclip (norm = 2)\n")
        plan = plan_of('plan x\nextends "a.plan"\nextends "b.plan"\nunset clip\n', tmp_path)
        assert plan.clip is None

    def test_override_in_one_of_two_bases_is_a_disagreement(self, tmp_path: Path):
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

    def test_error_in_a_base_is_reported_in_the_base(self, tmp_path: Path):
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

    def test_unknown_variant_is_reported_with_a_suggestion(self):
        found = resolution(self.TEXT, variant="wid").diagnostics
        assert [item.code for item in found] == ["LP215"]
        assert "did you mean `wide`?" in found[0].help

    @pytest.mark.parametrize("inner", ["plan b", 'extends "base.plan"', "variant deeper { clip (norm = 2) }"])
    @pytest.mark.parametrize("chosen", [None, "wide"])
    def test_whole_plan_statement_in_a_variant_is_an_error(self, inner: str, chosen: str | None):
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

    def test_variant_unsets_statements(self):
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

    def test_extending_plan_unsets_statements_of_any_base(self, tmp_path: Path):
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

    def test_statement_on_one_axis_is_unset(self):
        text = HEAD + "shard on tp { output = colwise }\nshard on ep { layers = experts }\n"
        assert [item.axes for item in self.variant("unset shard on ep", text).shard] == [("tp",)]
        assert self.variant("unset shard", text).shard == ()

    def test_unset_statement_may_be_written_again(self):
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
    def test_unsetting_an_absent_statement_is_an_error(self, body: str, code: str):
        assert codes(f"{self.BASE}variant v {{\n{body}\n}}\n", variant="v") == [code]

    def test_plan_cannot_unset_its_own_statement(self):
        assert codes(self.BASE + "unset clip\n") == ["LP203"]
        assert codes(HEAD + "unset clip\n") == ["LP223"]

    def test_unset_is_formatted_without_padding(self):
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

    def test_variant_rules_replace_equal_paths_and_extend_the_rest(self):
        assert self.rules("checkpoint { layers.{0, 1} = full, layers.3 = none }") == {
            "layers.*": "full", "layers.{0, 1}": "full", "layers.2": "none", "layers.3": "none",
        }  # fmt: skip

    def test_rule_is_unset(self):
        assert self.rules("checkpoint { layers.2 = unset }") == {"layers.*": "full", "layers.{0, 1}": "none"}

    def test_options_absent_from_the_variant_are_unchanged(self):
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

    def test_statement_without_rules_or_on_other_axes_replaces_all(self):
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

    def test_unset_treatment_outside_of_a_variant_is_an_error(self):
        assert codes(HEAD + "checkpoint { layers.* = unset }\n") == ["LP208"]


@pytest.mark.parametrize("inner", ["plan other", 'extends "base.plan"', "variant deeper { }"])
def test_plan_level_statement_in_a_variant_is_reported_at_its_line(inner):
    text = HEAD + f"variant long {{\n  {inner}\n}}\n"
    for variant in (None, "long"):
        (diagnostic,) = resolve(text, "test.plan", directory=Path(), variant=variant).diagnostics
        assert diagnostic.code == "LP218"
        assert diagnostic.label.span.line == text.count("\n", 0, text.index(inner)) + 1


def test_each_unset_of_a_let_looks_at_one_name(monkeypatch: pytest.MonkeyPatch):
    looked = []
    means = merge._means
    monkeypatch.setattr(merge, "_means", lambda *given: looked.append(given) or means(*given))
    names = [f"a{number}" for number in range(50)]
    lines = [*(f"let {name} = 1" for name in names), "variant v {", *(f"  unset let {name}" for name in names), "}"]
    found = resolve(HEAD + "\n".join(lines), "t.plan", directory=Path(), variant="v")
    assert found.diagnostics == []
    assert found.scope.names == {}
    assert len(looked) == len(names)
