"""Exported predictors: what `favour.export` wrote, read back without the model's code.

    model = favour.load_exported("model.onnx")      # or .pt2
    model.kind                                      # "classification" or "regression"
    model.inputs                                    # (Port(name="input", dtype="float32", shape=(None, 20), ...),)
    model.outputs                                   # mean, variance, and by kind
    answer = model(x)                               # array, tensor or nested list (batch, *shape) -> dict of arrays
    answer["probabilities"]                         # (batch, C)

The interface, in full:

    load_exported(path, threads=None, device="cpu") -> Exported
    Exported.path, .format         the file, and "onnx" or "pt2"
    Exported.kind                  "classification" or "regression"
    Exported.link                  "softmax", "binary", "multilabel" or "ordinal"; None for a regression
    Exported.classes, .labels      number of classes and their names, None where there are none
    Exported.level                 of the interval lower … upper; None for classes
    Exported.inputs, .outputs      tuples of Port(name, dtype, shape, meaning); a size None may change, the first is the
                                   batch, the same for all inputs; dtypes by their numpy names
    Exported.seen                  of the examples given to `favour.export`: means and ranges of the inputs, quantiles
                                   of the scores; None without
    Exported.example_shape         shape of one row of the first input, None where a size may change
    Exported.__call__(*arrays, **arrays) -> dict[str, numpy.ndarray]    in the order or by the name of the inputs
    Exported.check(*arrays, **arrays) -> list[numpy.ndarray]            the check of `__call__` alone, arrays converted

Outputs by kind. Every array has the batch first:

    both             mean, variance (batch, *event)
    classification   probabilities (batch, classes), jsd (batch,) unless `multilabel` or `ordinal`; covariance (batch,
                     C, C) of the logits for at most 10 outputs
    regression       stddev, lower, upper (batch, *event)

Rows do not influence each other, and nothing is random: the same row gives the same answer in any batch, but for
rounding. Calls from several threads are safe.

No code is executed from a file. ONNX files hold none; of a .pt2, `torch.export.load` would run pickles, evaluate
expressions and call any function that torch can reach if the file asked for it, so the archive is first held against
what `favour.export` writes (`favour.exporting.archive`), and refused where it has more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from favour.errors import CorruptFile, InvalidType, InvalidValue, ShapeMismatch, computing
from favour.extras import require
from favour.files.checksum import METADATA, check_onnx, expect_checksum
from favour.files.onnx_graph import check_graph

FORMAT = 1
KINDS = ("classification", "regression")
Arrays = list[npt.NDArray]


@dataclass(frozen=True)
class Port:
    """A named input or output: numpy's name of its dtype, its shape with None for sizes that may change.

    Attributes:
        least, most: Of whole numbers that are looked up in tables: one number each, or one for each entry of a row (in
            a list, None where anything goes); None where nothing is known.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    meaning: str = ""
    least: int | list[int | None] | None = None
    most: int | list[int | None] | None = None

    @property
    def written_shape(self) -> str:
        """For messages: (batch, 20)."""
        sizes = ["batch" if i == 0 and s is None else "any" if s is None else str(s) for i, s in enumerate(self.shape)]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


class Exported:
    """A predictor from a file. Made by `load_exported`; the module's docstring lists its attributes."""

    def __init__(self, path: str, form: str, described: Mapping[str, Any], run: Callable[[Arrays], Arrays]) -> None:
        self.path, self.format = path, form
        self.favour_version = str(described["favour"])
        self.kind = str(described["kind"])
        link, classes, labels = described["link"], described["classes"], described["labels"]
        self.link = None if link is None else str(link)
        self.classes = None if classes is None else int(classes)
        self.labels = None if labels is None else [str(label) for label in labels]
        self.level = None if described["level"] is None else float(described["level"])
        self.inputs = tuple(_port(p) for p in described["inputs"])
        self.outputs = tuple(_port(p) for p in described["outputs"])
        self.seen = _seen(described.get("seen"))
        self._lookups = bool(described.get("lookups"))
        self._run = run

    @property
    def example_shape(self) -> tuple[int | None, ...]:
        """The shape of one row of the first input."""
        return self.inputs[0].shape[1:]

    def __call__(self, *arrays: Any, **named: Any) -> dict[str, npt.NDArray]:
        """Predict for a batch.

        Args:
            arrays, named: Inputs in the file's order or by name: numpy arrays, tensors or nested lists.

        Raises:
            ShapeMismatch, InvalidType, InvalidValue: The arrays do not fit `inputs`, or hold NaN or infinity.
        """
        checked = self.check(*arrays, **named)
        with computing(self.path):
            results = self._run(checked)
        if self._lookups:  # rows that ask for what no table has are NaN
            rows = np.flatnonzero(np.isnan(results[0].reshape(len(results[0]), -1)).all(1))
            if len(rows):
                raise InvalidValue(
                    f"{len(rows)} of {len(results[0])} rows, first {int(rows[0])}, look for what no table of the model "
                    "has: a number in their inputs is negative or too large."
                )
        return {port.name: result for port, result in zip(self.outputs, results, strict=True)}

    def check(self, *arrays: Any, **named: Any) -> Arrays:
        """The arrays in the file's order and dtypes, or an error that says which one does not fit and why."""
        names = [port.name for port in self.inputs]
        unknown = [name for name in named if name not in names]
        values = dict(zip(names, arrays, strict=False))
        twice = [name for name in named if name in values]
        if unknown or twice or len(arrays) > len(names) or len({**values, **named}) < len(names):
            raise InvalidType(
                f"{len(arrays)} arrays and the names {sorted(named)} were given; this model takes {len(names)} "
                f"input(s): {', '.join(names)}, in this order or by name."
            )
        values |= named
        checked = [_fitting(port, values[port.name]) for port in self.inputs]
        batched = {p.name: len(a) for p, a in zip(self.inputs, checked, strict=True) if p.shape and p.shape[0] is None}
        if len(set(batched.values())) > 1:
            raise ShapeMismatch(f"the inputs have different numbers of rows: {batched}; one row of each per example.")
        return checked

    def __repr__(self) -> str:
        ports = [", ".join(f"{p.name} {p.written_shape}" for p in group) for group in (self.inputs, self.outputs)]
        return f"Exported({self.path!r}, {self.kind}: {ports[0]} -> {ports[1]})"


