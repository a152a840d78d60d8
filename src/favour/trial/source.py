"""The model that `favour check` is about, and a predictor of it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import FavourError, InvalidValue
from favour.exporting.factories import make
from favour.predictor.compilation import compile
from favour.predictor.predictor import Predictor
from favour.saving import load


def model(source: str, weights: str | os.PathLike[str] | None = None) -> tuple[nn.Module, Any]:
    """A model and its posterior, or a predictor.

    Args:
        source: A file of `Predictor.save`, or `package.module:factory`.
        weights: With a factory, a safetensors file.
    """
    ending = Path(source).suffix.lower()
    if ending in (".onnx", ".pt2"):
        raise InvalidValue(
            f"`{source}` is an exported graph: its noise is computed away, so there is nothing left to sample and to "
            "compare with. Check the model that it was exported from: `package.module:factory`, or the file of "
            "`Predictor.save`. (`favour export` compares every file that it writes with its predictor.)"
        )
    if os.path.isfile(source):
        if weights is not None:
            raise InvalidValue(f"`{source}` is a file with weights of its own; `--weights` goes with a factory.")
        return load(source), None
    if ":" not in source or os.sep in source.partition(":")[0]:
        raise InvalidValue(
            f"there is no file `{source}`, and it is not `package.module:factory` either. Save a predictor with "
            "`favour.compile(...).save(path)`, or name a function without arguments that returns the model."
        )
    return make(source, weights)


def prepared(made: nn.Module, x: Any, posterior: Any = None, method: str = "auto") -> tuple[Predictor, Any, list[str]]:
    """A predictor, inputs in its dtype, and what Favour warned of on the way."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if isinstance(made, Predictor):
            predict = made
        else:
            parameter = next((p for p in made.parameters() if p.is_floating_point()), torch.empty(0))
            x = _arguments(_as(x, parameter.dtype))
            try:
                predict = compile(made.eval(), x, posterior=posterior, method=method, check=False)
            except FavourError:
                raise
            except Exception as error:
                first = str(error).splitlines()[0] if str(error) else ""
                raise InvalidValue(
                    f"the model itself fails on these inputs: {type(error).__name__}: {first} (--columns chooses "
                    "columns of a table, names in an .npz file are the model's arguments)"
                ) from error
    dtypes = [n.dtype for n in predict.graph.inputs if n is not None and n.dtype is not None]
    floats = [d for d in dtypes if d.is_floating_point]
    x = _arguments(_as(x, floats[0] if floats else None))
    return predict, x, [str(w.message) for w in said if w.category.__module__.startswith("favour")]


def _as(x: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point inputs in the model's dtype; None: it reads whole numbers, and a table of them is meant."""

    def cast(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        return t.long() if dtype is None else t.to(dtype)

    return pytree.tree_map(cast, x)


def _arguments(x: Any) -> Any:
    """A list, as `torch.save` may hold it, is a tuple of arguments."""
    return tuple(x) if isinstance(x, list) else x
