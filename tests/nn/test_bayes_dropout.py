"""Per-neuron dropout: moments of the masks, the exported operation, learned rates."""

import math

import pytest
import torch
from torch import nn

import favour.nn as bayes
from favour.errors import InvalidType, InvalidValue, ShapeMismatch

F64 = torch.float64
RATES = torch.tensor([0.0, 0.1, 0.5, 0.9], dtype=F64)


def assert_moments(y, x, p):
    """y takes two values, so its central moments are sums of two terms; six standard errors."""
    n, q = len(y), 1 - p
    variance = x.square() * p / q
    low, high = -x, x * (1 / q - 1)  # the two values of y − x
    fourth = p * low**4 + q * high**4
    assert bool(((y.mean(0) - x).abs() <= 6 * (variance / n).sqrt() + 1e-12).all())
    spread = ((y - x).square().mean(0) - variance).abs()
    assert bool((spread <= 6 * ((fourth - variance.square()) / n).clamp_min(0).sqrt() + 1e-12).all())


@pytest.mark.parametrize("path", ["training", "forced", "capturing"])
def test_dropout_moments(path):
    layer = bayes.Dropout(RATES)
    x = torch.tensor([1.0, 2.0, -1.0, 3.0], dtype=F64)
    torch.manual_seed(0)
    if path == "forced":
        layer.eval()
        with bayes.sampling(layer):
            y = layer(x.expand(40_000, 4))
    else:
        layer.capturing = path == "capturing"
        y = layer.train(path == "training")(x.expand(40_000, 4))
    assert_moments(y, x, RATES)
    assert torch.equal(y[:, 0], x[0].expand(40_000))  # p = 0 leaves the neuron alone


def test_dropout_is_the_identity_in_eval_and_when_not_sampling():
    layer = bayes.Dropout(0.5)
    x = torch.randn(3, 4)
    layer.sampling = False
    assert layer(x) is x
    layer.sampling = True
    assert layer.eval()(x) is x


def test_dropout_rates_broadcast_to_the_event():
    torch.manual_seed(0)
    layer = bayes.Dropout(torch.tensor([0.0, 0.99]).view(2, 1, 1))
    y = layer(torch.ones(4, 2, 5, 5))
    assert bool((y[:, 0] == 1).all()) and float((y[:, 1] == 0).float().mean()) > 0.9
    for rates in (torch.full((3,), 0.1), torch.full((4, 2, 5, 5), 0.1), torch.full((2, 1), 0.1)):
        with pytest.raises(ShapeMismatch, match=r"\(4, 2, 5, 5\)"):
            bayes.Dropout(rates)(torch.ones(4, 2, 5, 5))


@pytest.mark.parametrize("p", [-0.1, 1.0, 2, float("nan"), torch.tensor([0.1, 1.0])])
def test_dropout_rate_out_of_range(p):
    with pytest.raises(InvalidValue, match=r"\[0, 1\)"):
        bayes.Dropout(p)


def test_dropout_rate_errors():
    with pytest.raises(InvalidValue, match="learnable"):
        bayes.Dropout(0.0, learnable=True)
    with pytest.raises(InvalidType, match="int64"):
        bayes.Dropout(torch.tensor([0, 0]))
    with pytest.raises(InvalidValue, match="temperature"):
        bayes.Dropout(0.5, temperature=0)


def network(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), bayes.Dropout(torch.full((6,), 0.3), **options), nn.Linear(6, 2))


@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize("learnable", [False, True])
def test_dropout_exports_as_one_node(mode, learnable):
    model = network(learnable=learnable).train(mode == "training")
    model[2].capturing = True
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes=({0: batch},))
    nodes = [n for n in program.graph.nodes if n.target is torch.ops.favour.dropout.default]
    assert len(nodes) == 1
    _, p, live = nodes[0].args
    assert live is True and tuple(p.meta["val"].shape) == (6,)
    if not learnable:
        assert program.graph_signature.inputs_to_buffers[p.name] == "2.rate"
    assert not any("rand" in str(n.target) for n in program.graph.nodes)
    assert program.module()(torch.randn(7, 4)).shape == (7, 2)


