"""Find the minimum of Branin's function with a dropout network, four points at a time.

python examples/bayesian_optimisation.py        (needs favour[botorch,sklearn])

A network is trained on what is known. Its joint belief over four candidates at once tells an acquisition function what
they would teach *together*: four good points that are all alike are worth little more than one. Nothing is sampled from
the network, so the acquisition function is smooth and its gradient in the candidates exact.
"""

import time
import warnings

warnings.filterwarnings("ignore")  # of the libraries below

import torch  # noqa: E402
from botorch.acquisition import qUpperConfidenceBound  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling import SobolQMCNormalSampler  # noqa: E402
from botorch.test_functions import Branin  # noqa: E402

from favour.botorch import FavourModel  # noqa: E402
from favour.sklearn import FavourRegressor  # noqa: E402

torch.set_default_dtype(torch.float64)
branin = Branin(negate=True)  # to be maximised; the best value is -0.397887
low, high = branin.bounds
unit = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
rounds, q = 6, 4


def f(x):  # x in the unit square, (n, 2)
    return branin(low + (high - low) * x)


def regret(y):
    return branin.optimal_value - y.max().item()


torch.manual_seed(0)
X = torch.rand(8, 2)
y = f(X)
everywhere = torch.rand(rounds * q, 2)  # what random search tries instead
print(f"{'evaluations':>11s} {'regret':>8s} {'random':>8s} {'correlation':>12s} {'seconds':>8s}")
print(f"{len(X):11d} {regret(y):8.4f} {regret(y):8.4f}")

for step in range(rounds):
    start = time.perf_counter()
    network = FavourRegressor(
        (64, 64), dropout=0.1, epochs=400, batch_size=64, learning_rate=1e-2, validation_fraction=0.0, random_state=step
    )
    network.fit(X.numpy(), y.numpy())
    model = FavourModel.from_regressor(network)
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=step)
    acquisition = qUpperConfidenceBound(model, beta=1.0, sampler=sampler)
    new, _ = optimize_acqf(
        acquisition, unit, q=q, num_restarts=4, raw_samples=32, options={"maxiter": 30, "seed": step}
    )
    covariance = model.posterior(new).distribution.covariance_matrix.detach()  # (q, q)
    scale = covariance.diagonal().sqrt()
    correlation = (covariance / scale / scale[:, None]).triu(1).sum() / (q * (q - 1) / 2)
    X, y = torch.cat([X, new]), torch.cat([y, f(new)])
    lucky = torch.cat([y[:8], f(everywhere[: (step + 1) * q])])
    seconds = time.perf_counter() - start
    print(f"{len(X):11d} {regret(y):8.4f} {regret(lucky):8.4f} {correlation:12.2f} {seconds:8.1f}", flush=True)

best = low + (high - low) * X[y.argmax()]
print(f"found {-y.max().item():.4f} at ({best[0]:.3f}, {best[1]:.3f}); the minimum is {-branin.optimal_value:.4f}")
