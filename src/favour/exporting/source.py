"""Predictors named on a command line: a saved file, or a factory with weights. No pickled code is run.

    predictor.favour                                     a file of `Predictor.save`
    package.module:factory [weights.safetensors] shape   factory() returns a model, (model, posterior), or a predictor

The factory is the user's own code, found on the import path or in the current folder; weights are safetensors, which
hold tensors and nothing else.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from favour.compilation import compile
from favour.errors import CorruptFile, InvalidType, InvalidValue, ShapeMismatch, UnknownName
from favour.extras import require
from favour.predictor import Predictor
from favour.saving import load


def load_source(
    source: str, weights: str | os.PathLike[str] | None = None, shape: str | None = None, dtype: str = "float32"
) -> Predictor:
    """The predictor that `source` names.

    Args:
        source: A file of `Predictor.save`, or `package.module:factory`.
        weights: A safetensors file with the state dict of the factory's model.
        shape: Of one example without the batch, numbers separated by commas.
        dtype: Of the example.

    Raises:
        InvalidValue, UnknownName, CorruptFile: What was wrong with the file, the factory, the weights or the shape.
    """
    if os.path.isfile(source):
        if weights is not None:
            raise InvalidValue(f"`{source}` is a file with weights of its own; `--weights` goes with a factory.")
        if source.endswith((".onnx", ".pt2")):
            raise InvalidValue(f"`{source}` is exported already; give a file of `Predictor.save` or a factory.")
        return load(source)
    if ":" not in source or os.sep in source:
        raise InvalidValue(
            f"there is no file `{source}`, and it is not `package.module:factory` either. Save a predictor with "
            "`favour.compile(...).save(path)`, or name a function that returns the model."
        )
    made = factory(source)()
    made, posterior = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(made, Predictor) and weights is None:
        return made
    if not isinstance(made, nn.Module) or isinstance(made, Predictor):
        raise InvalidType(
            f"`{source}` returned a {type(made).__name__}; a model (torch.nn.Module) is required, or, without "
            "`--weights`, a predictor."
        )
    if weights is not None:
        load_weights(made, weights)
    return compile(made.eval(), _example(source, shape, dtype), posterior=posterior)


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
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise UnknownName(
                f"`{module_name}` has no `{name}`; it has {', '.join(sorted(functions)) or 'no functions'}."
            )
        found = getattr(found, part)
    if not callable(found):
        raise InvalidType(f"`{source}` is a {type(found).__name__}; a function without arguments is required.")
    return found


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Put the tensors of a safetensors file into a model; every name and shape must fit.

    Raises:
        CorruptFile: Not a safetensors file; a pickle, say.
        UnknownName, ShapeMismatch: Names or shapes differ from the model's.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise InvalidValue(f"there is no file `{name}`.")
    safetensors = require("safetensors.torch", "experiments")
    try:
        tensors: Mapping[str, Tensor] = safetensors.load_file(name)
    except Exception as error:
        raise CorruptFile(
            f"`{name}` is not a safetensors file ({type(error).__name__}: {error}). Pickled checkpoints are not "
            "loaded, as they can hold code; convert one you trust with safetensors.torch.save_file(state_dict, path)."
        ) from error
    own = model.state_dict()
    missing, extra = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    if missing or extra:
        raise UnknownName(
            f"`{name}` does not fit {type(model).__name__}: it lacks {_few(missing)} and has {_few(extra)} too many."
        )
    wrong = [
        f"{k} {tuple(tensors[k].shape)} for {tuple(own[k].shape)}" for k in own if tensors[k].shape != own[k].shape
    ]
    if wrong:
        raise ShapeMismatch(f"`{name}` has other shapes than {type(model).__name__}: {_few(wrong)}.")
    model.load_state_dict(dict(tensors))


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def _example(source: str, shape: str | None, dtype: str) -> Tensor:
    if shape is None:
        raise InvalidValue(f"`{source}` is a model; give the shape of one example without the batch: --shape 3,32,32.")
    try:
        sizes = [int(part) for part in shape.replace("x", ",").split(",") if part.strip()]
    except ValueError:
        raise InvalidValue(f"--shape is {shape!r}; whole numbers separated by commas are required: 3,32,32.") from None
    if any(size < 1 for size in sizes):
        raise InvalidValue(f"--shape is {shape!r}; sizes are at least 1.")
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise InvalidValue(f"--dtype is {dtype!r}; give a dtype of torch such as float32 or int64.")
    return torch.zeros(2, *sizes, dtype=kind)
