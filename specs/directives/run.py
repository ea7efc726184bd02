"""`data`, `weights`, `save`, `evaluate`, `seed` and `steps`: defaults of a run's command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Boolean, Integer, Text

HF_DATASET: Final = "hf:"
"""Prefix of a source that is a dataset of Hugging Face."""

HF_FORM: Final = f"{HF_DATASET}NAME[@REVISION][:CONFIG[:SPLIT]]"

HF_SOURCE: Final = rf"{HF_DATASET}(?P<name>[^:@]+)(@(?P<revision>[^:@]+))?(:(?P<config>[^:]*)(:(?P<split>.+))?)?"
"""Pattern of such a source."""

JSON_LINES: Final = frozenset({".jsonl", ".ndjson"})
"""Suffixes, in lower case, of files with a JSON object in each line."""

PARQUET: Final = ".parquet"
"""Suffix, in lower case, of Parquet files."""


class Data(Directive):
    r"""Training data. `--data`, `--data-field` and `--tokenizer` override them.

    Text is UTF-8; a byte-order mark at its beginning is left out. Half of a surrogate pair that JSON escapes, as
    `"\ud83d"` alone does, is read as U+FFFD. JSONL files end in `.jsonl` or `.ndjson`, and Parquet files in `.parquet`,
    in capitals or not. Compressed files are not read.

    Folders are read with those within them, also behind symbolic links, each once. Files and folders whose names begin
    with a dot are left out; a run reports other files that it leaves out, as their suffix is not one of text.

    Texts are read whole: the sections `truncation` and `padding` of a tokenizer's file are ignored. Without a tokenizer
    a zero byte ends a text, and a text that has one is refused.

    Tokens are cached under `$XDG_CACHE_HOME/legoai/corpora`, by default `~/.cache/legoai/corpora`. Files with the same
    names, sizes and times of change are taken for the same, wherever they are.

    Without this statement a model of images is trained on made patterns, as there are no other images, and any other
    model on the sources of Python's standard library.
    """

    keyword: ClassVar[str] = "data"

    source: str = option(
        Text(f"a quoted name, or `{HF_FORM}`", rf"(?!{HF_DATASET})(?s:.*)|{HF_SOURCE}"),
        doc='`"python"` (the standard library\'s sources), a text file, a JSONL or Parquet file or a folder of them, '
        f'relative to where the program is started; `"{HF_FORM}"`, a dataset of Hugging Face, '
        "or in place of NAME the folder of a saved one, which has no `:` or `@` in its name and needs "
        "`pip install 'legoai[datasets]'`; "
        '`"synthetic"` for made patterns, where the model reads images.',
    )
    field: str = option(
        Text(),
        doc=(
            "The field of a JSONL object that holds its text, or the column of a dataset or a Parquet file; the last "
            "needs `pip install 'legoai[parquet]'`."
        ),
        default="text",
    )
    tokenizer: str = option(
        Text("a quoted name"),
        doc=(
            "A Hugging Face `tokenizer.json`, or the folder that has it, relative to where the program is started; it "
            "needs `pip install 'legoai[tokenizers]'`. Without one each byte is a token."
        ),
        default="",
    )


class Weights(Directive):
    """Weights with which a new training starts, in place of drawn ones. `--load-weights` replaces it.

    A training that resumes has its own. Each rank reads what it holds, under any mesh. Names and layouts of published
    Llama, Mixtral, DeepSeek, GPT-2, Qwen2 and Qwen3 models are known, and those of a model that `transformers` builds.
    """

    keyword: ClassVar[str] = "weights"

    huggingface: str = option(
        Text("a quoted name"),
        doc=(
            "The folder of safetensors files, with their index and `config.json`, relative to where the program is "
            "started; it needs `pip install 'legoai[safetensors]'`."
        ),
    )


class Save(Directive):
    """Checkpoints in the course of the run, and after the last step. `--save-every` and `--keep` replace them."""

    keyword: ClassVar[str] = "save"

    every: int = option(Integer(minimum=1), doc="Steps between checkpoints.")
    keep: int = option(Integer(minimum=0), doc="Complete checkpoints kept; 0 keeps all.", default=3)
    asynchronous: bool = option(
        Boolean(),
        doc=(
            "Written beside the training, which waits only until they are copied to the host's memory. "
            "`--save-async` and `--no-save-async` replace it."
        ),
        default=False,
    )


class Evaluate(Directive):
    """Validations in the course of the run. `--evaluate-every` and `--evaluate-batches` replace them."""

    keyword: ClassVar[str] = "evaluate"

    every: int = option(Integer(minimum=1), doc="Steps between validations.")
    batches: int = option(
        Integer(minimum=1),
        doc="Micro batches of one rank in a validation; a pipeline rounds up to whole passes.",
        default=8,
    )


class Seed(Directive):
    """The seed of weights, data order and dropout. `--seed` replaces it."""

    keyword: ClassVar[str] = "seed"
    subject: ClassVar[str | None] = "value"
    absent: ClassVar[Mapping[str, Any] | None] = {"value": 0}

    value: int = option(Integer(minimum=0, maximum=2**64 - 1), doc="The seed; 0 where no statement says it.")


class Steps(Directive):
    """Optimizer steps of the whole training; by default those of `schedule`. `--steps` replaces it."""

    keyword: ClassVar[str] = "steps"
    subject: ClassVar[str | None] = "count"

    count: int = option(Integer(minimum=1), doc="Their number.")
