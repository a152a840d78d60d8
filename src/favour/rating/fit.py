"""How rows become inputs: columns, shape and dtype that fit both data and model, or an error that says why none do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from favour.errors import InvalidValue
from favour.extras import require
from favour.rating.models import Rater
from favour.rating.options import Options
from favour.rating.reading import Bad, Reading, chunks
from favour.rating.sources import Data, Unit, is_numeric, open_parquet
from favour.rating.text import hint


def reading_for(data: Data, options: Options, rater: Rater | None, rows: Any = None) -> Reading:
    """Columns, shape and dtype that fit both data and model, or an error that says why there are none.

    `rows` is an Arrow table of some of the rows; read from the first file if it is needed and None.
    """
    wanted = rater.shape if rater is not None else None
    dtype = rater.dtype if rater is not None else options.dtype or "float32"
    columns: tuple[str, ...] = ()
    if data.kind == "images":
        shape = _image_shape(options, wanted)
        channels = shape[0]
        for name, values in (("mean", options.mean), ("std", options.std)):
            if values is not None and len(values) not in (1, channels):
                raise InvalidValue(f"`{name}` has {len(values)} values and the images have {channels} channels.")
        return Reading((), options.id, dtype, shape, options.mean or (), options.std or ())
    if data.kind == "npy":
        if options.columns or options.id:
            raise InvalidValue("an NPY file has no named columns; leave out `columns` and `id`.")
        assert data.shape is not None
        row = data.shape
    else:
        columns = _chosen(data, options, wanted)
        row = _row_shape(data, columns, wanted, rows)
    return Reading(columns, options.id, dtype, _fitted(row, wanted, columns), header=data.header)


def _chosen(data: Data, options: Options, wanted: tuple[int | None, ...] | None) -> tuple[str, ...]:
    """Names of the features: those that were asked for, or all that hold numbers and are not the id."""
    file, has = data.files[0], ", ".join(name or "''" for name in data.names)
    columns = options.columns or tuple(name for name in data.numeric if name != options.id)
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        raise InvalidValue(f"`columns` names {', '.join(repeated)} twice; each column is one feature.")
    missing = [n for n in (*columns, *([options.id] if options.id else [])) if n not in data.names]
    if missing:
        raise InvalidValue(f"`{file}` has no column {', '.join(missing)}; it has {has}.{hint(data.names)}")
    unclear = [name for name in data.unclear if name != options.id]
    if unclear and not options.columns:
        columns = tuple(name for name in data.names if name in columns or name in unclear)
        # As many as the model takes: there is no other choice.
        if wanted is None or None in wanted or len(columns) != int(np.prod([size or 0 for size in wanted])):
            raise InvalidValue(
                f"column `{unclear[0]}` of `{file}` is neither one of numbers nor one of text in its first rows; "
                "choose the features with `columns`."
            )
    if not columns:
        raise InvalidValue(f"`{file}` has no column of numbers; it has {has}.{hint(data.names)}")
    if "" in columns and not options.columns:
        raise InvalidValue(
            f"column {data.names.index('') + 1} of `{file}` holds numbers and has no name, as an index that was "
            "written along; choose the features with `columns`."
        )
    return columns


def _row_shape(
    data: Data, columns: tuple[str, ...], wanted: tuple[int | None, ...] | None, rows: Any
) -> tuple[int, ...]:
    """(features,): the number of columns, or the length of the lists in a column of lists."""
    pa = require("pyarrow", "rate")
    if data.kind == "csv":
        return (len(columns),)
    if rows is None:
        with open_parquet(data.files[0]) as file:
            empty = file.schema_arrow.empty_table()
            rows = next((pa.Table.from_batches([b]) for b in file.iter_batches(1024, columns=list(columns))), empty)
    kinds = {name: rows.schema.field(name).type for name in columns}
    nested = [name for name, kind in kinds.items() if pa.types.is_nested(kind)]
    if not nested:
        return (len(columns),)
    if len(columns) > 1 or not is_numeric(kinds[nested[0]]):
        raise InvalidValue(
            f"column `{nested[0]}` holds {kinds[nested[0]]}; give one column of lists of numbers with `columns`, "
            f"or columns of single numbers. Chosen are {', '.join(columns)}."
        )
    if wanted is not None and None not in wanted:
        return (int(np.prod([size or 0 for size in wanted])),)
    lengths = [len(value) for value in rows.column(nested[0]) if value.is_valid]
    if not lengths:
        raise InvalidValue(f"column `{nested[0]}` of `{data.files[0]}` begins with rows that hold nothing.")
    return (lengths[0],)


def _fitted(row: tuple[int, ...], wanted: tuple[int | None, ...] | None, columns: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of one input: the model's, if the row has as many numbers."""
    if wanted is None:
        return row
    if len(row) == len(wanted) and all(w in (None, g) for g, w in zip(row, wanted, strict=True)):
        return row
    numbers = int(np.prod(row))
    fixed = int(np.prod([size for size in wanted if size is not None]))
    free = [i for i, size in enumerate(wanted) if size is None]
    if not free and numbers == fixed:
        return tuple(size or 0 for size in wanted)
    if len(free) == 1 and fixed and numbers % fixed == 0:
        return tuple(numbers // fixed if size is None else size for size in wanted)
    shown = ", ".join(columns[:8]) + (", …" if len(columns) > 8 else "")
    chosen = f" ({shown}); choose with `columns`" if columns else ""
    raise InvalidValue(f"the model takes inputs of shape {wanted} and a row of the data has {row}{chosen}.")


def _image_shape(options: Options, wanted: tuple[int | None, ...] | None) -> tuple[int, int, int]:
    if wanted is not None and len(wanted) != 3:
        raise InvalidValue(f"the model takes inputs of shape {wanted}; images are (channels, height, width).")
    model: Sequence[int | None] = wanted or (None, None, None)
    channels = options.channels or model[0] or 3
    size = options.size or (model[1], model[2])
    if size[0] is None or size[1] is None:
        raise InvalidValue("the model takes images of any size: say which with `size`, such as 224 224.")
    for name, have, want in zip(("channels", "height", "width"), (channels, *size), model, strict=True):
        if want not in (None, have):
            raise InvalidValue(f"the {name} of images is {have} and the model takes {want}.")
    return channels, size[0], size[1]


def example_of(parts: list[Unit], reading: Reading, data: Data, count: int) -> tuple[npt.NDArray, Any]:
    """The first `count` rows that are inputs, and the Arrow type of their ids."""
    first: Bad | None = None
    for unit in parts:
        for chunk in chunks(unit, reading, 64):
            if len(chunk.x):
                return chunk.x[:count], None if chunk.ids is None else chunk.ids.type
            first = first or (chunk.bad[0] if chunk.bad else None)
    if first is not None:
        where = f"(`{first.source}`, row {first.row})"
        raise InvalidValue(f"there is no row to rate: the first ones are bad, {first.reason} {where}.")
    more = f" and {len(data.files) - 1} more" if len(data.files) > 1 else ""
    raise InvalidValue(f"there is no row to rate in `{data.files[0]}`{more}.")
