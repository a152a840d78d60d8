"""Draws of the last layers: their moments, and that they beat a Gaussian where logits are skewed."""

import itertools

import pytest
import torch
from torch import nn

import favour
from favour.belief import Belief
from favour.errors import UnsupportedOperation
from favour.experiments import digits
from favour.head import find_head, head_outputs


def mlp(p=0.5, wide=200, hidden=12, classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, wide),
        nn.ReLU(),
        nn.Dropout(p),
        nn.Linear(wide, wide),
        nn.ReLU(),
        nn.Linear(wide, hidden),
        nn.ReLU(),
        nn.Dropout(p),
        nn.Linear(hidden, classes),
    )


def test_head_is_cut_at_the_last_hidden_layer():
    predict = favour.compile(mlp(), torch.randn(2, 6))
    head = find_head(predict)
    assert head.cut.module == "5"
    assert [n.module for n in head.tail] == ["6", "7", "8"]
    assert find_head(predict) is head


def test_head_draws_have_the_moments_of_the_belief():
    predict = favour.compile(mlp().double(), torch.randn(2, 6, dtype=torch.float64))
    x = torch.randn(5, 6, dtype=torch.float64)
    belief = predict(x)
    z = head_outputs(predict, (x,), {}, belief)
    torch.testing.assert_close(z.mean(0), belief.mean)
    d = z - z.mean(0)
    torch.testing.assert_close(
        torch.einsum("nbi,nbj->bij", d, d) / len(z), belief.covariance_matrix, rtol=1e-6, atol=1e-8
    )


def test_head_keeps_the_skewness_a_gaussian_loses():
    # One hidden unit of large weight, dropped four times out of five: the logit has two values, far apart.
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Dropout(0.8), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[3].weight.copy_(torch.tensor([[4.0, 0.0], [0.0, 0.5]]))
        model[3].bias.copy_(torch.tensor([-2.0, 0.0]))
    x = torch.rand(3, 4, dtype=torch.float64)
    predict = favour.compile(model, x)
    hidden = torch.relu(model[0](x))
    exact = 0
    for mask in itertools.product([0.0, 5.0], repeat=2):
        weight = 0.8 ** mask.count(0.0) * 0.2 ** mask.count(5.0)
        exact = exact + weight * model[3](hidden * torch.tensor(mask, dtype=torch.float64)).softmax(-1)
    assert find_head(predict).cut is None
    head, nodes = (predict.probabilities(x, estimator=e) for e in ("head", "nodes"))
    assert (head - exact).abs().max() < 0.02
    assert (nodes - exact).abs().min() > 0.1


def test_head_probabilities_agree_with_samples_under_strong_dropout():
    data, model = digits.load(), digits.network()
    for layer in model:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.5
    for _ in digits.train(model, data, epochs=25):
        pass
    x = data.test_x[:200]
    predict = favour.compile(model, x[:2])
    exact = predict.sample(x, n=4000, generator=torch.Generator().manual_seed(0)).softmax(-1).mean(0)
    error = {e: (predict.probabilities(x, estimator=e) - exact).abs().mean().item() for e in ("head", "nodes")}
    assert error["head"] < 0.6 * error["nodes"]
    assert torch.equal(predict.probabilities(x, estimator="head"), predict.probabilities(x, estimator="head"))


def test_auto_takes_the_head_where_dropout_is_strong_and_the_head_small():
    x = torch.randn(4, 6)

    def same(model, estimator):
        predict = favour.compile(model, x)
        return torch.equal(predict.probabilities(x), predict.probabilities(x, estimator=estimator))

    assert same(mlp(0.5), "head")
    assert same(mlp(0.1), "nodes")  # weak dropout
    assert same(mlp(0.5, wide=20), "nodes")  # the head is most of the network


def test_head_follows_the_model_and_its_moves():
    model = mlp()
    x = torch.randn(4, 6)
    predict = favour.compile(model, x)
    before = predict.probabilities(x, estimator="head")
    with torch.no_grad():
        model[8].bias.add_(torch.tensor([3.0, 0.0, 0.0]))
    after = predict.probabilities(x, estimator="head")
    assert (after[:, 0] > before[:, 0]).all()
    moved = predict.to(torch.float64)
    torch.testing.assert_close(moved.probabilities(x.double(), estimator="head"), after.double(), atol=1e-4, rtol=1e-4)
    assert model[8].weight.dtype == torch.float32


class Residual(nn.Module):
    """The skip connection passes every layer but the last."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last, self.drop = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
            nn.Dropout(0.5),
        )

    def forward(self, x):
        h = self.drop(torch.relu(self.first(x)))
        return self.last(self.drop(h + torch.relu(self.second(h))))


def test_no_head_is_an_error_only_if_asked_for():
    x = torch.randn(4, 6)
    bayes = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), favour.nn.BayesLinear(8, 3))
    for model in (Residual(), bayes):
        predict = favour.compile(model, x)
        assert find_head(predict) is None
        assert torch.equal(predict.probabilities(x), favour.probabilities(predict(x)))
        with pytest.raises(UnsupportedOperation, match="estimator='nodes'"):
            predict.probabilities(x, estimator="head")


def test_uncertain_inputs_take_the_belief():
    x = Belief(torch.randn(4, 6), diag=torch.ones(4, 6))
    predict = favour.compile(mlp(), torch.randn(2, 6))
    assert torch.equal(predict.probabilities(x), favour.probabilities(predict(x)))
    with pytest.raises(UnsupportedOperation, match="plain inputs"):
        predict.probabilities(x, estimator="head")
