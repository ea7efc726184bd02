"""`batch`: how many sequences an optimizer step sees, and in what pieces."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Integer


class Batch(Directive):
    """The global batch, the micro batch and the sequence length.

    `global = micro · data-parallel degree · accumulation` must hold; the number of accumulated micro batches follows.
    Under a pipeline the micro batches of one rank are the pipeline's.
    """

    keyword: ClassVar[str] = "batch"

    global_batch: int = option(Integer(minimum=1), name="global", doc="Sequences in one optimizer step.")
    micro_batch: int = option(
        Integer(minimum=1), name="micro", doc="Sequences in one forward pass of one data-parallel rank."
    )
    seq_len: int = option(Integer(minimum=1), doc="Tokens in a sequence.")
