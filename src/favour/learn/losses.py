r"""What is minimised to learn a posterior, dropout rates and noise, and what a fit is judged by.

For rows (x_i, y_i), i = 1 … N, a posterior q over the weights w and the belief N(μ(x), Σ(x)) that Favour gives of the
outputs f(x; w) under q and dropout,

    log p(y) ≥ Σ_i E[log p(y_i | f(x_i))] − KL(q ‖ prior)                                  the bound

and `expected_nll` is the mean of the terms, exact in the belief for most likelihoods (`favour.learn.likelihoods`) and
without random numbers: gradients have no noise but that of the choice of rows. The bound estimates the marginal
likelihood, so it compares priors and architectures without a validation set.

Dropout rates. Variational dropout (Gal and Ghahramani) makes q of a unit's outgoing weights w_i a mixture of
w_i/(1 − p_i), with probability 1 − p_i, and 0; its divergence from N(0, s²) is, up to a constant,

    ‖w_i‖² / (2s²(1 − p_i)) − H(p_i),      H(p) = −p log p − (1 − p) log(1 − p).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from favour.belief import Belief
from favour.classify.targets import pairs
from favour.errors import InvalidType, InvalidValue, ShapeMismatch
from favour.learn.categorical import Categorical
from favour.learn.divergence import Prior, kl
from favour.learn.likelihoods import Bernoulli, Gaussian, Heteroscedastic, Likelihood, Poisson, StudentT, by_name
from favour.posterior import Posterior
from favour.predictor.predictor import Predictor

LIKELIHOODS: dict[str, type[Likelihood]] = {
    kind.name: kind for kind in (Gaussian, Heteroscedastic, Categorical, Bernoulli, Poisson, StudentT)
}


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """A likelihood by its name, or itself."""
    return by_name(LIKELIHOODS, likelihood)


def expected_nll(
    belief: Belief | Tensor,
    y: Tensor,
    likelihood: str | Likelihood = "gaussian",
    *,
    noise: float | Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """E[−log p(y | f)] over a belief: the training loss of a network whose outputs are uncertain.

    Args:
        belief: Over the outputs f; or draws of them (n, B, *event), over which the mean is taken.
        y: Targets, (B, *event); labels (B,) for `"categorical"`; (B, d) for the 2d outputs of `"heteroscedastic"`.
        likelihood: `"gaussian"`, `"heteroscedastic"`, `"categorical"`, `"bernoulli"`, `"poisson"`, `"student_t"`, or
            one of those objects with settings, such as `favour.losses.Categorical("bound")`.
        noise: Variance s² of the observations' noise, for `"gaussian"` and `"student_t"`.
        reduction: `"mean"` or `"sum"` over rows, or `"none"`.

    Example:
        >>> belief = Belief(torch.zeros(2, 1), diag=torch.ones(2, 1))
        >>> expected_nll(belief, torch.zeros(2, 1), "gaussian", noise=1.0)
        tensor(1.4189)
        >>> expected_nll(belief, torch.ones(2, 1), "bernoulli")
        tensor(0.8061)
    """
    kind, y, s = _prepared(belief, y, likelihood, noise)
    if isinstance(belief, Tensor):
        return _reduced(-kind.log_prob(belief, y, s).mean(0), reduction)
    return _reduced(kind.expected(belief, y, s), reduction)


def predictive_nll(
    belief: Belief | Tensor,
    y: Tensor,
    likelihood: str | Likelihood = "gaussian",
    *,
    noise: float | Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """−log E[p(y | f)]: how well a prediction meets observations; what held-out rows are scored by. See `expected_nll`.

    Example:
        >>> belief = Belief(torch.zeros(2, 1), diag=torch.ones(2, 1))
        >>> predictive_nll(belief, torch.zeros(2, 1), "gaussian", noise=1.0)
        tensor(1.2655)
    """
    kind, y, s = _prepared(belief, y, likelihood, noise)
    if isinstance(belief, Tensor):
        drawn = kind.log_prob(belief, y, s)
        return _reduced(-(torch.logsumexp(drawn, 0) - drawn.new_tensor(len(drawn)).log()), reduction)
    return _reduced(kind.predictive(belief, y, s), reduction)


def evidence_bound(
    predict: Predictor,
    loader: Iterable[Any],
    likelihood: str | Likelihood,
    *,
    noise: float | Tensor | None = None,
    prior: Prior = "layer",
) -> Tensor:
    """The bound on log p(y) of all rows of a loader, a scalar: the greater, the better prior, noise or architecture.

    Args:
        predict: Of a network whose weights have a posterior.
        loader: Pairs (inputs, targets), every row once; or one pair of tensors.
        likelihood, noise: See `expected_nll`.
        prior: See `kl`.

    Example:
        >>> import favour
        >>> model = torch.nn.Linear(2, 1)
        >>> predict = favour.compile(model, torch.zeros(2, 2), posterior={"weight": torch.full((1, 2), 0.1)})
        >>> x = torch.randn(20, 2)
        >>> bool(evidence_bound(predict, (x, model(x).detach()), "gaussian", noise=1.0) < 0)
        True
    """
    terms = []
    for x, y in pairs(loader):
        arguments = x if isinstance(x, tuple) else (x,)
        terms.append(-expected_nll(predict(*arguments), y, likelihood, noise=noise, reduction="sum"))
    if not terms:
        raise InvalidValue("`loader` gave no rows.")
    posterior = predict.posterior()
    named = {name: predict.store.take(name) for name in posterior.names}
    divergence = kl(Posterior.wrap(posterior), prior, parameters=named)
    return torch.stack(terms).sum() - divergence.to(terms[0])


def dropout_kl(p: Tensor, weight: Tensor | None = None, *, prior_std: float = 1.0, units: int | None = None) -> Tensor:
    """The objective's term of dropout rates, up to a constant (so it may be negative); see the module.

    Args:
        p: Rates in (0, 1): one, or one for each unit.
        weight: (out, in, …) that the dropped units feed, where it has no posterior or penalty of its own. Without it
            the entropy alone is taken.
        prior_std: s of those weights.
        units: How many units share the rates, where there is no weight to tell; p.numel() by default.

    Example:
        >>> dropout_kl(torch.tensor([0.5, 0.1]))
        tensor(-1.0182)
    """
    if not torch.compiler.is_compiling() and not bool(((p > 0) & (p < 1)).all()):
        raise InvalidValue("dropout rates that are learned lie strictly between 0 and 1.")
    entropy = -(torch.special.xlogy(p, p) + torch.special.xlog1py(1 - p, -p)).flatten()
    if weight is None:
        return -entropy.sum() * ((units or p.numel()) / p.numel())
    columns = weight.square().transpose(0, 1).flatten(1).sum(1)  # ‖w_i‖², (in,)
    if p.numel() not in (1, len(columns)):
        raise ShapeMismatch(
            f"`p` has shape {tuple(p.shape)} and `weight` {tuple(weight.shape)}; it needs {p.numel()} input columns."
        )
    return (columns / (2 * prior_std**2 * (1 - p.flatten())) - entropy).sum()


def _prepared(
    belief: Belief | Tensor, y: Tensor, likelihood: str | Likelihood, noise: float | Tensor | None
) -> tuple[Likelihood, Tensor, Tensor | None]:
    if not isinstance(belief, Belief | Tensor):
        raise InvalidType(f"`belief` is a {type(belief).__name__}; a Belief, or draws (n, batch, …), is required.")
    kind = as_likelihood(likelihood)
    like = belief.mean if isinstance(belief, Belief) else belief[0]
    if noise is not None and not kind.noisy:
        raise InvalidValue(f"`noise` is given, and likelihood {kind.name!r} has none.")
    s = None if noise is None else torch.as_tensor(noise, dtype=like.dtype, device=like.device)
    if s is not None and not torch.compiler.is_compiling() and not bool((s > 0).all()):
        raise InvalidValue(f"`noise` holds {float(s.min()):.4g}; a variance above 0 is required.")
    return kind, kind.targets(y, like), s


def _reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise InvalidValue(f"`reduction` is {reduction!r}; choose 'mean', 'sum' or 'none'.")
    return values.mean() if reduction == "mean" else values.sum() if reduction == "sum" else values
