"""Norms: the Jacobian against autograd, mean and covariance against draws from the same Gaussian."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from calls import Call, close, covariance, dense
from cases import of_kind

import favour
from favour.rules import RULES
from favour.rules.group_moments import second_order_of
from favour.surrogate.value import Context, Value

F64 = torch.float64
aten = torch.ops.aten
CTX = Context(module="layer", place="layer (model.py:1)")
NORMS = [case for case in of_kind("curved") if "norm" in case.overload or "var" in case.overload]


CURVED = [c for c in of_kind("curved") if c in NORMS or "softmax" in c.overload or "logsum" in c.overload]


@pytest.mark.parametrize("case", CURVED, ids=lambda c: c.name)
def test_map_without_covariance_is_the_jacobian(case):
    call = Call(case, certain=True)
    (surrogate,) = call.surrogates()
    ((x, G),) = surrogate.maps
    (key,) = call.values
    jacobian = torch.func.jacrev(lambda t: call.results(key, t)[0])(x.mean)
    close(dense(G, x.shape, F64), jacobian.reshape(surrogate.mean.numel(), -1))


def uncertain(n, spread, rank, seed=0):
    torch.manual_seed(seed)
    mean = torch.randn(2, n, dtype=F64)
    diag = spread**2 * (0.5 + torch.rand(2, n, dtype=F64))
    return Value(mean, diag, {"z": spread / rank**0.5 * torch.randn(rank, 2, n, dtype=F64)})


def draws(x, count=200_000):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(count, *x.shape, dtype=F64, generator=generator)
    w = torch.randn(count, x.blocks["z"].shape[0], dtype=F64, generator=generator)
    return x.mean + z * x.diag.sqrt() + torch.einsum("nr,rbi->nbi", w, x.blocks["z"])


OPERATIONS = {
    "layer": (aten.layer_norm.default, lambda n: ([n],)),
    "rms": (aten.rms_norm.default, lambda n: ([n], None, 1e-6)),
    "group": (aten.group_norm.default, lambda n: (2,)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_mean_and_covariance_against_draws(name, spread):
    op, options = OPERATIONS[name]
    n = 24
    x = uncertain(n, spread, 4)
    surrogate = RULES[op].function(CTX, x, *options(n))
    samples = op(draws(x).reshape(-1, n), *options(n)).reshape(-1, *x.shape)
    error = ((surrogate.mean - samples.mean(0)) / samples.std(0)).abs().max()
    naive = ((op(x.mean, *options(n)) - samples.mean(0)) / samples.std(0)).abs().max()
    assert error < 0.012 + 0.02 * (spread > 0.2) and error < naive / 4, (error, naive)

    ((_, G),) = surrogate.maps
    columns = torch.cat([G.apply(torch.diag_embed(x.diag.sqrt()).transpose(0, 1)), G.apply(x.blocks["z"])])
    got = torch.einsum("kbi,kbj->bij", columns, columns) + covariance(surrogate.noises[0], x.shape)
    centred = samples - samples.mean(0)
    expected = torch.einsum("nbi,nbj->bij", centred, centred) / (len(samples) - 1)
    assert (got - expected).norm() / expected.norm() < (0.03 if spread < 0.2 else 0.12)


def test_the_spread_of_the_input_enters_the_denominator():
    """With the mean alone the output would be too large: a constant input of variance v is divided by √v, not by √ε."""
    n, v = 64, 0.25
    x = Value(torch.zeros(1, n, dtype=F64), torch.full((1, n), v, dtype=F64))
    surrogate = RULES[aten.layer_norm.default].function(CTX, x, [n])
    ((_, G),) = surrogate.maps
    total = G.square(x.diag) + surrogate.noises[0].diag()
    close(total, torch.full_like(total, 1.0), tolerance=0.03)


def test_hand_written_rms_norm_is_close_to_the_operation():
    class Hand(torch.nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own, self.drop = own, torch.nn.Dropout(0.1)

        def forward(self, x):
            x = self.drop(x)
            if self.own:
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            return torch.nn.functional.rms_norm(x, (16,), eps=1e-5)

    torch.manual_seed(0)
    x = torch.randn(3, 16, dtype=F64)
    beliefs = [favour.compile(Hand(own), x, method="adjoint", rank=16)(x) for own in (True, False)]
    draws = favour.compile(Hand(True), x).sample(x, n=20_000)
    for belief in beliefs:
        assert ((belief.mean - draws.mean(0)) / draws.std(0).clamp_min(1e-9)).abs().max() < 0.1
        assert (belief.variance / draws.var(0) - 1).abs().max() < 0.3  # one large entry is not Gaussian


def test_second_order_variance_of_a_centred_group():
    """q = 2‖CΣC‖²/n², C = I − 11ᵀ/n, in dense matrices."""
    for n in (1, 2, 3, 8):
        x = uncertain(n, 0.7, 3)
        sigma = torch.diag_embed(x.diag) + torch.einsum("rbi,rbj->bij", x.blocks["z"], x.blocks["z"])
        C = torch.eye(n, dtype=F64) - 1 / n
        expected = 2 * (C @ sigma @ C).square().sum((1, 2)) / n**2
        close(second_order_of(x, True).squeeze(-1), expected, f"{n}", 1e-12)


def by_hand(t):
    return (t - t.mean(-1, True)) / (t.var(-1, False, keepdim=True) + 1e-5).sqrt()


ONE = {
    "layer": lambda x, b: torch.nn.functional.layer_norm(x.unsqueeze(-1), (1,), None, b).squeeze(-1),
    "group": lambda x, b: torch.nn.functional.group_norm(x, 6, None, b.expand(6)),
    "instance": lambda x, b: torch.nn.functional.instance_norm(x.unsqueeze(-1), None, None, None, b.expand(6))[..., 0],
    "by hand": lambda x, b: by_hand(x.unsqueeze(-1)).squeeze(-1) + b,
}


class One(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.drop, self.bias = name, torch.nn.Dropout(0.5), torch.nn.Parameter(torch.tensor([0.25]))

    def forward(self, x):
        return ONE[self.name](self.drop(x), self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("options", [{}, {"pairs": 16}, {"rank": 4}, {"method": "dplr"}, {"method": "full"}], ids=str)
@pytest.mark.parametrize("name", [n for n in ONE if n != "instance"])  # torch has none of one pixel
def test_a_group_of_one_entry_is_its_bias(name, options, dtype):
    """An entry is its own mean, whatever it is: the result is the bias, and certain but for rounding."""
    x = 100 * torch.randn(4, 6, dtype=dtype)
    rounding = float((One(name).to(dtype).eval()(2 * x) - 0.25).detach().abs().max())
    belief = favour.compile(One(name).to(dtype), x, **options)(x)
    close(belief.mean, torch.full_like(x, 0.25), "", 1e-5 + 2 * rounding)
    assert belief.stddev.max() <= 1.1e-4 + rounding


def test_norms_of_one_entry_without_a_mean_are_signs():
    """x/√(x² + ε), and F.normalize with an ε whose powers underflow: within [−1, 1], 0 at a certain 0."""
    x = torch.tensor([[0.0, 1.0], [1e3, 1.0], [-1e-3, 1.0]])

    class Sign(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.drop, self.function = torch.nn.Dropout(0.5), function

        def forward(self, x):
            return self.function(self.drop(x)[:, :1])

    for function in (
        lambda z: torch.nn.functional.rms_norm(z, (1,)),
        lambda z: torch.nn.functional.normalize(z, dim=1),
        lambda z: torch.nn.functional.cosine_similarity(z, torch.ones_like(z)),
    ):
        belief = favour.compile(Sign(function), x)(x)
        assert (belief.mean.abs() <= 1).all() and (belief.variance <= 1).all()
        assert belief.mean[0] == 0 and belief.variance[0] == 0


@pytest.mark.parametrize("op", ["layer", "rms", "group"])
def test_variance_stays_below_what_the_range_allows(op):
    """Σ_i y_i² ≤ n, however little is known of x."""
    overload, options = OPERATIONS[op]
    for spread in (1e-3, 1.0, 1e3):
        for n in (2, 4, 24):
            mean = torch.randn(2, n, dtype=F64)
            x = Value(mean, torch.full_like(mean, spread**2))
            if op == "group":
                options = lambda n: (1,)  # noqa: E731
            surrogate = RULES[overload].function(CTX, x, *options(n))
            ((_, G),) = surrogate.maps
            total = G.square(x.variance) + sum(noise.diag() for noise in surrogate.noises)
            assert (total.sum(-1) <= n * (1 + 1e-9)).all()


def test_variance_of_one_entry_is_refused_with_a_correction():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Unflatten(1, (3, 1)), Spread())
    with pytest.raises(favour.errors.UnsupportedOperation, match=r"1 entries.*correction=0"):
        favour.compile(model, torch.randn(2, 3))


class Spread(torch.nn.Module):
    def forward(self, x):
        return x.var(2)


@pytest.mark.parametrize("options", [{}, {"secant": True}, {"pairs": 16}, {"rank": 4}], ids=str)
def test_standard_deviation_behind_dropout(options):
    """Rows of all zeros included; the rest against samples."""

    Linear = partial(torch.nn.Linear, bias=False)

    class Deviation(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop, self.mix = Linear(4, 64), torch.nn.Dropout(0.3), Linear(64, 24)

        def forward(self, x):
            return self.mix(self.drop(torch.relu(self.layer(x)))).std(1)

    torch.manual_seed(0)
    model = Deviation()
    x = torch.randn(6, 4)
    x[0] = 0
    belief = favour.compile(model, x, **options)(x)
    assert belief.mean[0] == 0 and belief.variance[0] == 0
    samples = favour.sample(model, x, 20_000).detach()
    sampled = samples.std(0)
    assert ((belief.mean - samples.mean(0)).abs()[1:] / sampled[1:]).max() < 0.25
    assert (belief.stddev / sampled - 1)[1:].abs().max() < 0.25


def all_outcomes(x, p):
    """Every outcome of dropout on one row, and its probability."""
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * x.shape[-1])
    kept = masks.sum(-1)
    return masks * x / (1 - p), (1 - p) ** kept * p ** (x.shape[-1] - kept)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5])
def test_variance_right_behind_dropout_is_exact(p):
    """V is quadratic in draws of two values: with their cumulants and secants nothing of its moments is left out."""
    torch.manual_seed(3)
    x = torch.randn(2, 6, dtype=F64)

    class Spread(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.dropout(x, p).var(-1, keepdim=True)

    belief = favour.compile(Spread(), x, method="adjoint", secant=True, check=False)(x)
    for row, mean, variance in zip(x, belief.mean, belief.variance, strict=True):
        outcomes, chances = all_outcomes(row, p)
        spread = outcomes.var(-1)
        expected = chances @ spread
        close(mean.squeeze(), expected, "mean", 1e-10)
        close(variance.squeeze(), chances @ (spread - expected).square(), "variance", 1e-10)


@pytest.mark.parametrize("entries", [2, 3, 4, 8])
@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_second_moments_stay_on_the_sphere(entries, spread):
    """Σ y_i² is at most n, and so are its expectations."""
    x = uncertain(entries, spread, 2)
    x = Value(x.mean, x.diag)
    surrogate = RULES[aten.layer_norm.default].function(CTX, x, [entries])
    ((_, G),) = surrogate.maps
    variance = dense(G, x.shape, F64).square() @ x.variance.flatten()
    second = surrogate.mean.square() + variance.reshape(x.shape) + sum(noise.diag() for noise in surrogate.noises)
    assert (second.sum(-1) <= entries + 1e-9).all()
