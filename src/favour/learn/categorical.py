r"""Class labels: logits z ~ N(μ, Σ), and E[−log softmax(z)_y] = E[log Σ_j e^z_j] − μ_y, which has no closed form.

    nodes    the mean over fixed draws of the belief, the same for every input: exact for cubic polynomials
    bound    with a = softmax(μ) and z̃_j = z_j − aᵀz, of mean m̃_j and variance w_j = Σ_jj − 2(Σa)_j + aᵀΣa,
             E[log Σ e^z] = aᵀμ + E[log Σ e^z̃] ≤ aᵀμ + log Σ_j exp(m̃_j + ½w_j)                  (Jensen)

The bound holds for any a with Σa = 1; at a = softmax(μ) it agrees with the truth to second order in Σ, since
½Σ_j a_j w_j = ½ tr((diag(a) − aaᵀ)Σ). It needs variances and one product Σa only, but e^(½w) grows too fast: with ten
classes it is .003 too high at logits' standard deviations of .5, .04 at 1, 1 at 2, while 64 nodes stay within .02.
So `nodes` is the default, and `bound` what to take where there are too many classes for a covariance.

Both read the covariance between logits: what all logits share (a common shift) must not cost anything, and does if
variances alone are looked at. A `Directional` belief, of `favour.compile(..., directions=k)`, serves as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from favour.belief import Belief
from favour.classify.predictive import node_outputs
from favour.errors import InvalidValue, ShapeMismatch
from favour.learn.likelihoods import Likelihood, no_labels

ESTIMATORS = ("nodes", "bound")


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Labels 0 … C − 1 with logits f (B, C).

    Attributes:
        estimator: `"nodes"` or `"bound"`; see the module.
        nodes: How many fixed draws; even.
    """

    name, covariance, classes = "categorical", True, True
    estimator: str = "nodes"
    nodes: int = 64

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise InvalidValue(f"`estimator` is {self.estimator!r}; choose one of {', '.join(ESTIMATORS)}.")
        if self.nodes < 2 or self.nodes % 2:
            raise InvalidValue(f"`nodes` is {self.nodes}; an even number of at least 2 is needed.")

    def targets(self, y: Tensor, like: Tensor) -> Tensor:
        if like.dim() != 2 or like.shape[1] < 2:
            raise ShapeMismatch(
                f"likelihood 'categorical' takes logits (batch, classes), at least two; the outputs are "
                f"{tuple(like.shape)}. One logit for two classes is likelihood 'bernoulli'."
            )
        y = torch.as_tensor(y, device=like.device)
        if y.shape != like.shape[:1]:
            raise ShapeMismatch(f"`y` has shape {tuple(y.shape)}; labels of {len(like)} inputs have ({len(like)},).")
        no_labels(y, self.name)
        if not torch.compiler.is_compiling():
            bad = (y < 0) | (y >= like.shape[1])
            if bool(bad.any()):
                raise InvalidValue(
                    f"`y` holds the label {int(y[bad][0])}; {like.shape[1]} classes have labels 0 to "
                    f"{like.shape[1] - 1}."
                )
        return y.long()

    def log_prob(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        return _of_label(f, y) - torch.logsumexp(f, -1)

    def expected(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        if self.estimator == "bound":
            return bound(belief) - _of_label(belief.mean, y)
        return torch.logsumexp(node_outputs(belief, self.nodes), -1).mean(0) - _of_label(belief.mean, y)

    def predictive(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        drawn = self.log_prob(node_outputs(belief, max(self.nodes, 64)), y, None)
        return -torch.logsumexp(drawn, 0) + torch.tensor(len(drawn), dtype=drawn.dtype).log()

    def noise_shape(self, event: tuple[int, ...]) -> tuple[int, ...]:
        return ()


def bound(belief: Belief) -> Tensor:
    """An upper bound of E[log Σ e^z], (B,).

    >>> z = Belief(torch.zeros(1, 2), diag=torch.full((1, 2), 0.5))
    >>> bound(z), bound(Belief.point(torch.zeros(1, 2)))
    (tensor([0.8181]), tensor([0.6931]))
    """
    mean = belief.mean
    a = mean.softmax(-1)
    product = belief.covariance.matmul(a.unsqueeze(0)).squeeze(0)
    centre = (a * mean).sum(-1, keepdim=True)
    spread = belief.variance - 2 * product + (a * product).sum(-1, keepdim=True)
    return centre.squeeze(-1) + torch.logsumexp(mean - centre + 0.5 * spread, -1)


def _of_label(z: Tensor, y: Tensor) -> Tensor:
    """z_y of (…, B, C), (…, B)."""
    return z.gather(-1, y.expand(z.shape[:-1]).unsqueeze(-1)).squeeze(-1)
