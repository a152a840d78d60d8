"""Bayesian linear and convolution layers: draws, KL terms against dense Gaussians, training, saving."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

import favour.nn as bayes
from favour.errors import FavourError, InvalidValue
from favour.posterior import Posterior

F64 = torch.float64


def make(kind, bias=True, **options):
    torch.manual_seed(0)
    options = {
        "bias": bias,
        "dtype": F64,
        "initial_std": 0.5,
    } | options  # well conditioned for the dense reference
    layer = {
        "mean_field": lambda: bayes.BayesLinear(3, 2, **options),
        "rows": lambda: bayes.RowBayesLinear(3, 2, rank=2, **options),
        "rows_rank_0": lambda: bayes.RowBayesLinear(3, 2, rank=0, **options),
        "full": lambda: bayes.FullBayesLinear(3, 2, **options),
        "conv": lambda: bayes.BayesConv2d(3, 2, (1, 2), **options),
    }[kind]()
    with torch.no_grad():  # away from the symmetric initial spreads
        for name, parameter in layer.named_parameters():
            if name not in ("weight", "bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


KINDS = ["mean_field", "rows", "rows_rank_0", "full", "conv"]


def example(layer):
    torch.manual_seed(1)
    return torch.randn((5, 3, 1, 4) if isinstance(layer, nn.Conv2d) else (5, 3), dtype=F64)


def mean_forward(layer, x):
    return (
        F.conv2d(x, layer.weight, layer.bias) if isinstance(layer, nn.Conv2d) else F.linear(x, layer.weight, layer.bias)
    )


def dense_distribution(layer):
    """(mean, covariance) over all weights: each key's entries in row-major order, keys one after another."""
    means, blocks = [], []
    for key, gaussian in layer.favour_posterior().items():
        if key == ("weight", "bias"):
            means.append(torch.cat([layer.weight, layer.bias[:, None]], 1).flatten())
        else:
            means.append(getattr(layer, key).flatten())
        blocks.append(gaussian.covariance())
    return torch.cat(means), torch.block_diag(*blocks)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_kl_equals_the_dense_gaussian_kl(kind, bias):
    layer = make(kind, bias, prior_std=0.7)
    mean, covariance = dense_distribution(layer)
    for given, s in ((None, 0.7), (1.3, 1.3)):
        prior = MultivariateNormal(torch.zeros_like(mean), s**2 * torch.eye(len(mean), dtype=F64))
        expected = kl_divergence(MultivariateNormal(mean, covariance), prior)
        torch.testing.assert_close(layer.kl(given), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_draws_have_the_posterior_covariance(kind):
    layer = make(kind)
    _, dense = dense_distribution(layer)
    torch.manual_seed(2)
    n = 6000
    with torch.no_grad():
        draws = [layer.draw() for _ in range(n)]
        deviations = [(w - layer.weight, b - layer.bias) for w, b in draws]
    if kind == "full":
        rows = torch.stack([torch.cat([w, b[:, None]], 1).flatten() for w, b in deviations])
    else:
        rows = torch.stack([torch.cat([w.flatten(), b]) for w, b in deviations])
    d = dense.diagonal()
    bound = 6 * ((d[:, None] * d + dense.square()) / n).sqrt()
    assert bool(((rows.T @ rows / n - dense).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
def test_layer_forward_modes(kind):
    layer = make(kind)
    x = example(layer)
    expected = mean_forward(layer, x)
    assert not torch.equal(layer(x), layer(x))  # training: draws
    layer.sampling = False
    assert torch.equal(layer(x), expected)
    with bayes.sampling(layer):
        assert torch.equal(layer(x), expected)  # the layer's own switch wins
    layer.sampling = True
    layer.eval()
    assert torch.equal(layer(x), expected)
    with bayes.sampling(layer, True):
        assert not torch.equal(layer(x), expected) and not layer.training
        with bayes.sampling(layer, False):
            assert torch.equal(layer(x), expected)
        assert not torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected)
    with pytest.raises(RuntimeError), bayes.sampling(layer):
        raise RuntimeError
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_draws_once_per_call(kind):
    layer = make(kind)
    x = example(layer)[:1].expand(4, *example(layer).shape[1:])
    y = layer(x)
    torch.testing.assert_close(y, y[:1].expand_as(y))


@pytest.mark.parametrize("kind", KINDS)
def test_layer_posterior_is_valid_and_differentiable(kind):
    layer = make(kind)
    posterior = Posterior.from_module(layer)
    posterior.validate(dict(layer.named_parameters()))
    variances = posterior.variances(dict(layer.named_parameters()))
    sum(v.sum() for v in variances.values()).backward()
    spreads = [p for name, p in layer.named_parameters() if name not in ("weight", "bias")]
    assert all(p.grad is not None and bool(p.grad.any()) for p in spreads if p.numel())


@pytest.mark.parametrize("kind", KINDS)
def test_layer_state_dict_round_trip(kind):
    layer = make(kind)
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(layer.state_dict())
    for a, b in zip(dense_distribution(layer), dense_distribution(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["mean_field", "local", "rows", "full"])
def test_layer_trains(kind):
    torch.manual_seed(0)
    layer = {
        "mean_field": lambda: bayes.BayesLinear(3, 2),
        "local": lambda: bayes.BayesLinear(3, 2, local_reparametrisation=True),
        "rows": lambda: bayes.RowBayesLinear(3, 2),
        "full": lambda: bayes.FullBayesLinear(3, 2),
    }[kind]()
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0, -1.0], [2.0, 0.0], [0.0, 3.0]]) + 0.5
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)

    def objective():
        return 0.5 * (layer(x) - y).square().sum() + bayes.kl(layer, prior_std=3.0)

    with torch.no_grad():
        before = float(objective())
    for _ in range(200):
        optimiser.zero_grad()
        objective().backward()
        optimiser.step()
    with torch.no_grad():
        after = float(objective())
    assert after < 0.2 * before
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and bool(parameter.isfinite().all()), name


