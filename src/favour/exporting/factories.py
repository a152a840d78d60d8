"""Models named on a command line, `package.module:factory`, with their weights in a safetensors file.

The factory is the user's own code, found on the import path or in the current folder; weights are safetensors, which
hold tensors and nothing else: no pickled code is run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from favour.errors import CorruptFile, InvalidType, InvalidValue, ShapeMismatch, UnknownName
from favour.extras import require
from favour.predictor.predictor import Predictor


def make(source: str, weights: str | os.PathLike[str] | None = None) -> tuple[nn.Module, Any]:
    """What the factory returns: a model and its posterior, None if it gave none; or, without weights, a predictor.

    Args:
        source: `package.module:factory`; the factory returns a model, (model, posterior), or a predictor.
        weights: A safetensors file with the state dict of the model.
    """
    made = factory(source)()
    model, posterior = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or (isinstance(model, Predictor) and weights is not None):
        raise InvalidType(
            f"`{source}` returned a {type(model).__name__}; a model (torch.nn.Module) is required, or, without "
            "weights, a predictor."
        )
    if weights is not None:
        load_weights(model, weights)
    return model, posterior


def factory(source: str) -> Any:
    """The function `package.module:name`; the current folder is searched too, as `python -m` does."""
    module_name, _, name = source.partition(":")
    folder = os.getcwd()
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.split(".")[0])
        where = f"there is no module `{module_name}` on the import path or in {folder}" if missing else f"{error}"
        raise UnknownName(f"`{source}` cannot be imported: {where}.") from error
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
    member: Any = module
    for part in name.split("."):
        if not hasattr(member, part):
            functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise UnknownName(
                f"`{module_name}` has no `{name}`; it has {', '.join(sorted(functions)) or 'no functions'}."
            )
        member = getattr(member, part)
    if not callable(member):
        raise InvalidType(f"`{source}` is a {type(member).__name__}; a function without arguments is required.")
    return member


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Put the tensors of a safetensors file into a model; every name and shape must fit.

    Raises:
        CorruptFile: Not a safetensors file; a pickle, say.
        UnknownName, ShapeMismatch: Names or shapes differ from the model's.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise InvalidValue(f"there is no file `{name}`.")
    safetensors = require("safetensors.torch", "export")
    try:
        tensors: Mapping[str, Tensor] = safetensors.load_file(name)
    except Exception as error:
        raise CorruptFile(
            f"`{name}` is not a safetensors file ({type(error).__name__}: {error}). Pickled checkpoints are not "
            "loaded, as they can hold code; convert one you trust with safetensors.torch.save_file(state_dict, path)."
        ) from error
    state = model.state_dict()
    missing, extra = sorted(set(state) - set(tensors)), sorted(set(tensors) - set(state))
    if missing or extra:
        raise UnknownName(
            f"`{name}` does not fit {type(model).__name__}: it lacks {_few(missing)} and has {_few(extra)} too many."
        )
    wrong = [
        f"{k} {tuple(tensors[k].shape)} for {tuple(state[k].shape)}"
        for k in state
        if tensors[k].shape != state[k].shape
    ]
    if wrong:
        raise ShapeMismatch(f"`{name}` has other shapes than {type(model).__name__}: {_few(wrong)}.")
    model.load_state_dict(dict(tensors))


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
