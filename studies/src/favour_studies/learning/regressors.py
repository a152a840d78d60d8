"""Ways to learn a small regression network with error bars, all with one hidden layer of 50 ReLUs and Gaussian noise.

    closed      variational inference through beliefs, `favour.fit`
    sampled1/10 the same objective, its likelihood term from 1 or 10 draws by local reparametrisation
    rates       means, dropout rates and noise through beliefs
    mc_dropout  dropout of 5%, trained and predicted with draws
    last_layer  Laplace: Bayesian linear regression on the last hidden layer of an ordinary network
    laplace     Laplace, linearised, with the full Gauss–Newton matrix of all weights
    ensemble    five ordinary networks

All get rows to train on and rows held out (for the epoch to keep, and the noise where it is not learned), and answer
with mean and variance of observations, in standardised units.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import favour
from favour import losses
from favour.nn import BayesLinear

WIDTH, BATCH = 50, 128
Answer = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rows:
    """Standardised rows to train on and rows held out."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.x) // BATCH)


@dataclass(frozen=True)
class Trained:
    """Mean and variance of observations, the processor's seconds, and held-out −log p by seconds if told."""

    answer: Answer
    seconds: float
    curve: list[tuple[float, float]]
    draws: Callable[[Tensor, int], Tensor] | None = None
    noise: Tensor | None = None


def network(inputs: int, p: float = 0.0) -> nn.Sequential:
    """inputs → 50 → 1."""
    hidden = [nn.Linear(inputs, WIDTH), nn.ReLU(), *([nn.Dropout(p)] if p else [])]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


WARM_UP = 0.5  # of the epochs, as `favour.fit` does
LR = {"means": 1e-2, "variances": 1e-2, "noise": 1e-2, "rates": 1e-2}


def closed(rows: Rows, epochs: int, seed: int) -> Trained:
    """Variational inference without a sample."""
    torch.manual_seed(seed)
    begin, seconds = time.process_time(), []
    fitted = favour.fit(
        network(rows.x.shape[1]),
        (rows.x, rows.y),
        likelihood="gaussian",
        epochs=epochs,
        lr=LR,
        validation=(rows.held_x, rows.held_y),
        batch_size=BATCH,
        seed=seed,
        check=False,
        progress=False,
        callbacks=[lambda learner, r: seconds.append(time.process_time() - begin)],
    )
    curve = [(s, float(r.held_nll or math.nan)) for s, r in zip(seconds, fitted.history, strict=True)]
    return _through(fitted, time.process_time() - begin, curve)


def rates(rows: Rows, epochs: int, seed: int) -> Trained:
    """Dropout rates by gradient, weights as points."""
    torch.manual_seed(seed)
    begin = time.process_time()
    fitted = favour.fit(
        network(rows.x.shape[1], 0.05),
        (rows.x, rows.y),
        likelihood="gaussian",
        learn=("means", "rates", "noise"),
        epochs=epochs,
        lr=LR,
        validation=(rows.held_x, rows.held_y),
        batch_size=BATCH,
        seed=seed,
        check=False,
        progress=False,
    )
    return _through(fitted, time.process_time() - begin, [])


