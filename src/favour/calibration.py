"""Beliefs that fit held-out data: a covariance scale and a temperature, and conformal intervals and sets.

`calibrate` keeps the predictor and changes its belief N(μ, Σ):

    classes        N(μ/T, cΣ/T²)                 c and T minimise the negative log-likelihood of E[softmax(z)]
    numbers        N(μ, cΣ + s²I)                c and s², one per output, minimise that of N(y; μ, cσ² + s²)
    per source     Σ replaced by Σ_s c_s Σ_s,  Σ_s = A_s N_s A_sᵀ the term of source s in the reverse sweep's sum

Split-conformal prediction needs no distribution at all. With n held-out scores e_1 … e_n exchangeable with that of a
new input, P(e ≤ e_(k)) ≥ level for k = ⌈(n + 1) level⌉, e_(k) the k-th smallest; and < level + 1/(n + 1) without ties.

    intervals      e = |y − μ|/σ            μ ∓ e_(k) σ      wide where the belief is
    sets           e = 1 − p_y              {c : 1 − p_c ≤ e_(k)}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from favour import predictive, scores
from favour.belief import Belief
from favour.confidence import check_level
from favour.covariance import Covariance, Dense, check_finite
from favour.covariance.precision import psd_root
from favour.errors import InvalidType, InvalidValue, ShapeMismatch
from favour.metrics import Array
from favour.predictor import Predictor

_NODES = 64  # for fitting; the probabilities of the result take the default number


class Calibrated(nn.Module):
    """A predictor whose beliefs were fitted to held-out data; call it like the predictor.

    Attributes:
        scale: c, the factor on the covariance.
        temperature: T; 1 for a regression.
        noise: s², the observation-noise variance, (*event); 0 for classes.
        source_scales: c_s by source, where asked for.
        before, after: Negative log-likelihood per input on the held-out data.
    """

    scale: Tensor
    temperature: Tensor
    noise: Tensor

    def __init__(
        self,
        predict: Predictor,
        scale: Tensor,
        temperature: Tensor,
        noise: Tensor,
        source_scales: dict[str, float] | None,
        before: float,
        after: float,
    ):
        super().__init__()
        self.predict = predict
        self.register_buffer("scale", scale)
        self.register_buffer("temperature", temperature)
        self.register_buffer("noise", noise)
        self.source_scales, self.before, self.after = source_scales, before, after

    def forward(self, *args: Any, **kwargs: Any) -> Belief:
        """The fitted belief; over an observation, noise included, for a regression."""
        belief = self.predict(*args, **kwargs)
        covariance: Covariance = belief.covariance
        if self.source_scales is not None:
            parts = self.predict.attribute(*args, **kwargs).covariances
            covariance = Dense(_weighted(parts, self.source_scales), covariance.event_shape)
        covariance = covariance.scale(self.scale.to(belief.dtype))
        scaled = Belief(belief.mean, covariance=covariance, validate=False)
        scaled = scaled.scale((1 / self.temperature).to(belief.dtype))
        return scaled.with_noise(self.noise.to(belief.dtype))

    def probabilities(self, *args: Any, kind: str | None = None, estimator: str = "nodes", **kwargs: Any) -> Tensor:
        """Class probabilities of the fitted belief; see `favour.probabilities`."""
        return predictive.probabilities(self(*args, **kwargs), kind=kind, estimator=estimator)

    def jsd(self, *args: Any, **kwargs: Any) -> Tensor:
        """The Jensen–Shannon divergence of the fitted belief; see `favour.scores.jsd`."""
        return scores.jsd(scores.logits(self(*args, **kwargs)))

    def __repr__(self) -> str:
        noise = "" if not self.noise.any() else f", noise={[round(v, 6) for v in self.noise.flatten().tolist()]}"
        return (
            f"Calibrated(scale={self.scale.item():.4g}, temperature={self.temperature.item():.4g}{noise}, "
            f"nll {self.before:.4f} -> {self.after:.4f})"
        )


def calibrate(
    predict: Predictor, loader: Iterable[Any], *, sources: bool = False, temperature: bool = True
) -> Calibrated:
    """Fit a covariance scale and a temperature (classes) or a noise variance (numbers) to held-out data.

    Args:
        predict: From `favour.compile`, with one output: logits (C,) with C ≥ 2, or numbers.
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
    means, deviations, variances, targets = [], [], [], []
    shares: list[dict[str, Tensor]] = []
    for x, y in _pairs(loader):
        arguments = x if isinstance(x, tuple) else (x,)
        with torch.no_grad():
            belief = predict(*arguments)
            if not isinstance(belief, Belief):
                raise InvalidType(f"the predictor has outputs {type(belief).__name__}; `calibrate` takes one output.")
            y = torch.as_tensor(y, device=belief.device)
            classes = not y.is_floating_point()
            _check_targets(belief, y, classes)
            wide = belief.to(torch.promote_types(belief.dtype, torch.float32))
            if classes and not sources:
                deviations.append(predictive.node_outputs(wide, _NODES) - wide.mean)
            means.append(wide.mean.double())
            variances.append(wide.variance.double())
            targets.append(y)
            if sources:
                found = predict.attribute(*arguments)
                shares.append(found.covariances if classes else found.sources)
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
            return 0.5 * (v.log() + squared / v + math.log(2 * math.pi)).flatten(1).sum(1).mean()

        start = [zero.clone(), level - 2, variance.new_zeros(len(names))]
        plain = [start[0], level - 30, start[2]]
        fitted = _minimise(loss, start, [True, True, sources], len(y))
    before, after = loss(plain).item(), loss(fitted).item()
    if not after <= before:
        fitted, after = plain, before
    second = fitted[1].exp()  # the temperature of classes, the noise of numbers
    heat, noise = (second, zero) if classes else (torch.ones_like(zero), second)
    scales = {name: math.exp(v) for name, v in zip(names, fitted[2].tolist(), strict=True)} if sources else None
    return Calibrated(predict, fitted[0].exp(), heat, noise, scales, before, after)


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


