"""Plain values and tensors from an archive that `torch.save` wrote, read without running or trusting anything in it.

`torch.save` describes values by a pickle, a little program. Of its language this reader knows what values and tensors
need: numbers, texts, lists, tuples, dicts, and three names (`_NAMES`), none of which is looked up. Anything else is
refused, and so are tensors that reach beyond their bytes or, by repeating them, are much larger than the file.
`torch.load(weights_only=True)` is stricter than pickle too, but takes sizes on trust.
"""

from __future__ import annotations

import math
import pickletools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from favour.errors import CorruptFile
from favour.files.members import Members

DTYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_TENSOR, _PARAMETER, _ORDERED = (
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
)
_NAMES = {_TENSOR, _PARAMETER, _ORDERED} | {f"torch {name}" for name in DTYPES}
_FREE = 64 * 2**20  # bytes that tensors may hold together beyond four times those of the file


@dataclass(frozen=True)
class _Name:
    """What a pickle calls by name: not looked up."""

    text: str


@dataclass(frozen=True)
class _Storage:
    """Numbers in a member of the archive."""

    key: str
    dtype: torch.dtype
    count: int


class _Mark:
    """Where a list, tuple or dict on the stack begins."""


def read_values(members: Members) -> Any:
    """What was given to `torch.save`, on the CPU.

    Raises:
        CorruptFile: The archive is damaged, or holds more than values and tensors.
    """
    try:
        return _Reader(members).value()
    except CorruptFile:
        raise
    except Exception as error:  # an underflow of the stack, a text that is no UTF-8, …
        raise CorruptFile(f"its description of tensors is damaged: {type(error).__name__}: {error}") from error


class _Reader:
    def __init__(self, members: Members) -> None:
        self.members = members
        order = bytes(members.read("byteorder")).decode("ascii") if "byteorder" in members else "little"
        if order not in ("little", "big"):
            raise CorruptFile(f"its byte order is {order!r}")
        self.swapped = order != sys.byteorder
        self.storages: dict[str, tuple[_Storage, Tensor]] = {}
        self.left = 4 * sum(map(members.size, members)) + _FREE
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def value(self) -> Any:
        for operation, argument, _ in pickletools.genops(bytes(self.members.read("data.pkl"))):
            if operation.name == "STOP":
                break
            self.step(operation.name, argument)
        (result,) = self.stack
        return result

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            if len(stack) < count:
                raise CorruptFile("its description of tensors is damaged")
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self.since_mark()
            _plain(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop() for _ in range(2)][::-1] if name == "SETITEM" else self.since_mark()
            _plain(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in _NAMES:
                raise CorruptFile(f"it holds code: it names `{str(argument)[:80].replace(' ', '.')}`")
            stack.append(_Name(argument))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(self.made(stack.pop(), arguments))
        elif name not in ("PROTO", "FRAME"):
            raise CorruptFile(f"it holds code: its description of tensors uses {name}")

    def since_mark(self) -> list[Any]:
        place = max(i for i, item in enumerate(self.stack) if isinstance(item, _Mark))
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def made(self, name: Any, arguments: Any) -> Any:
        if name == _Name(_ORDERED) and arguments == ():
            return {}
        if name == _Name(_PARAMETER):
            data, trained, _ = arguments
            return nn.Parameter(_plain(data, Tensor), bool(trained))
        if name == _Name(_TENSOR):
            return self.tensor(*arguments[:4])
        raise CorruptFile("it holds code: it calls something that makes no tensor")

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        """A tensor, not larger than its bytes, or than what all may hold that repeat theirs."""
        whole = self.numbers(_plain(storage, _Storage))
        size, stride = _whole_numbers(size), _whole_numbers(stride)
        (offset,) = _whole_numbers((offset,))
        count = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else 0
        if last >= max(whole.numel(), 1) or (count and not whole.numel()):
            raise CorruptFile(f"a tensor of shape {size} reaches beyond its {whole.numel()} numbers")
        self.left -= count * whole.element_size()
        if self.left < 0:
            raise CorruptFile("its tensors are together much larger than the file; save the predictor again")
        return whole.as_strided(size, stride, offset if count else 0)

    def numbers(self, storage: _Storage) -> Tensor:
        """All numbers of a storage, in one dimension."""
        known = self.storages.get(storage.key)
        if known is not None:
            if known[0] != storage:
                raise CorruptFile(f"the numbers {storage.key!r} are described in two ways")
            return known[1]
        content = self.members.read(f"data/{storage.key}")
        if len(content) != storage.count * storage.dtype.itemsize:
            raise CorruptFile(f"{storage.count} numbers of {storage.dtype} are said to lie in {len(content)} bytes")
        if content:
            tensor = torch.frombuffer(content, dtype=storage.dtype)
            if self.swapped:
                tensor.untyped_storage().byteswap(storage.dtype)
        else:
            tensor = torch.empty(0, dtype=storage.dtype)
        self.storages[storage.key] = storage, tensor
        return tensor


_LITERALS = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Any] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "MARK": _Mark}


def _storage(described: Any) -> _Storage:
    kind, name, key, _, count = described
    if kind != "storage" or not isinstance(name, _Name) or not isinstance(key, str):
        raise CorruptFile("it holds something other than numbers")
    (count,) = _whole_numbers((count,))
    return _Storage(key, DTYPES[name.text.removeprefix("torch ")], count)


def _plain(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise CorruptFile(f"its description of tensors has a {type(value).__name__} for a {kind.__name__}")
    return value


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or any(type(v) is not int or not 0 <= v < 2**63 for v in values):
        raise CorruptFile(f"a tensor has the sizes {str(values)[:80]}")
    return tuple(values)
