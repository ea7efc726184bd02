"""`batch`: global batch, micro batch and sequence length."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.kinds import Integer, ListOf


class Stages(Treatment):
    """Smaller global batches in the first steps: one until a given step, the next until another, then the full one.

    `stages(global = [256, 512], until = [1000, 5000])` uses 256 samples in each of the first 1000 steps, and 512 in
    each of the next 4000. Micro batch and mesh stay the same; fewer micro batches are accumulated.
    """

    name: ClassVar[str] = "stages"

    batches: tuple[int, ...] = option(
        ListOf(Integer(minimum=1)), name="global", doc="Samples in one optimizer step of each stage, growing."
    )
    until: tuple[int, ...] = option(
        ListOf(Integer(minimum=1)),
        doc="For each stage, the optimizer steps after which it ends, counted from the first.",
    )


class Batch(Directive):
    """The global batch, the micro batch and, where the model reads text, the sequence length.

    `global = micro · data-parallel degree · accumulation` must hold; the number of accumulated micro batches follows.
    Under a pipeline the micro batches of one rank are the pipeline's. A sample is a sequence of tokens, an image, two
    texts, or an image and its text, as the model takes them; the size of images is the model's.
    """

    keyword: ClassVar[str] = "batch"

    global_batch: int = option(Integer(minimum=1), name="global", doc="Samples in one optimizer step.")
    micro_batch: int = option(
        Integer(minimum=1), name="micro", doc="Samples in one forward pass of one data-parallel rank."
    )
    seq_len: int | None = option(
        Integer(minimum=1),
        doc="Tokens in a sequence, and in each text of a sample; needed unless a model reads only images.",
        default=None,
    )
    ramp: Stages | None = option(
        Calls((Stages,)),
        doc=(
            "Growth of the global batch over the first steps; by default all are of `global`. Steps of `schedule` and "
            "`steps` count alike, whatever their batch. Costs are those of the full batch. Not under `backend = graph`."
        ),
        default=None,
    )

    @property
    def length(self) -> int:
        """The tokens in a sequence.

        Raises:
            Undecided: the plan does not state it.
        """
        if self.seq_len is None:
            raise Undecided("seq_len is not given")
        return self.seq_len


def unit_of(batch: Batch) -> str:
    """Return of what figures of throughput are: `tokens`, or `samples` where these have no sequences, as images."""
    return "tokens" if batch.seq_len else "samples"
