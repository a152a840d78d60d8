"""From a Laplace approximation to Favour: keep laplace-torch's posterior, leave out its samples.

laplace-torch fits a Kronecker-factored Gaussian over all weights of a trained network. Its predictions then come from
samples of those weights, or from a network linearised in its weights. `favour.adapters.adapt` takes the same posterior
and propagates it. Compared with 5000 of laplace-torch's own draws: the covariance of the logits, and the test scores.

Needs laplace-torch: pip install laplace-torch
"""

import time
import warnings

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import favour

warnings.filterwarnings("ignore", module="(laplace|curvlinops|backpack|asdl).*")
from laplace import Laplace  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(1)

# -- data: 178 wines, 13 measurements, three cultivars
wine = load_wine()
x = torch.tensor(wine.data, dtype=torch.float32)
y = torch.tensor(wine.target)
order = torch.randperm(len(x))
train, test = order[:90], order[90:]
x = (x - x[train].mean(0)) / x[train].std(0)

# -- a trained network: the mode of the posterior
model = nn.Sequential(nn.Linear(13, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))
optimiser = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-3)
for _ in range(150):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimiser.step()
model.eval()

# -- laplace-torch: the curvature at the mode, and a prior tight enough for draws of the weights to be good networks
la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
la.fit(DataLoader(TensorDataset(x[train], y[train]), batch_size=90))
la.prior_precision = torch.tensor([30.0])

# -- Favour: the same posterior, propagated
network, posterior = favour.adapters.adapt(la)
predict = favour.compile(network, x[:2], posterior=posterior)
torch.set_grad_enabled(False)


def timed(function):
    start = time.perf_counter()
    return function(), 1000 * (time.perf_counter() - start)


def covariance(draws):  # (n, batch, 3) -> (batch, 3, 3)
    d = draws - draws.mean(0)
    return torch.einsum("nbi,nbj->bij", d, d) / (len(d) - 1)


truth = la.functional_samples(x[test], pred_type="nn", n_samples=5000)
reference = covariance(truth)


def error(matrix):
    return (torch.linalg.matrix_norm(matrix - reference) / torch.linalg.matrix_norm(reference)).mean().item()


rows = {}
predict(x[test])  # the first call plans
belief, milliseconds = timed(lambda: predict(x[test]))
rows["favour"] = belief.covariance_matrix, predict.probabilities(x[test]), milliseconds
for n in (10, 100):
    draws, milliseconds = timed(lambda n=n: la.functional_samples(x[test], pred_type="nn", n_samples=n))
    rows[f"laplace-torch, {n} samples"] = covariance(draws), draws.softmax(-1).mean(0), milliseconds
with torch.enable_grad():
    (_, linear), milliseconds = timed(lambda: la._glm_predictive_distribution(x[test]))
    probit = la(x[test], pred_type="glm", link_approx="probit")
rows["laplace-torch, linearised"] = linear.detach(), probit.detach(), milliseconds

print(f"{'':<28}{'covariance error':>18}{'NLL':>8}{'ECE':>8}{'ms':>8}")
for name, (matrix, p, milliseconds) in rows.items():
    nll, ece = favour.metrics.nll(p, y[test]), favour.metrics.ece(p, y[test])
    print(f"{name:<28}{error(matrix):>18.3f}{nll:>8.3f}{ece:>8.3f}{milliseconds:>8.1f}")
p = truth.softmax(-1).mean(0)
print(f"{'5000 samples':<28}{'':>18}{favour.metrics.nll(p, y[test]):>8.3f}{favour.metrics.ece(p, y[test]):>8.3f}")
