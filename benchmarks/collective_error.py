"""Error of the shipped estimates of collectives, by device and fabric: `collective_error.py`.

Prints the error from 1 MiB upward on the measurements that the fits did not see, as the profiles state them
(`fit_profiles.py` describes how they are chosen): on one host by device and collective, between hosts by fabric, with
the measured placements and by the formula alone. A fabric without measurements is listed with its source.

Limit: a median of 10% for each fabric that has at least three held-out measurements.
"""

from __future__ import annotations

import sys

from legoai.cost.network.fabric import fabric_model
from legoai.cost.profiles import profile, profile_names
from legoai.specs.cluster import fabric, fabric_names

LIMIT = 0.10


def main() -> int:
    missed = 0
    for name in profile_names():
        for label, error in profile(name).held_out.items():
            if label.startswith("links"):
                missed += line(f"{name} {label.removeprefix('links ')}", error)
    for name in fabric_names():
        if not fabric(name).has_figures:
            print(f"{name:52} refused: no bandwidth is known")
            continue
        model = fabric_model(name)
        if model.derived:
            print(f"{name:52} not measured: {model.derived}")
        for label, error in model.held_out.items():
            missed += line(f"{name} {label}", error, counts="alone" not in label)
    return 1 if missed else 0


def line(label: str, error: dict, *, counts: bool = True) -> bool:
    if not error.get("rows"):
        print(f"{label:52} {error.get('note', 'no rows')}")
        return False
    late = bool(counts and error["rows"] >= 3 and error["median"] > LIMIT)
    mark = "MISSED" if late else ""
    print(
        f"{label:52} {error['rows']:4} rows  median {error['median']:6.1%}  mean {error['mean']:6.1%}  "
        f"bias {error.get('bias', 0.0):+6.1%} {mark} {error.get('note', '')}"
    )
    return late


if __name__ == "__main__":
    sys.exit(main())
