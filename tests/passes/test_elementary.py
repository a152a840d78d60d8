"""Functions that are written in terms of others, of a narrow Gaussian, against draws; and what is refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import favour
from favour.errors import UnsupportedOperation

DRAWS = 20_000
WIDTH = 0.02
halves = lambda x: (x[:, :4], x[:, 4:])  # noqa: E731


def transformed(x: Tensor) -> Tensor:
    z = torch.fft.rfft(x.view(-1, 2, 4), dim=-1)
    return torch.fft.irfft(z * torch.tensor([1.0, 0.5 + 1j, 2.0], dtype=z.dtype), n=4, dim=-1).flatten(1)


def rotated(x: Tensor) -> Tensor:
    z = torch.view_as_complex(x.view(-1, 4, 2))
    turn = torch.polar(torch.ones(4, dtype=x.dtype), torch.arange(4, dtype=x.dtype))
    return torch.view_as_real(z * turn + z).flatten(1)


def spectrum(x: Tensor) -> Tensor:
    z = torch.fft.fft2(x.view(-1, 2, 4))
    return torch.cat([z.real.flatten(1), (z.transpose(1, 2).reshape(-1, 8).imag + 3).abs(), z.abs().flatten(1)], 1)


def both_ways(x: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(x.view(-1, 2, 4)) * 2).flatten(1)


def spreads(x: Tensor) -> Tensor:
    y = x.view(-1, 2, 2, 2)
    v, m = torch.var_mean(x, -1, keepdim=True)
    return torch.cat([y.var((1, 3)), y.var((2, 3), keepdim=True).flatten(1), v, m], 1)


def masked(x: Tensor) -> Tensor:
    a, b = halves(x)
    return torch.where((a > b) & ~(b < -1), a - 1, b).masked_fill(a <= b - 0.525, 0.5) + a * (b > 0)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: torch.maximum(*halves(x)) + torch.fmin(*halves(x)) * 2,
    "where": lambda x: torch.where(halves(x)[0] < halves(x)[1], *halves(x)),
    "masked": masked,
    "amin": lambda x: torch.cat([x.view(-1, 2, 4).amin(2), x.view(-1, 2, 4).min(1)[0]], 1),
    "prod": lambda x: torch.cat([x.view(-1, 2, 4).prod(2), x.view(-1, 4, 2).prod(2, keepdim=True).flatten(1)], 1),
    "powers": lambda x: 2**x + torch.exp2(x) + torch.pow(0.5, x),
    "logarithms": lambda x: torch.log2(x.square() + 1) + torch.log10(x.square() + 2),
    "logaddexp": lambda x: torch.logaddexp(*halves(x)),
    "spreads": spreads,
    "special": lambda x: torch.special.expit(x) + torch.special.ndtr(x) + torch.special.softmax(x, -1),
    "nan_to_num": lambda x: torch.nan_to_num(x * 2),
    "transformed": transformed,
    "rotated": rotated,
    "spectrum": spectrum,
    "both ways": both_ways,
}


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_draws(name: str) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    # Apart from one another and from steps, which a narrow Gaussian then rarely meets.
    mean = torch.stack([0.35 * (torch.randperm(8) - 3.5) for _ in range(2)]).double()
    given = favour.Belief(mean, covariance=torch.full_like(mean, WIDTH**2).diag_embed())
    belief = favour.compile(Function(function), mean, check=False)(given)
    torch.testing.assert_close(belief.mean, function(mean), rtol=0.05, atol=0.05)
    for row in range(len(mean)):
        drawn = function(mean[row] + WIDTH * torch.randn(DRAWS, 8, dtype=torch.float64))
        want = torch.cov(drawn.T)
        gap = (belief.covariance_matrix[row] - want).norm() / want.norm()
        assert gap < 0.1 + 5 * DRAWS**-0.5


class Dropped(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.drop, self.function = nn.Dropout(0.2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.drop(x))


REFUSED = {
    "aten.min.dim": lambda x: x.min(1)[1] * x[:, 0],
    "aten.gt.Scalar": lambda x: x[:, :2] * torch.cumsum(x[:, :2] > 0, 1),
    "aten.view_as_complex": lambda x: torch.view_as_complex(x.view(-1, 4, 2)),
    "aten.prod.dim_int": lambda x: x.repeat(1, 20).prod(1),
    "aten.hypot": lambda x: torch.hypot(*halves(x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_such_form_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedOperation, match=name) as caught:
        favour.compile(Dropped(REFUSED[name]), torch.randn(3, 8), check=False)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norms_do_not_iterate(norm: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), norm(nn.Linear(6, 4))).train()
    x = torch.randn(3, 6)
    model(x)
    model.eval()
    torch.testing.assert_close(favour.compile(model, x, check=False)(x).mean, model(x))
