"""A rating as a plan that any process can carry out, unit by unit.

`Plan` says how rows become inputs and results become columns; it travels to other processes. `Plan.rate` carries out
one unit and writes its part. Nothing else differs between one process and a cluster of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from favour.errors import FavourError, InvalidValue
from favour.rating.columns import bad_table, rated_columns, sound, table
from favour.rating.models import Rater
from favour.rating.reading import Bad, Chunk, Reading, chunks
from favour.rating.sources import Unit
from favour.rating.store import Store


class ModelFailed(FavourError, RuntimeError):
    """The model fails on every row of a batch."""


@dataclass(frozen=True)
class Plan:
    """How to rate a unit.

    Attributes:
        out: Of the whole rating.
        reading: How rows become inputs.
        batch: Rows that are rated together.
        schema: Of the results, Arrow's.
        level: Of intervals; None for the model's own.
        every_class: Whether every class's probability is a column.
    """

    out: str
    reading: Reading
    batch: int
    schema: Any
    level: float | None = None
    every_class: bool = False

    def rate(
        self, number: int, unit: Unit, rater: Rater, tick: Callable[[int, int], None] | None = None
    ) -> tuple[int, int]:
        """Rate a unit and write its part; the numbers of rated and of bad rows."""
        store = Store(self.out)
        rows = 0
        bad: list[Bad] = []
        with store.writer(number, self.schema) as writer:
            for chunk in _ahead(chunks(unit, self.reading, self.batch)):
                done, failed = self.results(chunk, rater)
                writer.write(done)
                rows += done.num_rows
                bad += failed
                if tick is not None:
                    tick(done.num_rows, len(failed))
            if rows + len(bad) != unit.rows:
                raise InvalidValue(
                    f"`{unit.source}` gave {rows + len(bad)} rows from row {unit.start} on, and {unit.rows} were "
                    "counted before; was it changed meanwhile?"
                )
            unit.check()
            if bad:  # before the part appears, which says that the unit is done
                with store.bad_writer(number) as others:
                    others.write(bad_table(bad))
            else:
                store.bad_part(number).unlink(missing_ok=True)
        return rows, len(bad)

    def results(self, chunk: Chunk, rater: Rater) -> tuple[Any, list[Bad]]:
        """An Arrow table of the rated rows, and the bad ones: those of the chunk, and those the model fails on."""
        columns, failures = self._columns(chunk.x, rater)
        bad = list(chunk.bad)
        for i, reason in sorted(failures.items()):
            identifier = None if chunk.ids is None else str(chunk.ids[i].as_py())
            bad.append(Bad(chunk.sources[i], chunk.rows[i], reason, id=identifier))
        if failures:
            chunk = replace(chunk.take(np.array([i for i in range(len(chunk.x)) if i not in failures], np.int64)))
        if not len(chunk.x):
            return self.schema.empty_table(), bad
        return table(chunk, columns, self.schema), bad

    def _columns(self, x: npt.NDArray, rater: Rater) -> tuple[dict[str, npt.NDArray], dict[int, str]]:
        """Columns of the rows the model can rate, and why the others have none."""
        if not len(x):
            return {}, {}
        pieces: list[dict[str, npt.NDArray]] = []
        failures: dict[int, str] = {}

        def attempt(begin: int, end: int) -> None:
            # A batch that fails is halved, until the rows at fault (or the memory that is too small) are found.
            try:
                outputs = rater(x[begin:end])
            except Exception as error:
                if end - begin == 1:
                    failures[begin] = f"the model fails: {type(error).__name__}: {error}"[:300]
                    return
                middle = (begin + end) // 2
                attempt(begin, middle)
                attempt(middle, end)
                return
            columns = rated_columns(outputs, rater.kind, self.level, rater.labels, self.every_class)
            fine = sound(columns)
            failures.update({begin + int(i): "the model's answer is not finite" for i in np.flatnonzero(~fine)})
            pieces.append({name: values[fine] for name, values in columns.items()})

        attempt(0, len(x))
        if len(failures) == len(x) > 1:
            raise ModelFailed(f"none of {len(x)} rows in a row can be rated: {failures[0]}")
        if len(pieces) <= 1:
            return pieces[0] if pieces else {}, failures
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}, failures


def _ahead(items: Iterator[Chunk]) -> Iterator[Chunk]:
    """The next chunk is read while this one is rated."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (chunk := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield chunk
