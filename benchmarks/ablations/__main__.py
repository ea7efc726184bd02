"""Published ablations of three papers against simulated ones: `python -m benchmarks.ablations FOLDER`.

FOLDER holds the published figures, as for `benchmarks.validation`, whose code states rows as plans. A published ratio
is compared with the ratio of two simulated plans; nothing is tuned to it. Every plan is simulated once, in a process of
its own. Times are predicted: no figure is a time of this machine. Rows that no plan can state are listed with the
reason.

`--lint` only lints the plans. `--write` saves each prediction at once, so that an interrupted run can be resumed. Saved
predictions by older code are reused, and are marked with that code's version, unless `--anew` is given. Predictions
that `benchmarks.validation` has for rows of the same tables are read from its results.

A predicted direction that differs from the published one is listed, and does not fail the run; a plan without a
prediction does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Final

from benchmarks.ablations import deepcompile, fsdp_paper, simplefsdp
from benchmarks.ablations.claims import Claim, Filled, Text, Unstated, compared, plans
from benchmarks.ablations.report import page, report
from benchmarks.machine import about_machine, write_atomically, write_document
from benchmarks.validation.__main__ import code_digest
from benchmarks.validation.predict import Prediction, as_json, predict
from benchmarks.validation.rows import UnstatedError, read

from legoai.dsl.lint import lint

RESULTS: Final = Path(__file__).parents[1] / "results" / "ablations.json"
ROWS: Final = RESULTS.with_name("validation_simplefsdp.json")
PAPERS: Final = {"simplefsdp": simplefsdp, "deepcompile": deepcompile, "fsdp_paper": fsdp_paper}


class Answers:
    """Predictions by plan: saved ones and new ones."""

    def __init__(self, kept: Mapping[str, Mapping[str, Any]], seconds: float) -> None:
        self.kept, self.seconds, self.code = dict(kept), seconds, code_digest()

    def known(self, text: Text) -> Prediction | None:
        """The prediction for a plan, if there is one already."""
        if isinstance(text, Filled):
            first = self.known(text.first)
            if first is None or first.refused:
                return first
            return self.known(text.then(first))
        found = self.kept.get(key_of(text))
        return None if found is None else Prediction(**found["said"])

    def asked(self, text: str) -> Prediction:
        """The prediction for a plan, which is simulated if there is none yet."""
        key = key_of(text)
        if key not in self.kept:
            predicted = predict(text, seconds=self.seconds)
            self.kept[key] = {"plan": text, "code": self.code, "said": as_json(predicted)}
        return Prediction(**self.kept[key]["said"])


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        found = [item for name, paper in PAPERS.items() for item in paper.claims(read(options.folder / paper.FILE))]
    except UnstatedError as error:
        print(f"ablations: {error}", file=sys.stderr)
        return 2
    every = [item for item in found if isinstance(item, Claim)]
    unstated = [item for item in found if isinstance(item, Unstated)]
    chosen = [
        item for item in every if not options.names or any(name in f"{item.of} {item.what}" for name in options.names)
    ]
    if options.lint:
        return _lint(chosen)
    answers = Answers(_kept() if not options.anew else {}, options.seconds)
    texts = _texts(chosen)
    for number, text in enumerate(texts, 1):
        predicted = _answer(answers, text)
        print(f"{number}/{len(texts)} {_name(text)}: {_words(predicted)}", file=sys.stderr, flush=True)
        if options.write:
            _write(every, unstated, answers)
    rows = _compared(chosen, answers)
    print(report(rows, unstated))
    if options.write:
        _write(every, unstated, answers)
    return int(any(item["predicted"] is None for item in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of published figures")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only comparisons whose name contains NAME")
    parser.add_argument("--lint", action="store_true", help="lint the plans, and simulate none")
    parser.add_argument("--anew", action="store_true", help="simulate all plans again")
    parser.add_argument("--seconds", type=float, default=1800.0, help="time limit of a plan in seconds (default: 1800)")
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULTS.name}, after each plan")
    return parser.parse_args(arguments)


def key_of(text: str) -> str:
    """A digest of a plan's statements; plans that differ in name and comments are one."""
    return hashlib.sha256(text[text.index("\nmodel ") :].encode()).hexdigest()[:16]


