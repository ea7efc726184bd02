"""Error of the shipped profiles' kernel estimates: `kernel_error.py [DIRECTORY]`.

The script prints, for each profile, the error on the held-out fifth of the published measurements, as recorded in the
profile (`fit_profiles.py` describes how they are chosen). With DIRECTORY, which holds the CSV files of measurements, it
also prints the error of the shipped profile, fitted on all rows, on each device's rows: agreement, not accuracy.

Limit: a median of 5% on held-out rows, for each class that was measured on the device itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

from legoai.cost.profiles import profile, profile_names

LIMIT = 0.05


def main() -> int:
    missed = 0
    for name in profile_names():
        shipped = profile(name)
        print(f"{name} (made {shipped.made}, {shipped.hash})")
        for label, error in shipped.held_out.items():
            if label.startswith("links") or not error.get("rows"):
                continue
            counts = name != "cpu" and "note" not in error
            late = counts and error["median"] > LIMIT
            missed += late
            mark = "MISSED" if late else ""
            print(
                f"  {label:30} {error['rows']:4} rows  median {error['median']:6.1%}  mean {error['mean']:6.1%}"
                f"  {mark}{error.get('note', '')}"
            )
    if len(sys.argv) > 1:
        agreement(Path(sys.argv[1]))
    return 1 if missed else 0


def agreement(directory: Path) -> None:
    from fit_kernels import evaluate, forward_rows, short_runs, simumax_attention, simumax_products, xla_products

    def row(label: str, name: str, rows: list) -> None:
        error = evaluate(short_runs(profile(name)), rows)
        print(f"{label:40} {error['rows']:5} rows  median {error['median']:6.1%}  mean {error['mean']:6.1%}")

    for key, name in (("sm_90", "h100_sxm"), ("sm_100_B200", "b200")):
        for rate, rows in xla_products(directory, key).items():
            row(f"XLA products {name} {rate}", name, rows)
    row("SimuMax products b200", "b200", simumax_products(directory, "B200"))
    row("SimuMax attention b200", "b200", simumax_attention(directory, "B200", "cudnn"))
    row("figures of attention h100_sxm", "h100_sxm", forward_rows(directory, "H100-80GB-SXM5"))


if __name__ == "__main__":
    sys.exit(main())
