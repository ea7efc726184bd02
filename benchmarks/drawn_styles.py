"""Random styles on `tp` that lint accepts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from legoai.dsl.open_plan import OpenPlan
from legoai.specs.models.manifests.manifest import Manifest

MOST_CHANGED = 3
"""Styles drawn again in each step."""

_NORMS_OF_HEADS = ("q_norm", "k_norm")
_FIRST, _LAST = "first", "last"
"""Layers of an attention or a feed-forward module: those that read its input, and the one that gives its output."""

STARTS: tuple[dict[str, str], ...] = (
    {},
    {
        "embedding": "rowwise(input = replicate)",
        _FIRST: "colwise",
        _LAST: "rowwise",
        "logits": "colwise(loss_parallel = true)",
        "heads": "heads",
    },
    {
        "embedding": "rowwise(input = replicate, output = shard(1))",
        "norm": "sequence",
        "part": "inputs(from = shard(1), to = replicate)",
        _FIRST: "colwise",
        _LAST: "rowwise(output = shard(1))",
        "logits": "colwise(input = shard(1), loss_parallel = true)",
        "heads": "heads",
    },
    {
        "embedding": "rowwise(input = replicate, output = shard(1))",
        "norm": "sequence",
        _FIRST: "colwise(input = shard(1))",
        _LAST: "rowwise(output = shard(1))",
        "logits": "colwise(input = shard(1), loss_parallel = true)",
        "heads": "heads",
    },
)
"""Styles that agree with each other, by the role of a module; other modules keep theirs."""


def drawn_styles(
    draw: random.Random, plan: OpenPlan, choices: Sequence[int], *, tries: int
) -> Iterator[tuple[int, ...]]:
    """Yield choices with other styles that lint accepts, each a few steps from an earlier one.

    Args:
        draw: the random generator.
        plan: the plan, with its holes.
        choices: choice of each hole; those of styles are drawn again.
        tries: number of drawn choices.
    """
    styles = [index for index, hole in enumerate(plan.holes) if hole.line is not None]
    legal = [one for one in starts(plan, choices) if not plan.candidate(one).errors]
    yield from legal
    seen = set(legal)
    for _ in range(tries if legal else 0):
        changed = list(draw.choice(legal))
        for hole in draw.sample(styles, draw.randint(1, min(MOST_CHANGED, len(styles)))):
            changed[hole] = draw.randrange(len(plan.holes[hole].choices))
        found = tuple(changed)
        if found not in seen and not plan.candidate(found).errors:
            legal.append(found)
            yield found
        seen.add(found)


def starts(plan: OpenPlan, choices: Sequence[int]) -> list[tuple[int, ...]]:
    """Choices with styles that agree, if the other choices allow them."""
    assert plan.analysis is not None
    assert plan.analysis.manifest is not None
    part = _part_of(plan.analysis.manifest)
    found = []
    for styles in STARTS:
        changed = list(choices)
        for index, hole in enumerate(plan.holes):
            if hole.line is not None and hole.path is not None:
                style = styles.get(part(hole.path), "none")
                changed[index] = hole.choices.index(style) if style in hole.choices else 0
        found.append(tuple(changed))
    return list(dict.fromkeys(found))


def _part_of(manifest: Manifest) -> Callable[[str], str]:
    """The modules of a pattern in the model, as sets."""
    last: set[str] = set()
    for info in manifest.modules.values():
        linear = [name for name in info.children if manifest.modules[info.child_path(name)].kind == "linear"]
        if info.kind in ("attention", "feed_forward"):
            last.update(linear[-1:] if "w2" not in linear else ["w2"])

    def part(pattern: str) -> str:
        name = pattern.rpartition(".")[2]
        if name in _NORMS_OF_HEADS:
            return "heads"
        if name.endswith("norm"):
            return "norm"
        if "embeddings" in name:
            return "embedding"
        if name == "output":
            return "logits"
        if name in last:
            return _LAST
        return _FIRST if pattern.count(".") > pattern.count(".*") + 1 else "part"

    return part