def test_dropout_operation():
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)
    torch.manual_seed(0)
    y = torch.ops.favour.dropout(x, RATES, True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, (y / x).detach())  # dy/dx = z/q
    still = torch.ops.favour.dropout(x, RATES, False)
    assert torch.equal(still, x) and still is not x
    assert y.dtype == F64 and torch.ops.favour.dropout(x.bfloat16(), RATES, True).dtype == torch.bfloat16
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.favour.dropout.default, (x, RATES, True), test_utils=checks)


def test_dropout_operation_compiles_and_trains():
    model = network()
    model[2].capturing = True
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(5, 4)).sum().backward()
    assert bool(model[0].weight.grad.any())


def test_dropout_state_dict_round_trip():
    for learnable in (False, True):
        a = bayes.Dropout(torch.tensor([0.2, 0.7]), learnable=learnable)
        b = bayes.Dropout(torch.tensor([0.5, 0.5]), learnable=learnable)
        b.load_state_dict(a.state_dict())
        torch.testing.assert_close(b.p, torch.tensor([0.2, 0.7]))
    assert repr(bayes.Dropout(0.25)) == "Dropout(p=0.25)"
    assert repr(bayes.Dropout(RATES)) == "Dropout(p of shape (4,))"


def test_relaxed_mask_approaches_the_bernoulli():
    """P(z > ½) = q at any temperature, and at a low one z is nearly 0 or 1."""
    layer = bayes.Dropout(0.3, learnable=True, temperature=0.01)
    torch.manual_seed(0)
    n = 40_000
    z = layer(torch.ones(n, 1)).detach() * 0.7
    assert abs(float((z > 0.5).float().mean()) - 0.7) <= 6 * math.sqrt(0.21 / n)
    # |logit u + ℓ| < t·log 99 leaves z in (.01, .99); the logistic density is at most ¼
    middle = float(((z > 0.01) & (z < 0.99)).float().mean())
    bound = 0.25 * 2 * 0.01 * math.log(99)
    assert middle <= bound + 6 * math.sqrt(bound / n)


def test_dropout_kl():
    p = torch.tensor([0.2, 0.7], dtype=F64)
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    layer = bayes.Dropout(p, learnable=True)
    torch.testing.assert_close(layer.kl(), -entropy.sum(), atol=1e-12, rtol=0)
    weight = torch.randn(3, 2, 1, 2, dtype=F64)
    expected = -entropy.sum()
    for i in range(2):
        expected = expected + weight[:, i].square().sum() / (2 * 0.5**2 * (1 - p[i]))
    torch.testing.assert_close(layer.kl(0.5, weight=weight), expected, atol=1e-10, rtol=1e-10)
    scalar = bayes.Dropout(torch.tensor(0.2, dtype=F64), learnable=True, units=5)
    torch.testing.assert_close(scalar.kl(), -5 * entropy[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(
        scalar.kl(weight=weight), -2 * entropy[0] + weight.square().sum() / (2 * 0.8), atol=1e-10, rtol=1e-10
    )
    assert float(bayes.Dropout(0.5).kl()) == 0
    torch.testing.assert_close(bayes.kl(nn.Sequential(layer, layer)), layer.kl())
    with pytest.raises(ShapeMismatch, match=r"\(3, 5\)"):
        layer.kl(weight=torch.ones(3, 5))


def test_learned_rates_fall_where_the_noise_hurts():
    """Neuron 0 carries the signal and neuron 1 nothing: only dropping the first costs."""
    torch.manual_seed(0)
    layer = bayes.Dropout(torch.tensor([0.3, 0.3]), learnable=True)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    x = torch.cat([torch.randn(256, 1), torch.zeros(256, 1)], 1)
    for _ in range(150):
        optimiser.zero_grad()
        loss = 0.5 * (layer(x) - x).square().sum() / 16 + bayes.kl(layer)
        loss.backward()
        optimiser.step()
    first, second = layer.p.tolist()
    assert first < 0.15 and abs(second - 0.5) < 0.05  # −H alone is least at ½


def test_learned_rate_stays_below_one():
    layer = bayes.Dropout(0.5, learnable=True)
    nn.init.constant_(layer.logits, 100.0)
    assert float(layer.p.detach()) < 1 and bool(layer(torch.ones(100)).isfinite().all())
