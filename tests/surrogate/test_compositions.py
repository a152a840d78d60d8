"""Kinds of maps against each other: products of entries, and compositions, right or `Unavailable` and never wrong."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from calls import close, dense, probe
from cases import F64, rand, randn
from torch import Tensor

import favour
from favour.rules.windows import Box, Windows
from favour.surrogate import (
    Generic,
    LinearMap,
    Routing,
    Sum,
    Unavailable,
    compose,
    identity,
    scaling,
    structural,
    weighted_sum,
)
from favour.surrogate.convolution import Convolution, Geometry
from favour.surrogate.jacobian import DiagonalPlusLowRank
from favour.surrogate.matrices import Contraction, Matrix, Separable, passing

SHAPE = torch.Size([3, 2, 6])
GEOMETRY = Geometry((1,), (1,), (1,), output_padding=(0,), extra=(0,))
FLIP = structural(lambda d: d.flip(-1), lambda g: g.flip(-1), one_per_row=True, name="flip")
CUMSUM = structural(
    lambda d: d.cumsum(-1), lambda g: g.flip(-1).cumsum(-1).flip(-1), disjoint=False, channelwise=True, name="cumsum"
)


def kinds(seed: int) -> dict[str, LinearMap]:
    """A map of each kind from (3, 2, 6) to itself, with other numbers for every seed."""
    torch.manual_seed(seed)
    windows = Box((Windows.regular(-1, 6, 3, 1, 1, 1, False),), spatial=True)
    return {
        "identity": identity(),
        "number": scaling(1.5 + seed),
        "scaling": scaling(randn(SHAPE)),
        "scaling, alike": scaling(randn(1, 2, 6)),
        "permutation": FLIP.scaled_after(randn(SHAPE)),
        "sums": CUMSUM.scaled_before(randn(SHAPE)),
        "matrix": Matrix(passing(randn(6, 6))),
        "low rank": Matrix(passing(randn(6, 6))).low_rank(2),
        "convolution": Convolution(GEOMETRY, passing(randn(2, 2, 3)), (6,)),
        "contraction": Contraction(randn(3, 6, 6), "bci", "bij", "bcj", SHAPE),
        "separable": Separable([randn(2, 2), randn(6, 6)]),
        "jacobian": DiagonalPlusLowRank(randn(SHAPE), [randn(SHAPE)], [randn(SHAPE)], SHAPE),
        "routing": Routing(windows, [rand(SHAPE) for _ in range(3)]),
        "sum": Sum(scaling(randn(SHAPE)), FLIP.scaled_after(randn(SHAPE))),
        "generic": Generic(lambda d: 2 * d, lambda g: 2 * g),
    }


CLOSED = [name for name in kinds(0) if name != "generic"]
# Kinds that tell their diagonal, so that they meet scalings.
WITH_DIAGONAL = ["identity", "number", "scaling", "scaling, alike", "matrix", "convolution"]


def matrix(G: LinearMap, shape: torch.Size = SHAPE) -> torch.Tensor:
    return dense(G, shape, F64)


@pytest.mark.parametrize("name", CLOSED)
def test_a_kind_closes_under_products(name):
    G, H = kinds(0)[name], kinds(1)[name]
    if name == "low rank":  # for products; squares of entries are those of the whole weight
        G, H = G.low_rank(6), H.low_rank(6)
        G, H = (m.whole if hasattr(m, "whole") else m for m in (G, H))
    product = G.hadamard(H)
    assert isinstance(product, LinearMap), product
    close(matrix(product), matrix(G) * matrix(H))
    g = probe(2, *SHAPE)
    close(product.transpose(g).reshape(2, -1), g.reshape(2, -1) @ (matrix(G) * matrix(H)))
    again = product.hadamard(G)
    assert isinstance(again, LinearMap), again
    close(matrix(again), matrix(G).square() * matrix(H), "three of them", 1e-9)


@pytest.mark.parametrize(("one", "two"), list(itertools.product(kinds(0), kinds(1))))
def test_products_of_two_kinds_are_right_or_unavailable(one, two):
    G, H = kinds(0)[one], kinds(1)[two]
    product = G.hadamard(H)
    scalings = ("identity", "number", "scaling", "scaling, alike")
    if (one in scalings and two in WITH_DIAGONAL) or (two in scalings and one in WITH_DIAGONAL):
        assert isinstance(product, LinearMap), product
    if isinstance(product, Unavailable):
        assert product.reason
    elif "low rank" not in (one, two):
        close(matrix(product), matrix(G) * matrix(H))
    scaled = G.hadamard(H.scaled_after(randn(SHAPE)))
    assert isinstance(scaled, Unavailable) == isinstance(product, Unavailable), "a scaled map is as well known"


def kinds_of_other_shapes() -> dict[str, tuple[LinearMap, torch.Size, torch.Size]]:
    """Maps that reduce and widen the last axis: to and from (3, 2, 1)."""
    torch.manual_seed(2)
    thin = torch.Size([3, 2, 1])
    return {
        "weighted sum": (weighted_sum(randn(SHAPE), 2, True, 6), SHAPE, thin),
        "mean": (weighted_sum(1 / 6, 2, True, 6), SHAPE, thin),
        "expand": (
            structural(lambda d: d.expand(-1, *SHAPE), lambda g: g.sum(-1, True), one_per_row=True, disjoint=False),
            thin,
            SHAPE,
        ),
    }


def everything() -> dict[str, tuple[LinearMap, torch.Size, torch.Size]]:
    return {name: (G, SHAPE, SHAPE) for name, G in kinds(0).items()} | kinds_of_other_shapes()


PAIRS = [
    (outer, inner)
    for (outer, (_, into, _)), (inner, (_, _, out)) in itertools.product(everything().items(), everything().items())
    if into == out and "low rank" not in (outer, inner)
]


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_compositions_close_where_entries_have_one_path(outer, inner):
    A, _, out = everything()[outer]
    B, shape, _ = everything()[inner]
    G = compose(A, B)
    entries = matrix(A, everything()[outer][1]) @ matrix(B, shape)
    close(matrix(G, shape), entries)
    one_path = A.one_per_row or B.one_per_column
    for n in (2, 3):
        powered = G.power(n)
        if one_path and "generic" not in (outer, inner):
            assert isinstance(powered, LinearMap), powered
        if isinstance(powered, LinearMap):
            close(matrix(powered, shape), entries**n, f"power {n}", 1e-9)
    v = rand(shape)
    try:
        got = G.square(v)
    except favour.errors.UnsupportedOperation as error:
        assert not one_path or "generic" in (outer, inner), error
        assert "variances cannot be carried" in str(error)
    else:
        close(got.reshape(-1), entries.square() @ v.reshape(-1))
    c = randn(3, *shape)
    between = G.between(c, 3)
    if isinstance(between, Unavailable):
        assert not one_path or "generic" in (outer, inner), between
        return
    blocks = entries.reshape(3, -1, 3, shape[1:].numel()).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    for a, b in itertools.product(range(3), range(3)):
        close(between[a, b].reshape(-1), (blocks[a] * blocks[b]) @ c[a, b].reshape(-1), f"between {a} and {b}")
    assert between.shape == (3, *out)


def test_a_sum_over_a_matrix_has_many_paths():
    """(Σ_i w_i W_ij)² is not Σ_i w_i² W_ij²: 16.7 for 12.1 where it was taken for that."""
    G = compose(weighted_sum(randn(SHAPE), 2, True, 6), Matrix(passing(randn(6, 6))))
    assert isinstance(G.power(2), Unavailable) and "several paths" in G.power(2).reason
    assert isinstance(G.hadamard(G), Unavailable)
    with pytest.raises(favour.errors.UnsupportedOperation, match="several paths"):
        G.square(rand(SHAPE))


# ------------------------------------------------------------------------------------------ there and back


def _convolution(into: int, out: int, window: int, padding: int, dilation: int = 1, stride: int = 1) -> Convolution:
    geometry = Geometry((stride,) * 2, (padding,) * 2, (dilation,) * 2, output_padding=(0, 0))
    return Convolution(geometry, passing(torch.randn(out, into, window, window, dtype=torch.float64)), (5, 6))


def _matrix_of(G: LinearMap, *shape: int) -> Tensor:
    n = math.prod(shape)
    return G.apply(torch.eye(n, dtype=torch.float64).reshape(n, 1, *shape)).flatten(1).T


@pytest.mark.parametrize(
    "windows", [((3, 1, 1), (3, 1, 1)), ((1, 0, 1), (3, 1, 1)), ((3, 2, 2), (3, 2, 2)), ((5, 2), (3, 1))]
)
def test_the_diagonal_of_two_convolutions_with_factors_around(windows: tuple) -> None:
    """x + b∘conv(s∘conv(a∘x)), the residual unit: the covariance of its two terms needs this diagonal."""
    there, back = _convolution(2, 4, *windows[0]), _convolution(4, 2, *windows[1])
    a, b = torch.rand(1, 2, 1, 1, dtype=torch.float64), torch.rand(1, 2, 5, 6, dtype=torch.float64)
    s = torch.rand(1, 4, 5, 6, dtype=torch.float64)
    G = compose(scaling(b), compose(back, compose(scaling(s), compose(there, scaling(a)))))
    both = identity().hadamard(G)
    assert not isinstance(both, Unavailable)
    torch.testing.assert_close(_matrix_of(both, 2, 5, 6), _matrix_of(G, 2, 5, 6).diagonal().diag())


@pytest.mark.parametrize("stride", [1, 2])
def test_a_window_within_another_has_a_product_with_it(stride: int) -> None:
    """The 1 × 1 convolution beside a residual unit's 3 × 3."""
    wide, small = _convolution(2, 3, 3, 1, stride=stride), _convolution(2, 3, 1, 0, stride=stride)
    expected = _matrix_of(wide, 2, 5, 6) * _matrix_of(small, 2, 5, 6)
    for both in (wide.hadamard(small), small.hadamard(wide)):
        assert not isinstance(both, Unavailable)
        torch.testing.assert_close(_matrix_of(both, 2, 5, 6), expected)
    assert isinstance(wide.hadamard(_convolution(2, 3, 3, 2, 2, stride)), Unavailable)  # other places
