"""`shard`: rules about sizes that the ranks of an axis must divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import sequence_length
from legoai.dsl.analysis.blocks import by_rule, distinct, general, span_of
from legoai.dsl.analysis.computation.attention import head_widths
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.magnitudes.bounds import padded_vocabulary
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.devices.mesh import legal_divisors
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.shard import Colwise, Experts, Rowwise

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import ModuleInfo


class Cut(NamedTuple):
    """A linear layer or embedding whose weight `tp` cuts."""

    rule: PathRule[Any]
    info: ModuleInfo
    size: int
    """Features or rows that are divided among the ranks."""
    attention: ModuleInfo | None
    """The attention that a linear layer belongs to, where its features are heads."""
    heads: str = ""
    """Which heads its features are: `n_heads` or `n_kv_heads`."""

    @property
    def stays_local(self) -> bool:
        """Whether the features pass from module to module in pieces, which are taken to be equally large."""
        style = self.rule.treatment
        if self.info.kind != "linear" or (isinstance(style, Colwise) and style.loss_parallel):
            return False
        layout = style.output if isinstance(style, Colwise) else style.input
        return layout is None or isinstance(layout, Sharded)


_CUT_ATTRIBUTE = {
    ("linear", "colwise"): "out_features",
    ("linear", "rowwise"): "in_features",
    ("embedding", "colwise"): "embedding_dim",
    ("embedding", "rowwise"): "num_embeddings",
}


def cuts(analysis: Analysis) -> Iterator[Cut]:
    """Every layer under `colwise` or `rowwise`; of equal blocks one."""
    shard, manifest = analysis.plan.shard_on("tp"), analysis.manifest
    if manifest is None or shard is None:
        return
    for path, rule in distinct(analysis, shard):
        if not isinstance(rule.treatment, Colwise | Rowwise) or path not in manifest.modules:
            continue
        info = manifest.modules[path]
        count = info.attributes.get(_CUT_ATTRIBUTE.get((info.kind, rule.treatment.name), ""))
        if not isinstance(count, int):
            continue
        above = (manifest.modules[holder] for holder in holders(path))
        attention = next((item for item in above if item.kind == "attention"), None)
        if attention is not None and info.kind == "linear":
            widths = _widths(attention)
            for name in ("n_heads", "n_kv_heads"):
                if any(int(attention.attributes.get(name, 0)) * width == count for width in widths):
                    yield Cut(rule, info, count, attention, name)
                    break
            else:
                yield Cut(rule, info, count, None)
        else:
            yield Cut(rule, info, count, None)


def _widths(attention: ModuleInfo) -> tuple[int, ...]:
    """Features of one head that a layer may compute: queries or keys, values, or of both those from a latent."""
    if "head_dim" not in attention.attributes:
        return ()
    width, value = head_widths(attention)
    return width, value, width - int(attention.attributes.get("rope_head_dim", 0)) + value


class HeadsOverRanks(Check):
    """A tensor parallel degree that does not divide the heads of an attention that it cuts.

    Each rank computes whole heads. Queries are cut by `n_heads`, keys and values by `n_kv_heads`, so that
    with grouped-query attention the fewer key/value heads set the limit.

    ## Example
    ```
    model llama3("8b")
    mesh  (dp_shard = 2, tp = 16)
    shard on tp {
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise
    }
    ```

    ## Use instead
    ```
    model llama3("8b")
    mesh  (dp_shard = 4, tp = 8)
    shard on tp {
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise
    }
    ```
    """

    code = "LP401"
    slug = "heads-over-ranks"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        mesh, manifest = analysis.plan.mesh, analysis.manifest
        found: dict[tuple[str, str], Cut] = {}
        for item in cuts(analysis):
            if item.attention is not None:
                found.setdefault((item.attention.path, item.heads), item)
        for (path, name), item in found.items():
            assert manifest is not None
            assert item.attention is not None
            heads, others = item.attention.attributes[name], item.attention.attributes
            if int(heads) % mesh.tp:
                both = [int(others[key]) for key in ("n_heads", "n_kv_heads") if key in others]
                yield self.at(
                    span_of(item.rule),
                    f"`tp` = {mesh.tp} does not divide the {heads} {'key/value ' * (name == 'n_kv_heads')}heads of "
                    f"`{general(manifest, path)}`",
                    label=f"{heads} heads",
                    others=[Label(analysis.span_of(mesh, "tp"), f"over {mesh.tp} ranks")],
                    help=[f"legal sizes of `tp` are {legal_divisors(*both)}"],
                )


class FeaturesOverRanks(Check):
    """A tensor parallel degree that does not divide the features that pass between two sharded layers.

    A `colwise` layer passes its shard of the features to a `rowwise` layer as a plain tensor, whose size is assumed to
    be the same on every rank.

    ## Example
    ```
    model   llama3("8b")
    cluster h100_sxm(hosts = 3, fabric = infiniband_ndr)
    batch   (global = 192, micro = 1, seq_len = 8192)
    mesh    (dp_shard = 8, tp = 3)
    shard on tp {
      layers.*.feed_forward.{w1, w3} = colwise
      layers.*.feed_forward.w2       = rowwise
    }
    ```

    ## Use instead
    ```
    model   llama3("8b")
    cluster h100_sxm(hosts = 3, fabric = infiniband_ndr)
    batch   (global = 192, micro = 1, seq_len = 8192)
    mesh    (dp_shard = 12, tp = 2)
    shard on tp {
      layers.*.feed_forward.{w1, w3} = colwise
      layers.*.feed_forward.w2       = rowwise
    }
    ```
    """

    code = "LP402"
    slug = "features-over-ranks"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        mesh, manifest = analysis.plan.mesh, analysis.manifest
        told = set()
        for item in cuts(analysis):
            holder = item.info.path.rpartition(".")[0]
            if item.attention is not None or not item.stays_local or item.size % mesh.tp == 0:
                continue
            if (holder, item.size) in told:
                continue
            told.add((holder, item.size))
            assert manifest is not None
            side = "output" if isinstance(item.rule.treatment, Colwise) else "input"
            yield self.at(
                span_of(item.rule),
                f"`tp` = {mesh.tp} does not divide the {item.size} {side} features of "
                f"`{general(manifest, item.info.path)}`",
                label=f"{item.size} features",
                others=[Label(analysis.span_of(mesh, "tp"), f"over {mesh.tp} ranks")],
                help=[f"legal sizes of `tp` are {legal_divisors(item.size)}"],
            )


class UnevenShards(Check):
    """A layer whose rows or features `tp` does not divide, so that some ranks hold fewer.

    The program is correct, since PyTorch pads communication buffers. But the last rank has less to do, or nothing,
    while the others work; and matrices with odd sizes are slow. A vocabulary is usually padded to a multiple of 128
    times `tp`.

    ## Example
    ```
    model gpt2("xl")
    mesh  (dp_shard = 16, tp = 2)
    shard on tp {
      tok_embeddings = rowwise(input = replicate)
      output         = colwise(loss_parallel = true)
    }
    ```

    ## Use instead
    Pad the vocabulary, here to `model gpt2("xl", vocab_size = 50432)`, or leave these layers whole.
    """

    code = "LP403"
    slug = "uneven-shards"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        mesh, manifest = analysis.plan.mesh, analysis.manifest
        for item in cuts(analysis):
            if item.attention is not None or item.stays_local or item.size % mesh.tp == 0:
                continue
            assert manifest is not None
            what = "tokens of the vocabulary" if item.size == manifest.vocab_size else "rows or features"
            most = -(-item.size // mesh.tp)
            least = max(0, item.size - most * (mesh.tp - 1))
            help = []
            if item.size == manifest.vocab_size:
                padded = padded_vocabulary(item.size, mesh.tp)
                help.append(f"a vocabulary of {padded} would give each rank {padded // mesh.tp}")
            yield self.at(
                span_of(item.rule),
                f"`tp` = {mesh.tp} does not divide the {item.size} {what} of `{general(manifest, item.info.path)}`",
                label=f"{most} on most ranks, {least} on the last",
                others=[Label(analysis.span_of(mesh, "tp"), f"{mesh.tp} ranks")],
                help=help,
            )


class SequenceOverRanks(Check):
    """A sequence that the ranks of `tp` cannot share evenly, although a layout cuts it.

    `sequence` and `shard(1)` put equal pieces of a sequence on each rank of `tp`. Under context parallelism a
    rank has a piece of the sequence to begin with. The sequence of a vision transformer has a token for each patch, and
    the class token.

    ## Example
    ```
    batch (global = 256, micro = 1, seq_len = 8190)
    mesh  (dp_shard = 8, tp = 4)
    shard on tp {
      tok_embeddings = rowwise(input = replicate, output = shard(1))
      layers.*.{attention, ffn}_norm = sequence
    }
    ```

    ## Use instead
    ```
    batch (global = 256, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 8, tp = 4)
    shard standard on tp (sequence = true)
    ```
    """

    code = "LP404"
    slug = "sequence-over-ranks"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        layouts, mesh = analysis.layouts, analysis.plan.mesh
        if layouts is None or not layouts.cuts_sequence:
            return
        length = sequence_length(analysis.plan, layouts.manifest)
        ranks = Label(analysis.span_of(mesh, "tp"), f"{mesh.tp} ranks")
        if length is None or layouts.manifest.vocab_size is None:
            yield from self._of_images(analysis, length, ranks)
            return
        local, rest = divmod(length, mesh.cp)
        if rest or local % mesh.tp == 0:
            return
        others = [ranks]
        piece = "the sequence"
        if mesh.cp > 1:
            others.append(Label(analysis.span_of(mesh, "cp"), f"{local} of {length} tokens on each of {mesh.cp} ranks"))
            piece = "the piece of a sequence"
        multiple = mesh.tp * mesh.cp
        near = max(multiple, length // multiple * multiple)
        yield self.at(
            analysis.span_of(analysis.plan.batch, "seq_len"),
            f"`tp` = {mesh.tp} does not divide {piece} of {local} tokens, which styles of `shard on tp` cut",
            label="cannot be cut evenly",
            others=others,
            help=[f"`seq_len` must be a multiple of {multiple}, such as {near}"],
        )

    def _of_images(self, analysis: Analysis, length: int | None, ranks: Label) -> Iterator[Diagnostic]:
        """A model of images, whose dimensions say how many tokens there are, or nothing does."""
        if length is not None and length % analysis.plan.mesh.tp == 0:
            return
        model = analysis.span_of(analysis.plan.model, "family")
        problem = "styles of `shard on tp` cut the tokens of an image, and how many there are is not known"
        if length is not None:
            problem = (
                f"`tp` = {analysis.plan.mesh.tp} does not divide the {length} tokens of an image, which styles of "
                "`shard on tp` cut"
            )
        yield self.at(
            model,
            problem,
            label="an unknown number of tokens" if length is None else f"{length} tokens",
            others=[ranks],
            help=["leave the sequence whole: no `sequence`, and no layout `shard(1)`"],
        )


class ExpertsOverRanks(Check):
    """An expert-parallel degree that does not divide the number of experts.

    Every rank of `ep` holds as many experts as every other.

    ## Example
    ```
    model mixtral("8x7b")
    mesh  (dp_shard = 32, ep = 16)
    shard on ep { layers.*.feed_forward.experts = experts }
    ```

    ## Use instead
    ```
    model mixtral("8x7b")
    mesh  (dp_shard = 32, ep = 8)
    shard on ep { layers.*.feed_forward.experts = experts }
    ```
    """

    code = "LP406"
    slug = "experts-over-ranks"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        shard, mesh, manifest = analysis.plan.shard_on("ep"), analysis.plan.mesh, analysis.manifest
        if manifest is None or shard is None:
            return
        for rule, paths in by_rule(analysis, shard):
            if not isinstance(rule.treatment, Experts):
                continue
            for path in paths:
                info = manifest.modules.get(path)
                count = info.attributes.get("n_experts") if info is not None else None
                if isinstance(count, int) and count % mesh.ep:
                    yield self.at(
                        span_of(rule),
                        f"`ep` = {mesh.ep} does not divide the {count} experts of `{general(manifest, path)}`",
                        label=f"{count} experts",
                        others=[Label(analysis.span_of(mesh, "ep"), f"{mesh.ep} ranks")],
                        help=[f"legal sizes of `ep` are {legal_divisors(count)}"],
                    )
                    break
