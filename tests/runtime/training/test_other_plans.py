"""Checkpoints of other plans: of models with the same tensors that compute something else, and of other constants."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from legoai.runtime import RunError, RunErrorCode, RunOptions
from legoai.runtime.checkpoint.checkpoint import DETAILS
from legoai.runtime.optimizer.parameter_groups import ParameterGroups
from legoai.runtime.published.saved_model import recorded_config
from legoai.runtime.published.whole_model import WholeModel
from legoai.runtime.training.constants import GROUPS
from legoai.specs.models.configs import GPTConfig, LlamaConfig, ViTConfig
from legoai.specs.models.gpt import GPT
from legoai.specs.models.llama import Llama
from legoai.specs.models.vit import ViT
from support.training import corpus, programs
from support.training.checkpoints import edit_meta, record

data, own_cache = corpus.data, corpus.own_cache

SIZES = {"vocab_size": 256, "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4, "max_seq_len": 64}
LLAMA = LlamaConfig(**SIZES, n_kv_heads=2)
DEEPER = dataclasses.replace(LLAMA, n_layers=2)
FEWER_HEADS = dataclasses.replace(LLAMA, n_heads=2, n_kv_heads=1)

TIED = partial(programs.TinyLlama, tied=True)


def llama(config: LlamaConfig) -> Callable[[], nn.Module]:
    return partial(Llama, config)


def fit(
    build: Callable[[], nn.Module] | None,
    *,
    momentum: float = 0.9,
    micro_batch: int = 2,
    clip_norm: float | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    plan_hash: str = "sha256:test",
    ranks: int = 1,
    factory: str = "",
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    **options,
) -> str:
    """What a run says."""
    program = programs.trainer(dtype=torch.float32, dp_shard=ranks, micro_batch=micro_batch, plan_hash=plan_hash)
    program = dataclasses.replace(
        program,
        build_model=build or program.build_model,
        factory=factory,
        clip_norm=clip_norm,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        build_optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=momentum)),
    )
    with contextlib.redirect_stderr(io.StringIO()) as said:
        program.fit(RunOptions(device="cpu", log_every=0, **options))
    return said.getvalue()


OTHERS = [
    (llama(LLAMA), llama(FEWER_HEADS), "num_attention_heads = 4, and the plan's model 2"),
    (partial(GPT, GPTConfig(**SIZES)), partial(GPT, GPTConfig(**{**SIZES, "n_heads": 2})), "n_head = 4, and .* 2"),
    (
        programs.TinyLlama,
        TIED,
        "tied tensors = none, and the plan's model output.weight",
    ),
]


@pytest.mark.parametrize(("before", "now", "what"), OTHERS)
def test_model_with_equal_shapes_and_another_meaning_is_refused(gloo, data, tmp_path, before, now, what):
    pool, usual = gloo(1), {"steps": 2, "data": data}
    pool(fit, before, steps=1, data=data, out=tmp_path)
    for given in ({"load_weights": tmp_path}, {"resume": str(tmp_path)}):
        with pytest.raises(RunError, match=rf"is of another model \(plan tiny\), with {what}.*: the weights") as caught:
            pool(fit, now, **usual, **given)
        assert caught.value.code == RunErrorCode.CHECKPOINT_OTHER_MODEL
        assert "--resume-other-plan" in caught.value.help
        assert "computes something else" not in pool(fit, before, **usual, **given)[0]
        [said] = pool(fit, now, **usual, **given, resume_other_plan=True)
        assert "with its weights this one may compute something else" in said


def test_model_with_another_number_is_noted(gloo, data, tmp_path):
    pool = gloo(1)
    pool(fit, llama(LLAMA), steps=1, data=data, out=tmp_path)
    other = llama(dataclasses.replace(LLAMA, rope_theta=1e4, norm_eps=1e-6))
    for given in ({"load_weights": tmp_path}, {"resume": str(tmp_path)}):
        [said] = pool(fit, other, steps=2, data=data, **given)
        assert "the checkpoint's model has rope_theta = 500000, and the plan's model 10000: " in said
        assert "the checkpoint's model has rms_norm_eps = 1e-05, and the plan's model 1e-06: " in said


def test_tied_tensors_may_be_trained_by_themselves(gloo, data, tmp_path):
    gloo(1)(fit, TIED, steps=1, data=data, out=tmp_path)
    [said] = gloo(1)(fit, programs.TinyLlama, steps=2, data=data, out=tmp_path)
    assert "has tied tensors = output.weight, and the plan's model none" in said


def test_checkpoint_that_does_not_record_its_model_is_not_compared(gloo, data, tmp_path):
    pool = gloo(1)
    pool(fit, llama(LLAMA), steps=1, data=data, out=tmp_path)
    remove_details(tmp_path / "checkpoints" / "step-1")
    [said] = pool(fit, llama(FEWER_HEADS), steps=2, data=data, out=tmp_path, plan_hash="sha256:other")
    assert "resumed from" in said and "may compute" not in said
    assert said.count("note:") == 1 and "this plan's hash is another\n" in said


def remove_details(path: Path) -> None:
    """Make a checkpoint one of an earlier version."""
    fields = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    for name in (DETAILS, "meta.sha256"):
        del fields["files"][name]
        (path / name).unlink()
    (path / "meta.json").write_text(json.dumps(fields), encoding="utf-8")


def test_notes_tell_another_mesh_from_other_constants(gloo, data, tmp_path):
    first, usual = tmp_path / "first", {"data": data, "resume": str(tmp_path / "first")}
    gloo(1)(fit, None, steps=1, data=data, out=first)
    assert "note:" not in gloo(1)(fit, None, steps=2, **usual)[0]
    [said] = gloo(1)(fit, None, steps=2, plan_hash="sha256:other", **usual)
    constants = "with the same constants of optimizer, learning rate, clipping, batch and precision"
    same = f"this plan's hash is another, {constants}"
    assert f"{same}\n" in said
    [said, _] = gloo(2)(fit, None, steps=2, ranks=2, plan_hash="sha256:other", **usual)
    assert f"{same}, and another mesh dp_shard = 1 → dp_shard = 2\n" in said
    [said] = gloo(1)(fit, None, steps=2, momentum=0.5, plan_hash="sha256:other", **usual)
    assert "this plan's hash is another, with other constants of the training: momentum 0.9 → 0.5\n" in said


def of_norms(path: str) -> bool:
    return path.endswith("norm.weight")


def of_last_norms(path: str) -> bool:
    return of_norms(path) and not path.startswith("layers.0.")


def fit_in_groups(first: dict, of: Callable[[str], bool], other: dict, **options) -> str:
    """What a run says whose optimizer has two groups of parameters, one by the names that a function selects."""

    def optimizer(parameters: ParameterGroups) -> torch.optim.Optimizer:
        named = parameters._left
        own = [parameter for name, parameter in named.items() if of(name)]
        rest = [parameter for name, parameter in named.items() if not of(name)]
        return torch.optim.SGD([{"params": rest, **first}, {"params": own, **other}])

    return fit(None, optimizer=optimizer, **options)


def test_notes_name_the_parameters_whose_constants_are_others(gloo, data, tmp_path):
    pool, usual = gloo(1), {"steps": 2, "data": data, "plan_hash": "sha256:other", "resume": str(tmp_path)}
    groups = {"lr": 1e-2, "momentum": 0.9}, {"lr": 1e-3, "momentum": 0.5}
    pool(fit_in_groups, groups[0], of_norms, groups[1], steps=1, data=data, out=tmp_path)
    [said] = pool(fit_in_groups, groups[0], of_norms, groups[1], **usual)
    assert "with the same constants of optimizer, learning rate, clipping, batch and precision\n" in said
    [said] = pool(fit_in_groups, groups[1], of_norms, groups[0], **usual)
    matrices = "layers.[0-1].attention.wk.weight, layers.[0-1].attention.wo.weight, layers.[0-1].attention.wq.weight"
    norms = "layers.[0-1].attention_norm.weight, layers.[0-1].ffn_norm.weight, norm.weight"
    for text in (f"lr 0.01 → 0.001 and momentum 0.9 → 0.5 for {matrices} and 6 more", f"0.5 → 0.9 for {norms}"):
        assert text in said
    [said] = pool(fit_in_groups, groups[0], of_last_norms, groups[1], **usual)
    moved = "layers.0.attention_norm.weight, layers.0.ffn_norm.weight"
    assert f"of the training: lr 0.001 → 0.01 and momentum 0.5 → 0.9 for {moved}\n" in said
    [said] = pool(fit_in_groups, groups[0], of_norms, groups[1] | {"nesterov": True}, **usual)
    assert f"of the training: nesterov False → True for {norms}\n" in said
    path = tmp_path / "checkpoints" / "step-1"
    details = json.loads((path / DETAILS).read_text(encoding="utf-8"))
    del details["constants"][GROUPS]
    (path / DETAILS).write_text(json.dumps(details), encoding="utf-8")
    record(path, DETAILS)
    [said] = pool(fit_in_groups, groups[1], of_norms, groups[0], **usual)
    assert "precision, but it does not record which parameters have which\n" in said and "same constants" not in said


def test_notes_name_clipping_micro_batch_and_precision(gloo, data, tmp_path):
    pool, usual = gloo(1), {"steps": 2, "plan_hash": "sha256:other", "data": data, "resume": str(tmp_path)}
    pool(fit, None, steps=1, data=data, out=tmp_path, clip_norm=1.0, param_dtype=torch.float32)
    [said] = pool(fit, None, **usual, micro_batch=1, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    dtypes = "param_dtype float32 → bfloat16, reduce_dtype none → bfloat16"
    assert f"with other constants of the training: micro_batch 2 → 1, clip_norm 1.0 → none, {dtypes}\n" in said
    later = ("micro_batch", "clip_norm", "param_dtype", "reduce_dtype")
    path = tmp_path / "checkpoints" / "step-1"
    details = json.loads((path / DETAILS).read_text(encoding="utf-8"))
    details["constants"] = {name: value for name, value in details["constants"].items() if name not in later}
    (path / DETAILS).write_text(json.dumps(details), encoding="utf-8")
    record(path, DETAILS)
    [said] = pool(fit, None, **usual, micro_batch=1)
    assert "this plan's hash is another, with the same constants of optimizer, learning rate and batch\n" in said
    [said] = pool(fit, None, **usual, momentum=0.5, clip_norm=3.0)
    assert "with other constants of the training: momentum 0.9 → 0.5\n" in said


def test_arguments_of_a_factory_are_noted(gloo, data, tmp_path):
    before, now = 'python("models:build", n = 2)', 'python("models:build", k = 5.0, n = 2)'
    pool = gloo(1)
    pool(fit, None, steps=1, data=data, out=tmp_path, factory=before)
    for given in ({"load_weights": tmp_path}, {"resume": str(tmp_path)}):
        assert "may compute something else" not in pool(fit, None, steps=2, data=data, factory=before, **given)[0]
        [said] = pool(fit, None, steps=2, data=data, factory=now, plan_hash="sha256:other", **given)
        assert f"the checkpoint's model has factory = {before}, and the plan's model {now}: with its weights" in said


def test_heads_of_a_model_of_images_are_recorded():
    sizes = {"dim": 32, "hidden_dim": 48, "n_layers": 1, "patch_size": 8, "image_size": 16, "n_classes": 4}
    first, other = (recorded(ViT(ViTConfig(**sizes, n_heads=heads))) for heads in (4, 2))
    assert {name for name in first if first[name] != other[name]} == {"num_attention_heads"}


def recorded(model: nn.Module) -> dict:
    return recorded_config(WholeModel.of(model))


def test_text_of_a_checkpoint_is_shown_in_one_line(gloo, data, tmp_path):
    given = {"data": data, "out": tmp_path / "run"}
    gloo(1)(fit, llama(LLAMA), steps=1, **given)
    forged = {"plan": "x\n\x1b[31merror[RUN001]: fake", "plan_hash": "\x1b[2J"}
    edit_meta(tmp_path / "run" / "checkpoints" / "step-1", digested=False, **forged)
    [said] = gloo(1)(fit, llama(LLAMA), steps=2, **given)
    [note] = [line for line in said.splitlines() if line.startswith("note: the checkpoint is of plan x")]
    assert "fake" in note and "\x1b" not in said
    for other, match in ((FEWER_HEADS, "the weights mean something else"), (DEEPER, "other names or shapes")):
        with pytest.raises(RunError, match=match) as caught:
            gloo(1)(fit, llama(other), steps=3, resume=str(tmp_path / "run" / "checkpoints" / "step-1"), data=data)
        assert "fake" in caught.value.message and caught.value.message.isprintable()
