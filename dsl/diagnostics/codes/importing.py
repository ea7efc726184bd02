"""LP02x: a TorchTitan config from which `legoai import` makes a plan."""

from __future__ import annotations

from legoai.dsl.diagnostics.rule import Rule


class BrokenConfig(Rule):
    """A file that is no TOML.

    `legoai import` reads the TOML files with which TorchTitan was configured until February 2026.
    """

    code = "LP021"
    slug = "broken-config"


class UnknownConfigKey(Rule):
    """An option that TorchTitan does not have.

    The options of January 2026 are known, and the older names of its history since April 2024. TorchTitan itself
    refuses what it does not know, unless a module of the user's adds options (`job.custom_config_module`). The plan is
    made without it.
    """

    code = "LP022"
    slug = "unknown-config-key"
    severity = "warning"


class ConfigValue(Rule):
    """A value that an option of TorchTitan does not take, or that contradicts another option.

    Types, choices and bounds are those of its job config. What contradicts are, for example, degrees of parallelism
    whose product is not the number of devices.
    """

    code = "LP023"
    slug = "config-value"


class NotTranslated(Rule):
    """An option that changes what is trained, or how, and for which no statement of a plan stands.

    The plan is made without it. Options on which no schedule depends, such as folders and intervals of logs, are listed
    and are no diagnostics.
    """

    code = "LP024"
    slug = "not-translated"
    severity = "warning"


class UnknownConfigModel(Rule):
    """A model or flavour of TorchTitan that is no built-in of LegoAI.

    Known are `llama3` in its flavours `8B`, `70B`, `405B` and `debugmodel`, and `qwen3` without experts. Write the plan
    of another model by hand, over its Hugging Face config (`model huggingface("config.json")`) or a factory of your
    own.
    """

    code = "LP025"
    slug = "unknown-config-model"
