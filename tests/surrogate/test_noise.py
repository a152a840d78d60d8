"""Every member of `Noise` in every rule's case: what draws do to outputs, and between inputs that share them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from calls import Call, close, covariance, every, probe
from cases import F64, Uncertain, of_kind, rand, randn
from torch import Tensor

from favour.surrogate import DiagonalNoise, ImageNoise, LatentNoise, Noise, RotatedNoise, Surrogate
from favour.surrogate.gram import product_in_parts
from favour.surrogate.matrices import Contraction
from favour.surrogate.value import Value

NOISY = ("dropout", "scalar", "delta", "curved")
# Draws that inputs may share say what they are between inputs. The others are what a nonlinearity of many entries
# leaves over, for which `favour.methods.across` takes the square of the line's correlation.
TELL_BETWEEN = ("dropout", "scalar", "delta")
# Draws of two values are skewed, and say so.
TELL_CUMULANTS = ("aten.dropout.", "favour.dropout.", "aten.feature_dropout.", "aten.feature_alpha_dropout.")


def noises(case) -> list[tuple[Noise, Surrogate]]:
    return [(noise, s) for s in Call(case).surrogates() for noise in s.noises]


def flat(g: Tensor) -> Tensor:
    return g.reshape(*g.shape[:2], -1)


def gram(g: Tensor, N: Tensor) -> Tensor:
    return torch.einsum("fbn,bnm,gbm->bfg", flat(g), N, flat(g))


def rotated() -> tuple[Noise, torch.Size]:
    torch.manual_seed(0)
    return RotatedNoise(rand(3, 2, 4), randn(5, 4)), torch.Size([3, 2, 5])


def image() -> tuple[Noise, torch.Size]:
    torch.manual_seed(0)
    G = Contraction(randn(3, 4, 2), "bk", "bnk", "bn", (3, 2))
    third, fourth = randn(2), rand(2)
    noise = ImageNoise(G, torch.empty(0, 3, 2, dtype=F64), "", drawn_cumulants=lambda: (third, fourth), drawn=True)
    return noise, torch.Size([3, 4])


KINDS = {"rotated": rotated, "image": image}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_one_psd_covariance(name):
    noise, shape = KINDS[name]()
    N = covariance(noise, shape)
    n = N.shape[1]
    close(N, N.mT)
    assert torch.linalg.eigvalsh(N).min() > -1e-12
    close(noise.diag().reshape(3, n), N.diagonal(dim1=1, dim2=2), "diag")
    columns = noise.columns().reshape(-1, 3, n)
    close(torch.einsum("kbn,kbm->bnm", columns, columns), N, "columns")
    g = probe(3, *shape)
    close(noise.gram(g), gram(g, N), "gram")
    pulled = flat(noise.pulled(g))
    close(torch.einsum("fbz,gbz->bfg", pulled, pulled), gram(g, N), "pulled")


@every(*NOISY)
def test_pulled_covectors_are_at_draws_of_variance_one(case):
    for noise, s in noises(case):
        g = probe(3, *s.mean.shape)
        pulled = flat(noise.pulled(g))
        close(torch.einsum("fbz,gbz->bfg", pulled, pulled), noise.gram(g))
        close(noise.gram(g), gram(g, covariance(noise, s.mean.shape)))


def two_values(p: float) -> tuple[float, float, float]:
    """Variance, κ₃ and κ₄ of D − 1, by its two values."""
    values, chances = np.array([-1.0, 1 / (1 - p) - 1]), np.array([p, 1 - p])
    m2, m3, m4 = (float((chances * values**k).sum()) for k in (2, 3, 4))
    return m2, m3, m4 - 3 * m2**2


@every("dropout")
def test_cumulants_of_dropout(case):
    """κ₃ and κ₄ of x(D − 1), for Gaussian x, from its moments: E[(D−1)^k] E[x^k], x and D independent."""
    call = Call(case)
    (s,) = call.surrogates()
    told = [noise for noise in s.noises if noise.cumulants is not None]
    x, p, live = (call.values.get(id(leaf), leaf) for leaf in call.leaves)
    if not case.overload.startswith(TELL_CUMULANTS) or not live or (not torch.is_tensor(p) and p == 0):
        assert all(noise.cumulants is None or not torch.cat(noise.cumulants()).any() for noise in s.noises)
        return
    channels = case.overload.startswith("aten.feature") and s.mean.ndim > 2
    if channels and isinstance(x, Value):
        assert told, "a draw for whole channels is skewed"
        return  # the fourth cumulants of its columns are not told; with a known input they are, below
    if case.overload.startswith("aten.feature") and not channels:
        return  # a channel is one entry, and taken for Gaussian
    (noise,) = told
    third, fourth = noise.cumulants()
    mean = x.mean if isinstance(x, Value) else x.tensor
    variance = x.variance if isinstance(x, Value) else torch.zeros_like(mean)
    rates = torch.as_tensor(p, dtype=F64).expand(mean.shape[1:])
    gain = 1.0
    if "alpha" in case.overload:  # aq(D − 1)(x − α′)
        low = -1.0507009873554805 * 1.6732632423543772
        gain, mean = (1 - p) * ((1 - p) * (1 + p * low**2)) ** -0.5, mean - low
    gain = torch.as_tensor(gain, dtype=F64).expand(mean.shape[1:])
    for b, place in itertools.product(range(len(mean)), np.ndindex(*mean.shape[1:])):
        m, v = float(mean[b][place]), float(variance[b][place])
        m2, m3, k4 = two_values(float(rates[place]))
        moments = m**2 + v, m**3 + 3 * m * v, m**4 + 6 * m**2 * v + 3 * v**2
        factor = float(gain[place])
        close(third[b][place], factor**3 * m3 * moments[1], "third")
        moment = (k4 + 3 * m2**2) * moments[2] - 3 * (m2 * moments[0]) ** 2
        close(fourth[b][place], factor**4 * moment, "fourth")


def latent(noise: Noise, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """B (batch, n, z) with N = BBᵀ, and κ₃ (batch, z) of its draws of variance one."""
    batch, n = shape[0], shape[1:].numel()
    if isinstance(noise, DiagonalNoise):
        root = noise.variance.expand(shape).reshape(batch, n).clamp_min(0).sqrt()
        third = torch.zeros_like(root)
        if noise.cumulants is not None:
            told = noise.cumulants()[0].expand(shape).reshape(batch, n)
            third = torch.where(root > 0, told / torch.where(root > 0, root, 1.0) ** 3, 0.0)
        return root.diag_embed(), third
    assert isinstance(noise, ImageNoise)
    z = torch.Size(noise.latent_shape).numel()
    eye = torch.eye(z, dtype=F64).reshape(z, 1, *noise.latent_shape).expand(z, batch, *noise.latent_shape)
    B = noise.push(eye).reshape(z, batch, n).permute(1, 2, 0)
    third = torch.zeros(noise.latent_shape, dtype=F64)
    if noise.drawn_cumulants is not None:
        third = noise.drawn_cumulants()[0].expand(noise.latent_shape)
    return B, third.reshape(1, z).expand(batch, z)


@every(*NOISY)
def test_secants_are_lines_through_skewed_draws(case):
    """An output that moves by aε + ½c(ε² − 1) along each draw ε has the line a + ½cκ₃, a = Bᵀg and c = (B∘B)ᵀ c_y."""
    for noise, s in noises(case):
        shape = s.mean.shape
        if not noise.skewed:
            g, c = probe(2, *shape), probe(2, *shape)
            if isinstance(noise, DiagonalNoise):
                close(noise.secant_gram(g, c), noise.gram(g), "a Gaussian's line is its tangent")
            continue
        B, third = latent(noise, shape)
        g, c = probe(2, *shape), probe(2, *shape)
        line = torch.einsum("bnz,fbn->fbz", B, flat(g))
        line = line + 0.5 * torch.einsum("bnz,fbn->fbz", B.square(), flat(c)) * third
        expected = torch.einsum("fbz,gbz->bfg", line, line)
        close(noise.secant_gram(g, c), expected, "secant")
        pulled = flat(noise.pulled(g, c))
        close(torch.einsum("fbz,gbz->bfg", pulled, pulled), expected, "pulled")


def of_variances(case) -> Call:
    """As sweeps of second moments between inputs have it: no factor."""
    call = Call(case)
    for value in call.values.values():
        value.replace(value.variance, {})
    return call


def own(c: Tensor, q: int) -> Tensor:
    return c.unflatten(1, (-1, q)).diagonal(dim1=0, dim2=2).movedim(-1, 1).flatten(0, 1)


@every(*NOISY)
def test_between_an_input_and_itself_is_the_noise(case):
    """N_aa = N where C_aa = v, for one input and for groups of three that are alike."""
    call = of_variances(case)
    for s in call.surrogates():
        x = s.maps[0][0] if s.maps else None
        for noise in s.noises:
            if noise.between is None:
                assert case.kind not in TELL_BETWEEN or "alpha" in case.overload, "inputs share this draw"
                continue
            for q in (1, 3):
                c = None if x is None else x.variance.expand(q, *x.shape)
                made = noise.between(c, q).diag().expand(q * len(s.mean), *s.mean.shape[1:])
                close(own(made.unflatten(0, (q, -1)), q), noise.diag(), f"groups of {q}")


@every("dropout")
def test_between_two_inputs_under_one_mask(case):
    """Cov(x_a D, x_b D) less Cov(x_a, x_b), entry by entry: E[(D − 1)²] E[x_a x_b], by enumerating D."""
    call = of_variances(case)
    (s,) = call.surrogates()
    x, p, live = (call.values.get(id(leaf), leaf) for leaf in call.leaves)
    if "alpha" in case.overload or not live:
        return
    mean = x.mean if isinstance(x, Value) else x.tensor
    torch.manual_seed(1)
    c = randn(3, *mean.shape) if isinstance(x, Value) else None
    products = mean.unsqueeze(1) * mean.unsqueeze(0)  # (a, b, *event)
    if c is not None:
        products = products + c
    rates = torch.as_tensor(p, dtype=F64).expand(mean.shape[1:])
    spread = torch.tensor([two_values(float(r))[0] for r in rates.flatten()], dtype=F64).reshape(rates.shape)
    total = torch.zeros_like(products)
    for noise in s.noises:
        total = total + noise.between(c, 3).diag().expand(9, *mean.shape[1:]).reshape(products.shape)
    close(total, products * spread)


@pytest.mark.parametrize(
    ("overload", "second"),
    [("log", lambda x: -(x**-2)), ("sqrt", lambda x: -0.25 * x**-1.5), ("reciprocal", lambda x: 2 * x**-3)],
)
def test_between_two_inputs_behind_a_function_with_a_domain(overload, second):
    """To second order the remainder is ½f″((x − μ)² − v): ½f″(μ_a)f″(μ_b)C_ab²."""
    (case,) = [case for case in of_kind("delta") if case.overload == f"aten.{overload}.default"]
    call = of_variances(case)
    (s,) = call.surrogates()
    ((x, _),) = s.maps
    root = x.variance.sqrt()
    c = 0.7 * root.unsqueeze(1) * root.unsqueeze(0)
    got = s.noises[0].between(c, 3).diag().reshape(c.shape)
    bend = second(x.mean)
    close(got, 0.5 * bend.unsqueeze(1) * bend.unsqueeze(0) * c.square(), "between")


def test_every_kind_of_noise_of_the_cases_is_met():
    """These tests would say nothing of a kind that no case has."""
    kinds = {type(noise).__name__ for case in of_kind(*NOISY) for noise, _ in noises(case)}
    assert kinds >= {"DiagonalNoise", "Residual", "ImageNoise", "LatentNoise"}, kinds
    assert issubclass(ImageNoise, LatentNoise) and Uncertain


@pytest.mark.parametrize("parts", [1, 4, 64])
def test_products_with_long_sums_may_be_taken_in_parts(parts):
    a, b = randn(3, 5, 128), randn(3, 128, 2)
    close(product_in_parts(a, b, parts), a @ b)