def load_exported(path: str | os.PathLike[str], *, threads: int | None = None, device: str = "cpu") -> Exported:
    """Read a file that `favour.export` wrote. Executes no code from it.

    Args:
        path: A .onnx file (run by onnxruntime) or a .pt2 file (run by torch).
        threads: CPU threads of onnxruntime; None for its default. Torch has one setting for the whole process.
        device: `"cpu"`, or `"cuda"`: for ONNX this needs onnxruntime-gpu.

    Raises:
        CorruptFile: Not such a file, damaged, or one that asks for code to be run.
        MissingExtra: onnxruntime is not installed.

    Example:
        >>> import favour, tempfile
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = favour.export(favour.compile(net, torch.zeros(2, 3)), f"{folder}/net.pt2")
        ...     model = load_exported(file)
        >>> [port.name for port in model.outputs]
        ['mean', 'variance', 'stddev', 'lower', 'upper']
        >>> model([[0.1, 0.2, 0.3]])["mean"].shape
        (1, 1)
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise InvalidValue(f"there is no file `{name}`; `favour.export` or `favour export` writes one.")
    form = os.path.splitext(name)[1].lower().removeprefix(".")
    if form == "onnx":
        return _load_onnx(name, threads, device)
    if form == "pt2":
        return _load_pt2(name, device)
    raise InvalidValue(
        f"`{name}` ends in neither .onnx nor .pt2; a predictor of `Predictor.save` is read by favour.load."
    )


def _load_onnx(path: str, threads: int | None, device: str) -> Exported:
    runtime = require("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well
    if threads is not None:
        options.intra_op_num_threads = threads
    provider = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
    if provider not in runtime.get_available_providers():
        raise InvalidValue(
            f"device {device!r} needs onnxruntime's {provider}, which this installation lacks; install "
            "onnxruntime-gpu, use device='cpu', or export a .pt2."
        )
    with open(path, "rb") as file:
        content = file.read()
    sealed = check_onnx(content, path)
    try:
        check_graph(content)
        # Without that fusion, which divides by zero where a product sums over nothing, and the process dies.
        session = runtime.InferenceSession(
            content, options, providers=[provider], disabled_optimizers=["MatmulTransposeFusion"]
        )
        text = session.get_modelmeta().custom_metadata_map.get(METADATA)
        inputs, outputs = [i.name for i in session.get_inputs()], {o.name for o in session.get_outputs()}
    except CorruptFile as error:
        raise CorruptFile(f"`{path}` is refused: {error}. Write such a file with `favour.export`.") from None
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        raise CorruptFile(f"`{path}` is not a sound ONNX file: {_first_line(error)}") from error
    described = _described(path, text, sealed)
    names = [p["name"] for p in described["inputs"]], [p["name"] for p in described["outputs"]]
    if inputs != names[0] or not outputs.issuperset(names[1]):
        raise CorruptFile(f"`{path}` describes inputs and outputs {names} that its graph does not have.")
    return Exported(
        path, "onnx", described, lambda arrays: session.run(names[1], dict(zip(inputs, arrays, strict=True)))
    )


def _load_pt2(path: str, device: str) -> Exported:
    from favour.exporting.archive import read

    program, text, sealed = read(path)
    described = _described(path, text, sealed)
    if device != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    module = program.module(check_guards=False)
    names = [p["name"] for p in described["outputs"]]

    @torch.no_grad()
    def run(arrays: Arrays) -> Arrays:
        results = module(*[torch.from_numpy(a).to(device) for a in arrays])
        return [results[name].cpu().numpy() for name in names]

    return Exported(path, "pt2", described, run)


def _described(path: str, text: str | None, sealed: bool) -> dict[str, Any]:
    """The description that `favour.export` left, its shape checked, and whether its checksum is there."""
    if not text:
        raise CorruptFile(f"`{path}` holds no description by favour; write the file with `favour.export`.")
    try:
        described = json.loads(text)
        if not isinstance(described["format"], int) or described["format"] > FORMAT:
            raise CorruptFile(
                f"`{path}` has format {described['format']}; this favour reads up to {FORMAT}. Upgrade favour."
            )
        if described["kind"] not in KINDS or not described["inputs"] or not described["outputs"]:
            raise ValueError(f"kind {described['kind']!r}")
        for port in (*described["inputs"], *described["outputs"]):
            np.dtype(_port(port).dtype)
        for key in ("favour", "link", "classes", "labels", "level"):
            described[key]
        _seen(described.get("seen"))
    except CorruptFile:
        raise
    except Exception as error:
        raise CorruptFile(f"the description in `{path}` is damaged: {type(error).__name__}: {error}") from error
    expect_checksum(path, sealed, described.get("checksum") is True, "Export it again with `favour.export`.")
    return described


def _seen(seen: Any) -> dict[str, Any] | None:
    """What a file says of its examples, if it is what `favour.exporting.seen` writes; raises where it is not."""
    if seen is None:
        return None
    inputs = [{k: [float(v) for v in port[k]] for k in ("mean", "stddev", "low", "high")} for port in seen["inputs"]]
    scores = {str(name): [float(v) for v in values] for name, values in seen["scores"].items()}
    numbers = [v for group in (*inputs, scores) for values in group.values() for v in values]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("its examples hold no numbers")
    return {"rows": int(seen["rows"]), "inputs": inputs, "scores": scores}


def _port(described: Mapping[str, Any]) -> Port:
    shape = tuple(None if s is None else int(s) for s in described["shape"])
    least, most = (_bound(described.get(side), shape) for side in ("least", "most"))
    return Port(str(described["name"]), str(described["dtype"]), shape, str(described.get("meaning", "")), least, most)


def _bound(value: Any, shape: tuple[int | None, ...]) -> int | list[int | None] | None:
    if value is None or type(value) is int:
        return value
    entries = math.prod(s or 0 for s in shape[1:])
    if len(value) != entries or not all(v is None or type(v) is int for v in value):
        raise ValueError(f"{len(value)} bounds for {entries} entries")
    return list(value)


def _check_range(port: Port, array: npt.NDArray) -> None:
    """Raise for whole numbers that no table of the model has a row for."""
    if port.least is None or port.most is None or not array.size:
        return
    low, high = (
        side
        if isinstance(side, int)
        else np.array([none if v is None else v for v in side], dtype=np.int64).reshape(array.shape[1:])
        for side, none in ((port.least, -(2**63)), (port.most, 2**63 - 1))
    )
    bad = np.argwhere((array < low) | (array > high))
    if len(bad):
        where = tuple(bad[0])
        least, most = (int(np.broadcast_to(side, array.shape)[where]) for side in (low, high))
        raise InvalidValue(
            f"input `{port.name}` holds {array[where]} at index {[int(i) for i in where]}; the model looks it up in a "
            f"table and knows {least} to {most}. {len(np.unique(bad[:, 0]))} of {len(array)} rows hold such numbers."
        )


def _fitting(port: Port, value: Any) -> npt.NDArray:
    """The array in the port's dtype, in one piece of memory."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ShapeMismatch(f"input `{port.name}` is ragged; shape {port.written_shape} is required: {error}") from None
    if array.dtype.kind not in "biuf":
        raise InvalidType(f"input `{port.name}` holds {array.dtype}, not numbers; {port.dtype} is required.")
    wanted = np.dtype(port.dtype)
    fits = array.ndim == len(port.shape) and all(s in (None, n) for s, n in zip(port.shape, array.shape, strict=True))
    if not fits:
        hint = " Add the batch axis: x[None]." if array.ndim == len(port.shape) - 1 else ""
        raise ShapeMismatch(
            f"input `{port.name}` has shape {array.shape}; this model takes {port.written_shape}.{hint}"
        )
    if array.dtype.kind == "f" and wanted.kind != "f" and array.size:
        raise InvalidType(f"input `{port.name}` holds {array.dtype}; whole numbers ({port.dtype}) are required.")
    if array.dtype.kind == "f":
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            raise InvalidValue(
                f"input `{port.name}` holds NaN or infinity in {len(np.unique(bad[:, 0]))} of {len(array)} rows, first "
                f"at index {bad[0].tolist()}; leave such rows out or fill them in."
            )
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(array, dtype=wanted)
    if array.dtype.kind == "f" and not np.isfinite(converted).all():
        raise InvalidValue(f"input `{port.name}` holds numbers too large for {port.dtype}.")
    if wanted.kind in "iu" and array.dtype.kind in "iu" and not np.array_equal(converted, array):
        raise InvalidValue(f"input `{port.name}` holds whole numbers too large for {port.dtype}.")
    _check_range(port, converted)
    return converted


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
