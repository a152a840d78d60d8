"""A dropout classifier as an ONNX file: one pass with error bars, no random numbers, no favour at run time.

Trains a small network on handwritten digits, writes `digits.onnx`, and runs it with onnxruntime alone: the numbers
equal those of the predictor in torch, and unfamiliar inputs have a higher JSD.

    python examples/onnx_export.py          then: favour serve digits.onnx
"""

import time

import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

import favour

torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, test = slice(0, 1400), slice(1400, None)

# ---- a network with dropout, as anyone would train it
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.2), nn.Linear(100, 10))
optimiser = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(30):
    for rows in torch.randperm(1400).split(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images[train][rows]), labels[train][rows]).backward()
        optimiser.step()
model.eval()

# ---- one file
predict = favour.compile(model, images[:2])
path = favour.export(predict, "digits.onnx", labels=[str(digit) for digit in range(10)])

# ---- run it where there is neither torch nor favour
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(path, options)
names = [output.name for output in session.get_outputs()]


def answer(x):
    """Named outputs for a batch of any size."""
    return dict(zip(names, session.run(None, {session.get_inputs()[0].name: x}), strict=True))


digits = images[test].numpy()
noise = np.random.default_rng(0).uniform(0, 1, digits.shape).astype(np.float32)
known, strange = answer(digits), answer(noise)
with torch.no_grad():
    belief, p = predict(images[test]), predict.probabilities(images[test])


def difference(have, want):
    return float(np.abs(have - want.numpy()).max() / want.abs().max())


def milliseconds(function):
    function()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


print(f"accuracy on {len(digits)} digits: {(known['probabilities'].argmax(1) == labels[test].numpy()).mean():.3f}\n")
print("largest difference from torch, relative")
print(f"  variance                  {difference(known['variance'], belief.variance):.1e}")
print(f"  probabilities             {difference(known['probabilities'], p):.1e}\n")
print("median JSD, nats")
print(f"  digits                    {np.median(known['jsd']):.4f}")
print(f"  noise                     {np.median(strange['jsd']):.4f}\n")


def in_torch():
    return predict(images[test]), predict.probabilities(images[test])


with torch.no_grad():
    print(f"time for {len(digits)} rows, ms")
    print(f"  onnxruntime               {milliseconds(lambda: answer(digits)):.2f}")
    print(f"  torch                     {milliseconds(in_torch):.2f}")
    print(f"  100 dropout samples       {milliseconds(lambda: favour.sample(model, images[test], 100)):.2f}")
