"""Adapters: the dispatcher, SWAG and deep ensembles; the other libraries have files of their own.

What the adapter tests share is here: a small trained network, and a belief against samples of the other library.
"""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris
from torch import Tensor, nn
from torch.testing import assert_close

import favour
from favour import Belief, Diagonal, Posterior, adapters
from favour.errors import InvalidType, InvalidValue, ShapeMismatch, UnknownName

DRAWS = 10_000
ALLOWED = 0.15


def peer(name: str) -> Any:
    """Another library, or a skipped test; what it warns of on import is its affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def iris() -> tuple[Tensor, Tensor]:
    x, y = load_iris(return_X_y=True)
    return torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32), torch.tensor(y)


def network(hidden: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def fit(model: nn.Module, steps: int = 150, seen: Callable[[int], None] | None = None) -> nn.Module:
    x, y = iris()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5, weight_decay=1e-3)
    for step in range(steps):
        rows = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if seen is not None:
            seen(step)
    return model


def drawn(model: nn.Module, weights: Iterable[dict[str, Tensor]] | dict[str, Tensor], x: Tensor) -> Tensor:
    """The outputs of `model` for every draw of its parameters, by plain functional calls."""
    if not isinstance(weights, dict):
        rows = list(weights)
        weights = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        return torch.func.vmap(lambda w: torch.func.functional_call(model, w, (x,)))(weights)


def disagreement(belief: Belief, samples: Tensor) -> tuple[float, float]:
    """Relative Frobenius error of the covariance; error of the mean in standard deviations."""
    flat = samples.detach().flatten(2).double()
    mean = flat.mean(0)
    deviation = flat - mean
    covariance = torch.einsum("sbi,sbj->bij", deviation, deviation) / (len(flat) - 1)
    error = (belief.covariance_matrix.double() - covariance).norm() / covariance.norm()
    spread = covariance.diagonal(dim1=1, dim2=2).sum().sqrt()
    return float(error), float((belief.mean.double().flatten(1) - mean).norm() / spread)


def agrees(adapted: Any, x: Tensor, samples: Tensor, **settings: Any) -> None:
    """The belief of (model, posterior) describes the samples, and would not if its variances were a third off."""
    model, posterior = adapted
    assert len(samples) == DRAWS
    with torch.no_grad():
        belief = favour.compile(model, x, posterior=posterior, **{"method": "adjoint", **settings})(x)
    covariance, mean = disagreement(belief, samples)
    assert covariance <= ALLOWED and mean <= ALLOWED, (covariance, mean)
    wider = Belief(belief.mean, covariance=belief.covariance.scale(torch.tensor(4 / 3)))
    assert disagreement(wider, samples)[0] > ALLOWED


def weight_covariance(posterior: Posterior, names: list[str], sizes: list[int]) -> Tensor:
    """The dense covariance of all parameters, one behind the other, from a posterior without joint keys."""
    blocks = []
    for name, size in zip(names, sizes, strict=True):
        gaussian = posterior.gaussian(name)
        blocks.append(torch.zeros(size, size) if gaussian is None else gaussian.covariance())
    total = torch.block_diag(*blocks)
    if posterior.latents:
        columns = torch.cat([posterior.latents[name].flatten(1) for name in names], 1)
        total = total + columns.mT @ columns
    return total


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Parameters and buffers are exactly as before."""
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert_close(after[name], tensor, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------ SWAG


def collected(rank: int = 10) -> tuple[nn.Module, adapters.SWAG, list[dict[str, Tensor]]]:
    """A trained network with its moments and the snapshots they were made of."""
    torch.manual_seed(0)
    model, swag = network(), adapters.SWAG(rank)
    fit(model)
    snapshots: list[dict[str, Tensor]] = []

    def seen(step: int) -> None:
        if step % 5 == 4:
            swag.collect(model)
            snapshots.append({name: p.detach().clone() for name, p in model.named_parameters()})

    fit(model, 150, seen)
    return model, swag, snapshots


def swag_draws(snapshots: list[dict[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """Draws by the sampling formula of the SWAG paper, from the snapshots themselves."""
    common = torch.randn(DRAWS, rank)
    draws = {}
    for name in snapshots[0]:
        stack = torch.stack([s[name] for s in snapshots]).double()
        mean, square = stack.mean(0), stack.square().mean(0)
        running = stack.cumsum(0) / torch.arange(1, len(stack) + 1).reshape(-1, *[1] * mean.ndim)
        deviations = (stack - running)[-rank:]
        spread = (square - mean.square()).clamp_min(0).sqrt()
        low = torch.einsum("sk,k...->s...", common.double(), deviations) / math.sqrt(2 * (rank - 1))
        draws[name] = (mean + spread * torch.randn(DRAWS, *mean.shape) / math.sqrt(2) + low).float()
    return draws


def test_swag_agrees_with_draws_of_the_papers_formula():
    model, swag, snapshots = collected()
    before, x = state(model), iris()[0][::10]
    adapted = adapters.adapt(swag, model)
    agrees(adapted, x, drawn(model, swag_draws(snapshots, 10), x))
    same(model, before)
    assert adapted.posterior.latent_rank == 10 and len(snapshots) == 30


def test_swag_latents_are_shared_by_all_layers():
    """With the layers' draws independent of each other the belief is another one."""
    model, swag, snapshots = collected()
    x = iris()[0][::10]
    apart = swag_draws(snapshots, 10)
    for name in apart:
        apart[name] = apart[name][torch.randperm(DRAWS)]
    adapted = adapters.adapt(swag, model)
    with torch.no_grad():
        belief = favour.compile(adapted.model, x, posterior=adapted.posterior)(x)
    assert disagreement(belief, drawn(model, apart, x))[0] > ALLOWED


def test_swag_from_a_mapping_equals_the_collector():
    model, swag, _ = collected(4)
    moments = {"mean": swag.mean, "square_mean": swag.square_mean, "deviations": swag.deviations}
    one, other = adapters.adapt(swag, model, scale=2.0), adapters.adapt(moments, model, scale=2.0)
    for name, gaussian in one.posterior.gaussians.items():
        assert_close(gaussian.variance(), other.posterior.gaussian(name).variance())
        assert_close(gaussian.variance(), (swag.square_mean[name] - swag.mean[name] ** 2).clamp_min(0))  # 2 · ½
        assert_close(one.posterior.latents[name], other.posterior.latents[name])
        assert_close(one.posterior.latents[name][3], swag.deviations[3][name] / math.sqrt(3))  # √(2/(2·3))
        assert_close(one.model.get_parameter(name).detach(), swag.mean[name])


def test_swag_without_deviations_is_diagonal():
    model, swag, _ = collected(0)
    posterior = adapters.adapt(swag, model).posterior
    assert not posterior.latents and all(isinstance(g, Diagonal) for g in posterior.gaussians.values())


def test_swag_errors():
    model, swag = network(), adapters.SWAG(2)
    with pytest.raises(InvalidValue, match="two snapshots at least"):
        adapters.adapt(swag, model)
    swag.collect(model)
    with pytest.raises(InvalidValue, match="one SWAG, one model"):
        swag.collect(network(5))
    swag.update_parameters(model)
    with pytest.raises(ShapeMismatch, match="does not fit the model"):
        adapters.adapt(swag, network(5))
    with pytest.raises(UnknownName, match=r"lacks `0\.weight`"):
        adapters.adapt({"mean": {}, "square_mean": {}, "deviations": []}, model)
    moments = {"mean": swag.mean, "square_mean": swag.square_mean, "deviations": swag.deviations[:1]}
    with pytest.raises(InvalidValue, match="one column"):
        adapters.adapt(moments, model)
    with pytest.raises(InvalidValue, match="`rank` is 1"):
        adapters.SWAG(1)
    with pytest.raises(InvalidValue, match="`scale` is -1"):
        adapters.adapt(swag, model, scale=-1)
    with pytest.raises(InvalidType, match=r"adapt\(obj, model\)"):
        adapters.adapt(swag)


# ------------------------------------------------------------------- ensembles


def noisy(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
    return fit(model, 60)  # type: ignore[return-value]


def test_ensemble_agrees_with_draws_of_its_members():
    members, x = [noisy(seed) for seed in range(4)], iris()[0][::10]
    before = [state(member) for member in members]
    predict = adapters.Ensemble([favour.compile(member, x) for member in members])
    with torch.no_grad():
        belief = predict(x)
        repeated = x.repeat(DRAWS // 4, 1, 1).flatten(0, 1)
        samples = [copy.deepcopy(m).train()(repeated).reshape(-1, len(x), 3) for m in members]
    covariance, mean = disagreement(belief, torch.cat(samples))
    assert covariance <= ALLOWED and mean <= ALLOWED, (covariance, mean)
    alone = [disagreement(favour.compile(m, x)(x).detach(), torch.cat(samples))[0] for m in members]
    assert min(alone) > ALLOWED
    for member, kept in zip(members, before, strict=True):
        same(member, kept)


def test_ensemble_is_the_mixture_of_its_members():
    torch.manual_seed(0)
    mean, spread = torch.randn(3, 2, 4, dtype=torch.float64), torch.rand(3, 2, 4, dtype=torch.float64)
    factor = torch.randn(3, 2, 2, 4, dtype=torch.float64)
    beliefs = [Belief(m, d, u) for m, d, u in zip(mean, spread, factor, strict=True)]
    dense = [Belief(b.mean, covariance=b.covariance_matrix) for b in beliefs]
    for parts in (beliefs, dense, [beliefs[0], *dense[1:]]):
        mixed = adapters.mixture(parts)
        assert_close(mixed.mean, mean.mean(0))
        for row in range(2):
            second = sum(b.covariance_matrix[row] + torch.outer(b.mean[row], b.mean[row]) for b in beliefs) / 3
            expected = second - torch.outer(mean.mean(0)[row], mean.mean(0)[row])
            assert_close(mixed.covariance_matrix[row], expected, rtol=1e-10, atol=1e-10)
    assert mixed.rank == 4 and adapters.mixture(beliefs).rank == 3 * 2 + 3


def test_ensemble_probabilities_are_the_mean_of_its_members():
    members, x = [noisy(seed) for seed in range(3)], iris()[0][::10]
    predictors = [favour.compile(member, x) for member in members]
    with torch.no_grad():
        got = adapters.Ensemble(predictors).probabilities(x)
        assert_close(got, sum(p.probabilities(x) for p in predictors) / 3)
        plain = adapters.Ensemble([m.eval() for m in members])
        assert_close(plain.probabilities(x), sum(m(x).softmax(-1) for m in members) / 3)
        means = torch.stack([m(x) for m in members])
        assert_close(plain(x).variance, means.var(0, unbiased=False))


def test_ensemble_errors():
    with pytest.raises(InvalidValue, match="no members"):
        adapters.Ensemble([])
    with pytest.raises(InvalidType, match="ensemble of int"):
        adapters.Ensemble([1])
    with pytest.raises(ShapeMismatch, match="must agree"):
        adapters.Ensemble([nn.Linear(2, 3), nn.Linear(2, 1)])(torch.ones(1, 2))


# ------------------------------------------------------------------ dispatcher


def test_adapt_names_what_it_knows():
    with pytest.raises(InvalidType, match=r"no adapter knows a builtins\.int.*Pyro.*laplace-torch"):
        adapters.adapt(3)
    with pytest.raises(InvalidType, match="no adapter knows a torch"):
        adapters.adapt(network())
    with pytest.raises(InvalidType, match=r"favour\.adapters\.Ensemble"):
        adapters.adapt([network(), network()])
    with pytest.raises(InvalidType, match="no adapter knows"):
        adapters.adapt(torch.optim.SGD(network().parameters(), lr=0.1))
