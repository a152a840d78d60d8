"""Posteriors of other libraries: the belief against 10,000 samples of the library's own sampler, and the time of both.

A 64-24-24-10 network (or a small convolutional one) on scikit-learn's digits, trained by or for each library; 100 test
images, one thread. Errors are relative Frobenius norms of the output covariances: ours, and that of 100 and of 1000 of
the library's samples against the 10,000. Our time is one prediction, theirs that of the 10,000 samples.

    python benchmarks/adapters.py [--quick] [name …]
"""

from __future__ import annotations

import copy
import math
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import keep_freed_memory, time_all, write
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import favour
from favour import adapters

INPUTS, WIDTH = 100, 24
Case = tuple[Callable[[], Any], Callable[[int], Tensor]]  # what gives a predictor, and what draws n samples


def data() -> tuple[Tensor, Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return inputs[:-INPUTS], labels[:-INPUTS], inputs[-INPUTS:]


def mlp(linear: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(linear(64, WIDTH), nn.ReLU(), linear(WIDTH, WIDTH), nn.Tanh(), linear(WIDTH, 10))


def cnn(conv: Callable[..., nn.Module], linear: Callable[[int, int], nn.Module]) -> nn.Sequential:
    shape = nn.Unflatten(1, (1, 8, 8))
    return nn.Sequential(shape, conv(1, 8, 3), nn.ReLU(), conv(8, 8, 3), nn.Tanh(), nn.Flatten(), linear(128, 10))


def train(model: nn.Module, epochs: int = 10, seen: Callable[[], None] | None = None) -> nn.Module:
    x, y, _ = data()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        if seen is not None:
            seen()
    return model


def compiled(adapted: adapters.Adapted, x: Tensor) -> Any:
    return favour.compile(adapted.model, x, posterior=adapted.posterior)


def passes(model: nn.Module, x: Tensor) -> Callable[[int], Tensor]:
    """One forward pass is one draw."""
    return lambda n: torch.stack([model(x) for _ in range(n)])


def laplace(structure: str, subset: str, make: Callable[[], nn.Module] = mlp) -> Case:
    from laplace import Laplace

    x, y, test = data()
    la = Laplace(train(make()), "classification", subset_of_weights=subset, hessian_structure=structure)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=200))
    la.optimize_prior_precision(method="marglik", n_steps=50)

    def last_layer(n: int) -> Tensor:
        _, features = la.model.forward_with_features(test)
        size = la.model.last_layer.weight.numel()
        draws = la.sample(n)
        return torch.stack([F.linear(features, w[:size].view(10, -1), w[size:]) for w in draws])

    def every(n: int) -> Tensor:
        return la.functional_samples(test, pred_type="nn", n_samples=n)

    return lambda: compiled(adapters.adapt(la), test), last_layer if subset == "last_layer" else every


def low_rank(rank: int = 20) -> Case:
    """laplace-torch's class with our own eigenvectors: the backend it wants is not on the package index."""
    import laplace.baselaplace as base

    class Curvature:
        def __init__(self, model: nn.Module, likelihood: str, **kwargs: Any) -> None:
            self.model, self.factor = model, 1.0

        def eig_lowrank(self, loader: DataLoader) -> tuple[Tensor, Tensor, Tensor]:
            full = base.FullLaplace(copy.deepcopy(self.model), "classification")
            full.fit(loader)
            values, vectors = torch.linalg.eigh(full.H)
            return vectors[:, -rank:], values[-rank:], full.loss

    x, y, test = data()
    found, base.find_spec = base.find_spec, lambda name: True  # type: ignore[assignment, attr-defined]
    la = base.LowRankLaplace(train(mlp()), "classification", backend=Curvature, prior_precision=50.0)
    base.find_spec = found  # type: ignore[attr-defined]
    la.fit(DataLoader(TensorDataset(x, y), batch_size=200))
    return lambda: compiled(adapters.adapt(la), test), lambda n: la.functional_samples(test, "nn", n)


