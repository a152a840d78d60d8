"""ONNX files: one graph in the standard operators, weights inside, favour's description among the metadata."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from favour.errors import CaptureError, UnsupportedOperation
from favour.extras import require
from favour.files.checksum import DIGITS, METADATA, ONNX_KEY, seal_onnx
from favour.graph.tracing import TRACING

LARGEST = 2**31 - 2**20  # a protobuf message ends at 2 GiB; the graph takes the rest
_RANDOM = ("RandomNormal", "RandomUniform", "Multinomial", "Bernoulli", "Dropout")  # and …Like


def packages() -> None:
    """Raise `MissingExtra` now, and not after a long trace."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        require(name, "export")


def write_onnx(
    program: torch.export.ExportedProgram, path: str, described: dict[str, Any], dynamic: Sequence[dict[int, str]]
) -> None:
    """Translate and write a program of plain operations."""
    names = [port["name"] for port in described["inputs"]], [port["name"] for port in described["outputs"]]
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        log.setLevel(logging.ERROR)  # it warns that torchvision is absent
        with TRACING, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            translated = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
    except Exception as error:
        raise CaptureError(_refusal(error)) from error
    finally:
        log.setLevel(level)
    assert translated is not None
    model = translated.model
    random = sorted({node.op_type for node in model.graph if node.op_type.removesuffix("Like") in _RANDOM})
    if random:
        raise UnsupportedOperation(f"the ONNX graph draws random numbers ({', '.join(random)}).")
    _rename(model.graph, *names)
    model.metadata_props[METADATA] = json.dumps(described)
    model.metadata_props[ONNX_KEY] = "0" * DIGITS
    model.producer_name, model.producer_version = "favour", described["favour"]
    for value in (*model.graph, *model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()  # stack traces with paths of this machine
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if size > LARGEST:
        raise UnsupportedOperation(
            f"the weights take {size} bytes; an ONNX file holds less than {LARGEST}. Export a .pt2, or a predictor in "
            "float32 or half precision."
        )
    translated.save(path, external_data=False)
    seal_onnx(path)


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name inputs and outputs, after values inside that happen to have those names (`mean` of `aten.mean`)."""
    taken = {*inputs, *outputs}
    for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
        if value.name in taken:
            value.name = f"{value.name}_inner"
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name


def _refusal(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "No decompositions" in line or "not supported" in line]
    cause = error.__cause__ or error
    words = lines[0] if lines else f"{type(cause).__name__}: {str(cause).strip()[:400]}"
    return f"torch.onnx could not translate the predictor: {words}. A .pt2 file needs no translation."
