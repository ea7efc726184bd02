"""Training on the graph backend against the eager backend, under all subsets of five passes, over gloo processes.

Six plans are trained on 2 or 4 processes: FSDP, HSDP, FSDP with tensor and sequence parallelism, pipeline stages with
FSDP, experts with FSDP, and context parallelism over FSDP's ranks. Each statement that enables a pass is present or
absent, in all combinations: buckets of several units, all-gathers ahead of the computation that hides them, all-gathers
as early as memory allows, operators whose results are saved for backward, and offloaded activations. The units of the
plans differ in their reshard option: parameters are gathered again for backward, stay unsharded until it, or stay
unsharded for the whole step. A step has two micro batches, and its gradients are clipped.

No pass changes operators or the order of sums. So the losses and gradient norms of all steps and the final parameters
must be bitwise equal to those of the plan under the eager backend without any of these statements. A combination that
lint rejects is not run, and its codes are counted. A combination that lint accepts must be lowered and run: one that
fails, or differs, violates the limit.

With `--with-compile` the corners (no pass, each alone, all but one, and all) run once more with compiled regions, by
`aot_eager`, which keeps the operators of the graph and therefore has the same limit.

    python benchmarks/graph_numerics.py [--steps N] [--with-compile] [--write] [NAME ...]
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from machine import ROOT, ask, write_rows

sys.path.insert(0, str(ROOT / "tests"))

from support.texts.plans import SEQUENCE_PARALLEL, errors, lowered
from support.training.gloo import GlooPool
from support.training.meshed import TRAINING
from support.training.staged import together, train, with_fewer_passes

RESULTS: Final = ROOT / "benchmarks" / "results" / "graph_numerics.json"
TEXT: Final = "the same text for both of them, over and over; " * 400
DENSE: Final = """\
plan dense
model llama3("tiny", n_layers = 3, dim = 32, n_heads = 4, n_kv_heads = 4, hidden_dim = 64, vocab_size = 256)
"""
SPARSE: Final = """\
plan sparse
model mixtral("8x7b", n_layers = 2, dim = 32, n_heads = 4, n_kv_heads = 2, hidden_dim = 24, vocab_size = 256,
              n_experts = 8, top_k = 2, max_seq_len = 64)
"""
MIXED: Final = "precision (param = bf16, reduce = fp32)\n"


@dataclass(frozen=True, slots=True)
class Case:
    """A plan: ranks, model, statements, a rule of `comm` for buckets of several units, and a module to compile."""

    name: str
    ranks: int
    model: str
    body: str
    bucket: str = "layers.* = bucket([1, 2])"
    compiled: str = "root"
    samples: int = 8

    def plan(self, body: str) -> str:
        """Text of a plan with this parallelism, with two micro batches per step."""
        training = with_fewer_passes(TRAINING, body).replace("global = 8", f"global = {self.samples}")
        return f"{self.model}cluster cpu(devices = {self.ranks})\n{training}{body}"

    def text(self, *passes: str, compiled: bool = False) -> str:
        """Statements for the graph backend with some passes, optionally with compiled regions."""
        body = re.sub(r"(fsdp on [\w, ]+) \{", r"\1 (backend = graph) {", self.body)
        options = ", ".join(COMM[name] for name in passes if name in COMM)
        rules = f"{{ {self.bucket} }}" if "buckets" in passes else ""
        comm = f"comm {f'({options})' if options else ''} {rules}\n" if options or rules else ""
        others = "".join(OTHERS[name] for name in passes if name in OTHERS)
        return f"{body}{comm}{others}{f'compile {{ {self.compiled} = aot_eager }}' if compiled else ''}\n"


COMM: Final = {"reorder": "reorder = true", "prefetch": "prefetch = proactive(limit = 64KiB)"}
OTHERS: Final = {
    "operators": "checkpoint { layers.* = selective([attention, matmul]) }\n",
    "offload": "offload (activations = all)\n",
}
PASSES: Final = ("buckets", *COMM, *OTHERS)

CASES: Final = (
    Case("FSDP", 2, DENSE, f"mesh (dp_shard = 2)\nfsdp on dp_shard {{ layers.* = unit }}\n{MIXED}"),
    Case(
        "HSDP", 4, DENSE,
        "mesh (dp_replicate = 2, dp_shard = 2)\n"
        f"fsdp on dp_replicate, dp_shard {{ layers.* = unit(reshard = after_backward) }}\n{MIXED}", samples=16,
    ),
    Case(
        "FSDP+TP", 4, DENSE,
        f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}fsdp on dp_shard {{ layers.* = unit }}\n{MIXED}",
    ),
    Case(
        "PP+FSDP", 4, DENSE.replace("n_layers = 3", "n_layers = 4"),
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
        f"fsdp on dp_shard {{ layers.{{0, 2}} = unit, layers.{{1, 3}} = unit(reshard = after_backward) }}\n{MIXED}",
        "layers.* = bucket(module)",
    ),
    Case(
        "EP+FSDP", 2, SPARSE,
        "mesh (dp_shard = 2, ep = 2)\nshard on ep { layers.*.feed_forward.experts = experts }\n"
        f"fsdp on dp_shard {{ layers.*.attention = unit, layers.0 = unit, layers.1 = unit(reshard = never) }}\n{MIXED}",
        "layers.*.attention = bucket(group)",
    ),
    Case(
        "CP+FSDP", 2, DENSE,
        "mesh (cp = 2)\ncontext on cp (rotate = alltoall)\n"
        f"fsdp on cp {{ layers.{{0..1}} = unit(reshard = never), layers.2 = unit }}\n{MIXED}",
        "layers.* = bucket([2, 1])",
    ),
)  # fmt: skip


class Pools:
    """Process groups, one for each number of ranks; a group is started again after a failure."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pools, self._started = folder, dict[int, GlooPool](), itertools.count()

    def of(self, ranks: int) -> GlooPool:
        known = self._pools.get(ranks)
        if known is None or not known.alive:
            self.close()  # those that wait keep memory
            folder = self._folder / f"group{next(self._started)}"
            folder.mkdir()
            known = self._pools[ranks] = GlooPool(ranks, folder)
        return known

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@contextlib.contextmanager
def pools() -> Iterator[Pools]:
    import legoai.runtime.training.trainer  # noqa: F401  each rank would import it in its first step

    with tempfile.TemporaryDirectory() as folder:
        made = Pools(Path(folder))
        try:
            yield made
        finally:
            made.close()


