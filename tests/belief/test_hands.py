"""What people do with a belief by hand: arrays, rows, quantiles, pictures, notebooks, and what is refused."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import favour
from favour import Belief
from favour.errors import InvalidType, InvalidValue, ShapeMismatch

F64 = torch.float64


def make_belief(batch=4, event=(3,), dtype=F64):
    g = torch.Generator().manual_seed(0)
    return Belief(
        torch.randn(batch, *event, generator=g, dtype=F64).to(dtype),
        diag=torch.rand(batch, *event, generator=g, dtype=F64).to(dtype),
    )


def make_net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, outputs))


def test_numpy_gives_mean_and_stddev_without_gradients():
    belief = favour.compile(make_net(), torch.zeros(2, 5), check=False)(torch.randn(4, 5))
    assert belief.mean.requires_grad  # weights require it, as after any call of a module
    mean, stddev = belief.numpy()
    np.testing.assert_array_equal(mean, belief.mean.detach().numpy())
    np.testing.assert_array_equal(stddev, belief.stddev.detach().numpy())


def test_numpy_of_bfloat16_is_float32():
    assert make_belief(dtype=torch.bfloat16).numpy().mean.dtype == np.float32


def test_arrays_in_are_tensors_of_the_models_dtype_and_carry_no_gradient():
    x = np.random.default_rng(0).normal(size=(4, 5))  # float64; the model is float32
    predict = favour.compile(make_net(3), torch.zeros(2, 5), check=False)
    belief = predict(x)
    expected = predict(torch.tensor(x, dtype=torch.float32))
    assert not belief.mean.requires_grad and np.asarray(belief.mean).shape == (4, 3)
    torch.testing.assert_close(belief.covariance_matrix, expected.covariance_matrix.detach())
    assert np.asarray(predict.probabilities(x)).shape == (4, 3)
    assert predict.attribute(x).variance.shape == (4, 3)


def test_arrays_of_whole_numbers_stay_whole():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4), nn.Dropout(0.2), nn.Flatten(), nn.Linear(12, 2))
    predict = favour.compile(net, torch.zeros(2, 3, dtype=torch.int64), check=False)
    words = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)
    torch.testing.assert_close(predict(words).mean, predict(torch.tensor(words).long()).mean.detach())


def test_gradients_stay_where_training_needs_them():
    net = make_net()
    predict = favour.compile(net, torch.zeros(2, 5), check=False)
    predict(torch.randn(4, 5)).variance.sum().backward()
    assert net[0].weight.grad is not None and float(net[0].weight.grad.abs().sum()) > 0


def test_targets_without_their_own_axis_are_those_with_it():
    belief, y = make_belief(event=(1,)), torch.arange(4.0, dtype=F64)
    torch.testing.assert_close(belief.log_prob(y), belief.log_prob(y[:, None]))
    torch.testing.assert_close(belief.mahalanobis(y), belief.mahalanobis(y[:, None]))
    mean, stddev = belief.mean, belief.stddev
    assert favour.metrics.gaussian_nll(mean, stddev, y) == favour.metrics.gaussian_nll(mean, stddev, y[:, None])
    torch.testing.assert_close(favour.fit_noise(belief, y), favour.fit_noise(belief, y[:, None]))
    with pytest.raises(ShapeMismatch):
        belief.log_prob(y[:3])
    with pytest.raises(ShapeMismatch):
        favour.fit_noise(belief, y[:3])


def test_targets_without_their_own_axis_calibrate_alike():
    x, y = torch.randn(60, 5), torch.randn(60)
    predict = favour.compile(make_net(), x[:2], check=False)
    low, high = favour.calibrate(predict, (x, y)).interval(x, 0.9)
    assert low.shape == high.shape == (60, 1)
    torch.testing.assert_close(low, favour.calibrate(predict, (x, y[:, None])).interval(x, 0.9)[0])


@pytest.mark.parametrize(
    "rows", [2, -1, slice(1, 3), [0, 2], np.array([3, 1]), torch.tensor([True, False, True, True])]
)
def test_rows_are_beliefs(rows):
    belief = make_belief()
    expected = belief.mean[[rows] if isinstance(rows, int) else rows]
    torch.testing.assert_close(belief[rows].mean, expected)
    assert len(belief[rows]) == len(expected)


def test_quantile_is_that_of_the_normal():
    belief = make_belief()
    q = torch.tensor([0.025, 0.5, 0.9], dtype=F64)
    expected = torch.distributions.Normal(belief.mean, belief.stddev).icdf(q[:, None, None])
    torch.testing.assert_close(belief.quantile(q), expected)
    torch.testing.assert_close(belief.quantile(0.9), expected[2])
    for bad in (0, 1, math.nan, 1.5):
        with pytest.raises(InvalidValue, match="`q`"):
            belief.quantile(bad)


def test_a_belief_of_two_inputs_is_no_pair():
    belief = make_belief(batch=2)
    with pytest.raises(InvalidType, match=r"belief\.mean, belief\.variance"):
        _mean, _variance = belief
    with pytest.raises(InvalidType, match=r"belief\.numpy\(\)"):
        np.asarray(belief)
    assert len(belief) == 2 and belief[:0]


def test_notebooks_get_a_table_cut_to_size():
    html = make_belief(batch=20, event=(9,))._repr_html_()
    assert html.count("<tr>") == 9 and "12 more inputs; 3 more outputs" in html
    assert "±" in html and "<script" not in html and "<style" not in html
    assert "more" not in make_belief(batch=2, event=())._repr_html_()


@pytest.mark.parametrize("event, count", [((), 4), ((1,), 4), ((3,), 3), ((2, 2), 4)])
def test_plot_draws_each_number_with_its_interval(event, count):
    plt = pytest.importorskip("matplotlib.pyplot")
    belief = make_belief(event=event)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ax = belief.plot(row=1)
        assert len(ax.get_xticks()) == count
        if belief.event_shape.numel() == 1:
            assert len(belief.plot(torch.arange(4)).collections) > 0
    names = [f"n{i}" for i in range(count)]
    assert [t.get_text() for t in belief.plot(names=names).get_xticklabels()] == names
    with pytest.raises(ShapeMismatch, match="`names`"):
        belief.plot(names=["one"] * (count + 1))
    plt.close("all")