def _pairs(loader: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    if isinstance(loader, tuple | list) and len(loader) == 2 and all(isinstance(t, Tensor) for t in loader):
        loader = [tuple(loader)]
    for item in loader:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InvalidType(f"`loader` gave a {type(item).__name__}; pairs (inputs, targets) are required.")
        yield item[0], item[1]


def _check_targets(belief: Belief, y: Tensor, classes: bool) -> None:
    event = tuple(belief.event_shape)
    if classes:
        if len(event) != 1 or event[0] < 2:
            raise ShapeMismatch(
                f"targets of dtype {y.dtype} are classes, but the belief has mean {tuple(belief.mean.shape)} and no "
                "event (C,) with C ≥ 2. For a regression give floating-point targets."
            )
        if y.shape != belief.mean.shape[:1]:
            raise ShapeMismatch(f"labels have shape {tuple(y.shape)}; ({belief.batch_size},) is required.")
        if len(y) and (y.min() < 0 or y.max() >= event[0]):
            raise InvalidValue(
                f"labels run from {int(y.min())} to {int(y.max())}; there are classes 0 to {event[0] - 1}."
            )
    elif y.shape != belief.mean.shape:
        raise ShapeMismatch(f"targets have shape {tuple(y.shape)}; the predictions {tuple(belief.mean.shape)}.")
    else:
        check_finite("targets", y)


def _weighted(parts: dict[str, Tensor], scales: dict[str, float]) -> Tensor:
    """Σ_s c_s Σ_s, (B, n, n)."""
    (first, *rest) = parts
    total = parts[first] * scales.get(first, 1.0)
    for name in rest:
        total = total + parts[name] * scales.get(name, 1.0)
    return total


# ---- conformal prediction


def _threshold(scores: Tensor, level: float) -> Tensor:
    """The ⌈(n + 1) level⌉-th smallest score along the first dimension."""
    check_level(level)
    n = scores.shape[0]
    k = math.ceil((n + 1) * level - 1e-9)
    if k > n:
        need = math.ceil(level / (1 - level) - 1e-9)
        raise InvalidValue(f"{n} held-out inputs cannot give coverage {level}; at least {need} are required.")
    return scores.sort(0).values[k - 1]


class ConformalInterval:
    """Intervals μ ∓ qσ that hold at least `level` of new observations, whatever their distribution.

    The guarantee is on average over inputs, for each output separately, if held-out and new data are exchangeable.

    Args:
        belief: Predictions for held-out inputs, with σ > 0 (add noise with `belief.with_noise` if need be).
        y: Their targets, (B, *event).
        level: The coverage.

    Example:
        >>> held = Belief(torch.zeros(99, 1), diag=torch.ones(99, 1))
        >>> conformal = ConformalInterval(held, torch.randn(99, 1), 0.9)
        >>> low, high = conformal(Belief(torch.zeros(1, 1), diag=torch.ones(1, 1)))
        >>> bool(low < high)
        True
    """

    factor: Tensor  # q, (*event)

    def __init__(self, belief: Belief, y: Tensor, level: float = 0.9):
        if y.shape != belief.mean.shape:
            raise ShapeMismatch(f"`y` has shape {tuple(y.shape)}; this belief needs {tuple(belief.mean.shape)}.")
        check_finite("y", y)
        if belief.batch_size and not bool((belief.variance > 0).all()):
            raise InvalidValue(
                "some predictions have no variance, and an interval of width 0 times anything covers nothing. Add "
                "observation noise with `belief.with_noise(variance)`."
            )
        self.level = level
        self.factor = _threshold((y - belief.mean).abs() / belief.stddev, level)

    def __call__(self, belief: Belief) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds, (B, *event) each."""
        half = self.factor.to(belief.mean) * belief.stddev
        return belief.mean - half, belief.mean + half

    def __repr__(self) -> str:
        return f"ConformalInterval(level={self.level}, factor={[round(f, 4) for f in self.factor.flatten().tolist()]})"


class ConformalSet:
    """Sets of classes that hold the true one with probability `level` or more.

    Args:
        probabilities: Of held-out inputs, (N, C).
        labels: (N,).
        level: The coverage.

    Example:
        >>> p = torch.softmax(torch.randn(200, 3), 1)
        >>> sets = ConformalSet(p, torch.multinomial(p, 1).squeeze(1), 0.9)
        >>> sets(p[:5]).shape
        torch.Size([5, 3])
    """

    def __init__(self, probabilities: Array, labels: Array, level: float = 0.9):
        from favour.metrics import _checked

        p, y = _checked(probabilities, labels)
        self.level = level
        self.threshold = _threshold(1 - p.gather(1, y[:, None]).squeeze(1), level).item()

    def __call__(self, probabilities: Tensor) -> Tensor:
        """Which classes are in the set, (B, C), True or False; a set may be empty."""
        return 1 - probabilities.double() <= self.threshold

    def __repr__(self) -> str:
        return f"ConformalSet(level={self.level}, threshold={self.threshold:.4g})"
