"""LP1xx: text that is not in the plan language."""

from __future__ import annotations

from legoai.dsl.diagnostics.rule import Rule


class UnexpectedCharacter(Rule):
    """A character that the plan language does not use here.

    ## Example
    ```
    batch (global = 512; micro = 4, seq_len = 8192)
    ```

    ## Use instead
    Commas or newlines separate:
    ```
    batch (global = 512, micro = 4, seq_len = 8192)
    ```
    """

    code = "LP101"
    slug = "unexpected-character"


class UnexpectedToken(Rule):
    """A word or sign where another is expected.

    Every statement has one form: `keyword [value] [on axis, …] [(option = value, …)] [{ path = treatment … }]`.

    ## Example
    ```
    fsdp dp_shard on { root = unit }
    ```

    ## Use instead
    ```
    fsdp on dp_shard { root = unit }
    ```
    """

    code = "LP102"
    slug = "unexpected-token"


class UnclosedBracket(Rule):
    """A bracket that is never closed, or closed by one of another form.

    ## Example
    ```
    mesh (dp_shard = 32
    fsdp on dp_shard { root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { root = unit }
    ```
    """

    code = "LP103"
    slug = "unclosed-bracket"


class UnterminatedString(Rule):
    r"""A string whose closing quote is missing, or that is not in double quotes.

    Strings are in double quotes on one line; `\\"` and `\\\\` are a quote and a backslash.

    ## Example
    ```
    model llama3('8b')
    ```

    ## Use instead
    ```
    model llama3("8b")
    ```
    """

    code = "LP104"
    slug = "unterminated-string"


class UnknownUnit(Rule):
    """A number with a unit that the language does not have.

    Units are `B KiB MiB GiB TiB KB MB GB TB us ms s min %`.

    ## Example
    ```
    require peak_memory <= 72Gib
    ```

    ## Use instead
    ```
    require peak_memory <= 72GiB
    ```
    """

    code = "LP105"
    slug = "unknown-unit"


class MalformedPath(Rule):
    """A path pattern that cannot be read.

    A path is a module's name with dots: `*` matches one segment or a part of one, `**` any number, `{a, b}`
    either, and `{0..9}` for the numbers from 0 to 9.

    ## Example
    ```
    checkpoint { layers..attention = full }
    ```

    ## Use instead
    ```
    checkpoint { layers.*.attention = full }
    ```
    """

    code = "LP106"
    slug = "malformed-path"


class MalformedSolvedLine(Rule):
    """A `solved` line that the solver did not write.

    The line reads `solved "sha256:…" by legoai VERSION, device profile NAME@HASH, gap G%`, or `gap unknown`; then
    `, stopped at the time limit` or `, interrupted` where the search did not end by itself. It is written by
    `legoai solve`. Delete it where it is broken; solving writes a new one.
    """

    code = "LP107"
    slug = "malformed-solved-line"


class NotText(Rule):
    """A file that is not UTF-8 text.

    A plan is UTF-8 text without NUL characters. Save it in that encoding.
    """

    code = "LP108"
    slug = "not-text"


class NestedTooDeep(Rule):
    """A value with too deeply nested brackets, or a sum of too many terms.

    ## Use instead
    Give the inner part a name of its own:
    ```
    let hosts = 4
    let ranks = hosts * 8
    ```
    """

    code = "LP109"
    slug = "nested-too-deep"
