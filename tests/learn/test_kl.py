"""Divergences of posteriors against dense ones of torch.distributions."""

import math

import pytest
import torch
import torch.distributions as td
from torch import Tensor, nn

import favour
from favour import losses

F64 = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def positive(*shape: int) -> Tensor:
    return 0.2 + torch.rand(*shape, dtype=F64)


def psd(n: int) -> Tensor:
    root = randn(n, n)
    return root @ root.mT + 0.3 * torch.eye(n, dtype=F64)


def gaussians() -> dict[str, dict]:
    return {
        "diagonal": {"weight": favour.Diagonal(positive(2, 3)), "bias": positive(2)},
        "rows": {"weight": favour.Rows(positive(2, 3), randn(2, 2, 3))},
        "kronecker": {"weight": favour.Kronecker(psd(3), psd(2)), "bias": positive(2)},
        "kronecker joint": {("weight", "bias"): favour.Kronecker(psd(4), psd(2))},
        "rotated": {"weight": favour.Rotated(positive(2, 3), randn(3, 3), randn(2, 2))},
        "rotated, wide": {"weight": favour.Rotated(positive(3, 3), randn(3, 3), randn(2, 3))},
        "full": {"weight": favour.Full(psd(6), (2, 3))},
        "full joint": {("weight", "bias"): favour.Full(psd(8), (2, 4))},
    }


KINDS = list(gaussians())


def dense(posterior: favour.Posterior, model: nn.Module) -> tuple[list[str], Tensor]:
    """Names in order, and the covariance over all of their numbers, from the Gaussians' own dense form."""
    names = [n for n, _ in model.named_parameters() if n in posterior.names]
    shapes = {n: p.shape for n, p in model.named_parameters()}
    first, total = {}, 0
    for n in names:
        first[n], total = total, total + shapes[n].numel()
    cov = torch.zeros(total, total, dtype=F64)
    for key, gaussian in posterior.gaussians.items():
        if isinstance(key, str):
            places = first[key] + torch.arange(shapes[key].numel())
        else:
            m, n = shapes[key[0]]
            places = torch.cat(
                [
                    torch.cat([first[key[0]] + i * n + torch.arange(n), torch.tensor([first[key[1]] + i])])
                    for i in range(m)
                ]
            )
        cov[places[:, None], places] += gaussian.covariance()
    if posterior.latents:
        columns = torch.cat(
            [
                posterior.latents[n].flatten(1)
                if n in posterior.latents
                else cov.new_zeros(posterior.latent_rank, shapes[n].numel())
                for n in names
            ],
            1,
        )
        cov = cov + columns.mT @ columns
    return names, cov