def ivon() -> Case:
    from ivon import IVON

    x, y, test = data()
    model = mlp()
    optimizer = IVON(model.parameters(), lr=0.1, ess=len(x), beta2=0.999, weight_decay=1e-3, hess_init=0.2)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(64):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()

    def draw(n: int) -> Tensor:
        draws = []
        for _ in range(n):
            with optimizer.sampled_params():
                draws.append(model(test))
        return torch.stack(draws)

    return lambda: compiled(adapters.adapt(optimizer, model), test), draw


def bayesian_torch(make: Callable[[], nn.Module], kind: str) -> Case:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    model, test = make(), data()[2]
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -4.0}
    dnn_to_bnn(model, prior | {"type": kind, "moped_enable": False, "moped_delta": 0.5})
    train(model)
    return lambda: compiled(adapters.adapt(model), test), passes(model, test)


def torchbnn() -> Case:
    import torchbnn as bnn

    model = cnn(lambda i, o, k: bnn.BayesConv2d(0, 0.05, i, o, k), lambda i, o: bnn.BayesLinear(0, 0.05, i, o))
    test = data()[2]
    train(model)
    return lambda: compiled(adapters.adapt(model), test), passes(model, test)


def swag(rank: int = 20) -> Case:
    """The sampling formula of the paper, one set of weights after the other."""
    model, collector, test = train(mlp()), adapters.SWAG(rank), data()[2]
    train(model, 40, lambda: collector.collect(model))
    spread = {n: (collector.square_mean[n] - m.square()).clamp_min(0).sqrt() for n, m in collector.mean.items()}
    columns = {n: torch.stack([d[n] for d in collector.deviations]) for n in collector.mean}
    twin = copy.deepcopy(model)

    def draw(n: int) -> Tensor:
        draws = []
        for _ in range(n):
            common = torch.randn(rank)
            for name, p in twin.named_parameters():
                low = torch.tensordot(common, columns[name], 1) / math.sqrt(2 * (rank - 1))
                p.copy_(collector.mean[name] + spread[name] * torch.randn_like(p) / math.sqrt(2) + low)
            draws.append(twin(test))
        return torch.stack(draws)

    return lambda: compiled(adapters.adapt(collector, model), test), draw


def pyro_guide() -> Case:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Predictive, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample

    def linear(n: int, m: int) -> nn.Module:
        layer = PyroModule[nn.Linear](n, m)
        layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([m, n]).to_event(2))
        layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([m]).to_event(1))
        return layer

    class Classifier(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = linear(64, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, 10)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            logits = self.last(torch.tanh(self.second(torch.relu(self.first(x)))))
            with pyro.plate("data", x.shape[0]):
                pyro.sample("label", dist.Categorical(logits=logits), obs=y)
            return logits

    x, y, test = data()
    pyro.clear_param_store()
    model = Classifier()
    guide = AutoNormal(model, init_scale=0.03)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 5e-3}), Trace_ELBO())
    with torch.enable_grad():
        for _ in range(400):
            svi.step(x, y)

    def draw(n: int) -> Tensor:
        return Predictive(model, guide=guide, num_samples=n, return_sites=("_RETURN",))(test)["_RETURN"]

    return lambda: compiled(adapters.adapt(guide, model), test), draw


def ensemble(members: int = 5) -> Case:
    test = data()[2]

    def member() -> nn.Module:
        net = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, 10))
        return train(net).train()

    networks = [member() for _ in range(members)]

    def draw(n: int) -> Tensor:
        return torch.stack([networks[i % members](test) for i in range(n)])

    return lambda: adapters.Ensemble([favour.compile(network, test) for network in networks]), draw


