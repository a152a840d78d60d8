"""Every structure against dense algebra, by the same test bodies."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from favour.belief.covariance import Covariance, Dense, DiagonalPlusFactor, Directional
from favour.errors import FavourError, InvalidType, InvalidValue, NoDensity, ShapeMismatch

F64 = torch.float64
EVENTS = {"vector": (5,), "image": (2, 3, 2), "single": (1,), "scalar": ()}


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def spiked(rank, event, batch=3, zeros=0):
    diag = normal(1, batch, *event).exp()
    diag.view(batch, math.prod(event))[:, :zeros] = 0
    factor = normal(2, rank, batch, *event)
    n = math.prod(event)
    dense = torch.stack([torch.diag(diag[b].reshape(n)) for b in range(batch)]) if batch else diag.new_zeros(0, n, n)
    for b in range(batch):
        for k in range(rank):
            dense[b] += torch.outer(factor[k, b].reshape(n), factor[k, b].reshape(n))
    return DiagonalPlusFactor(diag, factor), dense


def full(event, batch=3):
    n = math.prod(event)
    root = normal(3, batch, n, n)
    dense = root @ root.mT + 0.1 * torch.eye(n, dtype=F64)
    return Dense(dense, event), dense


def directional(k, event, batch=3, zeros=0):
    n = math.prod(event)
    diag = normal(4, batch, *event).exp()
    diag.view(batch, math.prod(event))[:, :zeros] = 0
    q = torch.linalg.qr(normal(5, batch, n, k))[0]
    root = normal(6, batch, k, k)
    core = root @ root.mT + 0.1 * torch.eye(k, dtype=F64)
    rest = torch.eye(n, dtype=F64) - q @ q.mT
    dense = q @ core @ q.mT + rest @ torch.diag_embed(diag.view(batch, n)) @ rest
    return Directional(diag, q.permute(2, 0, 1).reshape(k, batch, *event), core), dense


def build():
    cases = {}
    for name, event in EVENTS.items():
        n = math.prod(event)
        for rank in (0, 1, 3, 2 * n + 1):
            cases[f"factor-{name}-rank{rank}"] = spiked(rank, event)
        cases[f"dense-{name}"] = full(event)
        for k in {0, 1, min(3, n), n}:
            cases[f"directional-{name}-k{k}"] = directional(k, event)
    cases["factor-zeros"] = spiked(3, (5,), zeros=2)  # nonsingular all the same
    cases["factor-all-zero"] = spiked(7, (5,), zeros=5)
    mixed = cases["factor-zeros"][0].diag.clone()
    mixed[1] = 1.5
    factor = cases["factor-zeros"][0].factor
    cases["factor-some-rows-zero"] = (
        DiagonalPlusFactor(mixed, factor),
        torch.diag_embed(mixed) + torch.einsum("kbi,kbj->bij", factor, factor),
    )
    cases["directional-zeros"] = directional(3, (5,), zeros=2)
    cases["factor-empty-batch"] = spiked(2, (4,), batch=0)
    cases["dense-empty-batch"] = full((4,), batch=0)
    cases["directional-empty-batch"] = directional(2, (4,), batch=0)
    return cases


CASES = build()
case = pytest.mark.parametrize("cov, dense", CASES.values(), ids=CASES.keys())


def flat(v, cov):
    """(F, B, *event) -> (B, n, F)."""
    n = math.prod(cov.event_shape)
    return v.reshape(v.shape[0], v.shape[1], n).permute(1, 2, 0)


def vectors(cov, folds=4, seed=7):
    return normal(seed, folds, cov.batch_size, *cov.event_shape)


@case
def test_dense_and_diagonal(cov, dense):
    assert_close(cov.dense(), dense, atol=1e-12, rtol=1e-12)
    marginals = dense.diagonal(dim1=-2, dim2=-1).reshape(cov.batch_size, *cov.event_shape)
    assert_close(cov.diagonal(), marginals, atol=1e-12, rtol=1e-12)


@case
def test_matmul(cov, dense):
    v = vectors(cov)
    out = cov.matmul(v)
    assert out.shape == v.shape
    assert_close(flat(out, cov), dense @ flat(v, cov), atol=1e-11, rtol=1e-11)


@case
def test_gram_and_linear(cov, dense):
    g = vectors(cov)
    rows = flat(g, cov).mT
    assert_close(cov.gram(g), rows @ dense @ rows.mT, atol=1e-10, rtol=1e-11)
    weight = normal(8, 3, dense.shape[-1])
    image = cov.linear(weight)
    assert image.event_shape == (3,)
    assert_close(image.dense(), weight @ dense @ weight.mT, atol=1e-10, rtol=1e-11)


@case
def test_solve_logdet_quadratic(cov, dense):
    v = vectors(cov)
    columns = flat(v, cov)
    solution = torch.linalg.solve(dense, columns)
    assert_close(flat(cov.solve(v), cov), solution, atol=1e-9, rtol=1e-9)
    assert_close(cov.logdet(), torch.linalg.slogdet(dense)[1], atol=1e-10, rtol=1e-10)
    quadratic, logdet = cov.density_terms(v)
    assert_close(quadratic, (columns * solution).sum(1).mT, atol=1e-9, rtol=1e-9)
    assert_close(logdet, cov.logdet())


@case
def test_roots(cov, dense):
    n = dense.shape[-1]
    eye = torch.eye(n, dtype=F64).reshape(n, 1, *cov.event_shape).expand(n, cov.batch_size, *cov.event_shape)
    root = flat(cov.root_matmul(eye), cov)  # columns S e_i
    assert_close(root @ root.mT, dense, atol=1e-10, rtol=1e-10)
    symmetric = flat(cov.sqrt_matmul(eye), cov)
    assert_close(symmetric, symmetric.mT, atol=1e-10, rtol=1e-10)
    assert_close(symmetric @ symmetric, dense, atol=1e-10, rtol=1e-10)
    assert (torch.linalg.eigvalsh(symmetric) >= -1e-10).all()
    assert_close(cov.as_diagonal_plus_factor().dense(), dense, atol=1e-10, rtol=1e-10)


@case
def test_noise_map_has_the_covariance(cov, dense):
    m = cov.noise_size  # the map from noise is linear: its matrix A must satisfy AAᵀ = Σ
    a = flat(cov.from_noise(torch.eye(m, dtype=F64).unsqueeze(1).expand(m, cov.batch_size, m)), cov)
    assert_close(a @ a.mT, dense, atol=1e-10, rtol=1e-10)


@case
def test_draw_shapes_and_seed(cov, dense):
    del dense
    one, two = (cov.draw((2, 3), generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert one.shape == (2, 3, cov.batch_size, *cov.event_shape)
    assert torch.equal(one, two)
    assert cov.draw().shape == (cov.batch_size, *cov.event_shape)


@case
def test_scale_and_add_diagonal(cov, dense):
    rows = normal(9, cov.batch_size).exp()
    assert_close(cov.scale(2.5).dense(), 2.5 * dense, atol=1e-11, rtol=1e-11)
    assert_close(cov.scale(rows).dense(), rows[:, None, None] * dense, atol=1e-11, rtol=1e-11)
    assert_close(cov.scale(0).dense(), 0 * dense)
    n = dense.shape[-1]
    assert_close(cov.add_diagonal(0.5).dense(), dense + 0.5 * torch.eye(n, dtype=F64), atol=1e-11, rtol=1e-11)
    assert type(cov.add_diagonal(0.5)) is type(cov)
    noise = normal(10, cov.batch_size, *cov.event_shape).exp()
    expected = dense + torch.diag_embed(noise.reshape(cov.batch_size, n))
    assert_close(cov.add_diagonal(noise).dense(), expected, atol=1e-11, rtol=1e-11)
    per_row = rows.reshape(-1, *[1] * len(cov.event_shape))
    expected = dense + rows[:, None, None] * torch.eye(n, dtype=F64)
    assert_close(cov.add_diagonal(per_row).dense(), expected, atol=1e-11, rtol=1e-11)


@case
def test_rows_dtype_detach_pytree(cov, dense):
    rows = torch.arange(cov.batch_size).flip(0)
    assert_close(cov[rows].dense(), dense[rows], atol=1e-11, rtol=1e-11)
    assert_close(cov[:1].dense(), dense[:1], atol=1e-11, rtol=1e-11)
    assert cov.to(torch.float32).dense().dtype == torch.float32
    leaves, spec = pytree.tree_flatten(cov)
    assert not pytree.tree_unflatten(leaves, spec).detach().dense().requires_grad
    assert_close(pytree.tree_unflatten(leaves, spec).dense(), cov.dense())
    assert isinstance(pytree.tree_unflatten([None] * len(leaves), spec), Covariance)  # placeholders pass
    assert set(cov.tensors()) == set(cov._axes)


@case
def test_gradients_exist(cov, dense):
    """Solves, log-determinants and draws are differentiable, also with zero variances."""
    del dense
    live = cov.mapped(lambda t, _: t.clone().requires_grad_())
    quadratic, logdet = live.density_terms(vectors(cov))
    value = quadratic.sum() + logdet.sum() + live.root_matmul(vectors(cov)).sum()
    value = value + live.draw((2,), torch.Generator().manual_seed(0)).sum()
    for grad in torch.autograd.grad(value, list(live.tensors().values()), allow_unused=True):
        assert grad is None or torch.isfinite(grad).all()


def test_gradcheck():
    for cov in (CASES["factor-vector-rank3"][0], CASES["factor-vector-rank11"][0], CASES["factor-zeros"][0]):

        def value(diag, factor):
            new = DiagonalPlusFactor(diag, factor)
            v = vectors(new, 2)
            return (*new.density_terms(v), new.solve(v), new.root_matmul(v))

        inputs = (
            cov.diag.clone().requires_grad_(bool(cov.diag.min() > 0)),
            cov.factor.clone().requires_grad_(),
        )
        assert torch.autograd.gradcheck(value, inputs)


def test_root_gradient_with_a_zero_factor():
    """Two zero columns: the eigenvalues of ZᵀZ coincide and an eigenvalue root would give NaN."""
    diag = torch.full((1, 4), 2.0, dtype=F64, requires_grad=True)
    factor = torch.zeros(2, 1, 4, dtype=F64, requires_grad=True)
    cov = DiagonalPlusFactor(diag, factor)
    grads = torch.autograd.grad(cov.root_matmul(vectors(cov)).sum(), (diag, factor))
    assert all(torch.isfinite(g).all() for g in grads)
    assert grads[0].abs().sum() > 0


SINGULAR = {
    "factor-rank0": DiagonalPlusFactor(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.zeros(0, 2, 2)),
    "factor-too-few": DiagonalPlusFactor(torch.zeros(2, 3), torch.ones(2, 2, 3)),
    "factor-parallel": DiagonalPlusFactor(torch.zeros(2, 2), torch.ones(3, 2, 2)),
    "dense-rank1": Dense(torch.ones(2, 3, 3)),
    "dense-zero": Dense(torch.zeros(1, 3, 3)),
    "dense-low-rank": Dense((lambda u: u @ u.mT)(normal(0, 2, 6, 3).float())),
    "directional-core": Directional(torch.ones(1, 3), torch.eye(3)[:1, None], torch.zeros(1, 1, 1)),
    "directional-diag": Directional(torch.zeros(1, 3), torch.eye(3)[:1, None], torch.ones(1, 1, 1)),
}


@pytest.mark.parametrize("cov", SINGULAR.values(), ids=SINGULAR.keys())
def test_singular_refuses_what_needs_an_inverse_only(cov):
    v = torch.ones(1, cov.batch_size, *cov.event_shape)
    for method in (lambda: cov.solve(v), cov.logdet, lambda: cov.density_terms(v)):
        with pytest.raises(NoDensity, match="with_noise"):
            method()
    assert torch.isfinite(cov.draw((5,))).all()
    assert torch.isfinite(cov.root_matmul(v)).all()
    n = cov.dense().shape[-1]
    eye = torch.eye(n).reshape(n, 1, n).expand(n, cov.batch_size, n)
    root = flat(cov.root_matmul(eye), cov)
    assert_close(root @ root.mT, cov.dense(), atol=2e-5, rtol=1e-5)
    assert torch.isfinite(cov.add_diagonal(0.1).logdet()).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("n", [2, 5, 20, 60])
def test_rounded_singular_matrices_are_recognised(n, dtype):
    """Rank n − 1 of n, formed in floating point: rounding must not pass for a density."""
    u = normal(0, 60, n, n - 1).to(dtype)
    scale = torch.logspace(-6, 6, n, dtype=dtype)  # the criterion has no scale
    u = u * scale[:, None]
    with pytest.raises(NoDensity, match="60 of 60"):
        Dense(u @ u.mT).logdet()
    full_rank = normal(0, 60, n, n + 2).to(dtype) * scale[:, None]
    assert torch.isfinite(Dense(full_rank @ full_rank.mT).logdet()).all()


def test_singular_names_the_rows():
    diag = torch.ones(8, 3)
    diag[2:, 1] = 0
    with pytest.raises(NoDensity, match=r"6 of 8 .*rows \[2, 3, 4, 5, 6\], …"):
        DiagonalPlusFactor(diag, torch.zeros(0, 8, 3)).logdet()
    # one singular row among those that fall back to a dense solve
    diag, factor = torch.ones(4, 2), torch.ones(1, 4, 2)
    diag[1, 0], diag[3] = 0, torch.tensor([0.0, 1.0])
    factor[0, 3, 0] = 0
    with pytest.raises(NoDensity, match=r"1 of 4 .*rows \[3\]"):
        DiagonalPlusFactor(diag, factor).logdet()


class Largest(TorchDispatchMode):
    """Records the largest result, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("kind", [spiked, directional])
