"""Deep ensembles: a mixture of beliefs, one for each member.

M networks, trained apart, are M components and no Gaussian over weights: the mean of two trained networks' weights is
not a trained network. A mixture with equal weights of beliefs N(μ_i, Σ_i) has

    μ = 1/M Σ_i μ_i,      Σ = 1/M Σ_i Σ_i + 1/M Σ_i (μ_i − μ)(μ_i − μ)ᵀ,

the mean of the members' own covariances plus the covariance of their means. Where every member's covariance is a
diagonal plus columns the result is one too: the diagonals' mean, and the columns of all members and the deviations of
their means, each divided by √M. Otherwise it is dense.

The belief has the mixture's mean and covariance. Class probabilities are the mean of the members' own, which is exact
for a mixture, while those of a Gaussian with its moments are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.adapters.silence import dropouts_of, silenced, warn_of_silence
from favour.belief import Belief, intervals
from favour.belief.covariance import DiagonalPlusFactor, flatten_event
from favour.classify.calibration import Calibrated, with_noise
from favour.classify.classes import logits_of
from favour.classify.predictive import probabilities
from favour.errors import InvalidType, InvalidValue, ShapeMismatch


class Ensemble(nn.Module):
    """Several predictors as one.

    Args:
        members: Predictors from `favour.compile`, or plain networks, whose outputs are taken as certain: copies that
            share their tensors are run in eval mode, as deep ensembles are, so their dropout is silent
            (`favour.errors.SilencedDropout` says so of networks in training mode; compile them to have it counted).
            All take the same inputs and have outputs of the same shapes.

    Example:
        >>> import favour
        >>> x = torch.randn(4, 3)
        >>> networks = [nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2)) for _ in range(3)]
        >>> predict = Ensemble([favour.compile(network, x) for network in networks])
        >>> predict(x)
        Belief(batch=4, event=(2,), Dense, float32)
        >>> predict.probabilities(x).shape
        torch.Size([4, 2])
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        models = list(members)
        wrong = [type(m).__name__ for m in models if not isinstance(m, nn.Module)]
        if wrong:
            raise InvalidType(
                f"an ensemble of {', '.join(wrong)}; its members are predictors made by favour.compile, or networks."
            )
        if not models:
            raise InvalidValue("an ensemble of no members; give one predictor at least.")
        plain = [m for m in models if not hasattr(m, "probabilities")]
        dropouts = [name for m in plain if m.training for name in dropouts_of(m)]
        if dropouts:
            warn_of_silence(
                dropouts,
                "plain networks are members of an ensemble by their outputs in eval mode",
                "give `favour.compile(member, x)` as the member instead",
                stacklevel=3,
            )
        self.members = nn.ModuleList([m if hasattr(m, "probabilities") else silenced(m) for m in models])

    def train(self, mode: bool = True) -> Ensemble:
        """Members that are plain networks stay in eval mode, whatever is asked."""
        super().train(mode)
        for member in self.members:
            if not hasattr(member, "probabilities"):
                member.eval()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The belief over the mixture's outputs, in the structure of the members' output."""
        results = [pytree.tree_flatten(m(*args, **kwargs), is_leaf=_is_belief) for m in self.members]
        spec = results[0][1]
        mixed = [mixture(parts) for parts in zip(*(leaves for leaves, _ in results), strict=True)]
        return pytree.tree_unflatten(mixed, spec)

    def logits(self, *args: Any, **kwargs: Any) -> Belief:
        """The belief over the mixture's logits, less a softmax or sigmoid that members end in."""
        return mixture([logits_of(member, args, kwargs) for member in self.members])

    def with_noise(self, variance: float | Tensor) -> Calibrated:
        """A predictor of observations, see `Predictor.with_noise`."""
        return with_noise(self, variance)

    def interval(self, *args: Any, level: float | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused, see `Predictor.interval`."""
        raise intervals.refuse()

    def probabilities(self, *args: Any, kind: str | None = None, estimator: str = "auto", **kwargs: Any) -> Tensor:
        """Class probabilities, (batch, C): the mean of the members' own.

        Args:
            args, kwargs: The members'.
            kind, estimator: As for `Predictor.probabilities`.
        """
        parts = []
        for member in self.members:
            method = getattr(member, "probabilities", None)
            if callable(method):
                parts.append(method(*args, kind=kind, estimator=estimator, **kwargs))
                continue
            belief = logits_of(member, args, kwargs)
            parts.append(probabilities(belief, kind=kind, estimator="nodes" if estimator == "auto" else estimator))
        return torch.stack(parts).mean(0)


def mixture(parts: Sequence[Any]) -> Any:
    """One belief with the moments of the equally weighted mixture; outputs that are not floating point must agree.

    Args:
        parts: Beliefs, or tensors taken as certain.

    Example:
        >>> mixture([torch.zeros(1, 1), torch.full((1, 1), 2.0)]).variance
        tensor([[1.0000]])
    """
    if any(not isinstance(p, Belief | Tensor) or (isinstance(p, Tensor) and not p.is_floating_point()) for p in parts):
        return parts[0]
    beliefs = [p if isinstance(p, Belief) else Belief.point(p) for p in parts]
    shapes = {tuple(b.mean.shape) for b in beliefs}
    if len(shapes) > 1:
        raise ShapeMismatch(f"members of an ensemble predict shapes {', '.join(map(str, shapes))}; they must agree.")
    count = len(beliefs)
    means = torch.stack([b.mean for b in beliefs])
    mean = means.mean(0)
    deviations = (means - mean) / math.sqrt(count)  # (M, B, *event)
    covariances = [b.covariance for b in beliefs]
    structured = [c for c in covariances if isinstance(c, DiagonalPlusFactor)]
    if len(structured) == count:
        diag = torch.stack([c.diag for c in structured]).mean(0)
        columns = torch.cat([c.factor / math.sqrt(count) for c in structured])
        return Belief(mean, diag, torch.cat([columns, deviations]), validate=False)
    flat = flatten_event(deviations, 2)
    between = torch.einsum("mbi,mbj->bij", flat, flat)
    within = torch.stack([c.dense() for c in covariances]).mean(0)
    return Belief(mean, covariance=within + between, validate=False)


def _is_belief(value: Any) -> bool:
    return isinstance(value, Belief)
