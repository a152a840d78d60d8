"""Predictors named on a command line: a saved file, or a factory with weights. No pickled code is run.

    predictor.favour                                     a file of `Predictor.save`
    package.module:factory [weights.safetensors] shape   factory() returns a model, (model, posterior), or a predictor

The factory is the user's own code, found on the import path or in the current folder; weights are safetensors, which
hold tensors and nothing else.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from favour.errors import InvalidValue
from favour.exporting.factories import make
from favour.predictor.compilation import compile
from favour.predictor.predictor import Predictor
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
    made, posterior = make(source, weights)
    if isinstance(made, Predictor):
        return made
    return compile(made.eval(), _example(source, shape, dtype), posterior=posterior)


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
