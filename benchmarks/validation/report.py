"""Several results as one page: `python -m benchmarks.validation.report RESULTS.json… > validation.md`.

Beside our errors stand those that other tools reached on the same data, run unmodified or as their authors state them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.validation.table import table

PEERS: Mapping[str, str] = {
    "torchtitan": "llm-analysis, a closed form, is 41% off in memory.",
    "nanotron": "Calculon is 32.6% off in memory and 39% in step time; Megatron's own formula 45.5% in memory; "
    "llm-analysis 39.5% in memory.",
    "vtrain": "vTrain, with kernels profiled on the GPU, claims 8.4% on one host and 14.7% on several; Calculon is 39% "
    "and 15.4% off.",
    "mosaicml": "llm-analysis is 18% off in step time.",
    "simumax": "SimuMax, with operators measured on the GPU, claims 5.6% in step time, 0.46% in allocated and 1.7% in "
    "reserved memory, on runs of its authors' own.",
}


def page(documents: Sequence[Mapping[str, Any]]) -> str:
    """All tables, each under its source, with how and where it was made."""
    parts = ["# Published runs against the simulator"]
    for document in documents:
        name, versions, rows = document["source"], document["versions"], document["rows"]
        made = (
            f"{document['file']}: {rows['taken']} rows of {rows['in the file']}, {document['date']}, on "
            f"{document['machine']}, torch {versions['torch']}, Python {versions['python']}."
        )
        fitted = document["fitted"] or "nothing that these rows measure"
        said = [made, f"Fitted to it: {fitted}.", PEERS.get(name, "")]
        parts += [f"## {name}", " ".join(line for line in said if line), table(document)]
    return "\n\n".join(parts) + "\n"


def main(paths: Sequence[str]) -> int:
    """Print the page for the results in ``paths``."""
    try:
        documents = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(page(documents), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