CASES: dict[str, Callable[[], Case]] = {
    "laplace-torch, diagonal": lambda: laplace("diag", "all"),
    "laplace-torch, Kronecker": lambda: laplace("kron", "all"),
    "laplace-torch, Kronecker, convolutions": lambda: laplace("kron", "all", lambda: cnn(nn.Conv2d, nn.Linear)),
    "laplace-torch, low rank 20": low_rank,
    "laplace-torch, full": lambda: laplace("full", "all"),
    "laplace-torch, last layer, diagonal": lambda: laplace("diag", "last_layer"),
    "laplace-torch, last layer, Kronecker": lambda: laplace("kron", "last_layer"),
    "laplace-torch, last layer, full": lambda: laplace("full", "last_layer"),
    "ivon-opt": ivon,
    "bayesian-torch, Reparameterization": lambda: bayesian_torch(mlp, "Reparameterization"),
    "bayesian-torch, Flipout": lambda: bayesian_torch(mlp, "Flipout"),
    "bayesian-torch, convolutions": lambda: bayesian_torch(lambda: cnn(nn.Conv2d, nn.Linear), "Reparameterization"),
    "torchbnn, convolutions": torchbnn,
    "SWAG, rank 20": swag,
    "Pyro AutoNormal": pyro_guide,
    "ensemble of 5 with dropout": ensemble,
}


def moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    flat = samples.double()
    deviation = flat - flat.mean(0)
    return flat.mean(0), torch.einsum("sbi,sbj->bij", deviation, deviation) / (len(flat) - 1)


def measure(make: Callable[[], Case], n: int, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    with torch.enable_grad():
        predictor, draw = make()
    test = data()[2]
    start = time.perf_counter()
    predict = predictor()
    setup = time.perf_counter() - start
    fast = torch.compile(predict, fullgraph=True)
    belief = predict(test)
    start = time.perf_counter()
    samples = draw(n).detach()
    theirs = time.perf_counter() - start
    mean, covariance = moments(samples)
    times = time_all({"eager": lambda: predict(test), "compiled": lambda: fast(test)}, rounds)

    def error(other: Tensor) -> float:
        return float((other - covariance).norm() / covariance.norm())

    return {
        "covariance error": error(belief.covariance_matrix.double()),
        "mean error": float((belief.mean.double() - mean).norm() / covariance.diagonal(dim1=1, dim2=2).sum().sqrt()),
        "covariance error of 100 samples": error(moments(samples[:100])[1]),
        "covariance error of 1000 samples": error(moments(samples[:1000])[1]),
        "mean standard deviation": float(belief.stddev.mean()),
        "our milliseconds, eager": times["eager"] * 1e3,
        "our milliseconds, compiled": times["compiled"] * 1e3,
        "our setup, seconds": setup,
        "their seconds for the samples": theirs,
        "their samples in our time": times["compiled"] / theirs * n,
    }


def main() -> None:
    keep_freed_memory()
    torch.set_num_threads(1)  # such small networks gain nothing from more
    torch._dynamo.config.recompile_limit = 64
    warnings.simplefilter("ignore")  # those of the other libraries
    quick = "--quick" in sys.argv
    names = [a for a in sys.argv[1:] if not a.startswith("--")]
    n, rounds = (1000, 5) if quick else (10_000, 20)
    rows: dict[str, dict[str, float]] = {}
    for name, make in CASES.items():
        if names and not any(part in name for part in names):
            continue
        with torch.no_grad():
            rows[name] = row = measure(make, n, rounds)
        spread = " / ".join(f"{row[f'covariance error{of}']:.3f}" for of in ("", " of 100 samples", " of 1000 samples"))
        ours = f"{row['our milliseconds, eager']:7.2f} ms, compiled {row['our milliseconds, compiled']:6.2f} ms"
        theirs = f"{row['their seconds for the samples']:6.2f} s for {n}"
        print(f"{name:40s} {spread}, mean {row['mean error']:.3f}; ours {ours}; theirs {theirs}", flush=True)
    network = f"64-{WIDTH}-{WIDTH}-10 or two convolutions, digits, {INPUTS} inputs, {n} samples"
    if not names:
        write("adapters_quick" if quick else "adapters", {"network": network, "rows": rows})


if __name__ == "__main__":
    main()
