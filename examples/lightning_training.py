"""Variational inference through beliefs in Lightning, with `favour.Learner` as a LightningModule.

python examples/lightning_training.py        (needs lightning)

Lightning keeps its own loop, optimiser, checkpoints and loggers. Favour gives the loss, which has no random numbers in
it; a callback writes down the bound on the log marginal likelihood after every epoch, and in the end the learner's
model and posterior make a predictor.
"""

import logging
import math
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import favour

warnings.filterwarnings("ignore", module="lightning")  # of its data loaders
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

torch.manual_seed(0)
x = 6 * torch.rand(400, 1) - 3
y = torch.sin(2 * x) + 0.2 * torch.randn(400, 1)
network = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))


class Fit(lightning.LightningModule):
    def __init__(self, network, example, rows, warm_up):
        super().__init__()
        self.learner = favour.Learner(network, example, likelihood="gaussian", noise=1.0)
        self.rows, self.warm_up = rows, warm_up

    def training_step(self, batch, index):
        weight = min(1.0, (self.current_epoch + 1) / self.warm_up) ** 2  # in full from the start it would prune units
        loss = self.learner.loss(*batch, rows=self.rows, kl_weight=weight)
        self.log_dict({"nll": loss.nll, "divergence": loss.divergence}, on_epoch=True, on_step=False)
        return loss.total

    def configure_optimizers(self):
        return torch.optim.Adam(self.learner.parameters(), 1e-2)


class Bound(lightning.Callback):
    """log p(y) ≥ −N·E[−log p(y | f)] − KL, after every epoch."""

    def __init__(self):
        self.bounds = []

    def on_train_epoch_end(self, trainer, fit):
        found = trainer.callback_metrics
        self.bounds.append(float(-fit.rows * found["nll"] - found["divergence"]))


epochs, bound = 60, Bound()
fit = Fit(network, x[:2], len(x), epochs / 2)
trainer = lightning.Trainer(
    max_epochs=epochs,
    accelerator="cpu",
    callbacks=[bound],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(fit, DataLoader(TensorDataset(x, y), 50, shuffle=True))

print(f"{'epoch':>6s} {'bound':>9s}")
for epoch in range(0, epochs, 10):
    print(f"{epoch + 1:6d} {bound.bounds[epoch]:9.1f}")

predict = favour.compile(fit.learner.fitted_model(), x, posterior=fit.learner.posterior())
grid = torch.tensor([[-4.5], [0.0], [4.5]])
with torch.no_grad():
    belief, noise = predict(grid), fit.learner.noise()
print(f"noise {float(noise):.3f} (made with {0.2**2:.3f})")
for at, mean, spread in zip(grid, belief.mean, belief.stddev, strict=True):
    print(f"f({float(at):4.1f}) = {float(mean):6.3f} ± {float(spread):.3f}   true {math.sin(2 * float(at)):6.3f}")
