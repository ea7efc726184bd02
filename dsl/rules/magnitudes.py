"""Rules about numbers far from what anybody trains with: another unit, a lost sign of an exponent, swapped values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import Declared, name_of, walk
from legoai.specs.directives.comm import ByBytes, Proactive
from legoai.specs.directives.hole import Hole
from legoai.specs.record import Record
from legoai.specs.units import KIB, format_bytes


class Usual(Record):
    """What an option is usually: values outside of the range from ``least`` to ``most`` are worth a word, but for 0."""

    least: float
    most: float
    words: str


_RATES: Final = {
    "sgd": Usual(1e-9, 10.0, "from 1e-3 to 1"),
    "muon": Usual(1e-9, 1.0, "from 1e-3 to 0.05"),
}
_RATE: Final = Usual(1e-9, 0.1, "from 1e-6 to 1e-2")
_CONSTANTS: Final = {
    "eps": Usual(0.0, 0.1, "from 1e-10 to 1e-5"),
    "weight_decay": Usual(0.0, 1.0, "from 0 to 0.3"),
    "momentum": Usual(0.0, 0.999, "from 0.8 to 0.99"),
}
_NORM: Final = Usual(1e-3, 1e3, "from 0.1 to 10")
_BUCKET: Final = Usual(64 * KIB, float("inf"), "from 1MiB to some GiB")
_FLOOR: Final = 1e-3
_MOST_TOKENS: Final = 2**28
"""Tokens of one step. The largest published batches are of 63 million (DeepSeek-V3, arXiv 2412.19437, section 4.2)."""
_MOST_SAMPLES: Final = 2**20
_MOST_AT_ONCE: Final = 2**24
"""Tokens of several sequences in one forward of one rank."""
_MOST_HOSTS: Final = 2**14
"""The largest published clusters have some 12,500 hosts of 8."""


class UnusualNumber(Check):
    """A number that is far from every usual one, and probably a slip.

    A lost minus (`lr = 3e4`), two values in each other's place (`betas = [0.95, 0.9]`), tokens in the place of
    sequences (`global = 4194304`), or a rate where a share is meant (`floor = 3e-5`). The program would run, and learn
    nothing.

    ## Example
    ```
    optimizer adamw(lr = 3e4, betas = [0.95, 0.9])
    ```

    ## Use instead
    ```
    optimizer adamw(lr = 3e-4, betas = [0.9, 0.95])
    ```
    """

    code = "LP684"
    slug = "unusual-number"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        yield from self._optimizer(analysis)
        if plan.clip is not None:
            yield from self._outside(analysis, plan.clip, "norm", _NORM)
        yield from self._floor(analysis)
        yield from self._batch(analysis)
        hosts = plan.cluster.hosts
        if not isinstance(hosts, Hole) and hosts > _MOST_HOSTS:
            yield self._found(analysis, plan.cluster, "hosts", f"{hosts} hosts", "up to some thousands")
        if analysis.device is None or analysis.device.kind != "cpu":
            yield from self._buckets(analysis)

    def _optimizer(self, analysis: Analysis) -> Iterator[Diagnostic]:
        usual = _RATES.get(name_of(analysis.plan.optimizer.algorithm), _RATE)
        for declared in walk(analysis.plan.optimizer):
            if not isinstance(declared, Declared):
                continue
            for item in declared.options:
                if item.name == "lr":
                    rate = _RATES.get(name_of(declared), usual)
                    yield from self._outside(analysis, declared, item.field, rate)
                elif item.name in _CONSTANTS:
                    yield from self._outside(analysis, declared, item.field, _CONSTANTS[item.name])
                elif item.name == "betas":
                    yield from self._betas(analysis, declared, item.field)

    def _betas(self, analysis: Analysis, declared: Declared, field: str) -> Iterator[Diagnostic]:
        betas = getattr(declared, field)
        if not isinstance(betas, tuple) or any(isinstance(beta, Hole) for beta in betas):
            return
        first, second = betas
        if first > second:
            yield self.at(
                analysis.span_of(declared, field),
                f"the first moment decays more slowly than the second: {first:g} is more than {second:g}",
                label="the other way round",
                help=[f"the first of `betas` is of the mean, the second of the squares: `[{second:g}, {first:g}]`?"],
            )
        elif second > 0.999999:
            yield self._found(analysis, declared, field, f"a decay of {second!r}", "0.9 and from 0.95 to 0.999")

    def _floor(self, analysis: Analysis) -> Iterator[Diagnostic]:
        form = analysis.plan.schedule.form
        floor = getattr(form, "floor", None)
        if not isinstance(floor, float) or not 0.0 < floor < _FLOOR:
            return
        rate = getattr(analysis.plan.optimizer.algorithm, "lr", None)
        share = floor / rate if isinstance(rate, float) and rate > 0.0 else 0.0
        meant = [f"a last rate of {floor:g} is `floor = {share:g}`"] if _FLOOR <= share <= 1.0 else []
        yield self.at(
            analysis.span_of(form, "floor"),
            f"`floor` is a share of the full rate, and {floor:g} of it is almost nothing",
            label="not a rate",
            help=[*meant, "usual are shares from 0.01 to 0.1, or 0"],
        )

    def _batch(self, analysis: Analysis) -> Iterator[Diagnostic]:
        batch = analysis.plan.batch
        samples, at_once, length = batch.global_batch, batch.micro_batch, batch.seq_len
        tokens = samples * length if length is not None else None
        if (tokens or 0) > _MOST_TOKENS or (tokens is None and samples > _MOST_SAMPLES):
            shown = f"{samples} samples" if tokens is None else f"{samples} sequences of {length} tokens"
            sequences = samples // length if length is not None and samples % length == 0 else 0
            yield self.at(
                analysis.span_of(batch, "global_batch"),
                f"{shown} in a step are far more than anybody trains with",
                label="`global` counts sequences" if tokens is not None else "`global` counts samples",
                help=[f"{samples} tokens are `global = {sequences}`"]
                if sequences
                else ["usual are up to some thousands"],
            )
        elif length is not None and at_once > 1 and at_once * length > _MOST_AT_ONCE:
            yield self._found(
                analysis, batch, "micro_batch", f"{at_once} sequences of {length} tokens at once", "from 1 to 64"
            )

    def _buckets(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.replicate is not None:
            yield from self._outside(analysis, plan.replicate, "bucket", _BUCKET)
        for declared in walk(plan.comm) if plan.comm is not None else ():
            if isinstance(declared, ByBytes):
                yield from self._outside(analysis, declared, "n", _BUCKET)
            elif isinstance(declared, Proactive):
                yield from self._outside(analysis, declared, "limit", _BUCKET)

    def _outside(self, analysis: Analysis, declared: Declared, field: str, usual: Usual) -> Iterator[Diagnostic]:
        value: Any = getattr(declared, field)
        if value is None or isinstance(value, Hole) or value == 0 or usual.least <= value <= usual.most:
            return
        name = declared.option(field).name
        shown = format_bytes(value) if usual is _BUCKET else f"{value:g}"
        yield self._found(analysis, declared, field, f"`{name}` = {shown}", usual.words)

    def _found(self, analysis: Analysis, declared: Declared, field: str, what: str, words: str) -> Diagnostic:
        return self.at(
            analysis.span_of(declared, field),
            f"{what} is far from what anybody trains with",
            label="unusual",
            help=[f"usual are values {words}" if words[0].isalpha() else f"usual are {words}"],
        )
