"""Diagonal plus low rank, compressed after each linear map (paper section 4): the method of the paper.

After an operation the covariance is

    M = Σ_i G_i Λ_i G_iᵀ + Σ_s N_s + YYᵀ + D

with Λ_i the arguments' independent parts, N_s draws that are not diagonal, Y the pushed factor columns and D what
stayed diagonal. Maps that keep independent entries independent (scaling, permutation, slices, sums) need no
compression. After the others Algorithm 1 turns M into Λ′ + VVᵀ of rank r, with products M V = Σ G(Λ(GᵀV)) + Σ N V +
Y(YᵀV) + D∘V.

Open branches. While another uncertain tensor, or a draw of a parameter that will be used again, is still to be read,
old columns stay aligned with it: only what is new, M without YYᵀ, is compressed, into columns of a new name. Once the
branches have met everything is compressed together.

Where the rank is at least the number of entries the factor is exact: explicit columns, reduced by a QR decomposition.
A small output is not compressed at all: its C × C covariance is computed by C covectors through the last map.

Cost in forward passes: 1 for the mean, 1 for diag(M), r for Y, and 2r for each of K iterations.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from favour.errors import InvalidValue
from favour.methods.algorithm1 import decompose
from favour.methods.cost import sweep_and_columns, uncertain_sizes
from favour.methods.forward import Blocks, Representation, Sweep, beliefs, forward, pushed_blocks
from favour.methods.memory import COLUMN, FORWARD
from favour.methods.method import Bound, Method, Numerics, check_whole, register
from favour.methods.pending import Pending, Start
from favour.methods.start import start_of
from favour.passes.plan.steps import Plan, Step
from favour.surrogate import DiagonalNoise, LinearMap, Surrogate, diagonal_columns, flat, root
from favour.surrogate.value import Value

# Of the kept part, where the user names none.
RANK = 4

# Outputs with at most this many entries keep their full covariance.
SMALL_OUTPUT = 32


@register
@dataclass(frozen=True, eq=False, repr=False)
class DPLR(Method):
    """Algorithm 1 of the paper after each linear map.

    Args:
        rank: r, of the part that is kept of all correlations; None for 4.
        iterations: K of Algorithm 1.
        weight_rank: q, for products through rank-q approximations of the weights.
        start: None (warm), `"random"`, or a mapping from module name to columns.
    """

    name = "dplr"
    partial = True

    rank: int | None = None
    iterations: int = 2
    weight_rank: int | None = None
    start: str | Mapping[str, Tensor] | None = None

    @property
    def columns(self) -> int:
        """r."""
        return RANK if self.rank is None else self.rank

    def run(self, bound: Bound) -> list[Any]:
        start = start_of(self.start, bound.starts, bound.numerics.seed)
        held = Compressed(self.columns, self.iterations, start, self.weight_rank)
        return beliefs(bound, forward(bound, held), held.dense)

    def held(self) -> str:
        return "A forward sweep holds variances and a factor of low rank; what Algorithm 1 compresses away is lost."

    def untried(self) -> str:
        return "method='adjoint', which keeps all correlations, or a larger `rank`"

    def cost(self, plan: Plan) -> float:
        return sweep_and_columns(plan, self.columns, self.iterations)

    def memory(self, plan: Plan) -> int:
        return (FORWARD + COLUMN * self.columns) * max(uncertain_sizes(plan))

    def validate(self, numerics: Numerics) -> None:
        check_compression(self.rank, self.iterations, self.weight_rank, self.start)


def check_compression(rank: Any, iterations: Any, weight_rank: Any, start: Any) -> None:
    """Raise for parameters of Algorithm 1 that make no sense."""
    check_whole("rank", rank, 0, optional=True)
    check_whole("iterations", iterations, 0)
    check_whole("weight_rank", weight_rank, 1, optional=True)
    named = start is None or (isinstance(start, str) and start in ("warm", "random"))
    if not named and not isinstance(start, Mapping):
        raise InvalidValue(f"`start` is {start!r}; choose None, 'warm', 'random' or a mapping from module name.")


class Compressed(Representation):
    """Σ = Λ + UUᵀ of rank r.

    Args:
        rank: r ≥ 0.
        iterations: K ≥ 0 of Algorithm 1.
        start: Gives the first V for a step; see `starts`.
        weight_rank: q, for products through rank-q approximations of the weights.
        small_output: Keep the full covariance of outputs with at most this many entries.
    """

    def __init__(
        self,
        rank: int,
        iterations: int,
        start: Start,
        weight_rank: int | None = None,
        small_output: int | None = None,
    ) -> None:
        self.rank, self.iterations, self.start = rank, iterations, start
        self.weight_rank = weight_rank
        self.small_output = SMALL_OUTPUT if small_output is None else small_output
        self.dense: dict[str, Tensor] = {}
        self.count = 0  # names of columns: an operation may have several results

    def absorb(self, surrogate: Surrogate, step: Step, sweep: Sweep) -> Value:
        maps = [(x, self._cheap(G)) for x, G in surrogate.maps]
        blocks = pushed_blocks(surrogate, maps)
        pending = Pending([], [], None, None, surrogate.mean)
        for x, G in maps:
            if x.diag is not None:
                if G.one_per_column:
                    part = G.square(x.diag)
                    pending.diag = part if pending.diag is None else pending.diag + part
                else:
                    pending.spread.append((G, x.diag))
        for noise in surrogate.noises:
            if isinstance(noise, DiagonalNoise):
                pending.diag = noise.variance if pending.diag is None else pending.diag + noise.variance
            elif noise.key is None:
                pending.noises.append(noise)
        mixed = len(pending.spread) + len(pending.noises) > 0
        held = sum(block.shape[0] for block in blocks.values())
        size = surrogate.mean[:1].numel() if surrogate.mean.shape[0] else surrogate.mean.flatten(1).shape[1]
        if step.closed:
            pending.columns = torch.cat(list(blocks.values())) if blocks else None
            if step.output and size <= self.small_output and (mixed or held > self.rank):
                return self._full_output(surrogate, step, pending, size)
            if mixed or held > self.rank:
                blocks = {}
                diag = self._compress(pending, step, size, blocks)
            else:
                diag = pending.diag
        else:
            diag = self._compress(pending, step, size, blocks) if mixed else pending.diag
        if diag is not None and step.forked and self.rank >= size:
            # Exact mode: what is independent now will reach two places, so it needs columns to stay aligned.
            self.count += 1
            blocks[("fork", self.count)] = diagonal_columns(root(diag))
            diag = None
        return Value(surrogate.mean, diag, blocks)

    def _cheap(self, G: LinearMap) -> LinearMap:
        return G if self.weight_rank is None else G.low_rank(self.weight_rank)

    def _compress(self, pending: Pending, step: Step, size: int, blocks: Blocks) -> Tensor | None:
        """Add a block of at most `rank` columns to `blocks` and return the new diagonal."""
        if self.rank >= size:
            columns = pending.explicit()
            if columns.shape[0] > max(size, self.rank):
                rows = flat(columns).permute(1, 0, 2)  # (batch, k, n)
                triangle = torch.linalg.qr(rows, mode="reduced").R  # RᵀR = Σ_k c_k c_kᵀ
                columns = triangle.permute(1, 0, 2).reshape(triangle.shape[1], *columns.shape[1:])
            blocks[self._name(step)] = columns
            return pending.diag
        if self.rank == 0:
            return pending.diagonal()
        start = self.start(step, pending, self.rank)
        diag, factor = decompose(pending.matmul, pending.diagonal(), start, self.iterations)
        blocks[self._name(step)] = factor
        return diag

    def _name(self, step: Step) -> Hashable:
        return ("low rank", step.node.name)

    def _full_output(self, surrogate: Surrogate, step: Step, pending: Pending, size: int) -> Value:
        mean = surrogate.mean
        eye = torch.eye(size, dtype=mean.dtype, device=mean.device).reshape(size, 1, *mean.shape[1:])
        matrix = pending.gram(eye).expand(mean.shape[0], size, size)
        self.dense[step.node.name] = matrix
        diagonal = matrix.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
        return Value(mean, diagonal)