def _texts(claims: Iterable[Claim]) -> list[Text]:
    """Every plan once, claim by claim."""
    found: dict[str, Text] = {}
    for claim in claims:
        for text in chain.from_iterable((pair.baseline, pair.changed) for pair in claim.pairs):
            key = key_of(text) if isinstance(text, str) else f"{key_of(text.first)}, filled"
            found.setdefault(key, text)
    return list(found.values())


def _answer(answers: Answers, text: Text) -> Prediction:
    if isinstance(text, str):
        return answers.asked(text)
    first = answers.asked(text.first)
    return first if first.refused else answers.asked(text.then(first))


def _compared(claims: Iterable[Claim], answers: Answers) -> list[dict[str, Any]]:
    """Comparisons of the claims all of whose plans have a prediction."""
    rows = []
    for claim in claims:
        known = {text: answers.known(text) for pair in claim.pairs for text in (pair.changed, pair.baseline)}
        predicted = {text: answer for text, answer in known.items() if answer is not None}
        if len(predicted) == len(known):
            rows.append(compared(claim, predicted))
    return rows


def _lint(claims: Iterable[Claim]) -> int:
    """Lint every plan; those with a number from another plan's simulation are linted when they are simulated."""
    refused = 0
    for text in plans(list(claims)):
        linted = lint(text, "ablation.plan", directory=Path(), variants=False)
        found = [
            f"{item.severity} {item.code} {item.message}" for item in linted.diagnostics if item.severity != "advice"
        ]
        refused += linted.has_errors
        print(f"{_name(text)}: {'; '.join(found) or 'clean'}")
    return int(refused > 0)


def _name(text: Text) -> str:
    plan = text if isinstance(text, str) else text.first
    comment = plan.splitlines()[0].removeprefix("# ")
    name = plan[plan.index("\nplan ") + 6 :].split()[0]
    return f"{name} ({comment})" + ("" if isinstance(text, str) else ", filled")


def _words(predicted: Prediction) -> str:
    if predicted.refused:
        return f"refused: {predicted.refused}"
    reserved = max(predicted.reserved) / 2**30
    return f"{predicted.seconds:.4g} s, {reserved:.1f} GiB reserved, took {predicted.took:.0f} s"


def _kept() -> dict[str, Any]:
    """Predictions of earlier runs, and for rows of the same tables; refusals are left out."""
    rows = [item for item in _json(ROWS).get("results", []) if "said" in item]
    found = {key_of(item["plan"]): {name: item[name] for name in ("plan", "code", "said")} for item in rows}
    found |= _json(RESULTS).get("plans", {})
    return {key: item for key, item in found.items() if not item["said"]["refused"]}


def _json(path: Path) -> dict[str, Any]:
    """A file of results; empty where there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _write(claims: Sequence[Claim], unstated: Sequence[Unstated], answers: Answers) -> None:
    """Write all predictions so far, atomically."""
    rows = _compared(claims, answers)
    texts = chain.from_iterable((pair.changed, pair.baseline) for claim in claims for pair in claim.pairs)
    used = {key_of(text) for text in chain.from_iterable(_with_first(text, answers) for text in texts)}
    known = [row for row in rows if row["direction"] is not None]
    document = {
        **about_machine(),
        "directions": {"the published": sum(row["direction"] for row in known), "of": len(known)},
        "comparisons": rows,
        "not stated": [asdict(item) for item in unstated],
        "plans": {key: item for key, item in answers.kept.items() if key in used},
    }
    write_document(RESULTS, document)
    write_atomically(RESULTS.with_suffix(".md"), page(rows, unstated))


def _with_first(text: Text, answers: Answers) -> list[str]:
    """The plans that a prediction needs, as far as they can be written already."""
    if isinstance(text, str):
        return [text]
    first = answers.known(text.first)
    return [text.first] if first is None or first.refused else [text.first, text.then(first)]


if __name__ == "__main__":
    sys.exit(main())
