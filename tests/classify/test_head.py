"""Draws of the last layers: their moments, and that they beat a Gaussian where logits are skewed."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import favour
from favour.belief import Belief
from favour.classify.head import draw, find_head
from favour.classify.head.tables import make_masks, shuffled
from favour.demo import digits
from favour.errors import InvalidValue, UnsupportedOperation
from favour.graph.node import Node


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


def test_head_begins_as_early_as_it_can_be_afforded():
    x = torch.randn(2, 6)
    small = mlp(wide=12)
    small = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 6), *small)
    predict = favour.compile(small, x)
    head = find_head(predict)
    assert head.cut is None and head.cost <= 1 and head.worthwhile
    assert find_head(predict) is head
    late = find_head(favour.compile(mlp(wide=400), x))
    assert late.cut is not None and late.cost <= 1
    assert "3" not in [n.module for n in late.tail]  # the wide layer is not sampled
    assert late.last.module == "8" and late.outer * late.inner >= 192


def by_loop(model, x, head, bits):
    """The draws of a network `linear, relu, dropout, linear, relu, dropout, linear`, one at a time."""
    first, second = bits
    out = []
    for a in range(head.outer):
        hidden = torch.relu(model[3](torch.relu(model[0](x)) * first[a]))
        out += [(hidden * second[a * head.inner + m]) @ model[6].weight.T for m in range(head.inner)]
    return torch.stack(out)


def test_draws_equal_a_loop_over_masks():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 300), nn.ReLU(), nn.Dropout(0.5), nn.Linear(300, 9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 3)
    ).double()
    with torch.no_grad():
        model[3].weight.mul_(2)
    x = torch.randn(4, 6, dtype=torch.float64)
    wide = nn.Sequential(nn.Linear(6, 3000), nn.ReLU(), nn.Linear(3000, 6)).double()
    predict = favour.compile(nn.Sequential(*wide, *model), x)
    head = find_head(predict)
    assert head.cut is None
    drops = [n for n in (*head.tail, *head.folded.values()) if n.draw is not None]
    early = next(n for n in drops if n.shape[1] == 300)
    late = next(n for n in drops if n.shape[1] == 9)
    bits = (
        make_masks(early, 0.5, torch.tensor(shuffled(head.outer, 300, drops.index(early))), x.dtype),
        make_masks(late, 0.3, torch.tensor(shuffled(head.outer * head.inner, 9, drops.index(late))), x.dtype),
    )
    d = by_loop(model, wide(x), head, bits).detach().numpy() + model[6].bias.detach().numpy()
    sigma, w, z = predict(x).covariance_matrix.detach().numpy(), 96 / (96 + head.outer), predict.draws(x).detach()
    for b in range(4):
        centred = d[:, b] - d[:, b].mean(0)
        own = centred.T @ centred / len(d)
        turn = np.linalg.cholesky(w * sigma[b] + (1 - w) * own) @ np.linalg.inv(np.linalg.cholesky(own))
        np.testing.assert_allclose(z[:, b], d[:, b].mean(0) + centred @ turn.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", [0.03, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("n", [8, 32, 128])
def test_masks_are_balanced(p, n):
    node = Node("drop", "call", torch.ops.aten.dropout.default, shape=("b", 1000))
    masks = make_masks(node, p, torch.tensor(shuffled(n, 1000, 0)), torch.float64)
    torch.testing.assert_close(masks.mean(0), torch.ones(1000, dtype=torch.float64), rtol=1e-6, atol=0)
    dropped = (masks == 0).sum(0)
    assert dropped.max() - dropped.min() <= 1
    if p * n < n - 1:
        assert abs(dropped.double().mean().item() / n - p) < 4 * 0.5 / n / 1000**0.5
    assert not torch.equal(masks, make_masks(node, p, torch.tensor(shuffled(n, 1000, 1)), torch.float64))


def test_head_draws_have_the_moments_of_the_belief():
    predict = favour.compile(mlp().double(), torch.randn(2, 6, dtype=torch.float64))
    x = torch.randn(5, 6, dtype=torch.float64)
    belief = predict(x)
    z = predict.draws(x)
    torch.testing.assert_close(z.mean(0), belief.mean)
    d = z - z.mean(0)
    torch.testing.assert_close(
        torch.einsum("nbi,nbj->bij", d, d) / len(z), belief.covariance_matrix, rtol=1e-6, atol=1e-8
    )


def test_many_classes_have_their_variances_matched():
    model = nn.Sequential(nn.Linear(6, 500), nn.ReLU(), nn.Dropout(0.5), nn.Linear(500, 70)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    predict = favour.compile(model, x)
    belief, z = predict(x), predict.draws(x)
    torch.testing.assert_close(z.mean(0), belief.mean)
    torch.testing.assert_close(z.var(0, correction=0), belief.variance)


def test_tables_follow_the_seed():
    x, model = torch.randn(4, 6), mlp()
    p = [favour.compile(model, x, seed=s).probabilities(x, estimator="head") for s in (0, 0, 1)]
    assert torch.equal(p[0], p[1]) and not torch.equal(p[0], p[2])


def test_large_batches_draw_in_chunks(monkeypatch):
    predict = favour.compile(mlp(), torch.randn(2, 6))
    x = torch.randn(7, 6)
    whole = predict.draws(x)
    monkeypatch.setattr("favour.classify.head.draw._HELD", (1, 1))
    torch.testing.assert_close(predict.draws(x), whole)


@pytest.mark.parametrize("kind", ["whole", "cut", "skip"])
def test_blocks_of_rows_equal_the_batch(monkeypatch, kind):
    """With draws from the first layer on, from a belief inside, and beside a certain input."""

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.last = mlp(wide=12)[:-1], nn.Linear(12, 3)

        def forward(self, x):
            return self.last(self.body(x)) + x[:, :3]

    models = {"whole": mlp(wide=12), "cut": mlp(), "skip": Skip()}
    x = torch.randn(7, 6, dtype=torch.float64)
    predict = favour.compile(models[kind].double(), x[:2])
    head = find_head(predict)
    assert (head.cut is not None) == (kind == "cut")
    whole = predict.draws(x)
    calls = []
    tail = draw._tail

    def counted(*arguments):
        calls.append(len(arguments[-1].mean))
        return tail(*arguments)

    monkeypatch.setattr(draw, "_tail", counted)
    for rows, want in ((3, [3, 3, 1]), (7, [7])):
        monkeypatch.setattr(draw, "_BLOCK", 1)
        monkeypatch.setattr(draw, "_LEAST", rows)
        calls.clear()
        torch.testing.assert_close(predict.draws(x), whole, rtol=1e-9, atol=1e-11)
        assert calls == want
        p = predict.probabilities(x, estimator="head")
        torch.testing.assert_close(p, whole.softmax(-1).mean(0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "mixed", "cut"),
    [
        (("s7", 4), False, True),
        (("s9", 4), False, False),  # another dynamic size
        ((5, 4), False, False),
        (("2*s7", 4), True, False),
        ((4, "s7"), True, False),
        (("s7", "s7"), True, True),
        (None, True, False),
    ],
)
def test_rows_are_taken_where_the_batch_comes_first(shape, mixed, cut):
    node = SimpleNamespace(shape=shape, kind="call")
    assert draw._mixed(node, "s7") is mixed
    value = torch.zeros(8, 4)
    assert len(draw._rows(node, value, slice(0, 3), "s7")) == (3 if cut else 8)


def test_axis_of_draws_equals_vmap_and_masked_inputs_equal_masked_weights(monkeypatch):
    x = torch.randn(20, 6, dtype=torch.float64)
    inner = favour.nn.BayesLinear(12, 12)
    for model in (mlp(), nn.Sequential(*mlp(wide=12)[:5], inner, *mlp(wide=12)[5:])):
        predict = favour.compile(model.double(), x)
        head = find_head(predict)
        assert head.batched
        few = torch.cat([predict.draws(x[i : i + 2]) for i in range(0, 20, 2)], 1)
        for value in (True, False):
            monkeypatch.setattr(head, "batched", value)
            torch.testing.assert_close(predict.draws(x), few, rtol=1e-8, atol=1e-10)


def test_other_operations_are_drawn_by_vmap():
    model = mlp(wide=12).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    same = nn.Sequential(*model[:4], nn.Unflatten(1, (3, 4)), nn.Flatten(), *model[4:])
    heads, z = [], []
    for m in (model, same):
        wide = nn.Sequential(nn.Linear(6, 900), nn.Linear(900, 6)).double()
        with torch.no_grad():
            wide[0].weight.fill_(0.01)
            wide[0].bias.fill_(0)
            wide[1].weight.copy_(torch.linspace(-1, 1, 5400).reshape(6, 900))
            wide[1].bias.fill_(0)
        predict = favour.compile(nn.Sequential(*wide, *m), x)
        heads.append(find_head(predict))
        z.append(predict.draws(x))
    assert heads[0].batched and not heads[1].batched
    torch.testing.assert_close(z[0], z[1], rtol=1e-8, atol=1e-10)


def test_draws_of_lower_rank_than_the_outputs_keep_variances():
    # One hidden unit: the covariance of the draws has rank one, and rounding makes it indefinite.
    torch.manual_seed(0)
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 1), nn.Dropout(0.5), nn.Linear(1, 7))
        x = torch.randn(50, 6)
        predict = favour.compile(model, x)
        z, belief = predict.draws(x), predict(x)
        torch.testing.assert_close(z.var(0, correction=0), belief.variance, rtol=1e-3, atol=1e-6)


def test_kept_tables_follow_rates_and_modes():
    class Rated(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.last = nn.Linear(6, 200), nn.Linear(200, 3)
            self.rate = nn.Parameter(torch.tensor(0.5), requires_grad=False)

        def forward(self, x):
            return self.last(torch.ops.favour.dropout(torch.relu(self.trunk(x)), self.rate, True))

    model, x = Rated(), torch.randn(4, 6)
    predict = favour.compile(model, x)
    head = find_head(predict)
    with torch.inference_mode():
        first = predict.probabilities(x, estimator="head")
    kept = head.tables
    assert torch.equal(first, predict.probabilities(x, estimator="head")) and head.tables is kept
    y = x.clone().requires_grad_()
    predict.probabilities(
        y, estimator="head"
    ).square().sum().backward()  # tables made in inference mode serve gradients
    assert y.grad.abs().sum() > 0
    with torch.no_grad():
        model.rate.fill_(0.1)
    after = predict.probabilities(x, estimator="head")
    assert head.tables is not kept and not torch.allclose(first, after)
    torch.testing.assert_close(after, favour.compile(model, x).probabilities(x, estimator="head"))


class Probable(nn.Module):
    def __init__(self, predict):
        super().__init__()
        self.predict = predict

    def forward(self, x):
        return self.predict.probabilities(x)


def test_head_compiles_and_exports():
    x = torch.randn(5, 6)
    predict = favour.compile(mlp(), x)
    assert find_head(predict).worthwhile
    expected = predict.probabilities(x)
    compiled = torch.compile(Probable(predict), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(Probable(predict), (x,), dynamic_shapes={"x": {0: batch}})
    y = torch.randn(9, 6)
    torch.testing.assert_close(exported.module()(y), predict.probabilities(y), rtol=1e-4, atol=1e-5)


def test_head_is_differentiable():
    x = torch.randn(3, 6, requires_grad=True)
    favour.compile(mlp(), x.detach()).probabilities(x)[:, 0].sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_random_last_layer_is_drawn_exactly(rate):
    # Few hidden units and wide weights: given the mask, the logits are Gaussian; their mixture is not.
    torch.manual_seed(0)
    last = favour.nn.BayesLinear(3, 3)
    model = nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 3), nn.Dropout(rate), last).double()
    with torch.no_grad():
        last.weight.mul_(8)
    x = torch.randn(20, 4, dtype=torch.float64)
    predict = favour.compile(model, x)
    head = find_head(predict)
    assert head.last is not None and head.cut is None
    exact = predict.sample(x, n=40_000, generator=torch.Generator().manual_seed(0)).softmax(-1).mean(0)
    error = {e: (predict.probabilities(x, estimator=e) - exact).abs().mean().item() for e in ("head", "nodes")}
    if rate:
        assert error["head"] < 0.6 * error["nodes"] and error["head"] < 0.02
    else:
        assert error["head"] < 0.01


def test_random_inner_layer_is_drawn_by_its_outputs():
    torch.manual_seed(0)
    inner = favour.nn.BayesLinear(5, 40)
    model = nn.Sequential(nn.Linear(4, 800), nn.ReLU(), nn.Linear(800, 5), inner, nn.ReLU(), nn.Dropout(0.5))
    model = nn.Sequential(*model, nn.Linear(40, 3)).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    predict = favour.compile(model, x)
    head = find_head(predict)
    assert inner is predict.program.link.model[3] and any(n.module == "3" for n in head.normals)
    exact = predict.sample(x, n=20_000, generator=torch.Generator().manual_seed(0)).softmax(-1).mean(0)
    assert (predict.probabilities(x, estimator="head") - exact).abs().mean() < 0.01


def test_channel_dropout_is_drawn_by_channel():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.AvgPool2d(4), nn.Dropout2d(0.8), nn.Flatten()
    )
    model = nn.Sequential(*model, nn.Linear(54, 3)).double()
    with torch.no_grad():
        model[7].weight.mul_(40)
    x = torch.randn(10, 1, 18, 18, dtype=torch.float64)
    predict = favour.compile(model, x)
    assert find_head(predict).last is None  # what was dropped is reshaped first
    exact = predict.sample(x, n=20_000, generator=torch.Generator().manual_seed(0)).softmax(-1).mean(0)
    error = {e: (predict.probabilities(x, estimator=e) - exact).abs().mean().item() for e in ("head", "nodes")}
    assert error["head"] < 0.7 * error["nodes"]


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
    few = predict.sample(x, n=100, generator=torch.Generator().manual_seed(1)).softmax(-1).mean(0)
    assert error["head"] < 0.75 * error["nodes"]
    assert error["head"] < 0.75 * (few - exact).abs().mean().item()
    assert torch.equal(predict.probabilities(x, estimator="head"), predict.probabilities(x, estimator="head"))


def test_auto_takes_the_head_where_it_is_small():
    x = torch.randn(4, 6)

    def same(model, estimator):
        predict = favour.compile(model, x)
        return torch.equal(predict.probabilities(x), predict.probabilities(x, estimator=estimator))

    assert same(mlp(0.5), "head")
    assert same(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), "nodes")  # the head is the network


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


def test_no_head_is_an_error_only_if_asked_for():
    x = torch.randn(4, 6)
    rows = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), favour.nn.RowBayesLinear(8, 3))
    alpha = nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(6, 3))
    for model in (rows, alpha):
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


def test_probabilities_are_ordinary_tensors_whatever_the_mode():
    predict, x = favour.compile(mlp(), torch.randn(2, 6)), torch.randn(4, 6)
    expected = predict.probabilities(x)
    with torch.no_grad():
        p = predict.probabilities(x)
    assert not p.is_inference() and not p.requires_grad
    with torch.inference_mode():
        assert predict.probabilities(x).is_inference()
    torch.testing.assert_close(p, expected)
    weight = torch.ones(3, requires_grad=True)
    (p @ weight).sum().backward()  # what is made without gradients serves where there are some
    y = x.clone().requires_grad_()
    predict.probabilities(y)[:, 0].sum().backward()  # and so does what was kept meanwhile
    assert weight.grad is not None and y.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws_in_low_precision(dtype):
    model = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 6), *mlp(wide=12)).to(dtype)
    x = torch.randn(5, 6).to(dtype)
    predict = favour.compile(model, x)
    z = predict.draws(x).double()
    assert z.isfinite().all()
    exact = favour.compile(model.double(), x.double())(x.double())
    torch.testing.assert_close(z.mean(0), exact.mean, rtol=0.1, atol=0.1)


def test_more_draws_when_asked_and_bad_numbers():
    predict, x = favour.compile(mlp(), torch.randn(2, 6)), torch.randn(4, 6)
    many = predict.draws(x, n=1000)
    assert 1000 <= len(many) < 1100
    torch.testing.assert_close(predict.probabilities(x, draws=1000), many.softmax(-1).mean(0))
    compiled = torch.compile(predict.probabilities, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, draws=1000), many.softmax(-1).mean(0))
    for n in (0, -3, 2.5, True):
        with pytest.raises(InvalidValue, match="`draws` is"):
            predict.draws(x, n=n)
        with pytest.raises(InvalidValue, match="`draws` is"):
            predict.probabilities(x, draws=n)
    with pytest.raises(InvalidValue, match="belongs to the head"):
        predict.probabilities(x, estimator="probit", draws=100)
    with pytest.raises(UnsupportedOperation, match="itself a Belief"):
        predict.probabilities(favour.Belief.point(x), draws=100)
    headless = favour.compile(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3), nn.ReLU(), nn.Softmax(1)), x)
    with pytest.raises(InvalidValue, match="`draws` is"):
        headless.draws(x, n=0)
