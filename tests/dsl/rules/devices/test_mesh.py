"""Rules about the mesh: sizes, uses, order."""

from __future__ import annotations

import pytest

from legoai.dsl.analysis.facts import divisors
from legoai.dsl.diagnostics.diagnostic import apply_fixes
from legoai.dsl.rules.devices.mesh import legal_divisors
from support.texts.rule_plans import codes, diagnostics, message, place

FSDP = "fsdp on dp_shard { layers.* = unit }"
MIXTRAL = 'model mixtral("tiny")\nmesh (dp_shard = 8)\n'


@pytest.mark.parametrize(
    ("mesh", "fits"),
    [
        ("mesh (dp_shard = 8)", True),
        ("mesh (pp = 2, dp_shard = 2, tp = 2)", True),
        ("mesh (dp_replicate = 2, dp_shard = 2, cp = 2)", True),
        ("mesh (dp_shard = 8, ep = 4)", True),
        ("mesh (dp_shard = 4)", False),
        ("mesh (dp_shard = 8, tp = 2)", False),
        ("mesh (tp = 3)", False),
        ("mesh (dp_shard = auto)", True),
    ],
)
def test_mesh_size_must_equal_the_devices(mesh: str, fits: bool) -> None:
    assert ("LP301" not in codes(mesh)) == fits


def test_wrong_axis_size_suggests_legal_sizes() -> None:
    text = "cluster h100_sxm(hosts = 32, fabric = infiniband_ndr)\nmesh (pp = 2, dp_shard = 8, tp = 8)\n" + FSDP
    found = next(item for item in diagnostics(text) if item.code == "LP301")
    assert found.message == (
        "the mesh has 128 places (`pp` = 2 · `dp_shard` = 8 · `tp` = 8) for the 256 devices of 32 hosts with 8 each"
    )
    assert found.help == (
        "with `dp_shard` = 16 the mesh has 256 places",
        "with `pp` = 4 the mesh has 256 places",
        "with `tp` = 16 the mesh has 256 places",
        "16 hosts of 8 would have 128 devices",
    )
    assert found.fix is not None
    assert not found.fix.safe
    assert "dp_shard = 16" in apply_fixes(f'plan test\nextends "base.plan"\n{text}', [found.fix])


def test_plan_without_a_mesh_has_one_rank() -> None:
    assert message("cluster h100_sxm", "LP301") == "the mesh has 1 place for the 8 devices"
    assert "LP301" not in codes("cluster cpu")


@pytest.mark.parametrize(
    ("text", "unused"),
    [
        ("mesh (dp_shard = 8)", ["dp_shard"]),
        ("mesh (dp_shard = 8)\n" + FSDP, []),
        ("mesh (dp_replicate = 8)", ["dp_replicate"]),
        ("mesh (dp_replicate = 8)\nreplicate on dp_replicate", []),
        ("mesh (dp_replicate = 2, dp_shard = 4)\nfsdp on dp_replicate, dp_shard { layers.* = unit }", []),
        ("mesh (dp_replicate = 2, dp_shard = 4)\n" + FSDP, ["dp_replicate"]),
        ("mesh (dp_shard = 4, cp = 2)\n" + FSDP, ["cp"]),
        ("mesh (cp = 8)\nfsdp on cp { layers.* = unit }\ncontext on cp", []),
        ("mesh (pp = 2, dp_shard = 4)\n" + FSDP, ["pp"]),
        ("mesh (dp_shard = 4, tp = 2)\n" + FSDP, ["tp"]),
        ("mesh (dp_shard = 4, tp = 2)\nshard on tp { }\n" + FSDP, ["tp"]),
        ("mesh (dp_shard = 8, ep = 2)\n" + FSDP, ["ep"]),
        ('model mixtral("tiny")\nmesh (dp_shard = 8, ep = 2)\nshard on ep { **.experts = experts }\n' + FSDP, []),
    ],
)
def test_every_axis_of_several_ranks_has_a_use(text: str, unused: list[str]) -> None:
    found = [item.message for item in diagnostics(text) if item.code == "LP306"]
    assert [message.split("`")[1] for message in found] == unused


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("context on cp", True),
        ("mesh (dp_shard = 8, cp = 1)\ncontext on cp\n" + FSDP, True),
        ("mesh (dp_shard = 8, cp = auto -> 1)\ncontext on cp\n" + FSDP, False),
        ("mesh (dp_shard = 8, cp = auto)\ncontext on cp\n" + FSDP, False),
        ("mesh (dp_shard = 8)\nshard on tp { }\n" + FSDP, False),
        ("mesh (dp_shard = 8)\nshard on tp { output = colwise }\n" + FSDP, True),
        ("mesh (dp_shard = 8)\nfsdp on dp_replicate, dp_shard { layers.* = unit }", True),
        (MIXTRAL + "shard on ep { **.experts = experts }\n" + FSDP, True),
        (MIXTRAL + "shard on ep { **.experts = experts(capacity_factor = 1.25) }\n" + FSDP, False),
    ],
)
def test_a_statement_on_an_axis_of_one_rank_is_idle(text: str, idle: bool) -> None:
    assert ("LP307" in codes(text)) == idle


