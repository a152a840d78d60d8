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
from favour.pages.notebook import card

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_HEADER = ("source", "share", "standard deviation")


@dataclass(frozen=True, repr=False)
class Attribution:
    """Variance by source.

    Attributes:
        mean: The prediction, (batch, *event).
        sources: Source name (module path or parameter name) to its share of the variance, (batch, *event) each.
        covariances: Source name to its term A_s N_s A_sᵀ, (batch, n, n) for n entries; they add up to the covariance.

    Printed, it is a table.

    Example:
        >>> import favour
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1, bias=False))
        >>> _ = torch.nn.init.ones_(net[1].weight)
        >>> print(favour.compile(net, torch.ones(2, 4)).attribute(torch.ones(3, 4)))
        Variance by source, over 3 inputs and 1 output
        source   share  standard deviation
        0       100.0%  2
        all     100.0%  2
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

    def table(self) -> list[list[str]]:
        """Source, share of the variance, root of its mean; largest first, the sum below."""
        count = max(1, self.mean.numel())
        total = self.variance.sum().item()
        parts = [(name, share.sum().item()) for name, share in self.sources.items()]
        parts = [*sorted(parts, key=lambda part: -part[1]), ("all", total)]
        return [
            [name, f"{part / total if total else 0.0:.1%}", f"{max(part / count, 0.0) ** 0.5:.4g}"]
            for name, part in parts
        ]

    def __repr__(self) -> str:
        lines = [list(_HEADER), *self.table()]
        first, second = (max(len(line[i]) for line in lines) for i in (0, 1))
        said = [f"{name:<{first}}  {share:>{second}}  {sigma}" for name, share, sigma in lines]
        return "\n".join([self._title(), *said])

    def _repr_html_(self) -> str:
        return card(self._title(), _HEADER, self.table())

    def _title(self) -> str:
        sizes = {"input": self.mean.shape[0], "output": self.mean[:1].numel()}
        inputs, outputs = (f"{n} {name}{'s' * (n != 1)}" for name, n in sizes.items())
        return f"Variance by source, over {inputs} and {outputs}"

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
