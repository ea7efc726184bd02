"""`rest` in the mesh: the axis that gets the devices which the other axes leave."""

from __future__ import annotations

import math
from pathlib import Path

from legoai.dsl.diagnostics.codes.names import NoRest
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.kinds import REST
from legoai.specs.directives.mesh import AXES, Mesh
from legoai.specs.span import Span
from legoai.specs.units import counted


def with_rest(mesh: Mesh, cluster: ClusterUse, directory: Path) -> tuple[Mesh, Diagnostic | None]:
    """Return the mesh with a number instead of `rest`; a hole, and a diagnostic, where there is no such number.

    Args:
        mesh: as the plan writes it.
        cluster: with the devices.
        directory: base of a relative device profile.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    open_axes = [axis for axis, size in sizes.items() if isinstance(size, str) and size == REST]
    if not open_axes:
        return mesh, None
    value: int | Hole = Hole()
    problem = None
    others = [size for axis, size in sizes.items() if axis not in (*open_axes, "ep")]
    if open_axes[1:]:
        first, second = (mesh.span_of(axis) for axis in open_axes[:2])
        assert first is not None
        assert second is not None
        problem = NoRest.at(
            second, "only one axis can take the rest of the devices", label="a second `rest`",
            others=[Label(first, "the first")], help=["give all axes but one a number"],
        )  # fmt: skip
    elif not any(isinstance(size, Hole) for size in (*others, cluster.hosts, cluster.devices, cluster.device)):
        devices = cluster.number_of_devices(directory)
        place = mesh.span_of(open_axes[0])
        assert place is not None
        if devices is not None:
            value, problem = _left(devices, math.prod(others), place)
    return _changed(mesh, dict.fromkeys(open_axes, value)), problem


def _left(devices: int, others: int, place: Span) -> tuple[int | Hole, Diagnostic | None]:
    count, over = divmod(devices, others)
    if over == 0:
        return count, None
    return Hole(), NoRest.at(
        place, f"{counted(devices, 'device')} cannot be divided by {others:,}, the product of the other axes",
        label=f"{devices} / {others} is no whole number",
        help=[f"the other axes must make a divisor of {devices}"],
    )  # fmt: skip


def _changed(mesh: Mesh, values: dict[str, int | Hole]) -> Mesh:
    fields = {item.field: getattr(mesh, item.field) for item in mesh.options}
    return Mesh(**{**fields, **values, "origins": mesh.origins})
