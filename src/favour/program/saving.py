"""Programs in files: tensors, and descriptions in JSON. No code is written and none is executed.

A file is written in one step and carries a checksum (`favour.files`). What is read is held against what a predictor of
`favour.compile` is: operations that are admitted, shapes that fit, posteriors that are sound, numbers that are finite.

`pickle`, `torch.save`, `copy.deepcopy` and processes that are sent a predictor go the same way: its pickle is the bytes
of such a file and the name of the function that reads them.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from favour.errors import CorruptFile, FavourError, InvalidValue
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
from favour.methods import keywords
from favour.posterior import Posterior
from favour.program.following import sound
from favour.program.program import Program


def write(program: Program, path: str | os.PathLike[str]) -> None:
    """Write a program to a file."""
    write_file(path, _content(program))


def to_bytes(program: Program) -> bytes:
    """What `write` writes."""
    file = io.BytesIO()
    write_content(file, _content(program))
    return file.getvalue()


def read(path: str | os.PathLike[str]) -> Program:
    """Read a program from a file. Executes no code from the file.

    Raises:
        CorruptFile: Not such a file, damaged, or from a newer version.

    Warns:
        UncheckedFile: The file was written by an earlier version, without a checksum.
    """
    return _program(read_file(path), os.fspath(path))


def from_bytes(content: bytes) -> Program:
    """The program whose `to_bytes` was `content`."""
    name = "the pickled predictor"
    return _program(read_content(io.BytesIO(content), name), name)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Whatever fails now is the file's fault.

    Raises:
        CorruptFile: Says what failed.
    """
    try:
        yield
    except Exception as error:
        words = str(error) if isinstance(error, FavourError) else f"{type(error).__name__}: {error}"
        raise CorruptFile(f"`{name}` is incomplete or damaged: {words}") from error


def _content(program: Program) -> dict[str, Any]:
    program.follow()
    arguments: dict[str, Tensor] = {}
    described = graph_to_json(program.graph, arguments)
    posterior_tensors, posterior_description = program.posterior().state()
    settings, settings_tensors = keywords.written(program.asked, program.numerics)
    return {
        "graph": json.dumps(described),
        "settings": json.dumps(settings),
        "posterior": json.dumps(posterior_description),
        "store": dict(program.store.state_dict()),
        "parameters": {k: p.requires_grad for k, p in program.store.named_parameters()},
        "constants": list(program.graph.constants),
        "arguments": arguments,
        "settings_tensors": settings_tensors,
        "posterior_tensors": posterior_tensors,
        "starts": dict(program.starts),
        "sizes": dict(program.sizes),
    }


def _program(content: Mapping[str, Any], name: str) -> Program:
    with reading(name):
        store = _tensors(content, "store")
        constants = {str(key): store[f"constant.{key}".replace(".", "/")] for key in content["constants"]}
        graph = graph_from_json(json.loads(content["graph"]), _tensors(content, "arguments"), constants)
        method, numerics = keywords.read(json.loads(content["settings"]), _tensors(content, "settings_tensors"))
        method.validate(numerics)
        numerics.validate()
        posterior = Posterior.from_state(_tensors(content, "posterior_tensors"), json.loads(content["posterior"]))
        sizes = {str(k): int(v) for k, v in content.get("sizes", {}).items()}
        program = Program(graph, method, posterior, None, numerics)
        for key, tensor in store.items():
            trained = content["parameters"].get(key)
            program.store.put(key.replace("/", "."), tensor if trained is None else nn.Parameter(tensor, bool(trained)))
        held = {n: program.store.take(_key(n)) for n in graph.nodes if n.kind in ("parameter", "buffer", "constant")}
        rehearse(graph, {node.name: tensor for node, tensor in held.items()}, sizes)
        _check_values(graph, held, posterior)
        program.starts, program.sizes = _tensors(content, "starts"), sizes
    return program


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
    tensors = content[name]
    if not isinstance(tensors, dict) or not all(
        isinstance(k, str) and isinstance(t, Tensor) for k, t in tensors.items()
    ):
        raise CorruptFile(f"its {name} are not tensors by name")
    return {key: tensor.detach() for key, tensor in tensors.items()}
