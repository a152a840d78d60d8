"""A linear layer given draws: dropout folded into its weights, its own randomness as one normal per output.

With D the diagonal matrix of a mask, W(Dx) = (WD)x, so that one product serves all inputs of a mask; and one product
serves all masks where x is masked instead, which is less work (in eager code) while there are fewer inputs than
outputs. Mean-field weights of variance S² and biases of variance s² add √(S²(Dx)² + s²)·ε, the exact law of the output
given Dx.

A is the number of draws, M that of masks for each; inside `torch.func.vmap` the axis A is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from favour.belief.covariance import square_root
from favour.graph.node import Node
from favour.graph.tracing import traced
from favour.program.tensors import Cached, can_keep, kept_value, version_of

_KEPT = 2**22  # numbers in the masked weights of one layer

FEWEST = 4  # inputs that are masked even where masked weights could be kept


@dataclass
class MaskedLinear:
    """What a linear layer reads.

    Attributes:
        x: Input before dropout, (A, B, F), or (B, F) where all draws share it.
        weight, bias: (C, F), and (C,) or None.
        scale: Of the units, 0 or 1/q: (A, 1, F) for one mask, (A, M, F) for several; None without dropout.
        weight_variance, bias_variance: As `weight` and `bias`, None where certain.
        kept: `masked_weights` of the layer from an earlier call.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    weight_variance: Tensor | None
    bias_variance: Tensor | None
    kept: Tensor | None = None

    @classmethod
    def of(
        cls,
        node: Node,
        local: Mapping[Node, Any],
        dropout: Node | None,
        masks: Mapping[str, Tensor],
        variances: Mapping[Node, Tensor],
        kept: Mapping[str, Tensor],
    ) -> MaskedLinear:
        """The layer of a node, behind `dropout` if that is folded into it."""
        source, weight, *rest = node.args
        bias: Any = rest[0] if rest else None
        x = local[source if dropout is None else dropout.args[0]]
        return cls(
            x,
            local[weight],
            None if bias is None else local[bias],
            None if dropout is None else masks[dropout.name],
            variances[weight].to(x) if weight in variances else None,
            variances[bias].to(x) if bias in variances else None,
            kept.get(node.name),
        )

    @property
    def _few(self) -> bool:
        """Whether masking inputs is less work than masking weights; compiled code serves every batch."""
        return not traced() and self.x.shape[-2] < self.weight.shape[0]

    def one(self, eps: Tensor | None) -> Tensor:
        """The output, (A, B, C), for one mask and normals (A, 1, C)."""
        y = self._product(self.x, self.weight, self.scale, self.bias, self.kept)
        if eps is None:
            return y
        spread = self.bias_variance
        if self.weight_variance is not None:
            scale = None if self.scale is None else self.scale.square()
            spread = self._product(self.x.square(), self.weight_variance, scale, self.bias_variance)
        return y if spread is None else y + square_root(spread) * eps

    def _product(
        self, v: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None, kept: Tensor | None = None
    ) -> Tensor:
        if scale is None:
            return functional.linear(v, w, bias)
        if self._few:
            return functional.linear(v * scale, w, bias)
        stacked = masked_weights(w, scale) if kept is None else kept
        if v.dim() == 2 and stacked.dim() == 3:  # all masks in one product
            tiled = None if bias is None else bias.repeat(stacked.shape[0])
            return functional.linear(v, stacked.flatten(0, 1), tiled).unflatten(1, stacked.shape[:2]).transpose(0, 1)
        y = _rows_times(v, stacked)
        return y if bias is None else y + bias

    def many(self, eps: Tensor | None) -> Tensor:
        """The output without its bias, (A, B, C, M), for M masks and normals (A, 1, C, M)."""
        y = self._products(self.x, self.weight, self.scale, self.kept)
        if eps is None:
            return y
        spread = None if self.bias_variance is None else self.bias_variance.unsqueeze(-1)
        if self.weight_variance is not None:
            scale = None if self.scale is None else self.scale.square()
            part = self._products(self.x.square(), self.weight_variance, scale)
            spread = part if spread is None else part + spread
        return y if spread is None else y + square_root(spread) * eps

    def _products(self, v: Tensor, w: Tensor, scale: Tensor | None, kept: Tensor | None = None) -> Tensor:
        if scale is None:
            return functional.linear(v, w).unsqueeze(-1)
        if self._few and kept is None:
            masked = v.unsqueeze(-3) * scale.unsqueeze(-2)  # (A, M, B, F)
            return functional.linear(masked, w).movedim(-3, -1)
        stacked = masked_weights(w, scale) if kept is None else kept
        return _rows_times(v, stacked).unflatten(-1, (w.shape[0], -1))


def masked_weights(w: Tensor, scale: Tensor) -> Tensor:
    """WD for every mask, (A, C·M, F), from weights (C, F) and masks (A, M, F)."""
    return (w.unsqueeze(-2) * scale.unsqueeze(-3)).flatten(-3, -2)


def _rows_times(v: Tensor, w: Tensor) -> Tensor:
    """vwᵀ, (A, B, C), for w (A, C, F) and v (A, B, F) or (B, F)."""
    return v @ w.mT if w.dim() == 2 else torch.bmm(v.expand(w.shape[0], -1, -1), w.mT)


@dataclass
class Tables:
    """Of A draws, by names of nodes.

    Attributes:
        masks: (A, 1, *event); (A, M, F) for the dropout before the last layer.
        normals: (A, 1, *event); (A, 1, C, M) for the last layer.
        latent: (A, rank), for the correlations at the cut.
        key: What they were made for.
        rates: Dropout rates that are tensors, and their versions.
        weights: Masked weights by linear layer.
    """

    masks: dict[str, Tensor]
    normals: dict[str, Tensor]
    latent: Tensor
    key: Any = None
    rates: list[tuple[Tensor, int | None]] = field(default_factory=list)
    weights: dict[str, Cached] = field(default_factory=dict)

    def fit(self, key: Any, rates: list[Tensor]) -> bool:
        """Whether they were made for this."""
        return self.key == key and all(
            kept is rate and version == version_of(rate) is not None
            for (kept, version), rate in zip(self.rates, rates, strict=True)
        )

    def masked(self, layer: str, weight: Tensor, dropout: Node) -> Tensor | None:
        """`masked_weights` of a layer, kept until the weight changes; None if that cannot be told, or too large."""
        masks = self.masks[dropout.name]
        if masks.numel() * weight.shape[0] > _KEPT or masks.dtype != weight.dtype or not can_keep(weight):
            return None
        return kept_value(self.weights, layer, weight, lambda w: masked_weights(w, masks))
