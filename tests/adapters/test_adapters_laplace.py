"""laplace-torch's posteriors against its own samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from test_adapters import DRAWS, agrees, drawn, fit, iris, network, peer, same, state, weight_covariance
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import favour
from favour import Full, Rotated, adapters
from favour.errors import InvalidType, InvalidValue, UnsupportedOperation

laplace = peer("laplace")
pytestmark = pytest.mark.filterwarnings("ignore")


def fitted(structure: str, subset: str = "all", **options: Any) -> Any:
    torch.manual_seed(0)
    model = fit(network(), 300)
    la = laplace.Laplace(model, "classification", subset_of_weights=subset, hessian_structure=structure, **options)
    la.fit(DataLoader(TensorDataset(*iris()), batch_size=50))
    la.optimize_prior_precision(method="marglik", n_steps=50)
    return la


def own_draws(la: Any, x: Tensor) -> Tensor:
    """Outputs for the weights that `la.sample` gives, which is what all of its predictions draw."""
    last = hasattr(la.model, "last_layer")
    model = la.model.model if last else la.model
    prefix = "4." if last else ""
    named = dict(model[4].named_parameters()) if last else dict(model.named_parameters())
    parts = la.sample(DRAWS).split([p.numel() for p in named.values()], 1)
    weights = {prefix + n: w.reshape(-1, *p.shape) for (n, p), w in zip(named.items(), parts, strict=True)}
    return drawn(model, weights, x)


class Curvature:
    """The leading eigenvectors of a Gauss–Newton matrix, as the backend that laplace-torch asks for them.

    (The one it was written for is not on the package index.)
    """

    rank = 10

    def __init__(self, model: nn.Module, likelihood: str, **kwargs: Any) -> None:
        self.model, self.factor = model, 1.0

    def eig_lowrank(self, loader: DataLoader) -> tuple[Tensor, Tensor, Tensor]:
        full = laplace.Laplace(copy.deepcopy(self.model), "classification", "all", "full")
        full.fit(loader)
        values, vectors = torch.linalg.eigh(full.H)
        return vectors[:, -self.rank :], values[-self.rank :], full.loss


def low_rank(monkeypatch: pytest.MonkeyPatch, prior: float = 4.0) -> Any:
    monkeypatch.setattr("laplace.baselaplace.find_spec", lambda name: True)
    torch.manual_seed(0)
    model = fit(network(), 300)
    la = laplace.LowRankLaplace(model, "classification", backend=Curvature, prior_precision=prior)
    la.fit(DataLoader(TensorDataset(*iris()), batch_size=50))
    return la


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_laplace_agrees_with_its_samples(structure, subset):
    la, x = fitted(structure, subset), iris()[0][::10]
    before, mean, prior = state(la.model), la.mean.clone(), la.prior_precision.clone()
    adapted = adapters.adapt(la)
    agrees(adapted, x, own_draws(la, x))
    same(la.model, before)
    assert_close(la.mean, mean, rtol=0, atol=0)
    assert_close(la.prior_precision, prior, rtol=0, atol=0)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_laplace_is_linearised_by_default_as_laplace_torch_does(structure):
    """To rounding in single precision: their Jacobians by backpropagation, ours by a reverse sweep."""
    la, x = fitted(structure), iris()[0][::10]
    mean, covariance = la._glm_predictive_distribution(x)
    model, posterior = adapters.adapt(la)
    with torch.no_grad():
        predict = favour.compile(model, x[:2], posterior=posterior)
        belief = predict(x)
        told = favour.compile(model, x[:2], posterior=posterior, method="adjoint")
    assert predict.method.name == "linearised" and told.method.name == "adjoint"
    assert_close(belief.mean, mean.detach(), rtol=1e-4, atol=1e-4)
    assert_close(belief.covariance_matrix, covariance.detach(), rtol=2e-3, atol=1e-4 * float(covariance.max()))
    drawn = adapters.adapt(la, linearised=False)
    assert favour.compile(drawn.model, x[:2], posterior=drawn.posterior).method.name == "adjoint"


def test_low_rank_laplace_agrees_with_its_samples(monkeypatch):
    la, x = low_rank(monkeypatch), iris()[0][::10]
    before = state(la.model)
    agrees(adapters.adapt(la), x, own_draws(la, x))
    same(la.model, before)


def test_laplace_posterior_is_the_inverse_of_its_precision(monkeypatch):
    """Entry by entry, so to rounding and not to a sampling error."""
    for la in (*(fitted(structure) for structure in ("diag", "kron", "full")), low_rank(monkeypatch)):
        precision = la.posterior_precision
        if isinstance(precision, tuple):
            (U, values), d = precision
            precision = U * values @ U.mT + d.diag()
        dense = precision.to_matrix() if hasattr(precision, "to_matrix") else precision
        dense = dense.diag() if dense.ndim == 1 else dense
        expected = torch.linalg.inv(dense.detach().double())
        named = dict(la.model.named_parameters())
        got = weight_covariance(adapters.adapt(la).posterior, list(named), [p.numel() for p in named.values()])
        assert float((got.double() - expected).norm() / expected.norm()) < 1e-4, type(la).__name__


def test_kronecker_laplace_keeps_its_eigenbases():
    """A prior added to a Kronecker product is no Kronecker product: nothing of size (mn)² is stored for a matrix."""
    posterior = adapters.adapt(fitted("kron")).posterior
    assert isinstance(posterior.gaussian("2.weight"), Rotated) and isinstance(posterior.gaussian("2.bias"), Full)
    assert max(t.numel() for t in posterior.gaussian("2.weight").tensors().values()) == 12 * 12


def test_damped_kronecker_laplace(monkeypatch):
    """√δ added to both factors. (laplace-torch 0.2 loses the flag when it adds the prior; then the sum is undamped.)"""
    la = fitted("kron", damping=True)
    precision = la.posterior_precision
    precision.damping = True
    monkeypatch.setattr(type(la), "posterior_precision", property(lambda self: precision))
    named = dict(la.model.named_parameters())
    got = weight_covariance(adapters.adapt(la).posterior, list(named), [p.numel() for p in named.values()])
    matrices = [i for i, p in enumerate(named.values()) if p.ndim == 2]
    expected = torch.linalg.inv(precision.to_matrix().detach().double())
    start = 0
    for i, p in enumerate(named.values()):
        block = slice(start, start + p.numel())
        if i in matrices:
            error = (got.double() - expected)[block, block].norm() / expected[block, block].norm()
            assert float(error) < 1e-4
        start += p.numel()


def test_kronecker_laplace_of_a_convolution_agrees_with_its_samples():
    images, y = load_digits(return_X_y=True)
    images, y = torch.tensor(images[:300], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(y[:300])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), y).backward()
        optimizer.step()
    la = laplace.Laplace(model, "classification", "all", "kron", prior_precision=5.0)
    la.fit(DataLoader(TensorDataset(images, y), batch_size=100))
    x = images[:5]
    agrees(adapters.adapt(la), x, own_draws(la, x))


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_subnetwork_laplace_agrees_with_its_samples(structure):
    chosen, x = torch.arange(10, 200, 3), iris()[0][::10]
    la = fitted(structure, "subnetwork", subnetwork_indices=chosen)
    posterior = adapters.adapt(la).posterior
    agrees(adapters.adapt(la), x, own_draws(la, x))
    sizes = {name: p.numel() for name, p in la.model.named_parameters()}
    variances = torch.cat([v.flatten() for v in posterior.variances(dict(la.model.named_parameters())).values()])
    assert sum(sizes.values()) == len(variances)
    assert_close(variances.nonzero().squeeze(1), chosen)


def test_laplace_of_frozen_layers():
    """Only parameters that require gradients are in it."""
    torch.manual_seed(0)
    model = fit(network(), 300)
    for p in model[0].parameters():
        p.requires_grad_(False)
    la = laplace.Laplace(model, "classification", "all", "kron")
    la.fit(DataLoader(TensorDataset(*iris()), batch_size=50))
    posterior = adapters.adapt(la).posterior
    assert posterior.names == ("2.weight", "2.bias", "4.weight", "4.bias")


def test_means_are_those_of_the_fit():
    la, x = fitted("diag"), iris()[0][:3]
    with torch.no_grad():
        wanted = favour.compile(*adapters.adapt(la)[:1], x, posterior=adapters.adapt(la).posterior)(x)
        for p in la.model.parameters():
            p.add_(1.0)
        model, posterior = adapters.adapt(la)
        got = favour.compile(model, x, posterior=posterior)(x)
    assert_close(got.mean, wanted.mean)


def test_laplace_errors(monkeypatch):
    model = network()
    for structure in ("diag", "kron", "full"):
        with pytest.raises(InvalidValue, match=r"not fitted; call `la\.fit"):
            adapters.adapt(laplace.Laplace(model, "classification", "all", structure))
    with pytest.raises(InvalidValue, match="not fitted"):
        adapters.adapt(laplace.Laplace(model, "classification", "last_layer", "kron"))
    functional = laplace.FunctionalLaplace(model, "classification", n_subset=10)
    with pytest.raises(UnsupportedOperation, match="Gaussian over functions"):
        adapters.adapt(functional)
    with pytest.raises(UnsupportedOperation, match=r"couples 255 parameters of 6 tensors.*refit with"):
        adapters.adapt(fitted("full"), columns=100)
    la = fitted("diag")
    la.prior_precision = -1e6
    with pytest.raises(InvalidValue, match="not positive"):
        adapters.adapt(la)
    with pytest.raises(InvalidType, match=r"pass what `laplace\.Laplace"):
        adapters.from_laplace(model)
    la = low_rank(monkeypatch)
    la.H = (la.H[0], -la.H[1])
    with pytest.raises(InvalidValue, match="negative eigenvalues"):
        adapters.adapt(la)
