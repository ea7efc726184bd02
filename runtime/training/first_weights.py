"""First weights of a new training where they are not drawn: published ones, or those of another training."""

from __future__ import annotations

from pathlib import Path

from legoai.runtime.checkpoint.checkpoint import weights
from legoai.runtime.launching.options import RunOptions
from legoai.runtime.metrics.log import MetricsLog
from legoai.runtime.process_group import on_first_rank
from legoai.runtime.published.folder import is_published
from legoai.runtime.published.start import load_published
from legoai.runtime.training.resume import fresh_tensors, load_weights, named_checkpoint
from legoai.runtime.training.state import Training


def start_with_weights(place: Path, training: Training, options: RunOptions, log: MetricsLog) -> None:
    """Read the weights of a folder, checkpoint or run into a training, and report what was read.

    Raises:
        RunError: there are none, or they are damaged, or belong to another model.
    """

    def warn(text: str) -> None:
        log.say(f"warning: {text}")

    others = options.resume_other_plan
    if on_first_rank(lambda: is_published(place)):
        left_out = load_published(place, weights(training.model), training.whole, others=others, warn=warn)
        path, event, what = place, {}, f"published weights of {place}"
    else:
        path, meta = named_checkpoint(place, option="--load-weights", warn=warn)
        left_out, notices = load_weights(path, meta, training, other_plan=others)
        for notice in notices:
            warn(notice)
        event, what = {"step": meta.step}, f"weights of {path}"
    log.event("weights", path=str(path), **event, left_out=left_out)
    log.say(f"{what}; the optimizer starts afresh")
    if left_out:
        log.say(f"note: {fresh_tensors(left_out, lacking='among them')}")
