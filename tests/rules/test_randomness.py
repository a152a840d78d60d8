"""Draws of a model's own, however they are written, against the moments of their distributions."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import favour
from favour.rules import RULES
from favour.surrogate.value import Context, Value

F64 = torch.float64
EULER = 0.5772156649015329


class Model(nn.Module):
    """A known function h of the input, with a draw made of it."""

    def __init__(self, spell):
        super().__init__()
        self.spell = spell
        self.register_buffer("weight", torch.linspace(-1, 1, 15, dtype=F64).reshape(3, 5))

    def forward(self, x):
        return self.spell((x @ self.weight).tanh())


def torchvision_depth(h, p):
    noise = torch.empty([h.shape[0], 1], dtype=h.dtype).bernoulli_(1.0 - p)
    noise.div_(1.0 - p)
    return h * noise


def transformers_path(h, p):
    keep = 1 - p
    mask = keep + torch.rand((h.shape[0], 1), dtype=h.dtype)
    mask.floor_()
    return h.div(keep) * mask


def computed_scale(h):
    return h + F.softplus(h) * torch.randn_like(h)


def turned_mask(h):
    kept = ~(torch.rand_like(h) < 0.3)
    return h * kept.to(h.dtype) / 0.7


def timm_path(h, p):
    return h * h.new_empty((h.shape[0], 1)).bernoulli_(1 - p).div_(1 - p)


def gumbel(h):
    return h - torch.empty_like(h).exponential_().log()


def logistic(h):
    u = torch.rand_like(h)
    return h + u.log() - (1 - u).log()


# Draw, its mean and its variances by h, and whether an input's entries share it.
ENTRIES = {
    "native dropout": (lambda h: torch.native_dropout(h, 0.2, True)[0], lambda h: h, lambda h: h**2 / 4),
    "bernoulli with p": (lambda h: h * torch.bernoulli(h, 0.7), lambda h: 0.7 * h, lambda h: 0.21 * h**2),
    "bernoulli of a tensor": (
        lambda h: torch.bernoulli(h.square()),
        lambda h: h.square(),
        lambda h: h.square() * (1 - h.square()),
    ),
    "bernoulli in place": (
        lambda h: h * torch.empty_like(h).bernoulli_(0.8) / 0.8,
        lambda h: h,
        lambda h: h**2 / 4,
    ),
    "uniform below": (lambda h: h * (torch.rand_like(h) < 0.7) / 0.7, lambda h: h, lambda h: h**2 * 3 / 7),
    "below uniform": (lambda h: h * (torch.rand_like(h) > 0.3).to(h.dtype), lambda h: 0.7 * h, lambda h: 0.21 * h**2),
    "turned mask": (turned_mask, lambda h: h, lambda h: h**2 * 3 / 7),
    "below a tensor": (
        lambda h: (torch.rand_like(h) < h.square()).to(h.dtype),
        lambda h: h.square(),
        lambda h: h.square() * (1 - h.square()),
    ),
    "moved uniform": (
        lambda h: h * (2 * torch.rand_like(h) - 1 > 0.5),
        lambda h: h / 4,
        lambda h: 3 / 16 * h**2,
    ),
    "masked fill": (
        lambda h: h.masked_fill(torch.rand_like(h) < 0.3, 2.0),
        lambda h: 0.7 * h + 0.6,
        lambda h: 0.21 * (h - 2) ** 2,
    ),
    "where": (
        lambda h: torch.where(torch.rand_like(h) < 0.3, h.cos(), h),
        lambda h: 0.7 * h + 0.3 * h.cos(),
        lambda h: 0.21 * (h - h.cos()) ** 2,
    ),
    "rounded": (lambda h: torch.round(torch.rand_like(h) - 0.3), lambda h: 0 * h + 0.2, lambda h: 0 * h + 0.16),
    "additive normal": (lambda h: h + 0.3 * torch.randn_like(h), lambda h: h, lambda h: 0 * h + 0.09),
    "multiplied normal": (lambda h: h * (1 + 0.3 * torch.randn_like(h)), lambda h: h, lambda h: 0.09 * h**2),
    "normal of tensors": (lambda h: torch.normal(h, h.abs()), lambda h: h, lambda h: h**2),
    "normal in place": (lambda h: h + torch.empty_like(h).normal_(1, 2), lambda h: h + 1, lambda h: 0 * h + 4),
    "computed scale": (computed_scale, lambda h: h, lambda h: F.softplus(h) ** 2),
    "one draw read twice": (
        lambda h: (lambda e: h * e + h.cos() * e)(torch.randn_like(h)),
        lambda h: 0 * h,
        lambda h: (h + h.cos()) ** 2,
    ),
    "additive uniform": (lambda h: h + torch.rand_like(h), lambda h: h + 0.5, lambda h: 0 * h + 1 / 12),
    "uniform in place": (
        lambda h: h * torch.empty_like(h).uniform_(0.5, 1.5),
        lambda h: h,
        lambda h: h**2 / 12,
    ),
    "torchvision's depth, by entry": (lambda h: h * (torch.rand(h.shape, dtype=h.dtype) < 0.8), lambda h: 0.8 * h,
                                      lambda h: 0.16 * h**2),
}  # fmt: skip
SHARED = {
    "torchvision's stochastic depth": lambda h: torchvision_depth(h, 0.2),
    "timm's drop path": lambda h: timm_path(h, 0.2),
    "transformers' drop path": lambda h: transformers_path(h, 0.2),
    "one for the batch": lambda h: h * (torch.rand((), dtype=h.dtype) < 0.8) / 0.8,
    "a row of one": lambda h: h * (torch.rand(1, 1, dtype=h.dtype) < 0.8) / 0.8,
}


def inputs():
    return torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))


def values(x):
    return (x @ Model(None).weight).tanh()


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_draw_apart(name):
    spell, mean, variance = ENTRIES[name]
    x = inputs()
    belief = favour.compile(Model(spell), x, check=False, method="adjoint")(x)
    h = values(x)
    torch.testing.assert_close(belief.mean, mean(h), rtol=0, atol=1e-12)
    torch.testing.assert_close(belief.covariance_matrix, torch.diag_embed(variance(h)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SHARED)
def test_a_draw_is_shared_by_what_reads_it(name):
    x = inputs()
    belief = favour.compile(Model(SHARED[name]), x, check=False, method="adjoint")(x)
    h = values(x)
    torch.testing.assert_close(belief.mean, h, rtol=0, atol=1e-12)
    torch.testing.assert_close(belief.covariance_matrix, h.unsqueeze(2) * h.unsqueeze(1) / 4, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "spell, mean, variance",
    [(gumbel, EULER, math.pi**2 / 6), (logistic, 0.0, math.pi**2 / 3)],
    ids=["gumbel", "logistic"],
)
def test_functions_of_a_uniform_draw(spell, mean, variance):
    """Their argument is no Gaussian: a function of a normal draw is taken instead, by quadrature."""
    x = inputs()
    belief = favour.compile(Model(spell), x, check=False, method="adjoint")(x)
    torch.testing.assert_close(belief.mean, values(x) + mean, rtol=0, atol=0.02)
    expected = torch.full_like(belief.mean, variance)
    torch.testing.assert_close(belief.variance, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("name", ["bernoulli", "normal", "uniform"])
def test_draws_add_the_total_variance(name):
    """Of a Bernoulli variable with an uncertain probability P: E P(1 − P) + Var P = m(1 − m)."""
    mean, diag = torch.tensor([[0.2, 0.5, 0.9]], dtype=F64), torch.tensor([[0.01, 0.1, 0.0]], dtype=F64)
    surrogate = RULES[getattr(torch.ops.favour, name).default].function(Context(), Value(mean, diag))
    total = diag + sum(noise.diag() for noise in surrogate.noises)
    expected = {"bernoulli": mean * (1 - mean), "normal": diag + 1, "uniform": diag + 1 / 12}[name]
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("name", ["bernoulli", "uniform"])
def test_cumulants_are_those_of_the_draw(name):
    """Sums over the two outcomes, or over a fine grid."""
    p = torch.tensor([[0.2, 0.5, 0.9]], dtype=F64)
    if name == "bernoulli":
        outcomes, weights = torch.stack([1 - p, -p]), torch.stack([p, 1 - p])
    else:
        outcomes = ((torch.arange(10_000, dtype=F64) + 0.5) / 10_000 - 0.5).reshape(-1, 1, 1)
        weights = torch.full_like(outcomes, 1e-4)
    second, third, fourth = ((weights * outcomes**k).sum(0).expand_as(p) for k in (2, 3, 4))
    noise = RULES[getattr(torch.ops.favour, name).default].function(Context(), p).noises[0]
    told = noise.cumulants()
    torch.testing.assert_close(noise.diag(), second, rtol=0, atol=1e-7)
    torch.testing.assert_close(told[0], third, rtol=0, atol=1e-7)
    torch.testing.assert_close(told[1], fourth - 3 * second**2, rtol=0, atol=1e-7)


def test_samples_are_those_of_the_model():
    """The sampler draws from the rewritten graph: Bernoulli, normal and uniform draws and dropout in one model."""

    def spell(h):
        kept = h * (torch.rand_like(h) < 0.7)
        return kept + 0.3 * torch.randn_like(h) + torch.rand_like(h) + torch.bernoulli(h.square())

    x, n = inputs(), 20_000
    draws = favour.sample(Model(spell), x, n, generator=torch.Generator().manual_seed(1))
    h = values(x)
    variance = 0.21 * h**2 + 0.09 + 1 / 12 + h**2 * (1 - h**2)
    z = (draws.mean(0) - (0.7 * h + 0.5 + h**2)) / (variance / n).sqrt()
    assert z.abs().max() < 4.5
    # No fourth moment here exceeds thrice the squared variance by much, so a variance is known to √(3/n) of it.
    torch.testing.assert_close(draws.var(0), variance, rtol=4.5 * (3 / n) ** 0.5, atol=0)


def test_a_draw_that_cannot_matter_is_a_constant():
    x = inputs()
    with pytest.warns(favour.NothingUncertain):
        predict = favour.compile(Model(lambda h: h * (torch.rand_like(h) < 1.0)), x)
    torch.testing.assert_close(predict(x).mean, values(x))


def test_a_draw_can_be_left_out_but_has_no_rate():
    class Inner(nn.Module):
        def forward(self, h):
            return h + torch.randn_like(h)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = Inner(), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.inner(x))

    x = inputs()
    belief = favour.compile(Outer(), x, dropout={"inner": 0}, check=False)(x)
    torch.testing.assert_close(belief.variance, x.square())
    with pytest.raises(favour.FavourError, match="no rate"):
        favour.compile(Outer(), x, dropout={"inner": 0.3})


@pytest.mark.parametrize(
    "spell, message",
    [
        (lambda h: h * torch.floor(3 * torch.rand_like(h)), "several whole values"),
        (lambda h: h.masked_fill(torch.rand_like(h) < 0.1, -torch.inf).softmax(1), "infinity"),
        (lambda h: h[:, torch.randperm(5)], "randperm"),
    ],
    ids=["several values", "infinite scores", "a permutation"],
)
def test_draws_that_are_refused_by_name(spell, message):
    with pytest.raises(favour.FavourError, match=message) as caught:
        favour.compile(Model(spell), inputs())
    assert len(str(caught.value)) < 1500
