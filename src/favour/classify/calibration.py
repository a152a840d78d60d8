"""Beliefs that fit held-out data: a covariance scale, and a temperature or the noise of observations.

`calibrate` keeps the predictor and changes its belief N(μ, Σ):

    classes        N(μ/T, cΣ/T²)                 c and T minimise the negative log-likelihood of E[softmax(z)]
    numbers        N(μ, cΣ + s²I)                c and s², one per output, minimise that of N(y; μ, cσ² + s²)
    per source     Σ replaced by Σ_s c_s Σ_s,  Σ_s = A_s N_s A_sᵀ the term of source s in the reverse sweep's sum

Class probabilities of the result are those of the predictor, by the same estimator: its draws or nodes z become
(z̄ + √c(z − z̄))/T, so that c = T = 1 changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from favour.belief import Belief
from favour.belief.covariance import Covariance, Dense, check_finite
from favour.belief.covariance.precision import psd_root
from favour.belief.intervals import with_level
from favour.classify import head, predictive, scores
from favour.classify.classes import classifier, ending_of, logits_of, natural_kind
from favour.classify.head.match import ridged
from favour.classify.simplex import sums_to_one
from favour.classify.targets import fitting, pairs
from favour.errors import InvalidType, InvalidValue, NotCalibrated, ShapeMismatch
from favour.program.propagator import Propagator

_NODES = 64  # for fitting; the probabilities of the result take the default number


class Calibrated(nn.Module):
    """A predictor whose beliefs were fitted to held-out data, or given a noise; call it like the predictor.

    Attributes:
        predict: The predictor.
        scale: c, the factor on the covariance.
        temperature: T; 1 for a regression.
        noise: s², the observation-noise variance, (*event); 0 for classes.
        source_scales: c_s by source, where asked for.
        before, after: Negative log-likelihood per input on the held-out data; NaN where nothing was fitted.
        classes: Whether the targets were classes.
    """

    scale: Tensor
    temperature: Tensor
    noise: Tensor

    def __init__(
        self,
        predict: Any,
        scale: Tensor,
        temperature: Tensor,
        noise: Tensor,
        source_scales: dict[str, float] | None = None,
        before: float = math.nan,
        after: float = math.nan,
        classes: bool = False,
    ):
        super().__init__()
        self.predict = predict
        self.register_buffer("scale", scale)
        self.register_buffer("temperature", temperature)
        self.register_buffer("noise", noise)
        self.source_scales, self.before, self.after, self.classes = source_scales, before, after, classes

    def forward(self, *args: Any, **kwargs: Any) -> Belief:
        """The fitted belief: of a regression over an observation, noise included; of a classifier over its logits."""
        belief = scores_of(self.predict, args, kwargs, self.classes)
        covariance: Covariance = belief.covariance
        if self.source_scales is not None:
            covariance = Dense(self._weighted(args, kwargs), covariance.event_shape)
        covariance = covariance.scale(self.scale.to(belief.dtype))
        scaled = Belief(belief.mean, covariance=covariance, validate=False)
        scaled = scaled.scale((1 / self.temperature).to(belief.dtype))
        return scaled.with_noise(self.noise.to(belief.dtype)) if not self.classes else scaled

    def _weighted(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Σ_s c_s Σ_s, (B, n, n)."""
        scales = self.source_scales or {}
        parts = asked(self.predict, self.classes).attribute(*args, **kwargs).covariances
        return sum((part * scales.get(name, 1.0) for name, part in parts.items()), start=torch.zeros(()).to(self.scale))

    def interval(self, *args: Any, level: float | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Bounds that hold an observation with probability `level`, (B, *event) each: `interval(x, 0.9)`.

        Args:
            args, kwargs: The predictor's; a number behind them is the level.
            level: .95 by default.

        Raises:
            NotCalibrated: A classifier, whose observations are classes.
        """
        args, level = with_level(self.predict, args, level)
        if self.classes:
            raise NotCalibrated(
                "this classifier was calibrated with classes, which have no interval; `favour.ConformalSet` makes sets "
                "of classes with a coverage. The interval of its logits is `fitted(x).confidence_interval(level)`."
            )
        return self(*args, **kwargs).confidence_interval(level)

    def probabilities(
        self, *args: Any, kind: str | None = None, estimator: str = "auto", draws: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Class probabilities of the fitted belief, by the predictor's own estimator; see `Predictor.probabilities`."""
        belief = self(*args, **kwargs)
        members: list[Any] = list(getattr(self.predict, "members", ()))
        centre = scores_of(self.predict, args, kwargs, True).mean if members else None
        estimates = []
        for one in members or [self.predict]:
            known = None if members else kind
            drawn = None
            if isinstance(one, Propagator):
                known = natural_kind(ending_of(one), tuple(belief.event_shape), kind)
                drawn = head.sampled(classifier(one), args, kwargs, estimator, draws)
            known = predictive.check_event(tuple(belief.event_shape), kind if known is None else known)
            if drawn is not None:
                turn = None if self.source_scales is None else self._turn(args, kwargs)
                parts = [predictive.mean_link(known, z) for z in self._fitted_draws(drawn, centre, turn)]
                estimates.append(torch.cat(parts))
                continue
            if members:
                belief = self._around(logits_of(one, args, kwargs), centre)
            estimates.append(
                predictive.expected(belief, known, "nodes" if estimator in ("auto", "head") else estimator)
            )
        return estimates[0] if len(estimates) == 1 else torch.stack(estimates).mean(0)

    def _around(self, belief: Belief, centre: Tensor | None) -> Belief:
        """A member's belief, drawn from the mean of all of them as its own deviations are."""
        root, heat = self.scale.sqrt().to(belief.dtype), (1 / self.temperature).to(belief.dtype)
        mean = belief.mean if centre is None else centre + root * (belief.mean - centre)
        return Belief(mean * heat, covariance=belief.covariance.scale((root * heat).square()), validate=False)

    def _fitted_draws(self, drawn: Iterable[Tensor], centre: Tensor | None, turn: Tensor | None) -> list[Tensor]:
        """Draws (b, C, n) of the predictor's head as draws of the fitted law, by rows."""
        draws, start = [], 0
        for z in drawn:
            middle = z.mean(2, keepdim=True)
            d = z - middle
            if centre is not None or turn is not None:  # else sizes stay free when this is traced
                rows = slice(start, start + len(z))
                start += len(z)
                middle = middle if centre is None else centre[rows].unsqueeze(-1)
                d = z - middle if turn is None else turn[rows].to(z.dtype) @ (z - middle)
            draws.append((middle + self.scale.sqrt().to(z.dtype) * d) / self.temperature.to(z.dtype))
        return draws

    def _turn(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """LL₀⁻¹ for L₀L₀ᵀ = Σ and LLᵀ = Σ_s c_s Σ_s, (B, C, C): the identity where all c_s are 1."""
        before = scores_of(self.predict, args, kwargs, True).covariance_matrix
        both = torch.stack([self._weighted(args, kwargs).to(before), before])
        root, _ = torch.linalg.cholesky_ex(ridged(both))
        return torch.linalg.solve_triangular(root[1], root[0], upper=False, left=False)

    def jsd(self, *args: Any, estimator: str = "auto", draws: int | None = None, **kwargs: Any) -> Tensor:
        """The Jensen–Shannon divergence under the fitted belief, (batch,), by the predictor's own estimator.

        See `Predictor.jsd`; of an ensemble, whose members have draws of their own, by nodes of the fitted belief.
        """
        drawn = None
        if isinstance(self.predict, Propagator):
            drawn = head.sampled(classifier(self.predict), args, kwargs, estimator, draws, scored=True)
        if drawn is None:
            belief = scores.logits(self(*args, **kwargs))
            return scores.jsd(belief, estimator="nodes" if estimator in ("auto", "head") else estimator)
        turn = None if self.source_scales is None else self._turn(args, kwargs)
        return torch.cat([head.disagreement(z) for z in self._fitted_draws(drawn, None, turn)])

    def __repr__(self) -> str:
        noise = "" if not self.noise.any() else f", noise={[round(v, 6) for v in self.noise.flatten().tolist()]}"
        fitted = "" if math.isnan(self.after) else f", nll {self.before:.4f} -> {self.after:.4f}"
        return f"Calibrated(scale={self.scale.item():.4g}, temperature={self.temperature.item():.4g}{noise}{fitted})"


def with_noise(predict: Any, variance: float | Tensor) -> Calibrated:
    """A predictor of observations, whose noise has this variance: `Predictor.with_noise`."""
    parameter = next((t for t in (*predict.parameters(), *predict.buffers()) if t.is_floating_point()), torch.empty(0))
    noise = torch.as_tensor(variance, device=parameter.device).detach()
    noise = noise if noise.is_floating_point() else noise.to(parameter.dtype)
    check_finite("variance", noise, nonnegative=True)
    one = torch.ones((), dtype=torch.float64, device=parameter.device)
    return Calibrated(predict, one, one.clone(), noise)


def scores_of(predict: Any, args: tuple, kwargs: Mapping[str, Any], classes: bool) -> Belief:
    """The belief to fit: over the outputs, or over the logits of classes."""
    logits = getattr(predict, "logits", None) if classes else None
    belief = predict(*args, **kwargs) if logits is None else logits(*args, **kwargs)
    if not isinstance(belief, Belief):
        raise InvalidType(f"the predictor has outputs {type(belief).__name__}; one uncertain output is required.")
    return belief


def asked(predict: Any, classes: bool) -> Any:
    """The predictor whose sources are weighed."""
    by = classifier(predict) if classes and isinstance(predict, Propagator) else predict
    if not hasattr(by, "attribute"):
        raise InvalidType(f"`sources` needs a predictor of favour.compile; a {type(by).__name__} has no sources.")
    return by


def calibrate(
    predict: Propagator, loader: Iterable[Any], *, sources: bool = False, temperature: bool = True
) -> Calibrated:
    """Fit a covariance scale and a temperature (classes) or a noise variance (numbers) to held-out data.

    Args:
        predict: From `favour.compile`, with one output: logits (C,) with C ≥ 2 or a softmax of them, or numbers.
        loader: Pairs (x, y) in batches, or one such pair of tensors; x as the predictor takes it. Whole numbers y of
            shape (B,) are classes, floating-point y are targets of the output's shape. Not data trained on.
        sources: Also fit one scale per noise source (dropout, parameter, …), starting from a common one.
        temperature: Fit T too; otherwise 1.

    Returns:
        A `Calibrated` predictor. The fit never makes the held-out likelihood worse.

    Raises:
        InvalidValue: No data, a label out of range, NaN targets.

    Example:
        >>> import favour
        >>> model = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3))
        >>> predict = favour.compile(model, torch.randn(4, 2))
        >>> fitted = favour.calibrate(predict, (torch.randn(50, 2), torch.randint(3, (50,))))
        >>> fitted.after <= fitted.before
        True
        >>> fitted.probabilities(torch.randn(5, 2)).shape
        torch.Size([5, 3])
    """
    if isinstance(predict, Calibrated):
        raise InvalidType("this predictor is calibrated already; fit its own `.predict` to the new data.")
    means, deviations, variances, targets = [], [], [], []
    shares: list[dict[str, Tensor]] = []
    for x, y in pairs(loader):
        arguments = x if isinstance(x, tuple) else (x,)
        with torch.no_grad():
            y = torch.as_tensor(y)
            classes = not y.is_floating_point() and not y.is_complex()
            belief = scores_of(predict, arguments, {}, classes)
            y = _checked(belief, y.to(belief.device), classes)
            if not len(y):
                continue
            wide = belief.to(torch.promote_types(belief.dtype, torch.float32))
            centre = wide.mean
            if classes and not sources:
                centre, drawn = _drawn(predict, arguments, wide)
                deviations.append(drawn - centre)
            means.append(centre.double())
            variances.append(wide.variance.double())
            targets.append(y)
            if sources:
                attribution = asked(predict, classes).attribute(*arguments)
                shares.append(attribution.covariances if classes else attribution.sources)
    if not targets:
        raise InvalidValue("`loader` gave no data; held-out inputs and targets are required.")
    if len({t.is_floating_point() for t in targets}) > 1:
        raise InvalidType("`loader` gave classes in some batches and numbers in others.")
    mean, variance, y = torch.cat(means), torch.cat(variances), torch.cat(targets)
    joined = {name: torch.cat([s[name] for s in shares]).double() for name in shares[0]} if sources else {}
    names = [name for name, part in joined.items() if part.any()]
    sources = bool(names)
    parts = torch.stack([joined[name] for name in names]) if sources else variance.new_zeros(0)

    def whole(logs: Tensor) -> Tensor:
        """Σ_s c_s Σ_s, or of its diagonal."""
        return torch.tensordot(logs.exp(), parts, 1)

    zero = variance.new_zeros(())
    start: list[Tensor]
    if classes:
        nodes = predictive.normal_nodes(_NODES, mean.shape[1]).to(mean)
        fixed = None if sources else torch.cat(deviations, 1)

        def loss(p: Sequence[Tensor]) -> Tensor:
            deviation = torch.einsum("bij,nj->nbi", psd_root(whole(p[2])), nodes) if fixed is None else fixed
            z = (mean + deviation * torch.exp(0.5 * p[0])) * torch.exp(-p[1])
            chosen = z.log_softmax(-1).gather(-1, y.long().expand(len(z), -1).unsqueeze(-1)).squeeze(-1)
            return -(torch.logsumexp(chosen, 0) - math.log(len(z))).mean()

        start = [zero.clone(), zero.clone(), variance.new_zeros(len(names))]
        plain = start
        fitted = _minimise(loss, start, [True, temperature, sources], len(y))
    else:
        squared = (y.double() - mean).square()
        level = squared.mean(0).clamp(min=1e-12).log()

        def loss(p: Sequence[Tensor]) -> Tensor:
            v = (whole(p[2]) if sources else variance) * p[0].exp() + p[1].exp()
            return 0.5 * (v.log() + squared / v + math.log(2 * math.pi)).reshape(len(y), -1).sum(1).mean()

        start = [zero.clone(), level - 2, variance.new_zeros(len(names))]
        plain = [start[0], level - 30, start[2]]
        fitted = _minimise(loss, start, [True, True, sources], len(y))
    before, after = loss(plain).item(), loss(fitted).item()
    if not after <= before:
        fitted, after = plain, before
    second = fitted[1].exp()  # the temperature of classes, the noise of numbers
    heat, noise = (second, zero) if classes else (torch.ones_like(zero), second)
    scales = {name: math.exp(v) for name, v in zip(names, fitted[2].tolist(), strict=True)} if sources else None
    return Calibrated(predict, fitted[0].exp(), heat, noise, scales, before, after, classes)


def _minimise(
    loss: Callable[[Sequence[Tensor]], Tensor], start: Sequence[Tensor], free: Sequence[bool], size: int
) -> list[Tensor]:
    """L-BFGS over the free ones.

    Each log has a standard normal prior around its start, worth one observation of `size`, which decides where the
    data say nothing; and logs move by at most 12, so that nothing overflows on the way.
    """
    with torch.enable_grad():
        values = [v.clone().requires_grad_(f and v.numel() > 0) for v, f in zip(start, free, strict=True)]
        optimiser = torch.optim.LBFGS(
            [v for v in values if v.requires_grad], lr=1, max_iter=200, line_search_fn="strong_wolfe"
        )
        offsets = [v.detach().clone() for v in start]

        def closure() -> Tensor:
            optimiser.zero_grad()
            bounded = _bounded(values, offsets)
            apart = sum(((b - o).square().sum() for b, o in zip(bounded, offsets, strict=True)), start=offsets[0] * 0)
            value = loss(bounded) + 0.5 * apart / size
            value.backward()
            return value

        optimiser.step(closure)
    return [v.detach() for v in _bounded(values, offsets)]


def _bounded(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[Tensor]:
    return [o + 12 * torch.tanh((v - o) / 12) for v, o in zip(values, offsets, strict=True)]


def _drawn(predict: Any, args: tuple, belief: Belief) -> tuple[Tensor, Tensor]:
    """The centre (B, C) and draws or nodes (n, B, C), by the estimator of `Calibrated.probabilities`, but fewer."""
    members = list(getattr(predict, "members", ()))
    parts = []
    for one in members or [predict]:
        drawn = None
        if isinstance(one, Propagator) and head.sampled(classifier(one), args, {}, "auto", None) is not None:
            drawn = list(head.sampled(classifier(one), args, {}, "head", _NODES) or ())
        if drawn:
            parts.append(torch.cat(drawn).permute(2, 0, 1))
        else:
            logits = logits_of(one, args, {}) if members else belief
            parts.append(predictive.node_outputs(logits.to(belief.dtype), _NODES))
    draws = torch.cat([z.to(belief.dtype) for z in parts])
    return (belief.mean if members else draws.mean(0)), draws


def _checked(belief: Belief, y: Tensor, classes: bool) -> Tensor:
    """Targets that fit the predictions, both finite."""
    event = tuple(belief.event_shape)
    check_finite("predictions", belief.mean)
    if not classes:
        return fitting(y, belief.mean)
    if len(event) != 1 or event[0] < 2:
        raise ShapeMismatch(
            f"targets of dtype {y.dtype} are classes, but the belief has mean {tuple(belief.mean.shape)} and no "
            "event (C,) with C ≥ 2. For a regression give floating-point targets."
        )
    if y.shape != belief.mean.shape[:1]:
        raise ShapeMismatch(f"labels have shape {tuple(y.shape)}; ({belief.batch_size},) is required.")
    y = y.long()
    if len(y) and (y.min() < 0 or y.max() >= event[0]):
        raise InvalidValue(f"labels run from {int(y.min())} to {int(y.max())}; there are classes 0 to {event[0] - 1}.")
    if sums_to_one(belief.mean):
        raise InvalidValue(
            "the predictor's outputs are probabilities, and a temperature is one of logits; calibrate a predictor of "
            "the logits: favour.compile(model, x, at='name of the module that makes them')."
        )
    return y
