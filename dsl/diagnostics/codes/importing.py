"""LP02x: a TorchTitan config from which `legoai import` makes a plan."""

from __future__ import annotations

from legoai.dsl.diagnostics.rule import Rule


class BrokenConfig(Rule):
    """A file that is not TOML, or a function of a Python file that cannot be followed.

    `legoai import` reads the TOML files that TorchTitan used until February 2026, and the functions that make its
    configs since then. It runs nothing: it follows assignments, calls and conditions whose values the files say. Name
    the function with `--config`, and move what it computes otherwise, such as values of the environment, out of it.
    """

    code = "LP021"
    slug = "broken-config"


class UnknownConfigKey(Rule):
    """An option that TorchTitan does not have.

    The options of January and August 2026 are known, and older names of its history since April 2024. TorchTitan itself
    rejects unknown options, unless a user's module adds them (`job.custom_config_module`). The plan is made without
    this one.
    """

    code = "LP022"
    slug = "unknown-config-key"
    severity = "warning"


class ConfigValue(Rule):
    """A value that an option of TorchTitan does not take, or that contradicts another option.

    Types, choices and bounds are those of its job config. Contradictions are, for example, degrees of parallelism
    whose product is not the number of devices.
    """

    code = "LP023"
    slug = "config-value"


class NotTranslated(Rule):
    """An option that changes what is trained, or how, and that no statement of a plan can express.

    The same is a value that a Python file computes, or a statement that changes the config, where it cannot be
    followed without running it. The plan is made without it. Options that do not affect the schedule, such as folders
    and intervals of logs, are listed and are no diagnostics.
    """

    code = "LP024"
    slug = "not-translated"
    severity = "warning"


class UnknownConfigModel(Rule):
    """A model or flavour of TorchTitan that is not built into LegoAI.

    Known are `llama3` in its flavours `8B`, `70B`, `405B` and `debugmodel`, in Python also `1B` and `3B`, `qwen3` with
    and without experts, and `deepseek_v3`. Write the plan of another model by hand, with its Hugging Face config
    (`model huggingface("config.json")`) or a factory of your own.
    """

    code = "LP025"
    slug = "unknown-config-model"
