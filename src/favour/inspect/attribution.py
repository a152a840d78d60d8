"""Where the variance of a prediction comes from.

The reverse sweep adds up one term per noise source, Var[y_i] = Σ_s (A_s N_s A_sᵀ)_ii. Kept apart, they say how much
of each output's variance every dropout, every parameter and every nonlinearity contributes.

A nonlinearity is no random draw of the model: its term is the part of Var[f(x)] that f makes out of the uncertainty
of its input beyond a straight line, and so belongs to the sources before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from favour.errors import InvalidValue

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Attribution:
    """Variance by source.

    Attributes:
        mean: The prediction, (batch, *event).
        sources: Source name (module path or parameter name) to its share of the variance, (batch, *event) each.
        covariances: Source name to its term A_s N_s A_sᵀ, (batch, n, n) for n entries; they add up to the covariance.
    """

    mean: Tensor
    sources: dict[str, Tensor]
    covariances: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mean: Tensor, covariances: dict[str, Tensor]) -> Attribution:
        """From the sources' covariances."""
        shares = {k: c.diagonal(dim1=1, dim2=2).reshape(mean.shape) for k, c in covariances.items()}
        return cls(mean, shares, covariances)

    @property
    def variance(self) -> Tensor:
        """The sum over sources."""
        total = torch.zeros_like(self.mean)
        for share in self.sources.values():
            total = total + share
        return total

    def fractions(self) -> dict[str, float]:
        """Share of each source in the total variance over all inputs and outputs, largest first."""
        total = self.variance.sum().item()
        shares = {name: share.sum().item() / total if total else 0.0 for name, share in self.sources.items()}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def plot(self, ax: Axes | None = None, *, row: int | None = None, output: Any = None, most: int = 12) -> Axes:
        """A horizontal bar per source, largest on top.

        Args:
            ax: Axes to draw into; new ones by default.
            row: One input of the batch; all of them by default.
            output: An index into the outputs; all of them by default.
            most: Draw at most this many bars and add up the rest.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise InvalidValue('plots need matplotlib: pip install "favour[plots]".') from error
        chosen = {}
        for name, share in self.sources.items():
            part = share if row is None else share[row : row + 1]
            chosen[name] = (part if output is None else part[:, output]).sum().item()
        total = sum(chosen.values()) or 1.0
        ordered = sorted(chosen.items(), key=lambda item: -item[1])
        bars = ordered[:most]
        if len(ordered) > most:
            bars.append((f"{len(ordered) - most} others", sum(v for _, v in ordered[most:])))
        if ax is None:
            _, ax = plt.subplots(figsize=(6.4, 0.6 + 0.35 * len(bars)), layout="constrained")
        names = [name for name, _ in bars][::-1]
        shares = [100 * value / total for _, value in bars][::-1]
        drawn = ax.barh(names, shares, color="#3b6ea5")
        ax.bar_label(drawn, fmt="%.1f%%", padding=3)
        ax.set_xlim(0, max(shares, default=1.0) * 1.18)
        ax.set_xlabel("share of the predictive variance (%)")
        ax.spines[["top", "right"]].set_visible(False)
        return ax
