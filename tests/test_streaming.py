"""`Predictor.stream`: the same answers as calls, in order, whatever the loader yields; errors name their batch."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import favour
from favour.predictor.streaming import arguments
from favour.progress import Bar


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(3, 4), nn.Linear(2, 4), nn.Dropout(0.3)

    def forward(self, left, right):
        return self.drop(self.a(left) + self.b(right).relu())


@pytest.fixture(scope="module")
def predict():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)).double()
    return favour.compile(model, torch.randn(4, 3).double())


@pytest.fixture(scope="module")
def two():
    torch.manual_seed(0)
    return favour.compile(Two(), (torch.randn(4, 3), torch.randn(4, 2)))


def batches(count=5, size=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size - (i == count - 1), 3, generator=generator).double() for i in range(count)]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, torch.zeros(len(x))), lambda x: [x, "label"]])
def test_stream_equals_calls(predict, wrap):
    xs = batches()
    found = list(predict.stream([wrap(x) for x in xs], prefetch=2))
    assert len(found) == len(xs)
    for x, belief in zip(xs, found, strict=True):
        torch.testing.assert_close(belief.mean, predict(x).mean, rtol=0, atol=0)
        torch.testing.assert_close(belief.covariance_matrix, predict(x).covariance_matrix, rtol=0, atol=0)


def test_stream_of_dicts_takes_arguments_by_name(two):
    left, right = torch.randn(4, 3), torch.randn(4, 2)
    (belief,) = two.stream([{"right": right, "label": torch.ones(4), "left": left}])
    torch.testing.assert_close(belief.mean, two(left, right).mean)


def test_stream_of_keyword_model():
    torch.manual_seed(0)
    left, right = torch.randn(4, 3), torch.randn(4, 2)
    predict = favour.compile(Two(), {"left": left, "right": right})
    (belief,) = predict.stream([{"left": left, "right": right, "label": 1}])
    torch.testing.assert_close(belief.mean, predict(left=left, right=right).mean)


def test_stream_with_a_data_loader_and_chosen_results(predict):
    x, y = torch.cat(batches()), torch.arange(19)
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    found = list(predict.stream(loader, results=["mean", "stddev", "probabilities", "batch"]))
    torch.testing.assert_close(torch.cat([f["mean"] for f in found]), predict(x).mean)
    torch.testing.assert_close(torch.cat([f["stddev"] for f in found]), predict(x).stddev)
    torch.testing.assert_close(torch.cat([f["probabilities"] for f in found]), predict.probabilities(x))
    assert torch.equal(torch.cat([f["batch"][1] for f in found]), y)


def test_stream_with_functions_of_beliefs(predict):
    x = batches(1)[0]
    (found,) = predict.stream([x], results={"jsd": favour.scores.jsd, "top": lambda b: b.mean.amax(1)})
    torch.testing.assert_close(found["jsd"], favour.scores.jsd(predict(x)))
    torch.testing.assert_close(found["top"], predict(x).mean.amax(1))


def test_stream_with_inputs_function(two):
    pair = torch.randn(4, 3), torch.randn(4, 2)
    (a,) = two.stream([{"both": pair}], inputs=lambda batch: batch["both"])
    (b,) = two.stream([pair])
    torch.testing.assert_close(a.mean, b.mean)


def test_stream_yields_without_waiting_for_the_next_batch(predict):
    """A source that waits for an answer before it gives the next batch."""
    answered = threading.Event()

    def source():
        for x in batches(3):
            yield x
            assert answered.wait(10)
            answered.clear()

    count = 0
    for _ in predict.stream(source()):
        count += 1
        answered.set()
    assert count == 3


def test_stream_is_lazy_and_stops_its_thread_when_left(predict):
    taken = []

    def source():
        for i in range(1000):
            taken.append(i)
            yield torch.zeros(2, 3).double()

    stream = predict.stream(source(), prefetch=2)
    next(stream)
    stream.close()
    assert len(taken) < 20
    assert not any(t.name == "favour-stream" for t in threading.enumerate())


def test_stream_of_nothing(predict):
    assert list(predict.stream([])) == []


def test_stream_on_another_device_leaves_the_predictor(predict):
    """The meta device has shapes only, but shows where tensors went."""
    from favour.predictor.streaming import _copied

    weight = predict.store.take("0.weight")
    twin = _copied(predict, torch.device("meta"))
    assert twin.store.take("0.weight").device.type == "meta"
    assert predict.store.take("0.weight") is weight and weight.device.type == "cpu"


def test_error_in_a_batch_names_it(predict):
    xs = batches()
    xs[2] = torch.randn(4, 5).double()
    seen = []
    with pytest.raises(favour.FavourError, match=r"^batch 2: "):
        for belief in predict.stream(xs):
            seen.append(belief)
    assert len(seen) == 2


def test_error_of_the_loader_names_the_batch_and_comes_behind_earlier_results(predict):
    def source():
        yield torch.zeros(2, 3).double()
        raise OSError("disk gone")

    stream = predict.stream(source())
    assert next(stream).mean.shape == (2, 2)
    with pytest.raises(OSError, match="disk gone") as error:
        next(stream)
    assert error.value.__notes__ == ["in batch 1 of the stream"]


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(4, 3), "one tensor, and the model takes 2 arguments"),
        ((torch.zeros(4, 3),), "1 entries, and the model takes 2 arguments"),
        ({"left": torch.zeros(4, 3)}, "'left', and the model takes 2 arguments .'left', 'right'"),
        ("text", "the batch is a str"),
    ],
)
def test_unfit_batches_are_described(two, batch, text):
    with pytest.raises(favour.errors.InvalidType, match=text):
        list(two.stream([batch]))


def test_unknown_results_and_devices_are_refused_at_once(predict):
    with pytest.raises(favour.errors.InvalidValue, match="choose from mean"):
        predict.stream([], results=["median"])
    with pytest.raises(favour.errors.InvalidValue, match="prefetch"):
        predict.stream([], prefetch=0)
    with pytest.raises(favour.errors.InvalidType, match="iterable of batches"):
        predict.stream(3)
    if not torch.cuda.is_available():
        with pytest.raises(favour.errors.InvalidValue, match="no GPU"):
            predict.stream([], "cuda")


def test_results_of_several_outputs_need_functions():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(3, 2), nn.Dropout(0.2)

        def forward(self, x):
            y = self.a(self.drop(x))
            return y, 2 * y

    predict = favour.compile(Pair(), torch.randn(4, 3))
    x = torch.randn(4, 3)
    with pytest.raises(favour.errors.InvalidType, match="batch 0: the model returns a tuple"):
        list(predict.stream([x], results=["mean"]))
    (found,) = predict.stream([x], results={"second": lambda pair: pair[1].mean})
    torch.testing.assert_close(found["second"], predict(x)[1].mean)


def test_arguments_of_a_single_keyword():
    class Word(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(3, 2), nn.Dropout(0.2)

        def forward(self, *, pixels):
            return self.a(self.drop(pixels))

    x = torch.randn(4, 3)
    predict = favour.compile(Word(), {"pixels": x})
    assert arguments(predict, x) == ((), {"pixels": x})


def test_bar_counts():
    with Bar("predicting", 4) as bar:
        for _ in range(3):
            bar.advance(10)
        assert bar.text().startswith("[###############-----] 3 of 4 batches, 30 inputs, ")
    with Bar("predicting", None) as bar:
        bar.advance(7)
        assert bar.text().startswith("1 batches, 7 inputs, ")


@pytest.mark.gpu
def test_stream_on_a_gpu_equals_the_cpu(predict):
    xs = batches(8)
    found = list(predict.stream(xs, "cuda", results=["mean", "covariance_matrix"]))
    for x, f in zip(xs, found, strict=True):
        assert f["mean"].device.type == "cpu"
        torch.testing.assert_close(f["mean"], predict(x).mean)
        torch.testing.assert_close(f["covariance_matrix"], predict(x).covariance_matrix)
    assert all(b.mean.is_cuda for b in predict.stream(xs, "cuda"))
