"""Cases as rules see them: arguments made into values, surrogates made into matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from cases import CASES, F64, Batched, Case, Uncertain, of_kind
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from favour.rules import RULES
from favour.surrogate import LinearMap, Noise, Surrogate
from favour.surrogate.value import Context, Value

MODES = ("price", "matched", "taylor")


def close(actual: Any, expected: Any, message: str = "", tolerance: float = 1e-10) -> None:
    actual, expected = torch.as_tensor(actual, dtype=F64), torch.as_tensor(expected, dtype=F64)
    assert_close(actual, expected, atol=tolerance, rtol=tolerance, msg=lambda m: f"{message}: {m}" if message else m)


def every(*kinds: str) -> pytest.MarkDecorator:
    chosen = of_kind(*kinds) if kinds else CASES
    return pytest.mark.parametrize("case", chosen, ids=lambda c: f"{c.name}".replace("::", "."))


class Call:
    """A case's arguments, as the rule gets them and as plain tensors."""

    def __init__(self, case: Case, *, certain: bool = False, row: int | None = None, mode: str = "price") -> None:
        torch.manual_seed(0)
        self.case, self.ctx = case, Context(activation=mode, module="layer", place="layer (model.py:1)")
        self.rows = slice(None) if row is None else slice(row, row + 1)
        self.leaves, self.spec = pytree.tree_flatten(tuple(case.build()))
        self.values: dict[int, Value] = {}  # by the identity of the Uncertain: one tensor read twice stays one
        for leaf in self.leaves:
            if isinstance(leaf, Uncertain) and id(leaf) not in self.values:
                given = (leaf.mean[self.rows], leaf.diag[self.rows], {"z": leaf.factor[:, self.rows]})
                self.values[id(leaf)] = Value(given[0], None, {}) if certain else Value(*given)

    def _arguments(self, leaf: Any) -> Any:
        return leaf.tensor[self.rows] if isinstance(leaf, Batched) else leaf

    def surrogates(self) -> list[Surrogate]:
        args = [self.values.get(id(leaf), self._arguments(leaf)) for leaf in self.leaves]
        args = pytree.tree_unflatten(args, self.spec)
        made = RULES[self.case.op].function(self.ctx, *args, **self.case.kwargs)
        return made if isinstance(made, list) else [made]

    def results(self, replaced: int | None = None, by: Tensor | None = None) -> list[Tensor]:
        """The operation itself on the means, one of them replaced."""
        args = []
        for leaf in self.leaves:
            if isinstance(leaf, Uncertain):
                args.append(by if id(leaf) == replaced else self.values[id(leaf)].mean)
            else:
                args.append(self._arguments(leaf))
        made = self.case.on_means(*pytree.tree_unflatten(args, self.spec))
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def matrix(self, output: int, key: int) -> Tensor:
        """The dense matrix from one uncertain argument to one result."""
        return reference.dense_matrix(lambda t: self.results(key, t)[output], self.values[key].mean)


def probe(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    """Small integers: sums of them are exact in float32 too."""
    return torch.randint(-4, 5, shape).to(dtype)


def dense(G: LinearMap, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The matrix of a LinearMap, by applying it to the basis in its fold axis."""
    n = math.prod(shape)
    images = G.apply(torch.eye(n, dtype=dtype).reshape(n, *shape))
    return images.reshape(n, -1).T


def covariance(noise: Noise, shape: torch.Size) -> Tensor:
    """N as (batch, n, n), from `matmul` on the basis."""
    n = math.prod(shape[1:])
    eye = torch.eye(n, dtype=F64).reshape(n, 1, *shape[1:]).expand(n, *shape)
    return noise.matmul(eye).reshape(n, shape[0], n).permute(1, 2, 0)
