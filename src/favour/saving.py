"""Predictors in files: tensors, and descriptions in JSON. No code is written and none is executed.

A file is written in one step and carries a checksum (`favour.files`). What is read is held against what a predictor of
`favour.compile` is: operations that are admitted, shapes that fit, posteriors that are sound, numbers that are finite.

`pickle`, `torch.save`, `copy.deepcopy` and processes that are sent a predictor go the same way: its pickle is the bytes
of such a file and the name of the function that reads them.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from favour.errors import CorruptFile, FavourError, InvalidValue, PickledPredictor
from favour.graph.graph_io import (
    graph_from_json,
    graph_to_json,
    read_content,
    read_file,
    write_content,
    write_file,
)
from favour.graph.node import Graph, Node
from favour.graph.rehearsal import rehearse
from favour.methods.keywords import read, written
from favour.posterior import Posterior
from favour.predictor.following import sound
from favour.predictor.predictor import Predictor
from favour.predictor.program import Program

__all__ = ["from_bytes", "load", "pickled", "save", "to_bytes"]


def save(predictor: Predictor, path: str | os.PathLike[str]) -> None:
    """Write a predictor."""
    write_file(path, _content(predictor))


def to_bytes(predictor: Predictor) -> bytes:
    """What `save` writes."""
    file = io.BytesIO()
    write_content(file, _content(predictor))
    return file.getvalue()


def pickled(predictor: Predictor, protocol: Any) -> tuple[Any, ...]:
    """What pickle writes: how to make the predictor again, of what, and the rest of its state."""
    if protocol == 2:  # torch.save's own, which pickle itself has not used since Python 3.0
        warnings.warn(
            "torch.save writes a pickle, which `torch.load` refuses by default and which can hold code; "
            "`predict.save(path)` and `favour.load(path)` keep the whole predictor without.",
            PickledPredictor,
            stacklevel=5,
        )
    rest = {"checked": predictor.checked, "training": predictor.training}
    return from_bytes, (to_bytes(predictor), str(predictor.device)), rest


def from_bytes(content: bytes, device: str = "cpu") -> Predictor:
    """The predictor whose `to_bytes` was `content`. Named in pickles of predictors."""
    name = "the pickled predictor"
    return _predictor(read_content(io.BytesIO(content), name), name).to(device)


def load(path: str | os.PathLike[str]) -> Predictor:
    """Read a predictor that `Predictor.save` wrote. Executes no code from the file.

    Raises:
        CorruptFile: Not such a file, damaged, or from a newer version.

    Warns:
        UncheckedFile: The file was written by an earlier version, without a checksum.
    """
    return _predictor(read_file(path), os.fspath(path))


def _content(predictor: Predictor) -> dict[str, Any]:
    predictor.follow()
    arguments: dict[str, Tensor] = {}
    described = graph_to_json(predictor.graph, arguments)
    posterior_tensors, posterior_description = predictor.posterior().state()
    settings, settings_tensors = written(predictor.asked, predictor.numerics)
    return {
        "graph": json.dumps(described),
        "settings": json.dumps(settings),
        "posterior": json.dumps(posterior_description),
        "store": dict(predictor.store.state_dict()),
        "parameters": {k: p.requires_grad for k, p in predictor.store.named_parameters()},
        "constants": list(predictor.graph.constants),
        "arguments": arguments,
        "settings_tensors": settings_tensors,
        "posterior_tensors": posterior_tensors,
        "starts": dict(predictor.program.starts),
        "sizes": dict(predictor.program.sizes),
    }


def _predictor(content: Mapping[str, Any], name: str) -> Predictor:
    try:
        store = _tensors(content, "store")
        constants = {str(key): store[f"constant.{key}".replace(".", "/")] for key in content["constants"]}
        graph = graph_from_json(json.loads(content["graph"]), _tensors(content, "arguments"), constants)
        method, numerics = read(json.loads(content["settings"]), _tensors(content, "settings_tensors"))
        method.validate(numerics)
        numerics.validate()
        posterior = Posterior.from_state(_tensors(content, "posterior_tensors"), json.loads(content["posterior"]))
        sizes = {str(k): int(v) for k, v in content.get("sizes", {}).items()}
        predictor = Predictor(Program(graph, method, posterior, None, numerics))
        for key, tensor in store.items():
            trained = content["parameters"].get(key)
            predictor.store.put(
                key.replace("/", "."), tensor if trained is None else nn.Parameter(tensor, bool(trained))
            )
        held = {n: predictor.store.take(_key(n)) for n in graph.nodes if n.kind in ("parameter", "buffer", "constant")}
        rehearse(graph, {node.name: tensor for node, tensor in held.items()}, sizes)
        _check_values(graph, held, posterior)
        predictor.program.starts, predictor.program.sizes = _tensors(content, "starts"), sizes
        predictor.file = name
        predictor.prepare()
    except Exception as error:
        words = str(error) if isinstance(error, FavourError) else f"{type(error).__name__}: {error}"
        raise CorruptFile(f"`{name}` is incomplete or damaged: {words}") from error
    return predictor


def _key(node: Node) -> str:
    """The name of a tensor in the store."""
    return f"constant.{node.target}" if node.kind == "constant" else str(node.target)


def _check_values(graph: Graph, held: Mapping[Node, Tensor], posterior: Posterior) -> None:
    """What `favour.compile` checks of a model: numbers are finite, posteriors fit and are sound, rates are rates."""
    parameters = {str(node.target): tensor for node, tensor in held.items() if node.kind != "constant"}
    for name, tensor in parameters.items():
        if not sound(tensor):
            raise InvalidValue(f"parameter `{name}` of shape {tuple(tensor.shape)} holds NaN or infinity")
    if {*posterior.names, *posterior.means} <= parameters.keys():
        posterior.validate(parameters)
    else:  # a bias that the graph never reads beside a weight that it does
        for key, gaussian in posterior.gaussians.items():
            gaussian.validate(str(key))
    for node in graph.nodes:
        if node.draw is not None and node.rate in held:
            node.draw.check(held[node.rate], node.place)


def _tensors(content: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    found = content[name]
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in found.items()):
        raise CorruptFile(f"its {name} are not tensors by name")
    return {key: tensor.detach() for key, tensor in found.items()}
