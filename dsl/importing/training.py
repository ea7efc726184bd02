"""Updates of TorchTitan: optimizer, clipping and learning rate; checkpoints and validations in the course of a run."""

from __future__ import annotations

from decimal import Decimal

from legoai.dsl.formatting.unparse import quoted
from legoai.dsl.importing.draft import Draft


def add_training(draft: Draft) -> None:
    """Add options other than forward and backward: optimizer, checkpoints, validation."""
    config = draft.config
    if config["training.max_norm"] <= 0:
        config.wrong("training.max_norm", "gradients are clipped to a norm above 0")
    draft.lines += [_optimizer(draft), f"clip (norm = {_number(config['training.max_norm'])})", _schedule(draft)]
    draft.lines += _weights(draft)
    if config["checkpoint.enable"] and not config["checkpoint.load_only"]:
        beside = config["checkpoint.async_mode"] != "disabled"
        options = [f"every = {config['checkpoint.interval']}", f"keep = {config['checkpoint.keep_latest_k']}"]
        draft.lines.append(f"save ({', '.join([*options, *(['asynchronous = true'] if beside else [])])})")
    if config["validation.enable"]:
        options = [f"every = {config['validation.freq']}", *_batches(draft)]
        length = config["validation.seq_len"]
        if not config.format.is_python and length != config["training.seq_len"]:
            why = "validations take the sequence length of training"
            if "validation.seq_len" in config.given:
                draft.lost["validation.seq_len"] = why
            else:
                draft.notes.append(f"TorchTitan validates on sequences of {length} by default; here {why}")
        draft.lines.append(f"evaluate ({', '.join(options)})")
    seed, total = config["debug.seed"], config["lr_scheduler.total_steps"]
    draft.lines += [f"seed {seed}"] if seed is not None else []
    if any(line.startswith("schedule constant") for line in draft.lines) or total not in (
        None,
        config["training.steps"],
    ):
        draft.lines.append(f"steps {config['training.steps']}")  # by default those of the schedule


def _weights(draft: Draft) -> list[str]:
    """The weights with which a training starts: TorchTitan reads them where it finds no checkpoint of its own."""
    config = draft.config
    if not config["checkpoint.enable"]:
        return []
    path = config["checkpoint.initial_load_path"]
    if not config["checkpoint.initial_load_in_hf"]:
        if path:
            draft.lost["checkpoint.initial_load_path"] = (
                "`weights` starts with published weights: name them there, or a checkpoint of LegoAI by --load-weights"
            )
            if not config["checkpoint.initial_load_model_only"]:
                draft.lost["checkpoint.initial_load_model_only"] = "`weights` starts with a fresh optimizer"
        if config["checkpoint.initial_load_in_hf_quantized"]:
            config.wrong(
                "checkpoint.initial_load_in_hf_quantized", "quantized weights are read in Hugging Face's layout"
            )
        return []
    if not config["checkpoint.initial_load_model_only"]:
        config.wrong("checkpoint.initial_load_model_only", "weights of Hugging Face have no state of an optimizer")
    if config["checkpoint.initial_load_in_hf_quantized"]:
        draft.lost["checkpoint.initial_load_in_hf_quantized"] = "`weights` reads no quantized tensors"
    return [f"weights (huggingface = {quoted(path or config['model.hf_assets_path'])})"]


def _batches(draft: Draft) -> list[str]:
    """`batches` of validations: the micro batches of a rank that have the samples of TorchTitan's steps."""
    config = draft.config
    steps = config["validation.steps"]
    local = config[f"{'training' if config.format.is_python else 'validation'}.local_batch_size"]
    if steps < 1:
        draft.lost["validation.steps"] = "a validation takes a number of micro batches, not all of a dataset"
        return []
    samples = steps * local
    batches = -(-samples // max(1, draft.micro))
    if batches * draft.micro != samples:
        draft.notes.append(
            f"TorchTitan validates on {samples} samples of each data-parallel rank, {steps} times {local}; here "
            f"{batches} micro batches of {draft.micro} make {batches * draft.micro}"
        )
    return [f"batches = {batches}"]


def _optimizer(draft: Draft) -> str:
    config = draft.config
    how = config["optimizer.implementation"]
    if how == "for-loop":
        draft.lost["optimizer.implementation"] = "updates are fused, or made for lists of parameters"
    if how == "fused_opt_states_bf16":
        draft.lost["optimizer.implementation"] = "moments have the dtype of the parameters"
    fused = config["optimizer.fused"] if config.is_old else how.startswith("fused")
    betas = ", ".join(_number(config[f"optimizer.{name}"]) for name in ("beta1", "beta2"))
    options = [f"lr = {_number(config['optimizer.lr'])}", f"betas = [{betas}]"]
    if config["optimizer.eps"] != config.default("optimizer.eps"):
        options.append(f"eps = {_number(config['optimizer.eps'])}")
    options.append(f"weight_decay = {_number(config['optimizer.weight_decay'])}")
    return f"optimizer {config['optimizer.name'].lower()}({', '.join(options)}, fused = {str(bool(fused)).lower()})"


def _schedule(draft: Draft) -> str:
    """The learning-rate schedule: TorchTitan's last step is one beyond the end, so that it trains at a rate above 0."""
    config = draft.config
    steps = config["lr_scheduler.total_steps"] or config["training.steps"]
    warmup = min(config["lr_scheduler.warmup_steps"], steps)
    if config.is_old and warmup:
        draft.notes.append(
            f"TorchTitan of that time warms up by (step + 1) / {warmup + 1}, and is at the whole rate a step later; "
            f"here by (step + 1) / {warmup}"
        )
    ratio, form = config["lr_scheduler.decay_ratio"], config["lr_scheduler.decay_type"]
    floor = config["lr_scheduler.min_lr_factor"]
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    options = [f"warmup = {warmup}"] if warmup else []
    if decay < 1:
        return f"schedule constant({', '.join(options)})" if options else "schedule constant"
    options.append(f"steps = {steps}")
    if form == "sqrt" or decay < steps - warmup:
        options.append(f"decay = {decay}")
        options += [f"shape = {form}"] if form != "linear" else []
        form = "wsd"
    options += [f"floor = {_number(floor)}"] if floor else []
    return f"schedule {form}({', '.join(options)})"


def _number(value: float) -> str:
    """A number as a person writes it, which reads back to the same: 3e-4, 0.95, 1.0."""
    value = float(value)
    if not 0 < abs(value) < 1e-2:
        return repr(value)
    # The exact value of `repr`'s digits, which are the fewest that read back.
    digits, _, exponent = f"{Decimal(repr(value)):e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"
