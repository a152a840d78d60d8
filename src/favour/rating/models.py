"""What rates: exported graphs, saved predictors, and models made by a function of the user's.

All of them become a `Rater`: called with a batch (n, *shape) it answers with arrays

    mean, variance     (n, *event)     of the outputs
    probabilities      (n, C)          of a classifier
    jsd                (n,)            of a classifier with a softmax or one logit

`Rater.packed` is a rater in a form that travels to other processes: bytes, from which `unpack` makes it again without
executing anything but Favour and the graph.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import favour
from favour.belief import Belief
from favour.classify import classes
from favour.classify.head import find_head
from favour.classify.predictive import KINDS, check_event, expected
from favour.classify.simplex import as_given
from favour.errors import InvalidType, InvalidValue, UnsupportedOperation
from favour.exporting.exported import load_exported
from favour.exporting.factories import make
from favour.graph.graph_io import graph_to_json
from favour.methods.keywords import written
from favour.posterior import Posterior
from favour.predictor.predictor import Predictor

EXPORTED = (".onnx", ".pt2")
TASKS = (*KINDS, "regression")
Outputs = dict[str, npt.NDArray]


@dataclass(frozen=True)
class Packed:
    """A rater as bytes.

    Attributes:
        form: `"predictor"`, `".onnx"` or `".pt2"`.
        content: Of the file.
        kind: As given by the user, or None.
    """

    form: str
    content: bytes
    kind: str | None


class Rater:
    """A model that answers with arrays.

    Attributes:
        kind: `"softmax"`, `"binary"`, `"multilabel"`, `"ordinal"` or `"regression"`.
        shape: Of one input; a dimension may be None where any size will do.
        dtype: Of the input.
        labels: Names of the classes, or None.
        level: Of the intervals the model itself answers with, or None.
        runtime: What computes, `"torch"` or `"onnx"`.
    """

    kind: str
    shape: tuple[int | None, ...]
    dtype: str
    labels: list[str] | None = None
    level: float | None = None
    runtime: str = "torch"

    def digest(self) -> str:
        """A text that changes when the model does."""
        raise NotImplementedError

    @property
    def packed(self) -> Packed:
        """The rater in a form that travels."""
        raise NotImplementedError

    def __call__(self, x: npt.NDArray) -> Outputs:
        raise NotImplementedError


class PredictorRater(Rater):
    """A `Predictor` of one input and one output."""

    def __init__(
        self, predictor: Predictor, kind: str | None = None, device: str = "cpu", file_digest: str | None = None
    ) -> None:
        self._digest = file_digest  # of the file it comes from, if there is one
        inputs = [node for node in predictor.graph.inputs if node is not None and node.shape is not None]
        if len(inputs) != 1:
            raise UnsupportedOperation(f"the model has {len(inputs)} tensor inputs; a rating feeds exactly one.")
        node = inputs[0]
        assert node.shape is not None
        self.shape = tuple(size if isinstance(size, int) else None for size in node.shape[1:])
        self.dtype = str(node.dtype).removeprefix("torch.")
        self.device = device
        self._saved: Predictor | bytes = predictor
        tensor = next(iter((*predictor.store.parameters(), *predictor.store.buffers())), torch.empty(0))
        if tensor.device.type != torch.device(device).type:
            predictor = _copy(predictor).to(device)  # the caller's stays where it is
        self.predictor = predictor
        self.kind = kind or ""  # until the first outputs tell

    def digest(self) -> str:
        return self._digest or digest(self.predictor)

    @property
    def packed(self) -> Packed:
        if isinstance(self._saved, Predictor):
            self._saved = _bytes(self._saved)
        return Packed("predictor", self._saved, self.kind or None)

    def __call__(self, x: npt.NDArray) -> Outputs:
        batch = torch.from_numpy(np.ascontiguousarray(x)).to(self.device)
        with torch.no_grad():
            belief = self.predictor(batch)
            if not isinstance(belief, Belief):
                raise UnsupportedOperation(
                    f"the model answers with {type(belief).__name__}; a rating reads exactly one uncertain output. "
                    "Name a module with `favour.compile(..., at=...)`."
                )
            end = classes.ending_of(self.predictor, (batch,))
            kind, squashed = classes.reading(end, belief, self.kind or None)
            if not self.kind:
                event = tuple(belief.event_shape)
                single = event in ((), (1,))
                self.kind = kind or ("regression" if single else check_event(event, None))
            outputs = {"mean": belief.mean, "variance": belief.variance}
            if self.kind != "regression" and squashed:
                outputs["probabilities"] = as_given(belief.mean, self.kind, end.sums)
            elif self.kind != "regression":
                logits = belief if end.logits is None else self.predictor.logits(batch)
                head = find_head(classes.classifier(self.predictor))
                drawn = head is not None and head.worthwhile
                outputs["probabilities"] = (
                    self.predictor.probabilities(batch, kind=self.kind) if drawn else expected(logits, self.kind)
                )
                if self.kind in ("softmax", "binary"):
                    outputs["jsd"] = (
                        self.predictor.jsd(batch, kind=self.kind)
                        if head is not None and head.for_scores
                        else favour.scores.jsd(favour.scores.logits(logits))
                    )
        wide = torch.float64 if belief.dtype == torch.float64 else torch.float32
        return {name: value.to(wide).cpu().numpy() for name, value in outputs.items()}


def _bytes(predictor: Predictor) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "predictor")
        predictor.save(file)
        return file.read_bytes()


def _copy(predictor: Predictor) -> Predictor:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "predictor")
        predictor.save(file)
        return favour.load(file)


class ExportedRater(Rater):
    """A graph that `favour.export` wrote."""

    def __init__(self, path: str, kind: str | None = None, device: str = "cpu", threads: int | None = None) -> None:
        # As many threads as torch uses: one setting for every kind of model.
        self.model = load_exported(path, threads=threads or torch.get_num_threads(), device=device)
        if len(self.model.inputs) != 1:
            names = ", ".join(port.name for port in self.model.inputs)
            raise UnsupportedOperation(f"`{path}` has the inputs {names}; a rating feeds exactly one.")
        self.kind = self.model.link or "regression"
        if kind not in (None, self.kind):
            raise InvalidValue(f"`{path}` was exported as {self.kind!r} and cannot be rated as {kind!r}.")
        self.labels, self.level = self.model.labels, self.model.level
        self.shape, self.dtype = self.model.example_shape, self.model.inputs[0].dtype
        self.path, self.wanted, self._digest = path, kind, digest(path)
        self.runtime = "onnx" if path.lower().endswith(".onnx") else "torch"

    def digest(self) -> str:
        return self._digest

    @property
    def packed(self) -> Packed:
        return Packed(os.path.splitext(self.path)[1].lower(), Path(self.path).read_bytes(), self.wanted)

    def __call__(self, x: npt.NDArray) -> Outputs:
        return {name: value for name, value in self.model(x).items() if name != "covariance"}


def unpack(packed: Packed, device: str = "cpu", threads: int | None = None) -> Rater:
    """The rater behind the bytes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model" + (packed.form if packed.form in EXPORTED else ""))
        file.write_bytes(packed.content)
        if packed.form == "predictor":
            return PredictorRater(favour.load(file), packed.kind, device)
        return ExportedRater(str(file), packed.kind, device, threads)


