"""The memory of a call, counted apart from the library that it judges."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made and that are still there; `most` at the worst moment.

    A storage counts once, whatever its views, and what an operation was given does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage, key = tensor.untyped_storage(), _key(tensor)
                if key not in given and key not in self._sizes:
                    self._sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, key)
        self.most = max(self.most, sum(self._sizes.values()))
        return result


def _key(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata


def peak_memory(function: Callable[[], Any], device: str | torch.device) -> int:
    """Bytes at the worst moment of a call, over what was there before."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.no_grad(), Alive() as alive:
        function()
    return alive.most
