"""Call of scaled dot-product attention in a model's forward, and which of these pieces of a sequence allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class AttentionCall(NamedTuple):
    """Arguments of `torch.nn.functional.scaled_dot_product_attention`, as far as they limit parallelism."""

    queries: tuple[int, ...]
    """Shape, of a small example."""
    keys: tuple[int, ...]
    mask: bool
    """Whether `attn_mask` is given."""
    dropout: bool
    """Whether `dropout_p` is more than 0, in training."""
    grouped: bool
    """Whether `enable_gqa` is set."""
    casts: str = ""
    """The dtype to which the model's own `torch.autocast` casts it on a GPU, by its name in plans; empty for none."""

    def misfit(self) -> Misfit | None:
        """What keeps context parallelism from computing it; None where nothing does.

        Under `context` every rank has the queries, keys and values of some tokens, and attention sees the keys and
        values of all ranks.
        """
        if len(self.queries) != 4 or len(self.keys) != 4:
            dims = len(self.queries if len(self.queries) != 4 else self.keys)
            return Misfit(
                f"tensors of {dims} dims", "pass queries, keys and values as [batch, heads, tokens, head_dim]"
            )
        if self.mask:
            return Misfit("a mask", "let each token attend to all, or with `is_causal = True` to those up to itself")
        if self.dropout:
            return Misfit("dropout", "let attention drop nothing (`dropout_p = 0.0`); dropout may be elsewhere")
        if self.queries[2] != self.keys[2]:
            found = f"{self.queries[2]} queries and {self.keys[2]} keys"
            return Misfit(found, "let the queries and keys be those of the same tokens")
        if self.queries[1] != self.keys[1] and not self.grouped:
            found = f"{self.queries[1]} heads of queries and {self.keys[1]} of keys, without `enable_gqa`"
            return Misfit(found, "pass `enable_gqa = True`")
        return None


class Misfit(NamedTuple):
    """Obstacle to attention over the pieces of a sequence."""

    given: str
    """What the function is called with."""
    help: str


def calls_from(raw: Iterable[Sequence[Any]]) -> tuple[AttentionCall, ...]:
    """Read the serialised form."""
    return tuple(AttentionCall(tuple(queries), tuple(keys), *rest) for queries, keys, *rest in raw)
