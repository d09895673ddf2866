"""The rows of Parquet files as values that JSON can hold."""

import os
from collections.abc import Iterator
from typing import Any

from megajax.errors import InputError, shown

COLUMNS_SHOWN = 10
EXPANSION = 200  # of a file's bytes; text's is below 30
REPETITION = 1000  # the same with the repeated values of dictionaries
TOGETHER = 1 << 30  # bytes of rows that are read together, at most
FEWEST = 8  # rows that are read together


def read_rows(path: str, column: str | None, option: str, skip: int, rows: int, most: int) -> Iterator[tuple[Any, int]]:
    """Each row after the first `skip`, and its share of the file's bytes; of one `column`, None: of all.

    At most `rows` are read together. A row may have `most` bytes. `option` is the setting that gave the column.
    """
    import pyarrow
    from pyarrow import parquet

    row, read_bytes, size = 0, 0, os.path.getsize(path)
    try:
        with parquet.ParquetFile(path) as file:
            _check_names(path, file.schema_arrow.names, column, option)
            total = max(1, file.metadata.num_rows)
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                if row + group.num_rows <= skip:
                    row += group.num_rows
                    continue
                where = f"{path}, row group {number}"
                together = _rows_together(where, group, size, rows, most)
                for batch in file.iter_batches(together, [number], None if column is None else [column]):
                    for part, part_bytes in _parts(batch, most):
                        read_bytes += part_bytes
                        if read_bytes > max(most, REPETITION * size):
                            raise _expanding(where, size, read_bytes)
                        if part_bytes > most:
                            _check_rows(where, row, part, most)
                        for record in _records(where, row, part):
                            row += 1
                            if row > skip:
                                yield record, size * row // total - size * (row - 1) // total
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise InputError(
            f"{path} cannot be read beyond row {row} ({shown(str(error).strip())}): it is damaged or incomplete; "
            "copy or download it again."
        ) from None


def _check_names(path: str, names: list[str], column: str | None, option: str) -> None:
    if column is not None and column not in names:
        raise InputError(
            f'{path} has no column "{column}" (its columns: {", ".join(names[:COLUMNS_SHOWN])}): name '
            f"the column of the text with {option}."
        )
    twice = [name for name in names if names.count(name) > 1 and column in (None, name)]
    if twice:
        raise InputError(f'{path} has {names.count(twice[0])} columns "{twice[0]}": rename all but one.')


def _rows_together(where: str, group: Any, stored: int, rows: int, most: int) -> int:
    """The rows of a row group to read together, by the size that it declares; InputError if no text has it.

    Not by the columns' sizes: pyarrow ends the process if their metadata are damaged.
    """
    declared = max(1, group.total_byte_size)
    if declared > max(most, min(group.num_rows * most, EXPANSION * stored)):
        raise _expanding(where, stored, declared)
    return min(rows, max(FEWEST, TOGETHER // declared))


def _expanding(where: str, stored: int, read: int) -> InputError:
    return InputError(
        f"{where}: the file's {stored:,} bytes become {read:,} when they are read, which text doesn't: write it again "
        "without long repeated values."
    )


def _parts(batch: Any, most: int) -> Iterator[tuple[Any, int]]:
    """The rows of a batch in parts of about `most` bytes, with their bytes."""
    step = _rows_at_once(batch, most)
    for start in range(0, batch.num_rows, step):
        part = batch.slice(start, step)
        yield part, _bytes(part)


def _records(where: str, before: int, part: Any) -> Iterator[dict[str, Any]]:
    """The rows of a part, whose first one has `before` rows before it in the file."""
    try:
        yield from _with_text(part).to_pylist()
    except Exception:  # of values that Python cannot hold; pyarrow has many kinds
        yield from _one_by_one(where, before, part)


def _rows_at_once(batch: Any, most: int) -> int:
    """So many rows that they have about `most` bytes; each may have the longest value of a dictionary."""
    of_row = sum(column.nbytes / (1 if _is_dictionary(column) else batch.num_rows) for column in batch.columns)
    return max(1, min(batch.num_rows, int(most / max(1.0, of_row))))


def _bytes(batch: Any) -> int:
    return sum((column.dictionary_decode() if _is_dictionary(column) else column).nbytes for column in batch.columns)


def _is_dictionary(column: Any) -> bool:
    return hasattr(column, "dictionary_decode")


def _check_rows(where: str, before: int, batch: Any, most: int) -> None:
    for number in range(batch.num_rows):
        if (size := _bytes(batch.slice(number, 1))) > most:
            raise InputError(
                f"{where}, row {before + number + 1} has {size >> 20} MiB, but a document has at most {most >> 20}: "
                "divide it."
            )


def _one_by_one(where: str, before: int, batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch up to the first with a value that cannot be read."""
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        for name in row.schema.names:
            try:
                _with_text(row.select([name])).to_pylist()
            except Exception as error:
                raise InputError(
                    f"{where}, row {before + number + 1}, column {name}: its value cannot be read "
                    f"({shown(str(error).strip())}): correct it, or leave the column out."
                ) from None
        yield from _with_text(row).to_pylist()


def _with_text(batch: Any) -> Any:
    """A batch with dates and times as text: Python's have other limits."""
    import pyarrow

    fields = [field.with_type(_text_type(field.type)) for field in batch.schema]
    return batch if fields == [*batch.schema] else batch.cast(pyarrow.schema(fields))


def _text_type(kind: Any) -> Any:
    """A type with text in place of all dates, times and durations in it."""
    import pyarrow
    from pyarrow import types

    if types.is_temporal(kind) and not types.is_interval(kind):
        return pyarrow.string()
    inner = [kind.field(number) for number in range(kind.num_fields)] if types.is_nested(kind) else []
    changed = [field.with_type(_text_type(field.type)) for field in inner]
    if changed == inner:
        return kind
    if types.is_struct(kind):
        return pyarrow.struct(changed)
    if types.is_map(kind):
        return pyarrow.map_(*changed[0].type)
    return pyarrow.large_list(changed[0])
