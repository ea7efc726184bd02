"""The files that a plan names beside it, and the contents of those that its program depends on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from legoai.specs.cluster import profile_path
from legoai.specs.directives.pipeline import OrderFile
from legoai.specs.files import MOST_DATA, read_file
from legoai.specs.plan import Plan
from legoai.specs.record import replace
from legoai.specs.span import Span


def named_files(plan: Plan) -> dict[str, Span | None]:
    """The files beside a plan that its meaning depends on, with the places where the plan names them.

    The module of a model's factory is among them; that module's imports are not.
    """
    found: dict[str, Span | None] = {}
    model, cluster = plan.model, plan.cluster
    if isinstance(model.target, str) and model.family == "huggingface":
        found[model.target] = model.span_of("target")
    elif isinstance(model.target, str) and model.family == "python":
        module = model.target.partition(":")[0].replace(".", "/")
        found |= dict.fromkeys((f"{module}.py", f"{module}/__init__.py"), model.span_of("target"))
    schedule = plan.pipeline.schedule if plan.pipeline is not None else None
    if isinstance(schedule, OrderFile) and isinstance(schedule.file, str):
        found[schedule.file] = schedule.span_of("file")
    if isinstance(cluster.profile, str):
        place = cluster.span_of("profile")
        found |= {cluster.profile: place, str(profile_path(Path(cluster.profile))): place}
    return found


def with_files(plan: Plan, directory: Path) -> Plan:
    """Return the plan with the digests of files whose content the program will contain: order files and configs.

    A file that cannot be read has no digest; the rules about it report the reason.
    """
    names = list(_names(plan))
    if not names:
        return plan
    found = {name: digest for name in names if (digest := _digest(directory / name)) is not None}
    return replace(plan, files=tuple(sorted(found.items())))


def _names(plan: Plan) -> Iterator[str]:
    schedule = plan.pipeline.schedule if plan.pipeline is not None else None
    if isinstance(schedule, OrderFile) and isinstance(schedule.file, str):
        yield schedule.file
    model = plan.model
    if isinstance(model.family, str) and model.family == "huggingface" and isinstance(model.target, str):
        yield model.target


def _digest(path: Path) -> str | None:
    import hashlib

    try:
        return "sha256:" + hashlib.sha256(read_file(path, MOST_DATA)).hexdigest()
    except (OSError, ValueError):
        return None
