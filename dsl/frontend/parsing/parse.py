"""Reads a plan's text into its syntax tree, going on after a mistake so that one does not hide the next."""

from __future__ import annotations

import re
from functools import lru_cache

from lark import Token
from lark.exceptions import LarkError, UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.utils import TextSlice

from legoai.dsl.diagnostics.codes import syntax as rules
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.frontend.parsing.build import Builder, NestedTooDeepError
from legoai.dsl.frontend.parsing.lalr import grammar
from legoai.dsl.frontend.syntax import AnyStatement, Comment, PlanFile
from legoai.dsl.frontend.text import Lines
from legoai.specs.record import Record
from legoai.specs.span import Span
from legoai.specs.units import UNITS

KEYWORDS = ("plan", "extends", "let", "variant", "require", "minimize", "maximize", "solved", "unset")
"""Statements of the language itself; the others are directive families."""

_SCAN = re.compile(r'"(?:[^"\\\n]|\\.)*"?|#[^\n]*|[()\[\]{}]|\n')
_HEAD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*(?![A-Za-z0-9_ \t]*[=.])")
_VARIANT = re.compile(r"variant[ \t]")
_CLOSED = re.compile(r'"(?:[^"\\\n]|\\["\\nt])*\\[^"\\nt\n](?=(?:[^"\\\n]|\\.)*")')
"""A closed string, up to its first unknown escape."""
_DASHED = re.compile(r"[A-Za-z_]\w*(?:-\w+)+$")
_FIRST_WORDS = re.compile(r'model[ \t]+([\w./-]+(?:\("?[\w./-]+)?)')
_NUMBERS_IN_SPLIT = re.compile(r"\bsplit[ \t]*=[ \t]*\[(?:[^\]]*[ \t,\[])?(\d[\d.]*)$")
_LAST_WORD = re.compile(r"[\w.]+")
_NESTED_BRACES = re.compile(r"\{[^{}=#\n]*\{[^{}=#\n]*\}")
_BARE_OPTION = re.compile(r"([a-z_]\w*)[ \t]+([a-z_]\w*)")
_SLICE = re.compile(r"\[(\d+)(?:([-:])(\d+))?\]")
_TUPLE = re.compile(r"=[ \t]*\([^()]*$")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MOST_MISTAKES = 20


