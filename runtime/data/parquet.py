"""Texts of columns of Arrow, and of Parquet files: one column, read in batches of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from legoai.runtime.errors import RunError, RunErrorCode

_ROWS: Final = 1024
"""Rows that are decoded together."""


def column_texts(path: Path, column: str) -> Iterator[bytes]:
    """Yield the texts of a column, in the order of the rows.

    Raises:
        RunError: the file is no Parquet, has no such column, or a row of it has no text; or the package `pyarrow` is
            missing.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise RunError(
            RunErrorCode.NO_PYARROW,
            f"{path} needs the package `pyarrow`, which is not installed",
            help="`pip install 'legoai[parquet]'` installs it",
        ) from None
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            check_column(str(path), column, file.schema_arrow)
            batches = file.iter_batches(batch_size=_ROWS, columns=[column])
            yield from texts_of(str(path), column, (batch.column(0) for batch in batches))
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(f"{path} is damaged, or no Parquet file", error) from None


def texts_of(source: str, column: str, pieces: Iterable[Any]) -> Iterator[bytes]:
    """Yield the texts of a column that is given in pieces, which are read as they are needed.

    Raises:
        RunError: a row has no text, or a piece is damaged.
    """
    import pyarrow

    number = 0
    try:
        for piece in pieces:
            for text in piece.to_pylist():
                number += 1
                if text is None:
                    raise RunError(
                        RunErrorCode.DATA_FORMAT,
                        f"{source}: row {number} has no text in {column!r}",
                        help="remove the row, or name another column with --data-field",
                    )
                yield text.encode("utf-8", errors="surrogateescape")
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise _damaged(f"{source} is damaged behind row {number}", error) from None


def _damaged(what: str, error: Exception) -> RunError:
    said = " ".join(str(error).split())[:200]
    return RunError(
        RunErrorCode.DATA_FORMAT, f"{what}: {said}", help="write or copy it again, or leave it out of the source"
    )


def check_column(source: str, column: str, schema: Any) -> None:
    """Check that a column exists and contains texts, in any encoding.

    Raises:
        RunError: it does not.
    """
    import pyarrow

    if column not in schema.names:
        raise RunError(
            RunErrorCode.DATA_FORMAT,
            f"{source} has no column {column!r}: it has {', '.join(schema.names) or 'none'}",
            help="name the column that holds the text with --data-field",
        )
    if schema.names.count(column) > 1:
        raise RunError(
            RunErrorCode.DATA_FORMAT,
            f"{source} has the column {column!r} twice, or more often",
            help="write it again with one column of that name, or name another column with --data-field",
        )
    kind = schema.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    texts = ("is_string", "is_large_string", "is_string_view")
    if not any(check(kind) for name in texts if (check := getattr(pyarrow.types, name, None)) is not None):
        raise RunError(
            RunErrorCode.DATA_FORMAT,
            f"{source}: the column {column!r} has {kind}, and no text",
            help="name the column that holds the text with --data-field",
        )
