"""laplace-torch on a network with dropout: what its predictions and ours score, by what is counted and how.

A 64-100-100-10 ReLU network with dropout on scikit-learn's digits, half of them for training. Kronecker Laplace over
the last layer and over all weights; prior precision by marginal likelihood. The negative log-likelihood and calibration
error of test digits for

    mode                     the trained network alone
    laplace-torch, draws        E[softmax] over draws of the weights, the network in eval mode
    laplace-torch, linearised   E[softmax] over draws of the linearised network's Gaussian logits
    laplace-torch, probit       the same with its probit link: what `la(x)` gives by default
    favour                      `adapt(la)`: the network linearised, dropout silent
    favour, weights drawn       `adapt(la, linearised=False)`: the law of the network under draws of its weights
    … dropout kept              `adapt(la, linearised=False, keep_dropout=True)`: dropout on top

    python benchmarks/adapters_dropout.py [--quick]
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.nn.functional as F
from common import write
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import favour
from favour import adapters

WIDTH, EPOCHS = 100, 60


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    inputs, labels = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    half = len(x) // 2
    return inputs[:half], labels[:half], inputs[half:], labels[half:]


def trained(p: float) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(p), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(p)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    x, y, _, _ = data()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def measure(subset: str, p: float, n: int) -> dict[str, dict[str, float]]:
    from laplace import Laplace

    model = trained(p)
    x, y, test, labels = data()
    la = Laplace(model, "classification", subset_of_weights=subset, hessian_structure="kron")
    la.fit(DataLoader(TensorDataset(x, y), batch_size=256))
    la.optimize_prior_precision(method="marglik", n_steps=100)
    found = {"mode": model(test).softmax(-1)}
    torch.manual_seed(0)
    found[f"laplace-torch, {n} draws"] = la.predictive_samples(test, pred_type="nn", n_samples=n).mean(0)
    found["laplace-torch, linearised"] = la(test, pred_type="glm", link_approx="mc", n_samples=n)
    found["laplace-torch, probit"] = la(test, pred_type="glm", link_approx="probit")
    asked = {
        "favour": {},
        "favour, weights drawn": {"linearised": False},
        "favour, weights drawn, dropout kept": {"linearised": False, "keep_dropout": True},
    }
    for name, options in asked.items():
        network, posterior = adapters.adapt(la, **options)
        predict = favour.compile(network, x[:2], posterior=posterior, check=False)
        with torch.no_grad():
            found[name] = predict.probabilities(test)
    scores = {"nll": favour.metrics.nll, "ece": favour.metrics.ece, "accuracy": favour.metrics.accuracy}
    rows = {name: {key: score(q.detach(), labels) for key, score in scores.items()} for name, q in found.items()}
    return {**rows, "prior": {"precision": float(la.prior_precision.mean())}}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # those of the other library, and of silenced dropout
    quick = "--quick" in sys.argv
    results: dict[str, dict[str, dict[str, float]]] = {}
    for p in (0.2,) if quick else (0.1, 0.2, 0.3):
        for subset in ("last_layer", "all"):
            results[f"{subset}, dropout {p}"] = rows = measure(subset, p, 100 if quick else 1000)
            print(f"\n{subset}, dropout {p}, prior precision {rows['prior']['precision']:.3g}")
            for name, row in rows.items():
                if name != "prior":
                    print(f"  {name:36s} NLL {row['nll']:.3f}   ECE {row['ece']:.3f}   accuracy {row['accuracy']:.3f}")
    write(
        "adapters_dropout_quick" if quick else "adapters_dropout",
        {"network": f"64-{WIDTH}-{WIDTH}-10", "rows": results},
    )


if __name__ == "__main__":
    main()
