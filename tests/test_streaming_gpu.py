"""`Predictor.stream` on a GPU: the same answers as calls, in order, through pinned memory. Run with `pytest -m gpu`."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import favour
from favour.predictor.streaming import _Lane

pytestmark = pytest.mark.gpu

ROWS, BATCH = 70, 16  # four whole batches and one of six


@pytest.fixture(scope="module")
def predict():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 36, 5)]
    return favour.compile(nn.Sequential(*layers).double(), torch.randn(4, 1, 8, 8).double())


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 1, 8, 8, generator=generator, dtype=torch.float64), torch.arange(ROWS)


def loader(rows, **options):
    return DataLoader(TensorDataset(*rows), batch_size=BATCH, **options)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_stream_on_a_gpu_equals_predict_on_the_same_rows(predict, rows, pinned, prefetch):
    wanted = ["mean", "variance", "covariance_matrix", "batch"]
    found = list(predict.stream(loader(rows, pin_memory=pinned), device="cuda", results=wanted, prefetch=prefetch))
    assert [len(f["mean"]) for f in found] == [16, 16, 16, 16, 6]
    want = predict(rows[0])
    for name in wanted[:-1]:
        got = torch.cat([f[name] for f in found])
        assert got.device.type == "cpu"
        torch.testing.assert_close(got, getattr(want, name), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.cat([f["batch"][1] for f in found]), rows[1])  # in order


def test_stream_on_a_gpu_gives_beliefs_there_and_leaves_the_predictor(predict, rows):
    found = list(predict.stream(loader(rows), device="cuda"))
    assert all(belief.mean.is_cuda and belief.covariance_matrix.is_cuda for belief in found)
    assert all(not t.is_cuda for t in predict.store.parameters())
    torch.testing.assert_close(
        torch.cat([belief.variance.cpu() for belief in found]), predict(rows[0]).variance, rtol=1e-9, atol=1e-11
    )


def test_stream_on_a_gpu_pins_what_it_copies(rows):
    lane = _Lane(torch.device("cuda"))
    there, label = lane.pinned((rows[0], "label"))
    assert there.is_pinned() and label == "label"
    back, event = lane.back({"mean": there.to("cuda"), "name": "label"})
    event.synchronize()
    assert back["mean"].is_pinned() and back["name"] == "label"
    torch.testing.assert_close(back["mean"], rows[0], rtol=0, atol=0)


def test_stream_on_a_gpu_of_many_batches_keeps_them_apart(predict):
    """Buffers that come and go on three streams: every batch is a constant of its own, and so is its answer."""
    xs = [torch.full((BATCH, 1, 8, 8), i / 50, dtype=torch.float64) for i in range(100)]
    found = list(predict.stream(xs, device="cuda", results=["mean", "variance"], prefetch=4))
    want = predict(torch.stack([x[0] for x in xs]))
    for i, result in enumerate(found):
        torch.testing.assert_close(result["mean"], want.mean[i : i + 1].expand(BATCH, -1), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(
            result["variance"], want.variance[i : i + 1].expand(BATCH, -1), rtol=1e-9, atol=1e-11
        )


# torch's own, at the import of its compiler and for float32 products
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_stream_on_a_gpu_compiled_with_a_short_last_batch(predict, rows):
    found = list(predict.stream(loader(rows), device="cuda", results=["mean", "variance"], compiled=True))
    want = predict(rows[0])
    for name in ("mean", "variance"):
        got = torch.cat([f[name] for f in found])
        torch.testing.assert_close(got, getattr(want, name), rtol=1e-8, atol=1e-10)
