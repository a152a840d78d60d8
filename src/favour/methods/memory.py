"""How much memory a prediction takes, and how to stay within a budget.

Per input of the batch, with a the total size of the uncertain tensors, w the largest of them, k covectors and forward
sweeps of rank r, a prediction holds at its peak about

    reverse sweep     (4 + 2r)a + 3kw + 10rw     the tape, the covectors before and after a map, Algorithm 1's products
      with secants    + 3kw                      as many curvatures
      with pairs      + Pa + Pkw                 images of P groups, and their products with covectors
    forward methods   (16 + 10r)w                what a rule works with, the columns, their images, the products

numbers (measured by tests/test_adjoint.py, which holds these to be upper bounds on multilayer perceptrons). `full`
keeps a column per noise dimension. Some rules work with more than that (all windows of a max-pooling), so the first
prediction with a budget also measures what one or two inputs take, and the larger of the two numbers counts.

Predictions are made in slices of the batch that fit the budget; where a single input does not fit, covectors go in
groups, two groups at a time, so that every entry of the covariance is met.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from favour.methods.method import Method
from favour.passes.plan.steps import Plan

TAPE, TAPE_COLUMN, COVECTOR, FORWARD, COLUMN = 4, 2, 3, 16, 10


def rows_within(method: Method, plan: Plan, memory: int, itemsize: int) -> int:
    """How many inputs fit a budget of so many bytes at a time."""
    predicted = itemsize * method.memory(plan) * max(1.0, plan.correction[1] if plan.correction else 1.0)
    return max(1, int(memory // predicted))


class Peak(TorchDispatchMode):
    """Bytes of tensor storage alive at the worst moment, `most`, counted from what operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self._seen.discard(key)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._seen and key not in arguments:  # not a view of a weight
                    self._seen.add(key)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key, size)
        return result


def measure(method: Method, plan: Plan, itemsize: int, rows: int, run: Callable[[], Any]) -> None:
    """Correct what is predicted for `plan` by what `run`, a prediction for `rows` inputs, takes."""
    with torch.no_grad(), Peak() as peak:
        run()
    plan.correction = dict(plan.sizes), peak.most / (rows * itemsize * method.memory(plan))


def free_memory(device: str | torch.device = "cpu") -> int:
    """Bytes that can still be taken."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = 2**32
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            free = next((int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")), free)
    group = Path("/sys/fs/cgroup")
    try:  # of a container
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        free = free if limit == "max" else min(free, int(limit) - int(used))
    except OSError:
        pass
    return max(free, 0)