def digest(model: Any, weights: str | os.PathLike[str] | None = None) -> str:
    """A text that changes when the model does: the content of a file; of a network all its tensors, those of its
    posterior, and its graph or structure.

    Args:
        model: What `open_model` takes; the function of `"package.module:factory"` is called, with `weights`.
        weights: See `open_model`.
    """
    sha = hashlib.sha256()
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        if os.path.isfile(name):
            _update(sha, name)
            return sha.hexdigest()
        model = make(name, weights)
    posterior: Any = None
    if isinstance(model, tuple) and len(model) == 2:
        model, posterior = model
    if isinstance(model, Predictor):
        arguments: dict[str, torch.Tensor] = {}
        settings, tensors = written(model.asked, model.numerics)
        sha.update(json.dumps([graph_to_json(model.graph, arguments), settings], sort_keys=True, default=str).encode())
        _tensors(sha, arguments)
        _tensors(sha, tensors)
        _tensors(sha, model.store.state_dict())
        posterior = model.posterior()
    elif isinstance(model, nn.Module):
        sha.update(repr(model).encode())
        _tensors(sha, {**dict(model.named_buffers()), **model.state_dict()})
    else:
        sha.update(repr(model).encode())
    if posterior is not None:
        values, description = Posterior.wrap(posterior).state()
        sha.update(json.dumps(description, sort_keys=True, default=str).encode())
        _tensors(sha, values)
    return sha.hexdigest()


