"""Plans for the tests of lowering, and their resolved plans, programs and refusals."""

from __future__ import annotations

import functools
from pathlib import Path

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.lint import lint
from legoai.lowering.program import LoweringError, Program, lower
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource
from legoai.specs.plan import Plan

HEAD = """\
plan tiny

model   llama3("tiny")
cluster cpu(devices = 4)
"""

SEQUENCE_PARALLEL = """\
shard on tp {
  tok_embeddings                     = rowwise(output = shard(1))
  layers.*.{attention,ffn}_norm      = sequence
  layers.*.attention                 = inputs(from = shard(1), to = replicate)
  layers.*.attention.{wq, wk, wv}    = colwise
  layers.*.attention.wo              = rowwise(output = shard(1))
  layers.*.feed_forward              = inputs(from = shard(1), to = replicate)
  layers.*.feed_forward.{w1, w3}     = colwise
  layers.*.feed_forward.w2           = rowwise(output = shard(1))
  norm                               = sequence
  output                             = colwise(input = shard(1), loss_parallel = true)
}
"""
SEQUENCE_BESIDE_EXPERTS = """\
shard on tp {
  tok_embeddings                  = rowwise(output = shard(1))
  layers.*.{attention, ffn}_norm  = sequence
  layers.*.attention              = inputs(from = shard(1), to = replicate)
  layers.*.attention.{wq, wk, wv} = colwise
  layers.*.attention.wo           = rowwise(output = shard(1))
  layers.*.feed_forward           = inputs(
    from = shard(1), to = replicate, local = true, then = outputs(from = replicate, to = shard(1)))
  norm                            = sequence
  output                          = colwise(input = shard(1), loss_parallel = true)
}
"""

PIECES_OF_EXPERTS = """\
shard standard on tp (sequence, loss_parallel) {
  layers.*.feed_forward        = inputs(
    from = shard(1), to = shard(1), local = true, then = outputs(from = shard(1), to = shard(1)))
  layers.*.feed_forward.router = sequence(dim = 0, local = true)
}
shard on ep { layers.*.feed_forward.experts = experts(across_tp = true) }
"""

FULL = f"""\
{HEAD}
batch   (global = 16, micro = 4, seq_len = 256)
mesh    (dp_shard = 2, tp = 2)

{SEQUENCE_PARALLEL}
fsdp on dp_shard {{
  layers.* = unit
  root     = unit
}}

checkpoint {{ layers.* = full }}
precision (param = bf16, reduce = fp32)
optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1)
clip      (norm = 1.0)
schedule  cosine(warmup = 20, steps = 300, floor = 0.1)
"""


def resolved(text: str, *, name: str = "tiny.plan") -> Plan:
    """The plan that a text comes to, which must be read without a diagnostic."""
    resolution = resolve(text, name, directory=Path())
    assert not resolution.diagnostics, [(item.code, item.message) for item in resolution.diagnostics]
    assert resolution.plan is not None
    return resolution.plan


@functools.cache
def manifest_of(source: ModelSource) -> Manifest:
    """The model's manifest, computed in this process."""
    if source.kind == "builtin":
        return load_manifest(source, base_directory=".")
    from legoai.specs.models.inspect import inspect_model  # imports torch

    return inspect_model(source, Path())


def lowered(plan: str | Plan, *, name: str = "tiny.plan") -> Program:
    """The program of a plan."""
    plan = resolved(plan, name=name) if isinstance(plan, str) else plan
    return lower(Analysis(plan, manifest_of(plan.model.source()), Path(name).parent, file=name))


def refusals(plan: str | Plan) -> list[Diagnostic]:
    """Why a plan is not lowered; empty where it is."""
    try:
        lowered(plan)
    except LoweringError as error:
        return list(error.diagnostics)
    return []


def errors(text: str) -> dict[str, str]:
    """The errors that lint finds in a plan, by code: the first message of each."""
    found = lint(text, "tiny.plan", directory=Path()).diagnostics
    return {item.code: item.message for item in reversed(found) if item.severity == "error"}


def without_hash(program: Program) -> str:
    """The program's text without the plan's hash, which every change of the plan changes."""
    return program.text.replace(program.digest, "")