class Parsed(Record):
    """A file's tree, the diagnostics about its text, and the statements with syntax errors."""

    file: PlanFile
    diagnostics: tuple[Diagnostic, ...]
    damaged: tuple[Span, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    """As :func:`chunks` gives them."""


@lru_cache(maxsize=8)
def parse(text: str, name: str) -> Parsed:
    """Parse the text of the file called ``name``. Never raises for any text; every error becomes a diagnostic.

    The last results are cached: a plan with variants is resolved once for each of them.
    """
    lines = Lines(text, name)
    scan = _scan(lines)
    statements: list[AnyStatement] = []
    diagnostics: list[Diagnostic] = []
    damaged = []
    for start, end in scan.chunks:
        found, mistakes = _parse_chunk(lines, start, end)
        statements.extend(found)
        diagnostics.extend(mistakes)
        if mistakes:
            damaged.append(lines.span(start, end))
    file = PlanFile(name, text, tuple(statements), scan.comments)
    return Parsed(file, tuple(diagnostics), tuple(damaged), tuple(scan.chunks))


def chunks(text: str) -> list[tuple[int, int]]:
    """Return the start of each statement and of the next one, even in unreadable text."""
    return _scan(Lines(text, "")).chunks


class _Scanned(Record):
    comments: tuple[Comment, ...]
    chunks: list[tuple[int, int]]


def _scan(lines: Lines) -> _Scanned:
    """Find comments, and the starts of statements: in column 1 outside brackets.

    Inside brackets a line in column 1 still begins a statement if its first word is a keyword and cannot be a rule or
    option; then a bracket above it was not closed. Only a variant whose bracket is closed further down may contain
    statements that are not indented.
    """
    from legoai.specs.directives import FAMILIES

    text = lines.text
    comments = []
    heads: list[int] = []
    closed_variants: dict[int, bool] = {}
    depth = 0
    line_start = 0
    position = 0
    while True:
        word = _HEAD.match(text, line_start)
        known = word is not None and (word[1] in FAMILIES or word[1] in KEYWORDS)
        inside = known and depth == 1 and bool(heads)
        if inside and heads[-1] not in closed_variants:
            closed_variants[heads[-1]] = _in_variant(text, heads[-1], line_start)
        if word and (depth == 0 or (known and not (inside and closed_variants[heads[-1]]))):
            heads.append(line_start)
            depth = 0
        elif depth == 0 and line_start < len(text) and text[line_start] not in " \t\r\n#})]":
            heads.append(line_start)
        line_end = False
        while match := _SCAN.search(text, position):
            position = match.end()
            sign = match[0]
            if sign == "\n":
                line_start, line_end = position, True
                break
            if sign[0] == "#":
                alone = not text[line_start : match.start()].strip()
                written = sign.rstrip("\r")
                comments.append(Comment(written, alone, lines.span(match.start(), match.start() + len(written))))
            elif sign in _CLOSING:
                depth += 1
            elif sign in ")]}":
                depth = max(0, depth - 1)
        if not line_end:
            break
    ends = [*heads[1:], len(text)] if heads else []
    first = heads[0] if heads else len(text)
    leading = [(0, first)] if text[:first].strip() and _has_code(text[:first]) else []
    return _Scanned(tuple(comments), leading + list(zip(heads, ends, strict=True)))


def _in_variant(text: str, head: int, position: int) -> bool:
    """Whether the statement that begins at ``head`` is a variant that is closed somewhere after ``position``."""
    if _VARIANT.match(text, head) is None:
        return False
    depth = 0
    for match in _SCAN.finditer(text, position):
        depth += (match[0] in _CLOSING) - (match[0] in (")", "]", "}"))
        if depth < 0:
            return match[0] == "}"
    return False


def _has_code(text: str) -> bool:
    return any(line.strip() and not line.strip().startswith("#") for line in text.split("\n"))


def _parse_chunk(lines: Lines, start: int, end: int) -> tuple[list[AnyStatement], list[Diagnostic]]:
    """Parse one statement. After a mistake on a line of its own, parse again without that line."""
    diagnostics: list[Diagnostic] = []
    text = lines.text
    while len(diagnostics) < _MOST_MISTAKES:
        try:
            tree = grammar().parse(TextSlice(text, start, end))
        except UnexpectedInput as error:
            diagnostic, position = _explain(error, lines, start, end)
            diagnostics.append(diagnostic)
            masked = _without_line(text, position, start, end)
            if masked is None:
                return [], diagnostics
            text = masked
        except LarkError as error:
            raise AssertionError(f"the grammar failed on {text[start:end]!r}") from error
        else:
            builder = Builder(lines)
            try:
                found = builder.statements(tree)
            except NestedTooDeepError as error:
                return [], [*diagnostics, error.diagnostic]
            return found, diagnostics + builder.diagnostics
    return [], diagnostics


def _without_line(text: str, position: int, start: int, end: int) -> str | None:
    """Return the text with the line at ``position`` blanked; None where the chunk depends on the line."""
    first = text.rfind("\n", 0, position) + 1
    last = text.find("\n", position)
    last = len(text) if last < 0 else last
    line = _SCAN.sub(lambda match: match[0] if match[0] in "()[]{}" else "", text[first:last])
    signs = re.sub(r"[^()\[\]{}]", "", line)
    while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", signs)) != signs:
        signs = shorter
    if first <= start or last > end or signs or not text[first:last].strip():
        return None
    return text[:first] + " " * (last - first) + text[last:]


def _explain(error: UnexpectedInput, lines: Lines, start: int, end: int) -> tuple[Diagnostic, int]:
    """Return the diagnostic for lark's error, and the character at fault."""
    text = lines.text
    bracket = _unclosed(text, start, end)
    if isinstance(error, UnexpectedCharacters):
        position = error.pos_in_stream or 0
        return _unexpected_character(lines, position), position
    assert isinstance(error, UnexpectedToken), f"lark has another error: {error!r}"
    token = error.token
    if token.type == "$END" or (bracket is not None and token.start_pos >= end):
        position = bracket[0] if bracket else max(start, len(lines.text[:end].rstrip()) - 1)
    else:
        position = token.start_pos or start
    if bracket is not None and (token.type == "$END" or _is_wrong_closer(token, lines.text, bracket[0])):
        opener = lines.span(bracket[0], bracket[0] + 1)
        closer = _CLOSING[bracket[1]]
        wrong = [] if token.type == "$END" else [Label(lines.span(position, position + 1), f"not `{closer}`")]
        return (
            rules.UnclosedBracket.at(
                opener, f"this `{bracket[1]}` is not closed", label=f"no `{closer}` belongs to it", others=wrong,
                help=[f"close it with `{closer}`" + ("" if wrong else " before the next statement")],
            ),
            bracket[0],
        )  # fmt: skip
    if str(token) in (")", "]", "}") and not _open_at(text, start, position):
        return (
            rules.UnclosedBracket.at(
                lines.span(position, position + 1), f"this `{token}` closes nothing", label="no bracket is open here",
                help=["delete it, or write the bracket that it should close"],
            ),
            position,
        )  # fmt: skip
    expected = _expected(set(error.accepts or error.expected))
    found = _found(token)
    span = lines.span(
        position, position + max(1, len(str(token).rstrip())) if token.type not in ("$END", "_NL") else position + 1
    )
    return (
        rules.UnexpectedToken.at(span, f"expected {expected}, found {found}", label=f"expected {expected}",
                                 help=_hints(token, lines.text, position, expected)),
        position,
    )  # fmt: skip


_FOREIGN = (
    (";", "separate with a comma or a new line"),
    (":", "options and rules are written `name = value`"),
    ("≤≥≠!&|", "comparisons are `<=`, `>=`, `<`, `>` and `==`"),
    ("×·", "multiplication is written `*`"),
    ("–—−", "a minus is written `-`"),
    ("→", "the solver's answer stands behind `->`"),
    ("\u00a0", "this is a non-breaking space: write a plain one"),
    ("\ufeff", "this is a byte order mark: save the file without it"),
    ("\r", "lines end with a line feed, or with a carriage return and a line feed: save the file with such line ends"),
    ("\f\v", "this is a page or column break: delete it"),
)
"""Characters of other languages, with their equivalents here."""


def _unexpected_character(lines: Lines, position: int) -> Diagnostic:
    character = lines.text[position]
    span = lines.span(position, position + 1)
    if escape := _CLOSED.match(lines.text, position):
        return rules.UnterminatedString.at(
            lines.span(escape.end() - 2, escape.end()), f"there is no escape `{escape[0][-2:]}`", label="not an escape",
            help=['escapes are `\\"`, `\\\\`, `\\n` and `\\t`; a backslash is written twice'],
        )  # fmt: skip
    if character in "\"'“”‘’":
        end = lines.text.find("\n", position)
        rest = lines.span(position, len(lines.text) if end < 0 else end)
        return rules.UnterminatedString.at(
            rest if character == '"' else span,
            "this string is not closed" if character == '"' else "strings stand in double quotes",
            label='no closing `"` on this line' if character == '"' else f'not `{character}` but `"`',
        )
    help = [text for characters, text in _FOREIGN if character in characters]
    word = lines.text[lines.text.rfind("\n", 0, position) + 1 : position].strip()
    if character == ":" and _is_family(word):
        help = _own_statement(word)
    if not help and character.isalnum():
        help = ["names have the letters a to z and A to Z, digits and `_`; others stand in strings and comments alone"]
    shown = character if character.isprintable() else f"U+{ord(character):04X}"
    return rules.UnexpectedCharacter.at(
        span, f"unexpected character `{shown}`", label="begins nothing in the plan language", help=help
    )


def _unclosed(text: str, start: int, end: int) -> tuple[int, str] | None:
    """The innermost bracket of the chunk that is open at its end."""
    stack: list[tuple[int, str]] = []
    for match in _SCAN.finditer(text, start, end):
        sign = match[0]
        if sign in _CLOSING:
            stack.append((match.start(), sign))
        elif sign in (")", "]", "}"):
            if not stack or _CLOSING[stack[-1][1]] != sign:
                return stack[-1] if stack else None
            stack.pop()
    return stack[-1] if stack else None


def _open_at(text: str, start: int, position: int) -> bool:
    """Whether a bracket is open at ``position``."""
    depth = 0
    for match in _SCAN.finditer(text, start, position):
        depth += (match[0] in _CLOSING) - (match[0] in (")", "]", "}"))
    return depth > 0


def _is_wrong_closer(token: Token, text: str, opener: int) -> bool:
    return str(token) in (")", "]", "}") and str(token) != _CLOSING[text[opener]]


_WORDS = {
    "NAME": "a name", "PATH": "a path", "LBRACE": "`{`", "RBRACE": "`}`", "LPAR": "`(`", "RPAR": "`)`", "LSQB": "`[`",
    "RSQB": "`]`", "EQUAL": "`=`", "COMMA": "`,`", "_NL": "a new line", "$END": "the end of the statement",
    "ON": "`on`", "IN": "`in`", "ARROW": "`->`", "COMPARISON": "a comparison such as `<=`", "__ANON_0": "`..`",
    "NUMBER": "a number", "STRING": "a string",
}  # fmt: skip
_VALUE = {"NUMBER", "STRING", "TRUE", "FALSE", "NAME", "LSQB"}
_MINOR = {
    "PLUS",
    "MINUS",
    "STAR",
    "SLASH",
    "FLOOR",
    "PERCENT",
    "DOTTED",
    "DIGIT_NAME",
    "AUTO",
    "TRUE",
    "FALSE",
    "LET",
    "REQUIRE",
    "VARIANT",
    "SOLVED",
    "UNSET",
}


def _expected(terminals: set[str]) -> str:
    words = []
    if terminals >= _VALUE:
        words.append("a value")
        terminals = terminals - _VALUE - {"LPAR", "MINUS"}
    elif "VARIANT" in terminals:
        words.append("a statement")
        terminals = terminals - {"NAME"}
    if "COMMA" in terminals and "_NL" in terminals:
        words.append("`,`")
        terminals = terminals - {"COMMA", "_NL"}
    if "$END" in terminals:
        terminals = terminals - {"_NL"}
    words += sorted(_WORDS[terminal] for terminal in terminals - _MINOR)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _found(token: Token) -> str:
    if token.type == "$END":
        return "the end of the statement"
    if token.type == "_NL":
        return "the end of the line"
    return f"`{token}`"


def _own_statement(word: str) -> list[str]:
    """Return help on ``word = …`` where a statement is expected."""
    from legoai.dsl.diagnostics.vocabulary import our_form
    from legoai.specs.directives import FAMILIES, family

    if word in FAMILIES:
        subject = family(word).subject
        return [f"a statement has no sign behind its keyword: `{word} {'…' if subject else '(…)'}`"]
    holders = [keyword for keyword in FAMILIES for item in family(keyword).options if item.name == word]
    own = [f"`{word}` is an option: `{keyword} ({word} = …)`" for keyword in holders]
    form = our_form(word)
    return own or ([form] if form else [])


def _hints(token: Token, text: str, position: int, expected: str) -> list[str]:
    before = text[text.rfind("\n", 0, position) + 1 : position].rstrip()
    sign = str(token)
    if token.type == "_NL" and before.endswith(("=", "<", ">")):
        return ["the value stands on the same line"]
    first = before.partition(" ")[0]
    if first == "model" and (name := _FIRST_WORDS.match(text, position - len(before))):
        from legoai.dsl.diagnostics.model_names import our_model

        if ours := our_model(name[1]):
            return [f"write `model {ours}`"]
    if expected == "`=`" and before and (sign in ("}", ",") or token.type == "_NL"):
        treatment = _some_treatment(text, position)
        return [f"a rule gives a path its treatment: `{before.split()[-1]} = {treatment}`"] if treatment else []
    if token.type == "MINUS":
        return ["names are written with `_`"]
    if sign == "=" and first == before and before.isidentifier():
        return _own_statement(before)
    if sign == "=" and (bare := _BARE_OPTION.fullmatch(before)) and _is_family(bare[1]):
        return [f"options stand in parentheses: `{bare[1]} ({bare[2]} = …)`"]
    words = _LAST_WORD.findall(before)
    if sign == "[" and words and (sliced := _SLICE.match(text, position)):
        return [f"numbers of blocks stand behind a dot: `{words[-1]}.{_numbers(sliced)}`"]
    if sign == "," and _TUPLE.search(before):
        return ["a list stands in brackets: `[…]`"]
    if sign == "," and first == "require":
        return ["every requirement is a statement of its own, on its own line"]
    if sign == "{" and not before and _is_family(text[:position].rstrip().rpartition("\n")[2].partition(" ")[0]):
        return ["a block begins on the line of its statement"]
    if sign.startswith(".") and (begun := _NUMBERS_IN_SPLIT.search(before)):
        return [f'a path that begins with a number stands in quotes: `"{begun[1]}{sign}"`']
    if "`,`" in expected and "=" in before and token.type in ("DOTTED", "NAME", "PATH"):
        return ["separate with a comma or a new line"]
    if sign == "=" and (dashed := _DASHED.search(before)):
        return [f"names are written with `_`: `{dashed[0].replace('-', '_')}`"]
    if sign == "//":
        return ["comments begin with `#`"]
    if sign == "{" and _NESTED_BRACES.match(text, position):
        return ["braces in a path hold names, or a range of numbers, and do not nest: write a rule for each path"]
    if sign == "{" and before.endswith(" on"):
        return ["axes stand behind `on`: `fsdp on dp_shard { … }`"]
    if sign in UNITS and before[-1:].isdigit():
        return [f"a unit stands right behind its number: `{words[-1]}{sign}`"]
    return []


def _some_treatment(text: str, position: int) -> str | None:
    """Return a treatment that the statement has in whose block ``position`` is; None outside of one."""
    from legoai.specs.directives import FAMILIES, family

    while (position := text.rfind("{", 0, position)) >= 0:
        word = text[text.rfind("\n", 0, position) + 1 : position].partition(" ")[0]
        if word in FAMILIES:
            kinds = family(word).treatments
            return None if kinds is None else next(one.name for one in kinds.treatments if one.name != "none")
    return None


def _is_family(word: str) -> bool:
    from legoai.specs.directives import FAMILIES

    return word in FAMILIES


def _numbers(sliced: re.Match[str]) -> str:
    """A slice as a path writes it; `0:8` ends before 8, and `0-7` with 7."""
    if sliced[3] is None:
        return sliced[1]
    return f"{{{sliced[1]}..{int(sliced[3]) - (sliced[2] == ':')}}}"
