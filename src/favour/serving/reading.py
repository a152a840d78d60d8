"""Reading a request: its body within limits of bytes, values and time, and arrays from its JSON.

The number of values is known before any of them is made: n numbers in nested lists have n − 1 commas between them, so
commas are counted while the body arrives. JSON is read a row at a time, and each row is an array at once: a value takes
8 bytes then, where Python's floats in lists take 32. Long work pauses between pieces, so that the event loop can see to
others meanwhile (`in_turns`).
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from favour.errors import FavourError
from favour.exporting.exported import Exported, Port
from favour.serving.limits import GRACE, UNCOUNTED, Held, Limits
from favour.serving.refusals import Gone, Refused, shortened

Arrays = list[npt.NDArray]
Result = TypeVar("Result")
_SPACE = re.compile(r"[ \t\n\r]*")
PIECE = 512  # values between two pauses: about half a millisecond
IDLE, PATIENCE = 1e-4, 20  # seconds of work that the event loop does when it has nothing to do; most turns to wait


async def courtesy() -> None:
    """Let the event loop go on for as long as it has other work, but not for ever.

    A short request takes a dozen turns of the loop; if long work took a piece in each of them, it would be held up by a
    dozen pieces. The clock is the thread's own, so that other processes do not look like work.
    """
    for _ in range(PATIENCE):
        start = time.thread_time()
        await asyncio.sleep(0)
        if time.thread_time() - start < IDLE:
            return


async def in_turns(work: Generator[None, None, Result], turn: asyncio.Lock) -> Result:
    """What `work` returns. Work that pauses is done one at a time, and when there is nothing else to do."""
    try:
        next(work)
        async with turn:
            while True:
                await courtesy()
                next(work)
    except StopIteration as end:
        return end.value


# ---- the body


def check_kind(headers: Any) -> None:
    """Refuse what is not plain JSON."""
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refused(
            415, f"the content type is {shortened(kind) if kind else 'missing'}; application/json is required."
        )
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise Refused(415, f"the content encoding is {shortened(coding)}; send the JSON as it is.")


def most_values(model: Exported, limits: Limits) -> int:
    """How many values a body may hold.

    Where the model's shapes are fixed this is twice what the largest request holds, so that one which is only somewhat
    too large is still told by how many rows.
    """
    total = 0
    for port in model.inputs:
        batched = bool(port.shape) and port.shape[0] is None
        sizes = port.shape[1:] if batched else port.shape
        if None in sizes:
            return limits.max_values
        total += max(1, math.prod(s for s in sizes if s is not None)) * (limits.max_batch if batched else 1)
    return min(limits.max_values, 2 * total)


async def read_body(request: Any, limits: Limits, most: int, held: Held) -> tuple[bytes, int]:
    """The body and the number of values in it.

    Args:
        request: With `headers` and `receive`.
        limits: See there.
        most: Values.
        held: Told of the bytes.

    Raises:
        Refused: 408 too slow, 413 too large.
        Overloaded: All bodies together are too large.
        Gone: The client left.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limits.max_body:
        raise _too_large(request, limits)
    loop = asyncio.get_running_loop()
    start = loop.time()
    body, commas, more = bytearray(), 0, True
    while more:
        end = limits.timeout
        if limits.min_rate > 0:
            end = min(end, GRACE + len(body) / limits.min_rate)
        try:
            async with asyncio.timeout_at(start + end):
                message = await request.receive()
        except TimeoutError:
            said = f"{len(body)} bytes of the body arrived in {loop.time() - start:.1f} s"
            needs = f"{limits.timeout:g} s are allowed, and {limits.min_rate:g} bytes a second required"
            raise Refused(408, f"{said}; {needs}.", {"connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise Gone
        part, more = message.get("body", b""), message.get("more_body", False)
        if len(body) + len(part) > limits.max_body:
            raise _too_large(request, limits)
        commas += part.count(b",")
        if commas >= most:
            raise Refused(413, f"the body holds more than {most} values; send fewer rows at a time.", _closing(request))
        held.add(max(0, len(body) + len(part) - UNCOUNTED) - held.amount)
        body += part
        if more and len(body) > UNCOUNTED:
            await courtesy()
    return bytes(body), commas + 1


def _too_large(request: Any, limits: Limits) -> Refused:
    return Refused(
        413, f"the body is larger than {limits.max_body} bytes; send fewer rows at a time.", _closing(request)
    )


def _closing(request: Any) -> dict[str, str]:
    """A client that asked whether to send its body is not going to, so its next request would be taken for the body."""
    return {"connection": "close"} if "expect" in request.headers else {}


# ---- its JSON


def parse(body: bytes, model: Exported, limits: Limits) -> Generator[None, None, tuple[Arrays, int]]:
    """The arrays of a request and their number of rows, checked; pauses after every `PIECE` values.

    Raises:
        Refused: 400 or 422.
    """
    try:
        reader = _Reader(_text(body), model, limits)
        yield from reader.read()
    except (ValueError, RecursionError) as error:  # a FavourError is caught by the reader
        raise Refused(400, f"the body is not JSON: {str(error)[:200] or type(error).__name__}.") from None
    arrays = reader.arrays
    if arrays is None:
        raise Refused(422, f"an object {reader.wanted} is required.")
    if sorted(arrays) != sorted(reader.ports):
        raise Refused(422, f"`inputs` must have {', '.join(reader.ports)}: {reader.wanted}.")
    try:
        checked = model.check(**arrays)
    except FavourError as error:
        raise Refused(422, str(error)) from None
    first = next((a for a, p in zip(checked, model.inputs, strict=True) if p.shape and p.shape[0] is None), checked[0])
    return checked, len(first)


def _text(body: bytes) -> str:
    return body.decode(json.detect_encoding(body))


class _Reader:
    """Walks over an object with `inputs`; everything below a row is left to the standard library."""

    def __init__(self, text: str, model: Exported, limits: Limits) -> None:
        self.text, self.limits = text, limits
        self.ports = {port.name: port for port in model.inputs}
        name = next(iter(self.ports))
        self.wanted = '{"inputs": [[…], …]}' if len(self.ports) == 1 else f'{{"inputs": {{"{name}": [[…], …], …}}}}'
        self.truths = "true" in text or "false" in text
        self.arrays: dict[str, npt.NDArray] | None = None
        self._decoder = json.JSONDecoder(parse_constant=_constant)
        self._place = 0  # behind what was read last
        self._count = 0

    def read(self) -> Generator[None, None, None]:
        start = self._skip(0)
        if self.text[start : start + 1] != "{":
            self._end(self._value(start)[1])
            raise Refused(422, f"an object {self.wanted} is required.")
        for key, at in self._members(start):
            if key != "inputs":
                raise Refused(422, f"the object has {shortened(key)} besides `inputs`; {self.wanted} is required.")
            if self.text[at : at + 1] == "{":
                self.arrays = {}
                for name, place in self._members(at):
                    if name not in self.ports:
                        raise Refused(422, f"`inputs` must have {', '.join(self.ports)}, not {shortened(name)}.")
                    yield from self._rows(self.ports[name], place)
            elif len(self.ports) == 1:
                self.arrays = {}
                yield from self._rows(next(iter(self.ports.values())), at)
            else:
                raise Refused(422, f"`inputs` must have {', '.join(self.ports)}: {self.wanted}.")
        self._end(self._place)

    def _members(self, at: int) -> Iterable[tuple[str, int]]:
        """Names of an object's members and where their values begin; whoever takes them leaves `_place` behind each."""
        at = self._skip(at + 1)
        seen: set[str] = set()
        while self.text[at : at + 1] != "}" or seen:
            if self.text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self.text, at)
            key, at = self._value(at)
            if key in seen:
                raise Refused(422, f"the object has {shortened(key)} twice.")
            seen.add(key)
            at = self._skip(at)
            if self.text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self.text, at)
            yield key, self._skip(at + 1)
            at = self._skip(self._place)
            if self.text[at : at + 1] == "}":
                break
            if self.text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", self.text, at)
            at = self._skip(at + 1)
        self._place = at + 1

    def _rows(self, port: Port, at: int) -> Generator[None, None, None]:
        """The array of one input."""
        assert self.arrays is not None
        if self.text[at : at + 1] != "[":
            value, self._place = self._value(at)
            raise Refused(
                422, f"`{port.name}` is {_kind(value)}; a list of rows of shape {port.written_shape} is required."
            )
        most = self.limits.max_batch if port.shape and port.shape[0] is None else self.limits.max_values
        rows: list[npt.NDArray] = []
        at = self._skip(at + 1)
        if self.text[at : at + 1] == "]":
            self._place = at + 1
        else:
            while True:
                if len(rows) >= most:
                    raise Refused(
                        422, f"`{port.name}` has more than {most} rows; between 1 and {most} are allowed at a time."
                    )
                value, at = self._value(at)
                rows.append(self._array(port, value))
                self._count += max(1, rows[-1].size)
                if self._count >= PIECE:
                    self._count = 0
                    yield
                at = self._skip(at)
                if self.text[at : at + 1] == "]":
                    break
                if self.text[at : at + 1] != ",":
                    raise json.JSONDecodeError("Expecting ',' delimiter", self.text, at)
                at = self._skip(at + 1)
            self._place = at + 1
        if not rows:
            raise Refused(422, f"`{port.name}` has 0 rows; between 1 and {most} are allowed at a time.")
        shapes = {row.shape for row in rows}
        if len(shapes) > 1:
            raise Refused(422, f"the rows of `{port.name}` are not of one shape: {shortened(sorted(shapes)[:3], 80)}.")
        self.arrays[port.name] = np.stack(rows)

    def _array(self, port: Port, row: Any) -> npt.NDArray:
        if self.truths and np.dtype(port.dtype).kind != "b" and _has_truth(row):
            raise Refused(422, f"`{port.name}` holds true or false, not numbers; {port.dtype} is required.")
        try:
            array = np.array(row)
        except (ValueError, OverflowError) as error:
            words = f"a row of `{port.name}` has lists of different lengths, or numbers out of range"
            raise Refused(422, f"{words}: {error}.") from None
        if array.dtype.kind not in "biuf":
            raise Refused(422, f"`{port.name}` holds {_stranger(row)}, not numbers; {port.dtype} is required.")
        return array

    def _value(self, at: int) -> tuple[Any, int]:
        try:
            return self._decoder.raw_decode(self.text, at)
        except json.JSONDecodeError:
            raise
        except ValueError:  # Python's limit on the digits of an integer
            raise Refused(400, "the body holds a whole number of thousands of digits.") from None

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self.text, at)
        return match.end() if match else at

    def _end(self, at: int) -> None:
        if (at := self._skip(at)) != len(self.text):
            raise json.JSONDecodeError("Extra data", self.text, at)


