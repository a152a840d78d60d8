"""Rate a data set on a Ray cluster: predictions, probabilities and unfamiliarity for every row.

    pip install "favour[ray]" scikit-learn
    python examples/ray_rating.py

A dropout network learns the handwritten digits that come with scikit-learn. The test digits, a few pictures of noise
and one broken row go into a Parquet file; a pool of Ray actors rates it. On a real cluster, `ray.init(address="auto")`
and a folder that all machines see are the only changes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from sklearn.datasets import load_digits
from torch import nn

import favour.scale

NOISE = 60  # pictures that are no digits


def trained(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """An MLP with dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def main() -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    x, y = digits.data.astype(np.float32) / 16, digits.target
    model = trained(torch.from_numpy(x[:1200]), torch.from_numpy(y[:1200]))

    noise = np.random.default_rng(0).random((NOISE, 64), np.float32)
    rows = np.concatenate([x[1200:], noise])
    rows[3, 5] = np.nan  # a broken row
    truth = np.concatenate([y[1200:], np.full(NOISE, -1)])

    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "digits.parquet"), Path(folder, "rated.parquet")
        pixels = {f"pixel_{i}": rows[:, i] for i in range(64)}
        pq.write_table(pa.table({"key": np.arange(len(rows)), **pixels}), data, row_group_size=128)

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**28)
        try:
            done = favour.scale.rate(data, model, out, id="key", part_rows=128, workers=2)
        finally:
            ray.shutdown()
        print(done)
        for bad in pq.read_table(done.bad_out).to_pylist():
            print(f"row {bad['row']} was not rated: {bad['reason']}")
        rated = pq.read_table(out).to_pandas()

    known = truth[rated["id"]]
    digit = known >= 0
    right = rated["prediction"].to_numpy() == known
    jsd = rated["jsd"].to_numpy()
    print(f"accuracy on digits: {right[digit].mean():.1%}")
    print(f"median JSD: {np.median(jsd[digit]):.4f} of digits, {np.median(jsd[~digit]):.4f} of noise")
    threshold = np.quantile(jsd[digit], 0.95)
    print(
        f"setting aside the strangest 5% of digits also sets aside {np.mean(jsd[~digit] > threshold):.0%} of the noise"
    )


if __name__ == "__main__":
    main()
