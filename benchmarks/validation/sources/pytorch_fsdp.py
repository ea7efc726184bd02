"""Plans for runs of PyTorch's FSDP by others than its developers: IBM's fms-fsdp and NVIDIA's NeMo AutoModel.

Read for this: of fms-fsdp of May 2024 `README.md`, `docs/configurations.md`, `main_training_llama.py`,
`fms_fsdp/policies/` and `fms_fsdp/config/training.py`; of NeMo AutoModel the performance summary and the recipe that
each row names.

- fms-fsdp: units are the blocks and the model; 7B is sharded within hosts. Parameters are stored in fp32, and computed
  with and reduced in bf16. The whole model is compiled around FSDP1's hooks, which makes a graph of each block.
- NeMo AutoModel: parameters, gradients and optimizer state in bf16, sharded over the ranks of `cp` too; attention of
  whole sequences by torch's context parallelism, which prefers cuDNN's kernel on an H100.
"""

from __future__ import annotations

from typing import Final

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources.common import batch_of, cluster_of, llama_of
from benchmarks.validation.statements import Draft, Stated, mesh, name_of

_FABRICS: Final = {"400 Gb/s per host": "efa_p4d", "800 Gb/s per host": "infiniband_hdr100", "": "infiniband_ndr"}
"""Fabrics of the catalogue with these rates."""
_CHECKPOINT: Final = {
    "none": "",
    "full": "checkpoint { layers.* = full }",
    "every(3)": "checkpoint { layers.* = every(3) }",
}


def convert(row: Row, device: str | None = None) -> Stated:
    """State a run of one of the two.

    Raises:
        UnstatedError: the row is of neither.
    """
    framework = row.text("framework")
    if not framework.startswith(("fms-fsdp", "NeMo AutoModel")):
        raise UnstatedError(f"the framework is {framework or 'not stated'}")
    automodel = framework.startswith("NeMo")
    draft = Draft(name_of(row.id), f"{row.text('model')}, {row.text('source')}")
    draft.assumed.append("the network between hosts, by its rate")
    degrees = {axis: row.whole(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp")}
    axes = ", ".join(axis for axis, degree in degrees.items() if degree > 1)
    draft.add(
        llama_of(row, seq_len=row.whole("seq_len"), theta=500_000.0 if automodel else 10_000.0),
        cluster_of(row, device, fabric=_FABRICS[row.text("interconnect")]),
        batch_of(row),
        mesh(**degrees),
        f"fsdp on {axes} {{\n  layers.* = unit\n  root = unit\n}}",
        _CHECKPOINT[row.text("ac_mode")],
    )
    if degrees["cp"] > 1:
        draft.add("context on cp")
    draft.add(f"attention {'cudnn' if automodel else 'flash'}", "compile { layers.* = inductor }")
    if automodel:
        draft.add("precision (param = bf16, reduce = bf16, master = bf16)", "optimizer adamw(lr = 2e-4)")
        draft.differs.append("the fused Adam of Transformer Engine")
    else:
        draft.add(
            "precision (param = bf16, reduce = bf16)", "optimizer adamw(lr = 3e-4, fused = false)", "clip (norm = 1.0)"
        )
        draft.differs.append("FSDP1's flat parameters; the loss within the compiled model")
    return draft.done()
