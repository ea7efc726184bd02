"""`batch`: global batch, micro batch and sequence length."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.kinds import Integer


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

    @property
    def length(self) -> int:
        """Tokens in a sequence.

        Raises:
            Undecided: the plan says none, so that nothing can be said of sequences.
        """
        if self.seq_len is None:
            raise Undecided("seq_len is not given")
        return self.seq_len