def _through(fitted: favour.Fitted, seconds: float, curve: list[tuple[float, float]]) -> Trained:
    noise = fitted.noise_variance
    assert noise is not None

    def answer(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            belief = fitted.predict(x)
        return belief.mean, belief.variance + noise

    return Trained(answer, seconds, curve, lambda x, n: fitted.predict.sample(x, n=n), noise)


def sampled(rows: Rows, epochs: int, seed: int, draws: int) -> Trained:
    """The objective of `closed`, its likelihood term by local reparametrisation."""
    torch.manual_seed(seed)
    begin = time.process_time()
    start = network(rows.x.shape[1])
    model = nn.Sequential(*(_bayesian(m) if isinstance(m, nn.Linear) else m for m in start))
    log_noise = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.Adam([*model.parameters(), log_noise], 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * rows.steps)
    predict = favour.compile(model, rows.x[:2], check=False)
    best, state, curve = math.inf, copy.deepcopy(model.state_dict()), []
    kept = log_noise.detach().clone()
    for epoch in range(epochs):
        model.train()
        weight = min(1.0, (epoch + 1) / max(1.0, WARM_UP * epochs)) ** 2
        for part in torch.randperm(len(rows.x)).split(BATCH):
            x, y = rows.x[part].repeat(draws, 1), rows.y[part].repeat(draws, 1)
            noise = log_noise.exp()
            nll = 0.5 * (math.log(2 * math.pi) + log_noise + (y - model(x)).square() / noise).mean()
            weights = favour.Posterior.from_module(model)
            divergence = losses.kl(weights, "layer", parameters=model)
            optimiser.zero_grad()
            (nll + weight * divergence / len(rows.x)).backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            held = float(losses.predictive_nll(predict(rows.held_x), rows.held_y, "gaussian", noise=log_noise.exp()))
        curve.append((time.process_time() - begin, held))
        if weight == 1 and held < best:
            best, state, kept = held, copy.deepcopy(model.state_dict()), log_noise.detach().clone()
    model.load_state_dict(state)
    noise = kept.exp()

    def answer(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            belief = predict(x)
        return belief.mean, belief.variance + noise

    return Trained(answer, time.process_time() - begin, curve, lambda x, n: predict.sample(x, n=n), noise)


def _bayesian(linear: nn.Linear) -> BayesLinear:
    std = 0.1 * float(linear.weight.detach().square().mean().sqrt())
    return BayesLinear.from_linear(linear, std, local_reparametrisation=True)


# ---- ordinary networks


def point(rows: Rows, epochs: int, seed: int, p: float = 0.0) -> nn.Sequential:
    """Least squares with early stopping and a little weight decay."""
    torch.manual_seed(seed)
    model = network(rows.x.shape[1], p)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * rows.steps)
    best, state = math.inf, copy.deepcopy(model.state_dict())
    for _ in range(epochs):
        model.train()
        for part in torch.randperm(len(rows.x)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(rows.x[part]), rows.y[part]).backward()
            optimiser.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            held = float(nn.functional.mse_loss(model(rows.held_x), rows.held_y))
        if held < best:
            best, state = held, copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    return model.eval()


def _with_noise(rows: Rows, moments: Answer, begin: float, seconds: float | None = None) -> Trained:
    """Noise that makes the held-out rows most likely."""
    mean, variance = moments(rows.held_x)
    noise = favour.fit_noise(favour.Belief(mean, diag=variance), rows.held_y).clamp(min=1e-6)
    spent = time.process_time() - begin if seconds is None else seconds

    def answer(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = moments(x)
        return mean, variance + noise

    return Trained(answer, spent, [])


def ensemble(rows: Rows, epochs: int, seed: int) -> Trained:
    """Five networks."""
    begin = time.process_time()
    members = [point(rows, epochs, 1000 * seed + i) for i in range(5)]

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            outputs = torch.stack([m(x) for m in members])
        return outputs.mean(0), outputs.var(0)

    return _with_noise(rows, moments, begin)


def mc_dropout(rows: Rows, epochs: int, seed: int) -> Trained:
    """Dropout of 5%, 200 draws."""
    begin = time.process_time()
    model = point(rows, epochs, seed, 0.05)

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = favour.sample(model, x, 200, generator=torch.Generator().manual_seed(0))
        return outputs.mean(0), outputs.var(0)

    return _with_noise(rows, moments, begin)


def last_layer(rows: Rows, epochs: int, seed: int) -> Trained:
    """Bayesian linear regression on the features of the last hidden layer; prior by held-out likelihood."""
    begin = time.process_time()
    model = point(rows, epochs, seed)

    def features(x: Tensor) -> Tensor:
        with torch.no_grad():
            h = model[:-1](x)
        return torch.cat([h, torch.ones(len(h), 1)], 1).double()

    return _linearised(rows, model, features, begin)


def laplace(rows: Rows, epochs: int, seed: int) -> Trained:
    """Linearised Laplace with the full Gauss–Newton matrix; prior by held-out likelihood."""
    begin = time.process_time()
    model = point(rows, epochs, seed)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def output(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x[None],))[0, 0]

    slopes = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0))

    def features(x: Tensor) -> Tensor:
        return torch.cat([g.flatten(1) for g in slopes(parameters, x).values()], 1).double()

    return _linearised(rows, model, features, begin)


def _linearised(rows: Rows, model: nn.Module, features: Callable[[Tensor], Tensor], begin: float) -> Trained:
    """Variances φᵀ(ΦᵀΦ/s² + δI)⁻¹φ around the network's outputs, δ the one of a grid that suits the held-out rows."""
    with torch.no_grad():
        mean, held = model(rows.held_x), features(rows.held_x)
        gram = sum(f.mT @ f for f in (features(part) for part in rows.x.split(1024)))
        s = float((rows.held_y - mean).square().mean())
        values, vectors = torch.linalg.eigh(torch.as_tensor(gram))
        best: tuple[float, float] = (math.inf, 1.0)
        for delta in torch.logspace(-3, 4, 29).tolist():
            variance = _quadratic(held, values, vectors, s, delta)
            noise = favour.fit_noise(favour.Belief(mean, diag=variance), rows.held_y).clamp(min=1e-6)
            belief = favour.Belief(mean, diag=variance)
            nll = float(losses.predictive_nll(belief, rows.held_y, "gaussian", noise=noise))
            best = min(best, (nll, delta))

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return model(x), _quadratic(features(x), values, vectors, s, best[1])

    return _with_noise(rows, moments, begin)


def _quadratic(phi: Tensor, values: Tensor, vectors: Tensor, s: float, delta: float) -> Tensor:
    turned = (phi @ vectors).square()
    return (turned / (values.clamp(min=0) / s + delta)).sum(1, keepdim=True).float()


METHODS: dict[str, Callable[[Rows, int, int], Trained]] = {
    "closed": closed,
    "sampled1": lambda rows, epochs, seed: sampled(rows, epochs, seed, 1),
    "sampled10": lambda rows, epochs, seed: sampled(rows, epochs, seed, 10),
    "rates": rates,
    "mc_dropout": mc_dropout,
    "last_layer": last_layer,
    "laplace": laplace,
    "ensemble": ensemble,
}