def test_pipeline_of_one_rank_is_ignored() -> None:
    text = "mesh (pp = PP, dp_shard = 8)\npipeline on pp (schedule = 1F1B)\n"
    text += "fsdp on dp_shard { layers.* = unit(reshard = never), root = unit }"
    assert "LP326" in codes(text.replace("PP", "2"))
    assert "LP326" not in codes(text.replace("PP", "1"))
    assert "LP307" in codes(text.replace("PP", "1"))


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("fsdp on dp_shard { layers.* = unit(reshard = never), root = unit }", "LP326"),
        ("fsdp on dp_shard { layers.* = unit(reshard = after_forward), root = unit }", "LP516"),
        ("fsdp blocks on dp_shard\ncheckpoint { layers.* = selective([attention]) }", "LP656"),
    ],
)
def test_errors_under_a_pipeline_wait_for_the_number_of_its_ranks(statement: str, code: str) -> None:
    text = f"mesh (pp = PP, dp_shard = rest)\npipeline on pp (schedule = ZBVZeroBubble)\n{statement}"
    found = [code in codes(text.replace("PP", ranks)) for ranks in ("2", "1", "auto")]
    assert found == [True, False, False]


def test_variant_may_unset_an_idle_statement() -> None:
    text = FSDP + "\nmesh (dp_shard = 4, tp = 2)\nshard on tp { layers.*.feed_forward.{w1, w3} = colwise\n"
    text += "layers.*.feed_forward.w2 = rowwise }\nvariant flat { mesh (dp_shard = 8)"
    assert "LP307" in codes(text + " }")
    assert "LP307" not in codes(text + "\nunset shard on tp }")


def test_axes_must_be_in_nesting_order() -> None:
    text = "mesh (tp = 2, dp_shard = 2 * 2)\n" + FSDP
    found = next(item for item in diagnostics(text) if item.code == "LP308")
    assert found.fix is not None
    assert found.fix.safe
    fixed = apply_fixes(f'plan test\nextends "base.plan"\n{text}', [found.fix])
    assert "mesh (dp_shard = 2 * 2, tp = 2)" in fixed
    assert "LP308" not in codes(fixed.split("\n", 2)[2])


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [("dp_shard = 8, ep = 8", True), ("dp_shard = 4, cp = 2, ep = 8", True), ("dp_shard = 8, ep = 3", False),
     ("dp_shard = 4, tp = 2, ep = 8", False)],
)  # fmt: skip
def test_ep_must_divide_dp_shard_times_cp(sizes: str, fits: bool) -> None:
    assert ("LP309" not in codes(f"mesh ({sizes})")) == fits


def test_tensor_parallel_stays_inside_a_host() -> None:
    hosts = "cluster h100_sxm(hosts = 6, fabric = infiniband_ndr)\n"
    assert place(hosts + "mesh (dp_shard = 3, tp = 16)", "LP801") == "16"
    assert "LP801" in codes(hosts + "mesh (dp_shard = 8, tp = 6)")  # every fourth group lies on two hosts
    assert "LP801" not in codes(hosts + "mesh (dp_shard = 6, tp = 8)")
    assert "LP801" not in codes("cluster cpu(hosts = 2, devices = 1, fabric = ethernet_100)\nmesh (tp = 2)")


def test_divisors_are_those_of_any_number() -> None:
    for number in range(1, 200):
        assert divisors(number) == [value for value in range(1, number + 1) if number % value == 0]
    assert divisors(2**40) == [2**power for power in range(41)]
    assert divisors(10**18 + 9) == [1, 10**18 + 9], "at once, though it is prime"
    assert legal_divisors(12, 18) == "1, 2, 3 and 6"
    assert legal_divisors(5 * 2**21, 2**21).endswith("524288, 1048576 and 2097152")
