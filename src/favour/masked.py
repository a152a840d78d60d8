"""A linear layer given a draw: dropout folded into its weights, its own randomness as one normal per output.

With D the diagonal matrix of a mask, W(Dx) = (WD)x, so that one product serves all inputs of a mask. Mean-field weights
of variance S² and biases of variance s² add √(S²(Dx)² + s²)·ε, the exact law of the output given Dx.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from favour.capture.node import Node
from favour.covariance import square_root


@dataclass
class MaskedLinear:
    """What a linear layer reads for one draw.

    Attributes:
        x: Input before dropout, (B, F).
        weight, bias: (C, F), and (C,) or None.
        scale: Of the units, 0 or 1/q: (F,) for one mask, (M, F) for several; None without dropout.
        weight_variance, bias_variance: As `weight` and `bias`, None where certain.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    weight_variance: Tensor | None
    bias_variance: Tensor | None

    @classmethod
    def of(
        cls,
        node: Node,
        local: Mapping[Node, Any],
        dropout: Node | None,
        mask: Mapping[str, Tensor],
        variances: Mapping[Node, Tensor],
    ) -> MaskedLinear:
        """The layer of a node, behind `dropout` if that is folded into it."""
        source, weight, *rest = node.args
        bias: Any = rest[0] if rest else None
        x = local[source if dropout is None else dropout.args[0]]
        return cls(
            x,
            local[weight],
            None if bias is None else local[bias],
            None if dropout is None else mask[dropout.name],
            variances[weight].to(x) if weight in variances else None,
            variances[bias].to(x) if bias in variances else None,
        )

    def one(self, eps: Tensor | None) -> Tensor:
        """The output, (B, C), for one mask and normals (C,)."""

        def product(v: Tensor, w: Tensor, scale: Tensor | None) -> Tensor:
            return v @ (w if scale is None else w * scale).mT

        y = product(self.x, self.weight, self.scale)
        y = y if self.bias is None else y + self.bias
        if eps is None:
            return y
        spread = torch.zeros_like(y)
        if self.weight_variance is not None:
            spread = product(self.x.square(), self.weight_variance, None if self.scale is None else self.scale.square())
        return y + square_root(spread if self.bias_variance is None else spread + self.bias_variance) * eps

    def many(self, eps: Tensor | None) -> Tensor:
        """The output without its bias, (B, C, M), for M masks and normals (M, C)."""

        def product(v: Tensor, w: Tensor, scale: Tensor | None) -> Tensor:
            if scale is None:
                return (v @ w.mT).unsqueeze(-1)
            stacked = (w.unsqueeze(1) * scale).flatten(0, 1)  # (C·M, F)
            return (v @ stacked.mT).unflatten(1, (w.shape[0], -1))

        y = product(self.x, self.weight, self.scale)
        if eps is None:
            return y
        spread = torch.zeros_like(y)
        if self.weight_variance is not None:
            spread = product(self.x.square(), self.weight_variance, None if self.scale is None else self.scale.square())
        if self.bias_variance is not None:
            spread = spread + self.bias_variance.unsqueeze(-1)
        return y + square_root(spread) * eps.mT  # (M, C) → (C, M)