def test_structures_stay_small(kind):
    batch, n, rank = 2, 400, 3
    cov, _ = kind(rank, (n,), batch)
    v = vectors(cov, 1)
    with Largest() as seen:
        (
            cov.solve(v),
            cov.logdet(),
            cov.density_terms(v),
            cov.draw(),
            cov.root_matmul(v),
            cov.matmul(v),
            cov.gram(v),
        )
        cov.diagonal(), cov.scale(2.0), cov.add_diagonal(1.0)
    assert 0 < seen.elements <= batch * (n + rank) * (rank + 1)
    with Largest() as seen:
        cov.dense()
    assert seen.elements >= batch * n * n  # the recorder does see n × n


def test_rank_deficiency_is_refused_before_a_matrix_exists():
    cov, _ = spiked(3, (400,), 2, zeros=4)
    with Largest() as seen, pytest.raises(NoDensity):
        cov.logdet()
    assert seen.elements <= 2 * 400 * 4


@pytest.mark.parametrize("small", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_float32_extreme_variances(small):
    """Overall scale 1e-30 to 1e30, diagonal 1e-6 times the factor: float32 keeps 4 digits."""
    cov64, _ = spiked(3, (6,))
    cov64 = DiagonalPlusFactor(cov64.diag * 1e-6, cov64.factor).scale(small)
    cov = cov64.to(torch.float32)
    exact = cov.to(F64).dense() / small  # of the rounded inputs
    assert_close(cov.logdet().double(), torch.linalg.slogdet(exact)[1] + 6 * math.log(small), atol=1e-3, rtol=1e-5)
    v = vectors(cov).float() * math.sqrt(small)
    quadratic, _ = cov.density_terms(v)
    columns = flat(v.double() / math.sqrt(small), cov)
    expected = (columns * torch.linalg.solve(exact, columns)).sum(1).mT
    assert_close(quadratic.double(), expected, rtol=1e-4, atol=0)


def test_quadratic_is_never_negative():
    cov = DiagonalPlusFactor(torch.full((1, 3), 1e-20), torch.ones(1, 1, 3))
    quadratic, _ = cov.density_terms(torch.ones(1, 1, 3))
    assert_close(quadratic, torch.ones(1, 1))  # 1ᵀ(1e-20 I + 11ᵀ)⁻¹1 = 3/(3 + 1e-20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["factor-vector-rank3", "dense-vector", "directional-vector-k3"])
def test_half_precision_solves_in_wider_type(dtype, name):
    cov = CASES[name][0].add_diagonal(1.0).to(dtype)
    v = vectors(cov).to(dtype)
    quadratic, logdet = cov.density_terms(v)
    assert quadratic.dtype == logdet.dtype == torch.float32
    wide = cov.to(F64)
    if isinstance(wide, Directional):
        assert cov.solve(v).dtype == dtype  # a rounded basis is not orthonormal: no dense twin to compare with
        return
    columns = flat(v.double(), cov)
    solution = torch.linalg.solve(wide.dense(), columns)
    assert_close(logdet.double(), torch.linalg.slogdet(wide.dense())[1], rtol=1e-5, atol=1e-5)
    assert_close(quadratic.double(), (columns * solution).sum(1).mT, rtol=1e-5, atol=1e-5)
    assert_close(flat(cov.solve(v), cov), solution.to(dtype))


def test_dense_root_of_an_indefinite_matrix_clips():
    matrix = torch.diag_embed(torch.tensor([[1.0, 1.0, 1.0]]))
    matrix[0, 0, 1] = matrix[0, 1, 0] = 1.01  # correlation above 1: not rounding
    eye = torch.eye(3).unsqueeze(1)
    root = flat(Dense(matrix).root_matmul(eye), Dense(matrix))
    values, vectors_ = torch.linalg.eigh(matrix[0])
    assert_close((root @ root.mT)[0], vectors_ @ torch.diag(values.clamp(min=0)) @ vectors_.T)


def test_constructor_errors():
    ones = torch.ones
    for error, make in {
        (ShapeMismatch, lambda: DiagonalPlusFactor(ones(2, 3), ones(2, 3))),
        (ShapeMismatch, lambda: DiagonalPlusFactor(ones(2, 3), ones(1, 3, 2))),
        (ShapeMismatch, lambda: DiagonalPlusFactor(torch.tensor(1.0), ones(1))),
        (InvalidType, lambda: DiagonalPlusFactor(ones(2, 3), ones(1, 2, 3).double())),
        (InvalidType, lambda: DiagonalPlusFactor(ones(2, 3).int(), ones(1, 2, 3))),
        (ShapeMismatch, lambda: Dense(ones(2, 3, 4))),
        (ShapeMismatch, lambda: Dense(ones(2, 4, 4), (3,))),
        (ShapeMismatch, lambda: Directional(ones(2, 3), ones(1, 2, 3), ones(2, 2, 2))),
        (ShapeMismatch, lambda: Directional(ones(2, 1), ones(2, 2, 1), ones(2, 2, 2))),
        (ShapeMismatch, lambda: Dense(ones(2, 3, 3)).solve(ones(2, 3))),
    }:
        with pytest.raises(error) as caught:
            make()
        assert isinstance(caught.value, FavourError)


def test_value_errors():
    with pytest.raises(InvalidValue, match=r"`diag` .* -1.0 at index \(0, 1\)"):
        DiagonalPlusFactor(torch.tensor([[1.0, -1.0]]), torch.ones(1, 1, 2)).check_values()
    with pytest.raises(InvalidValue, match=r"`factor` .* nan at index \(0, 0, 0\)"):
        DiagonalPlusFactor(torch.ones(1, 1), torch.full((1, 1, 1), math.nan)).check_values()
    with pytest.raises(InvalidValue, match="not symmetric at batch index 1"):
        matrix = torch.eye(2).repeat(2, 1, 1)
        matrix[1, 0, 1] = 0.5
        Dense(matrix).check_values()
    with pytest.raises(InvalidValue, match="not orthonormal"):
        Directional(torch.ones(1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 1)).check_values()
    for cov, _ in CASES.values():
        cov.check_values()


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(0, 3),
    event=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    rank=st.integers(0, 6),
    exponent=st.integers(-8, 8),
)
def test_any_shape_agrees_with_dense(batch, event, rank, exponent):
    cov, dense = spiked(rank, event, batch)
    cov, dense = cov.scale(10.0**exponent), dense * 10.0**exponent
    v = vectors(cov, 2)
    solution = torch.linalg.solve(dense, flat(v, cov))
    scale = 10.0**-exponent
    assert_close(flat(cov.solve(v), cov), solution, rtol=1e-8, atol=1e-9 * scale)
    assert_close(cov.logdet(), torch.linalg.slogdet(dense)[1], rtol=1e-9, atol=1e-9)
    assert_close(Dense(dense, event).logdet(), cov.logdet(), rtol=1e-9, atol=1e-9)
    assert cov.draw((2,)).shape == (2, batch, *event)
