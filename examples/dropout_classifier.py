"""A dropout classifier with the probabilities of a thousand samples in one pass.

Train a small network on scikit-learn's digits, then compare plain inference, sampling (MC dropout) and Favour:
accuracy, negative log-likelihood, calibration error, and the time for the whole test set.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import favour

torch.manual_seed(0)
torch.set_num_threads(1)

# -- data: 1797 pictures of 8 x 8 pixels, ten classes
digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)  # (1797, 64)
y = torch.tensor(digits.target)  # (1797,)
order = torch.randperm(len(x))
train, test = order[:900], order[900:]

# -- an ordinary network, trained in the ordinary way
model = nn.Sequential(
    nn.Linear(64, 100),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(100, 100),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(100, 10),
)
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    for batch in train[torch.randperm(len(train))].split(64):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
model.eval()
torch.set_grad_enabled(False)

# -- four ways to predict
predict = favour.compile(model, x[:2])  # dropout stays live inside, whatever the model's mode


def sampled(n):
    return lambda x: favour.sample(model, x, n).softmax(-1).mean(0)  # (n, batch, 10) -> (batch, 10)


ways = {
    "plain": lambda x: model(x).softmax(-1),
    "10 samples": sampled(10),
    "1000 samples": sampled(1000),
    "favour": predict.probabilities,
}

print(f"{'':<14}{'accuracy':>10}{'NLL':>8}{'ECE':>8}{'ms':>8}")
for name, way in ways.items():
    way(x[:2])  # the first call captures and plans
    start = time.perf_counter()
    p = way(x[test])
    milliseconds = 1000 * (time.perf_counter() - start)
    scores = (f(p, y[test]) for f in (favour.metrics.accuracy, favour.metrics.nll, favour.metrics.ece))
    print(f"{name:<14}" + "{:>10.4f}{:>8.4f}{:>8.4f}".format(*scores) + f"{milliseconds:>8.1f}")

# -- is the belief itself right? fresh samples of the network tell
print()
print(favour.check(predict, x[test[:100]], n=1000))
