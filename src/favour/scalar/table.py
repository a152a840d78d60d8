"""Small tables of numbers (quadrature nodes, indices) as tensors, made once per device.

On a GPU each copy from the host makes the stream wait, and can't be recorded in a CUDA graph. What is asked for while a
compiler traces is made anew, so that it becomes a constant of what is traced.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["table"]


Numbers = tuple[float, ...] | tuple[int, ...] | tuple[bool, ...] | tuple[tuple[float, ...], ...]


def table(numbers: Numbers, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers as a tensor on the device of another; nobody may write to it.

    Args:
        numbers: What it holds.
        like: Gives the device, and the type where none is named.
        dtype: The type.
    """
    dtype = like.dtype if dtype is None else dtype
    if torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter):
        return torch.tensor(numbers, dtype=dtype, device=like.device)
    return _made(numbers, dtype, like.device)


@lru_cache(maxsize=256)
def _made(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # usable where gradients are wanted, wherever it is first asked for
        return torch.tensor(numbers, dtype=dtype, device=device)
