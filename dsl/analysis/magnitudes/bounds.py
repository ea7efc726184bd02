"""Bounds of memory, time and bubble that follow from a plan without a simulation."""

from __future__ import annotations

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import local_tokens, pass_micro_batches
from legoai.dsl.analysis.computation.precision import computes_in_float8, has_policy
from legoai.dsl.analysis.parallelism.shard import last_module, placement, shard_on_tp
from legoai.dsl.analysis.stages.pipeline import stage_count
from legoai.dsl.analysis.training.loss import layer_of_logits, pieces_of_last_layer, takes_last_layer
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.loss import EagerLoss
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.pipeline import SPLIT_BACKWARD, OrderFile
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.models.reads import Tokens, TwoTexts

_PASSES = 6
"""Operations of a linear layer for each weight and token: a product and a sum in forward, twice that in backward."""

_ALIGNED = 16
"""Bytes to which matrices' rows are aligned for full speed (NVIDIA's Matrix Multiplication Background User's Guide)."""


def local_logits(analysis: Analysis) -> int | None:
    """A lower bound of the number of one micro batch's logits on a rank; None where the model has none."""
    plan, manifest = analysis.plan, analysis.manifest
    if manifest is None or manifest.vocab_size is None or not isinstance(manifest.reads, Tokens | TwoTexts):
        return None
    ranks = plan.mesh.tp if shard_on_tp(analysis) is not None else 1
    return local_tokens(plan) * manifest.vocab_size // ranks


def unaligned_vocabulary(analysis: Analysis) -> int | None:
    """The tokens of the vocabulary on a rank where the rows of logits do not begin at multiples of 16 bytes, else None.

    That is what matrix units of NVIDIA GPUs read and write at their full speed in half precision. Where `tp` does not
    divide the vocabulary, nothing is said.

    Raises:
        Undecided: the size of `tp`, a placement or the dtype is a hole.
    """
    plan, manifest = analysis.plan, analysis.manifest
    if manifest is None or manifest.vocab_size is None or not isinstance(manifest.reads, Tokens | TwoTexts):
        return None
    output = last_module(manifest)
    is_layer = output is not None and manifest.modules[output].kind == "linear"
    is_cut = is_layer and placement(analysis, f"{output}.weight").dim == 0
    held, left = divmod(manifest.vocab_size, plan.mesh.tp if is_cut else 1)
    return held if not left and _unaligned(analysis, held) else None


def unaligned_layers(analysis: Analysis) -> list[str]:
    """Paths of the linear layers whose features on a rank are no multiple of 16 bytes, but for the vocabulary.

    Where `tp` does not divide them, nothing is said.

    Raises:
        Undecided: the size of `tp`, a placement or the dtype is a hole.
    """
    manifest = analysis.manifest
    if manifest is None:
        return []
    of_vocabulary = last_module(manifest) if manifest.vocab_size is not None else None
    found = []
    for path, module in manifest.modules.items():
        shape = next((one.shape for one in module.parameters if one.name == "weight"), ())
        if module.kind != "linear" or len(shape) != 2 or path == of_vocabulary:
            continue
        cut = placement(analysis, f"{path}.weight").dim
        held = [divmod(n, analysis.plan.mesh.tp if dim == cut else 1) for dim, n in enumerate(shape)]
        if any(not left and _unaligned(analysis, columns) for columns, left in held):
            found.append(path)
    return found


def _unaligned(analysis: Analysis, columns: int) -> bool:
    """Whether rows of so many elements are slower for matrix units in the dtype of computation."""
    dtype, device = analysis.plan.precision.param, analysis.device
    if device is None or device.kind == "cpu" or dtype not in ("bf16", "fp16"):
        return False
    return columns * DTYPE_BYTES[dtype] % _ALIGNED != 0


def padded_vocabulary(tokens: int, ranks: int) -> int:
    """The next vocabulary that is a multiple of 128 on each rank of `tp`, as vocabularies are usually padded."""
    unit = 128 * ranks
    return -(-tokens // unit) * unit


def logits_bytes(analysis: Analysis) -> int | None:
    """A lower bound of the bytes of one micro batch's logits on a rank at a time; None where the model has none.

    A loss that computes the last layer in pieces holds those of one piece; 0 where it is not known whether it does. An
    eager loss holds the logits in the dtype of computation, or in `output` where units give that, a copy in fp32 where
    that is narrower, and their logarithms in fp32; other losses at least the first.
    """
    plan, logits = analysis.plan, local_logits(analysis)
    given = plan.precision.output if has_policy(analysis) else None
    size = DTYPE_BYTES[given or plan.precision.param]
    if isinstance(plan.loss.form, EagerLoss):
        size += max(4, size) + (4 if size < 4 else 0)
    if logits is None:
        return None
    try:
        return logits // pieces_of_last_layer(plan.loss.form) * size
    except Undecided:
        return 0


def loss_bytes(analysis: Analysis) -> int:
    """A lower bound of the bytes that the loss of one micro batch takes on a rank, beside what forward has kept.

    A loss that computes the last layer in pieces holds the sum of its gradients when it computes those of the next
    piece, from the gradient of that one's logits.
    """
    plan, manifest, whole = analysis.plan, analysis.manifest, logits_bytes(analysis)
    form = plan.loss.form
    if whole is None or manifest is None or not takes_last_layer(form):
        return whole or 0
    layer = layer_of_logits(manifest)
    trained = () if layer is None else (item.numel for item in manifest.modules[layer].parameters if not item.frozen)
    size = min(DTYPE_BYTES[plan.precision.param], DTYPE_BYTES[plan.precision.master])
    in_pieces = whole + 2 * sum(trained) // plan.mesh.tp * size
    if isinstance(form, Hole):  # of another form, the logits are whole
        return min(in_pieces, (local_logits(analysis) or 0) * DTYPE_BYTES[plan.precision.param])
    return in_pieces


def shortest_step(analysis: Analysis) -> float | None:
    """A lower bound of a step's seconds: the linear layers of a model of tokens at the peak rate of all devices.

    None where the model is another, or the device has no published rate.
    """
    plan, manifest, device = analysis.plan, analysis.manifest, analysis.device
    if manifest is None or device is None or plan.model.family in FOREIGN or not manifest.reads_tokens:
        return None
    rates = device.peak_flops_per_second
    dtypes = {"fp32": ("fp32", "tf32")}.get(plan.precision.param, (plan.precision.param,))
    if computes_in_float8(plan.precision):
        dtypes = (*dtypes, "fp8", "mxfp8")
    peaks = [rate for dtype in dtypes if (rate := getattr(rates, dtype, None)) is not None]
    if not peaks:
        return None
    weights = sum(
        parameter.numel
        for module in manifest.modules.values()
        if module.kind == "linear"
        for parameter in module.parameters
        if len(parameter.shape) == 2
    )
    tokens = plan.batch.global_batch * plan.batch.length
    return float(_PASSES * weights * tokens / (max(peaks) * plan.mesh.world_size))


def idle_share(analysis: Analysis) -> float | None:
    """The share of forward and backward in which a pipeline's ranks wait; None for schedules without a closed form."""
    plan = analysis.plan
    pipeline, ranks = plan.pipeline, plan.mesh.pp
    if pipeline is None or isinstance(pipeline.schedule, OrderFile) or pipeline.schedule in SPLIT_BACKWARD:
        return None
    count, stages = pass_micro_batches(plan), stage_count(analysis)
    if count is None or stages is None or stages % ranks:
        return None
    each = stages // ranks
    return (ranks - 1) / (each * count + ranks - 1)
