"""Predictors in files: tensors, and descriptions in JSON. No code is written and none is executed."""

from __future__ import annotations

import json
import os

from torch import Tensor, nn

from favour.capture.graph_io import graph_from_json, graph_to_json, read_file, write_file
from favour.errors import CorruptFile
from favour.methods.settings import Settings
from favour.posterior import Posterior
from favour.predictor import Predictor


def save(predictor: Predictor, path: str | os.PathLike[str]) -> None:
    """Write a predictor."""
    arguments: dict[str, Tensor] = {}
    described = graph_to_json(predictor.graph, arguments)
    posterior_tensors, posterior_description = predictor.posterior().state()
    settings, settings_tensors = predictor.settings.describe()
    content = {
        "graph": json.dumps(described),
        "settings": json.dumps(settings),
        "posterior": json.dumps(posterior_description),
        "store": {k: v.detach() for k, v in predictor.store.state_dict().items()},
        "parameters": {k: p.requires_grad for k, p in predictor.store.named_parameters()},
        "constants": list(predictor.graph.constants),
        "arguments": arguments,
        "settings_tensors": settings_tensors,
        "posterior_tensors": posterior_tensors,
        "starts": dict(predictor._starts),
        "sizes": dict(predictor._sizes),
    }
    write_file(path, content)


def load(path: str | os.PathLike[str]) -> Predictor:
    """Read a predictor that `Predictor.save` wrote. Executes no code from the file.

    Raises:
        CorruptFile: Not such a file, damaged, or from a newer version.
    """
    content = read_file(path)
    try:
        constants = {name: content["store"][f"constant.{name}".replace(".", "/")] for name in content["constants"]}
        graph = graph_from_json(json.loads(content["graph"]), content["arguments"], constants)
        settings = Settings.restore(json.loads(content["settings"]), content["settings_tensors"])
        settings.validate()
        posterior = Posterior.from_state(content["posterior_tensors"], json.loads(content["posterior"]))
        predictor = Predictor(graph, settings, posterior, None)
        for key, tensor in content["store"].items():
            trained = content["parameters"].get(key)
            predictor.store.put(key.replace("/", "."), tensor if trained is None else nn.Parameter(tensor, trained))
        missing = [
            n.target for n in graph.nodes if n.kind in ("parameter", "buffer") and not predictor.store.has(n.target)
        ]
        if missing:
            raise KeyError(", ".join(missing))
        predictor._starts = dict(content["starts"])
        predictor._sizes = {str(k): int(v) for k, v in content.get("sizes", {}).items()}
    except CorruptFile:
        raise
    except Exception as error:
        raise CorruptFile(f"`{os.fspath(path)}` is incomplete: {type(error).__name__}: {error}") from error
    predictor.prepare()
    return predictor
