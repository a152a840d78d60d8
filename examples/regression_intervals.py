"""Regression with intervals that hold what they promise.

A dropout network on scikit-learn's diabetes data. Its own spread is not the spread of the observations: calibration on
held-out data adds the missing noise, and conformal prediction turns the result into intervals with a guarantee that
does not depend on the network being right.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import favour

torch.manual_seed(0)
torch.set_num_threads(1)
LEVEL = 0.9

# -- data: 442 patients, ten measurements, the progression of the disease
diabetes = load_diabetes()
x = torch.tensor(diabetes.data, dtype=torch.float32)
y = torch.tensor(diabetes.target, dtype=torch.float32)[:, None]  # (442, 1)
order = torch.randperm(len(x))
train, held_out, test = order[:200], order[200:300], order[300:]
x = (x - x[train].mean(0)) / x[train].std(0)
centre, unit = y[train].mean(), y[train].std()

model = nn.Sequential(
    nn.Linear(10, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1)
)
optimiser = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-2)
for _ in range(200):
    optimiser.zero_grad()
    nn.functional.mse_loss(model(x[train]), (y[train] - centre) / unit).backward()
    optimiser.step()
torch.set_grad_enabled(False)

# -- four intervals of the same level
predict = favour.compile(model, x[:2])
z = (y - centre) / unit
fitted = favour.calibrate(predict, (x[held_out], z[held_out]))  # cΣ + s²
conformal = favour.ConformalInterval.fit(fitted, (x[held_out], z[held_out]), LEVEL)
noisy = predict.with_noise(favour.fit_noise(predict(x[held_out]), z[held_out]))  # Σ + s²

intervals = {
    "network's spread": predict(x[test]).confidence_interval(LEVEL),  # no prediction interval: predict.interval refuses
    "with noise": noisy.interval(x[test], LEVEL),
    "calibrated": fitted.interval(x[test], LEVEL),
    "conformal": conformal.interval(x[test], LEVEL),
}
print(fitted)
print(f"\n{'interval':<18}{'coverage':>10}{'mean width':>12}{'narrowest':>11}{'widest':>8}   (asked for: {LEVEL:.0%})")
for name, (low, high) in intervals.items():
    coverage = favour.metrics.coverage(low, high, z[test])
    width = (high - low) * unit
    print(f"{name:<18}{coverage:>10.2f}{width.mean():>12.1f}{width.min():>11.1f}{width.max():>8.1f}")

# -- a few patients
belief = fitted(x[test[:5]])
low, high = (bound * unit + centre for bound in conformal(belief))
print(f"\n{'patient':<10}{'predicted':>10}{'from':>8}{'to':>8}{'observed':>10}")
for i, row in enumerate(test[:5].tolist()):
    predicted = belief.mean[i, 0] * unit + centre
    print(f"{row:<10}{predicted:>10.0f}{low[i, 0]:>8.0f}{high[i, 0]:>8.0f}{y[row, 0]:>10.0f}")
