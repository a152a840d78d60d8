"""The BoTorch model: the posterior is the joint belief, acquisition functions take it, and it optimises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import favour

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:linear_operator", "ignore::FutureWarning")

pytest.importorskip("botorch")
from botorch.acquisition import (  # noqa: E402
    LogExpectedImprovement,
    qLogExpectedImprovement,
    qUpperConfidenceBound,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling import SobolQMCNormalSampler  # noqa: E402

from favour.botorch import FavourModel  # noqa: E402
from favour.sklearn import FavourRegressor  # noqa: E402

F64 = torch.float64


def network(outputs: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 16),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(16, outputs),
    ).double()


def model(outputs: int = 1, **options: object) -> FavourModel:
    return FavourModel(favour.compile(network(outputs), torch.zeros(2, 2, dtype=F64)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_posterior_is_the_joint_belief(outputs: int, batch: tuple[int, ...]) -> None:
    scale, shift = torch.arange(1.0, outputs + 1).to(F64), 0.5
    m = model(outputs, x_mean=0.1, x_scale=2.0, y_mean=shift, y_scale=scale)
    X = torch.rand(*batch, 3, 2, dtype=F64)
    posterior = m.posterior(X)
    assert posterior.mean.shape == (*batch, 3, outputs)
    assert posterior.rsample(torch.Size([5])).shape == (5, *batch, 3, outputs)
    for index in np.ndindex(*batch):
        joint = m.predict.joint((X[index] - 0.1) / 2)
        torch.testing.assert_close(posterior.mean[index], joint.mean[0] * scale + shift)
        across = scale.repeat(3)
        want = joint.covariance_matrix[0] * across * across[:, None]
        torch.testing.assert_close(posterior.distribution.covariance_matrix[index], want, rtol=1e-6, atol=1e-10)


def test_draws_have_the_belief_covariance() -> None:
    m, X = model(2), torch.rand(3, 2, dtype=F64)
    draws = m.posterior(X).rsample(torch.Size([20_000])).flatten(1)
    want = m.predict.joint(X).covariance_matrix[0]
    spread = want.diagonal()
    error = ((spread[:, None] * spread + want.square()) / 20_000).sqrt()
    assert ((torch.cov(draws.mT) - want).abs() < 5 * error).all()


def test_observation_noise_and_output_indices() -> None:
    m, X = model(3, noise=torch.tensor([0.1, 0.2, 0.3], dtype=F64)), torch.rand(2, 2, dtype=F64)
    plain = m.posterior(X).variance
    torch.testing.assert_close(m.posterior(X, observation_noise=True).variance - plain, m.noise.expand(2, 3))
    given = torch.tensor([[0.5, 0.5, 0.5]], dtype=F64)
    torch.testing.assert_close(m.posterior(X, observation_noise=given).variance - plain, given.expand(2, 3))
    some = m.posterior(X, output_indices=[2, 0], observation_noise=True)
    torch.testing.assert_close(some.variance, (plain + m.noise)[:, [2, 0]], rtol=1e-6, atol=1e-9)
    one = m.posterior(X, output_indices=[1])
    torch.testing.assert_close(one.mean, m.posterior(X).mean[:, [1]])


def test_posterior_transform() -> None:
    m, X = model(2), torch.rand(4, 2, 2, dtype=F64)
    weights = torch.tensor([0.3, 0.7], dtype=F64)
    summed = m.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    torch.testing.assert_close(summed.mean.squeeze(-1), m.posterior(X).mean @ weights)


def test_acquisition_functions_are_differentiable() -> None:
    m = model()
    X = torch.rand(4, 3, 2, dtype=F64, requires_grad=True)
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    for acquisition in (
        qLogExpectedImprovement(m, 0.0, sampler=sampler),
        qUpperConfidenceBound(m, 0.5, sampler=sampler),
    ):
        (gradient,) = torch.autograd.grad(acquisition(X).sum(), X)
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0
    one = X[:, :1]
    assert LogExpectedImprovement(m, 0.0)(one).shape == (4,)


def test_gradient_of_the_acquisition_is_right() -> None:
    m = model()
    X = torch.rand(1, 2, 2, dtype=F64, requires_grad=True)
    acquisition = qUpperConfidenceBound(m, 0.5, sampler=SobolQMCNormalSampler(torch.Size([16]), seed=0))
    assert torch.autograd.gradcheck(acquisition, (X,), atol=1e-5)


def test_equal_candidates_do_not_break_the_draws() -> None:
    m = model()
    X = torch.rand(1, 2, dtype=F64).expand(4, 2)
    draws = m.posterior(X).rsample(torch.Size([8]))
    assert draws.isfinite().all()
    assert (draws - draws[:, :1]).abs().max() < 1e-2 * draws.std()


def test_optimises_a_parabola() -> None:
    """A few rounds of q = 2 find the top of −‖x − c‖² from ten points."""
    centre = torch.tensor([0.3, 0.7], dtype=F64)

    def f(x: Tensor) -> Tensor:
        return -(x - centre).square().sum(-1)

    X = torch.rand(40, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    X = X[f(X) < -0.1][:10]
    start = f(X).max()
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=F64)
    for _ in range(4):
        net = FavourRegressor(
            (32,), activation="tanh", epochs=150, learning_rate=1e-2, validation_fraction=0.0, random_state=0
        )
        m = FavourModel.from_regressor(net.fit(X.numpy(), f(X).numpy()))
        acquisition = qLogExpectedImprovement(m, f(X).max(), sampler=SobolQMCNormalSampler(torch.Size([32]), seed=0))
        new, _ = optimize_acqf(
            acquisition, bounds, 2, num_restarts=2, raw_samples=16, options={"maxiter": 20, "seed": 0}
        )
        X = torch.cat([X, new])
    assert f(X).max() > start / 4


def test_float32_networks_answer_in_the_dtype_of_the_points() -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
    m = FavourModel(favour.compile(net, torch.zeros(2, 2)))
    assert m.posterior(torch.rand(3, 2, dtype=F64)).mean.dtype == F64


def test_refusals() -> None:
    m = model()
    with pytest.raises(favour.errors.UnsupportedOperation, match="without look-ahead"):
        m.fantasize(torch.rand(2, 2), None)
    with pytest.raises(favour.errors.UnsupportedOperation, match="train it"):
        m.condition_on_observations(torch.rand(2, 2), torch.rand(2, 1))
    with pytest.raises(favour.errors.InvalidType, match=r"favour\.compile"):
        FavourModel(nn.Linear(2, 1))  # type: ignore[arg-type]
    conv = favour.compile(nn.Sequential(nn.Conv1d(1, 1, 2), nn.Dropout(0.1)), torch.zeros(2, 1, 4))
    with pytest.raises(favour.errors.ShapeMismatch, match=r"\(batch, d\) to \(batch, n\)"):
        FavourModel(conv)
    assert m.num_outputs == 1
    assert m.batch_shape == torch.Size([])