def reference(posterior: favour.Posterior, model: nn.Module, std: Tensor, centre: Tensor | None = None) -> Tensor:
    names, cov = dense(posterior, model)
    mean = torch.cat([dict(model.named_parameters())[n].detach().flatten() for n in names])
    q = td.MultivariateNormal(mean, cov)
    p = td.MultivariateNormal(torch.zeros_like(mean) if centre is None else centre, (std**2).diag())
    return td.kl_divergence(q, p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("latents", [False, True])
def test_kl_equals_the_dense_one(kind: str, latents: bool) -> None:
    model = nn.Linear(3, 2).double()
    held = gaussians()[kind]
    covered = favour.Posterior(held).names
    factors = {n: randn(2, *p.shape) for n, p in model.named_parameters() if n in covered} if latents else None
    posterior = favour.Posterior(held, latents=factors)
    n = sum(p.numel() for name, p in model.named_parameters() if name in covered)
    want = reference(posterior, model, torch.full((n,), 0.7, dtype=F64))
    torch.testing.assert_close(losses.kl(posterior, 0.7, parameters=model).detach(), want)


def test_kl_with_a_prior_for_each_number_and_a_centre() -> None:
    model = nn.Linear(3, 2).double()
    posterior = favour.Posterior(gaussians()["diagonal"])
    weight, bias, centre = positive(2, 3), positive(2), randn(2, 3)
    got = losses.kl(posterior, {"weight": weight, "bias": bias}, parameters=model, centre={"weight": centre})
    stds, middle = torch.cat([weight.flatten(), bias]), torch.cat([centre.flatten(), torch.zeros(2, dtype=F64)])
    torch.testing.assert_close(got.detach(), reference(posterior, model, stds, middle))


def test_means_of_the_posterior_win() -> None:
    model = nn.Linear(3, 2).double()
    means = {"weight": randn(2, 3), "bias": randn(2)}
    held = gaussians()["diagonal"]
    got = losses.kl(favour.Posterior(held, means=means), 1.0, parameters=model)
    with torch.no_grad():
        model.weight.copy_(means["weight"])
        model.bias.copy_(means["bias"])
    torch.testing.assert_close(got, losses.kl(favour.Posterior(held), 1.0, parameters=model).detach())


@pytest.mark.parametrize("groups", ["parameter", "layer", "shared"])
def test_empirical_bayes_is_the_minimum(groups: str) -> None:
    """Descent over one log standard deviation for each group ends at the closed form."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().requires_grad_(False)
    posterior = favour.Posterior({n: positive(*p.shape) for n, p in model.named_parameters()})
    of = {n: {"parameter": n, "layer": n[0], "shared": ""}[groups] for n in posterior.names}
    logs = {g: torch.zeros((), dtype=F64, requires_grad=True) for g in of.values()}
    optimiser = torch.optim.LBFGS(logs.values(), max_iter=100, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = losses.kl(posterior, {n: logs[of[n]].exp() for n in of}, parameters=model)
        value.backward()
        return value

    optimiser.step(loss)
    torch.testing.assert_close(losses.kl(posterior, groups, parameters=model), loss().detach())
    stds = losses.prior_std(posterior, groups, parameters=model)
    for name in of:
        torch.testing.assert_close(stds[name], logs[of[name]].detach().exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_finite_differences(kind: str) -> None:
    held = {k: favour.Diagonal(v) if isinstance(v, Tensor) else v for k, v in gaussians()[kind].items()}
    leaves = [t.requires_grad_() for g in held.values() for t in g.tensors().values()]
    weight, bias = randn(2, 3).requires_grad_(), randn(2).requires_grad_()

    def run(weight: Tensor, bias: Tensor, *tensors: Tensor) -> Tensor:
        left = iter(tensors)
        made = {}
        for key, gaussian in held.items():
            fields = {name: next(left) for name in gaussian.tensors()}
            if not isinstance(gaussian, favour.Diagonal | favour.Rows | favour.Rotated):  # keep them symmetric
                fields = {name: 0.5 * (t + t.mT) for name, t in fields.items()}
            made[key] = type(gaussian)(**fields, **gaussian.settings())
        return losses.kl(made, "layer", parameters={"weight": weight, "bias": bias})

    assert torch.autograd.gradcheck(run, (weight, bias, *leaves), atol=1e-6, rtol=1e-5)


def test_a_singular_posterior_is_infinitely_far() -> None:
    mean = {"weight": torch.zeros(2, 3, dtype=F64)}
    for gaussian in (
        favour.Diagonal(torch.zeros(2, 3, dtype=F64)),
        favour.Full(torch.ones(6, 6, dtype=F64), (2, 3)),
        favour.Rotated(torch.ones(1, 1, dtype=F64), randn(3, 1), randn(2, 1)),
    ):
        assert float(losses.kl(favour.Posterior({"weight": gaussian}), 1.0, parameters=mean)) == math.inf
    only = favour.Posterior({}, latents={"weight": randn(2, 2, 3)})
    assert float(losses.kl(only, 1.0, parameters=mean)) == math.inf


def test_bad_input() -> None:
    posterior = favour.Posterior({"weight": torch.ones(2, 3)})
    model = nn.Linear(3, 2)
    with pytest.raises(favour.errors.UnknownName, match="no means for `weight`"):
        losses.kl(posterior)
    with pytest.raises(favour.errors.UnknownName, match="no standard deviation for `weight`"):
        losses.kl(posterior, {"bias": 1.0}, parameters=model)
    with pytest.raises(favour.errors.InvalidValue, match="layer"):
        losses.kl(posterior, "each", parameters=model)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(favour.errors.InvalidValue, match="positive"):
            losses.kl(posterior, bad, parameters=model)
    assert float(losses.kl({}, 1.0)) == 0.0