def test_conv_trains():
    torch.manual_seed(0)
    target, layer = nn.Conv2d(1, 2, 3, padding="same"), bayes.BayesConv2d(1, 2, 3, padding="same")
    x = torch.randn(8, 1, 6, 6)
    y = target(x).detach()
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(100):
        optimiser.zero_grad()
        loss = 0.5 * (layer(x) - y).square().sum() + layer.kl()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_local_reparametrisation_has_the_right_moments():
    layer = make("mean_field", local_reparametrisation=True)
    n = 20_000
    x = example(layer)[:1]
    torch.manual_seed(3)
    with torch.no_grad():
        y = layer(x.expand(n, 3))
        variance = F.linear(x**2, torch.exp(2 * layer.weight_log_std), torch.exp(2 * layer.bias_log_std))[0]
        mean = mean_forward(layer, x)[0]
    assert bool(((y.mean(0) - mean).abs() <= 6 * (variance / n).sqrt()).all())
    assert bool(((y.var(0) - variance).abs() <= 6 * variance * (2 / n) ** 0.5).all())
    layer.eval()
    with bayes.sampling(layer):  # a Monte Carlo baseline draws weights, shared by the batch
        y = layer(x.expand(4, 3))
    torch.testing.assert_close(y, y[:1].expand_as(y))


def test_local_reparametrisation_gradient_at_zero_variance():
    layer = make("mean_field", bias=False, local_reparametrisation=True)
    layer(torch.zeros(2, 3, dtype=F64)).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_and_from_conv_copy_the_means(bias):
    linear = nn.Linear(3, 2, bias=bias).double().eval()
    x = torch.randn(4, 3, dtype=F64)
    for cls, options in (
        (bayes.BayesLinear, {}),
        (bayes.RowBayesLinear, {"rank": 1}),
        (bayes.FullBayesLinear, {}),
    ):
        layer = cls.from_linear(linear, std=0.1, **options)
        assert torch.equal(layer(x), linear(x)) and layer.weight is not linear.weight and not layer.training
    variance = bayes.BayesLinear.from_linear(linear, std=0.1).favour_posterior()["weight"].variance()
    torch.testing.assert_close(variance, torch.full_like(variance, 0.01))
    conv = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, bias=bias, padding_mode="reflect").eval()
    image = torch.randn(2, 2, 7, 7)
    assert torch.equal(bayes.BayesConv2d.from_conv(conv, std=0.1)(image), conv(image))


def test_rows_initial_std_is_the_marginal_one():
    torch.manual_seed(0)
    variance = bayes.RowBayesLinear(200, 100, rank=2, initial_std=0.1).favour_posterior()["weight"].variance()
    # E = 0.01; the factor's half is 0.005·χ²₂/2, of variance 0.005² per entry
    assert abs(float(variance.detach().mean()) - 0.01) < 6 * 0.005 / 20_000**0.5


def test_kl_counts_a_shared_layer_once():
    layer = make("mean_field")
    assert torch.equal(bayes.kl(nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer))), layer.kl())
    other = make("full")
    torch.testing.assert_close(bayes.kl(nn.ModuleList([layer, other]), 2.0), layer.kl(2.0) + other.kl(2.0))
    assert float(bayes.kl(nn.Linear(2, 2))) == 0


def test_layer_errors():
    with pytest.raises(InvalidValue, match=r"4160.*RowBayesLinear"):
        bayes.FullBayesLinear(64, 64)
    with pytest.raises(InvalidValue, match="rank"):
        bayes.RowBayesLinear(2, 2, rank=-1)
    for options in ({"prior_std": 0.0}, {"initial_std": -1.0}, {"initial_std": float("nan")}):
        with pytest.raises(FavourError, match=next(iter(options))):
            bayes.BayesLinear(2, 2, **options)
    with pytest.raises(InvalidValue, match="prior_std"):
        bayes.BayesLinear(2, 2).kl(-1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_exports_its_mean_forward(kind):
    layer = make(kind)
    layer.sampling = False
    x = example(layer)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.conv2d.default" if kind == "conv" else "aten.linear.default"]


def test_layer_compiles_in_one_graph():
    layer = bayes.BayesLinear(3, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(torch.ones(4, 3)).sum().backward()
    assert layer.weight_log_std.grad is not None


def test_layer_bfloat16():
    for layer in (bayes.RowBayesLinear(4, 3), bayes.FullBayesLinear(4, 3), bayes.BayesConv2d(4, 3, 1)):
        layer = layer.to(torch.bfloat16)
        x = torch.ones((2, 4, 1, 1) if isinstance(layer, nn.Conv2d) else (2, 4), dtype=torch.bfloat16)
        assert layer(x).dtype == torch.bfloat16 and bool(layer.kl().isfinite())
