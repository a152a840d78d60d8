"""Files in the safetensors format, without the package: eight bytes of length, a JSON header, raw numbers.

    header = {NAME: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, "__metadata__": {text: text}}

All tensors here are float32. Any reader of the format opens them; nothing in them is run as code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from favour.errors import CorruptFile


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a file."""
    top: dict[str, Any] = {"__metadata__": dict(metadata)}
    pieces, end = [], 0
    for name, tensor in tensors.items():
        raw = tensor.float().contiguous().numpy().astype("<f4").tobytes()
        top[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + len(raw)]}
        pieces.append(raw)
        end += len(raw)
    text = json.dumps(top).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and where the numbers begin."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= path.stat().st_size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {path.stat().st_size}")
            top = json.loads(file.read(length))
        if not isinstance(top, dict):
            raise ValueError("the header is no object")
    except (OSError, ValueError) as error:
        raise CorruptFile(f"cannot read {path}: {error}. Delete it and train anew.") from error
    return top, 8 + length


def decode(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata."""
    top, begin = header(path)
    raw = path.read_bytes()[begin:]
    metadata = top.pop("__metadata__", {})
    tensors = {}
    try:
        for name, entry in top.items():
            first, last = entry["data_offsets"]
            if entry["dtype"] != "F32" or not 0 <= first <= last <= len(raw):
                raise ValueError(f"{name} of {entry['dtype']} at {first} … {last} of {len(raw)}")
            numbers = np.frombuffer(raw[first:last], "<f4").astype(np.float32)
            tensors[name] = torch.from_numpy(numbers).reshape(entry["shape"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptFile(f"cannot read {path}: {error}. Delete it and train anew.") from error
    return tensors, metadata