def _constant(name: str) -> float:
    raise Refused(422, f"the inputs hold {name}, which is not a number JSON allows; leave such rows out.")


def _has_truth(value: Any) -> bool:
    return any(map(_has_truth, value)) if isinstance(value, list) else isinstance(value, bool)


def _stranger(value: Any) -> str:
    """What in a row is no number."""
    if isinstance(value, list):
        return next((stranger for item in value if (stranger := _stranger(item))), "")
    if isinstance(value, int) and not isinstance(value, bool):
        return "" if -(2**63) <= value < 2**64 else "whole numbers out of range"
    return "" if isinstance(value, float) else _kind(value)


def _kind(value: Any) -> str:
    kinds = {
        type(None): "null",
        bool: "a truth value",
        str: "a text",
        dict: "an object",
        list: "a list",
        int: "a number",
        float: "a number",
    }
    return kinds.get(type(value), "something else")


# ---- the answer


def encode(outputs: Any, rows: int) -> Generator[None, None, bytes]:
    """The answer as JSON, which has no NaN; pauses after every `PIECE` values.

    Raises:
        Refused: The answer is not finite.
    """
    parts: list[str] = []
    count = 0
    for name, array in outputs.items():
        if not np.isfinite(array).all():
            raise Refused(
                422, "the answer is not finite for these inputs; they are probably far out of the model's range."
            )
        step = max(1, PIECE // max(1, array[:1].size))
        pieces = []
        for start in range(0, len(array), step):
            piece = array[start : start + step]
            pieces.append(json.dumps(piece.tolist(), separators=(",", ":"))[1:-1])
            count += piece.size
            if count >= PIECE:
                count = 0
                yield
        parts.append(f"{json.dumps(name)}:[{','.join(pieces)}]")
    return f'{{"outputs":{{{",".join(parts)}}},"rows":{rows}}}'.encode()