def _tensors(sha: Any, tensors: Mapping[str, Any]) -> None:
    for name, value in sorted(tensors.items()):
        if not isinstance(value, torch.Tensor):
            sha.update(f"{name} {value!r}".encode())
            continue
        data = value.detach().cpu().contiguous().reshape(-1)
        sha.update(f"{name}{tuple(value.shape)}{value.dtype}".encode() + data.view(torch.uint8).numpy().tobytes())


def _update(sha: Any, file: str) -> None:
    with open(file, "rb") as stream:
        while block := stream.read(2**22):
            sha.update(block)


# ---- finding a model


def open_model(
    model: Any, weights: str | os.PathLike[str] | None = None, kind: str | None = None, device: str = "cpu"
) -> Rater | Callable[[npt.NDArray], Rater]:
    """A rater, or for a network that is yet to be compiled a function from the first rows to one.

    Args:
        model: A path to an exported graph or a saved predictor, `"package.module:factory"`, a `Predictor`, a module,
            or a pair of a module and its posterior.
        weights: A safetensors file for the module that a factory makes.
        kind: See `Rater`; None for what the model says or, of a network, what its outputs suggest.
        device: Of predictors.
    """
    if kind is not None and kind not in TASKS:
        raise InvalidValue(f"`kind` is {kind!r}; choose one of {', '.join(TASKS)}.")
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        if weights is not None and (":" not in name or os.path.exists(name)):
            raise InvalidValue(f"`weights` go with `package.module:factory`; `{name}` has its own.")
        if os.path.isfile(name):
            before = digest(name)
            rater = (
                ExportedRater(name, kind, device)
                if name.lower().endswith(EXPORTED)
                else PredictorRater(favour.load(name), kind, device, before)
            )
            if digest(name) != before:
                raise InvalidValue(f"`{name}` was written to while it was read; try again when it is whole.")
            return rater
        if ":" not in name:
            raise InvalidValue(
                f"no model at `{name}`: give a .onnx or .pt2 file that favour exported, a file that "
                "`Predictor.save` wrote, or `package.module:factory`."
            )
        made, posterior = make(name, weights)
        model = made if isinstance(made, Predictor) else (made, posterior)
    if isinstance(model, Predictor):
        return PredictorRater(model, kind, device)
    posterior = None
    if isinstance(model, tuple) and len(model) == 2:
        model, posterior = model
    if not isinstance(model, nn.Module):
        raise InvalidType(
            f"a model is a path, a Predictor, a module or a pair (module, posterior); got {type(model).__name__}."
        )
    module = model.eval().requires_grad_(False)

    def compiled(x: npt.NDArray) -> Rater:
        predictor = favour.compile(module, torch.from_numpy(np.ascontiguousarray(x)), posterior=posterior)
        return PredictorRater(predictor, kind, device)

    return compiled