@dataclass(slots=True)
class Row:
    """Results of all combinations of a plan's passes.

    Attributes:
        equal: bitwise equal combinations.
        refused: combinations that lint rejects, with its codes.
        different: combinations whose losses, norms or parameters differ.
        failed: combinations that lint accepts, and that fail in lowering or at run time, with their error's first line.
    """

    plan: str
    ranks: int
    compiled: bool
    losses: list[float]
    equal: list[str] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    different: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kept(self) -> bool:
        return not self.different and not self.failed

    def line(self) -> str:
        codes = Counter(code for item in self.refused for code in item["codes"].split(", "))
        refusals = f" ({', '.join(f'{code} {count}' for code, count in sorted(codes.items()))})" if codes else ""
        ran = len(self.equal) + len(self.different) + len(self.failed)
        name = f"{self.plan}{', compiled' if self.compiled else ''}, {self.ranks} ranks"
        return (
            f"{name:<28} {ran:3} ran, {len(self.equal):3} bitwise equal, {len(self.different)} different, "
            f"{len(self.failed)} failed; {len(self.refused):3} rejected by lint{refusals}; {self.seconds:.0f} s"
        )

    def record(self) -> Mapping[str, Any]:
        names = ("plan", "ranks", "compiled", "losses", "equal", "refused", "different", "failed")
        return {**{name: getattr(self, name) for name in names}, "seconds": round(self.seconds)}


def trained(case: Case, body: str, started: Pools, steps: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as data:
        data.write(TEXT)
        data.flush()
        return together(started.of(case.ranks)(_silently, lowered(case.plan(body)).text, data.name, steps))


def _silently(text: str, data: str, steps: int) -> dict[str, Any]:
    """Train on one rank, without the output of a run."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return train(text, data, steps=steps)


def codes_of(case: Case, body: str) -> list[str]:
    """Codes of lint's errors in a plan."""
    return sorted(errors(case.plan(body)))


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Names of the results of two runs that are not bitwise equal; empty where all are."""
    names = [name for name in ("loss", "norm") if one[name] != other[name]]
    if one["parameters"].keys() != other["parameters"].keys():
        return ", ".join([*names, "names of parameters"])
    unequal = [name for name, value in one["parameters"].items() if not torch.equal(value, other["parameters"][name])]
    return ", ".join([*names, *unequal])


def combinations(*, corners: bool) -> Iterator[tuple[str, ...]]:
    """All subsets of the passes in ascending size; with `corners` those of no pass, one, all but one, and all."""
    for count in range(len(PASSES) + 1):
        if not corners or count not in (2, 3):
            yield from itertools.combinations(PASSES, count)


def measure(case: Case, started: Pools, steps: int, *, compiled: bool) -> Row:
    """Train a plan under each combination of passes, and compare it with the eager backend."""
    eager = trained(case, case.body, started, steps)
    assert len(set(eager["loss"])) == steps, "each step must change the loss"
    row, start = Row(case.name, case.ranks, compiled, eager["loss"]), time.perf_counter()
    for passes in combinations(corners=compiled):
        body, name = case.text(*passes, compiled=compiled), " + ".join(passes) or "no pass"
        if codes := codes_of(case, body):
            row.refused.append({"passes": name, "codes": ", ".join(codes)})
            continue
        try:
            found = difference(trained(case, body, started, steps), eager)
        except Exception as error:
            row.failed.append({"passes": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]})
            print(f"{case.name} with {name} failed: {error}", *getattr(error, "__notes__", ()), sep="\n")
            continue
        if found:
            row.different.append({"passes": name, "what": found})
        else:
            row.equal.append(name)
    row.seconds = time.perf_counter() - start
    return row


def main() -> int:
    """Train, and print a line for each plan; the exit status is 0 where all combinations that ran are equal."""
    asked = ask(
        __doc__, RESULTS, steps=(3, "steps of each training"),
        with_compile=(False, "run the corners with compiled regions too"),
    )  # fmt: skip
    rows, about = list[Row](), {**asked.about, "steps": asked.options.steps, "passes": PASSES}
    with pools() as started:
        for compiled in (False, True) if asked.options.with_compile else (False,):
            for case in sorted(CASES, key=lambda case: case.ranks):
                if asked.has(case.name):
                    rows.append(measure(case, started, asked.options.steps, compiled=compiled))
                    print(rows[-1].line(), flush=True)
                    if asked.options.write:  # intermediate rows, since all of them take half an hour
                        write_rows(RESULTS, about, [row.record() for row in rows])
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
