"""Belief against scipy, torch.distributions and dense algebra; compile and export round trips."""

import io
import math

import numpy as np
import pytest
import scipy.stats
import torch
from test_covariance import CASES, F64, Largest, directional, full, normal, spiked
from torch import nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.confidence import chi_square_quantile
from favour.belief.covariance import Dense, DiagonalPlusFactor, Directional
from favour.errors import InvalidType, InvalidValue, NoDensity, ShapeMismatch, UnsupportedOperation


def belief_of(cov):
    return Belief(normal(20, cov.batch_size, *cov.event_shape), covariance=cov)


BELIEFS = {name: (belief_of(cov), dense) for name, (cov, dense) in CASES.items()}
every = pytest.mark.parametrize("belief, dense", BELIEFS.values(), ids=BELIEFS.keys())
STRUCTURES = {"factor": spiked(2, (4,)), "dense": full((4,)), "directional": directional(2, (4,))}
structure = pytest.mark.parametrize("cov", [c for c, _ in STRUCTURES.values()], ids=STRUCTURES.keys())


def rows(belief, y, dense):
    """Per batch row: flattened y, mean, covariance as numpy."""
    n = dense.shape[-1]
    for b in range(belief.batch_size):
        yield y[b].reshape(n).numpy(), belief.mean[b].reshape(n).numpy(), dense[b].numpy()


@every
def test_moments(belief, dense):
    variance = dense.diagonal(dim1=-2, dim2=-1).reshape(belief.mean.shape)
    assert_close(belief.variance, variance, atol=1e-11, rtol=1e-11)
    assert_close(belief.stddev, variance.sqrt(), atol=1e-11, rtol=1e-11)
    assert_close(belief.covariance_matrix, dense, atol=1e-11, rtol=1e-11)
    assert belief.event_shape == belief.mean.shape[1:]
    assert (belief.dtype, belief.device.type) == (F64, "cpu")


@every
def test_density_against_scipy(belief, dense):
    y = belief.mean + normal(21, *belief.mean.shape)
    reference = [scipy.stats.multivariate_normal(m, s) for _, m, s in rows(belief, y, dense)]
    points = [point for point, _, _ in rows(belief, y, dense)]
    expected = np.array([r.logpdf(p) for r, p in zip(reference, points, strict=True)])
    assert_close(belief.log_prob(y), torch.tensor(expected, dtype=F64), atol=1e-9, rtol=1e-9)
    expected = np.array([r.entropy() for r in reference])
    assert_close(belief.entropy(), torch.tensor(expected, dtype=F64), atol=1e-9, rtol=1e-9)
    expected = np.array([math.sqrt((p - m) @ np.linalg.solve(s, p - m)) for p, m, s in rows(belief, y, dense)])
    assert_close(belief.mahalanobis(y), torch.tensor(expected, dtype=F64), atol=1e-9, rtol=1e-9)
    v = (y - belief.mean).reshape(belief.batch_size, dense.shape[-1], 1)
    assert_close(belief.solve(y - belief.mean), torch.linalg.solve(dense, v).reshape(y.shape), atol=1e-9, rtol=1e-9)


@every
def test_leading_sample_dimensions(belief, dense):
    del dense
    y = belief.sample((2, 3), generator=torch.Generator().manual_seed(1))
    assert y.shape == (2, 3, *belief.mean.shape)
    log_prob = belief.log_prob(y)
    assert log_prob.shape == (2, 3, belief.batch_size)
    assert_close(log_prob[1, 2], belief.log_prob(y[1, 2]), atol=1e-10, rtol=1e-10)
    assert belief.mahalanobis(y).shape == (2, 3, belief.batch_size)
    assert belief.solve(y).shape == y.shape


@every
def test_to_distribution(belief, dense):
    if belief.batch_size == 0:
        pytest.skip("torch.distributions refuses an empty batch")
    other = belief.to_distribution()
    n = dense.shape[-1]
    assert (other.batch_shape, other.event_shape) == ((belief.batch_size,), (n,))
    y = belief.mean + normal(22, *belief.mean.shape)
    flat = y.reshape(belief.batch_size, n)
    assert_close(other.log_prob(flat), belief.log_prob(y), atol=1e-8, rtol=1e-8)
    assert_close(other.mean, belief.mean.reshape(belief.batch_size, n))
    assert_close(other.variance, belief.variance.reshape(belief.batch_size, n), atol=1e-10, rtol=1e-10)


def test_to_distribution_types():
    kinds = {
        "factor-vector-rank3": "LowRankMultivariateNormal",
        "factor-vector-rank0": "Independent",
        "factor-zeros": "MultivariateNormal",
        "dense-vector": "MultivariateNormal",
        "directional-vector-k3": "MultivariateNormal",
    }
    for name, kind in kinds.items():
        assert type(BELIEFS[name][0].to_distribution()).__name__ == kind


@structure
def test_sample_covariance(cov):
    """Entry ij of the covariance of N draws has variance (Σ_ii Σ_jj + Σ_ij²)/N; the bound is 5 deviations."""
    belief, count = belief_of(cov), 40_000
    dense = belief.covariance_matrix
    draws = belief.sample((count,), generator=torch.Generator().manual_seed(0))
    centred = draws - belief.mean
    empirical = torch.einsum("sbi,sbj->bij", centred, centred) / count
    variance = dense.diagonal(dim1=-2, dim2=-1)
    bound = 5 * ((variance[:, :, None] * variance[:, None, :] + dense.square()) / count).sqrt()
    assert ((empirical - dense).abs() < bound).all()
    assert (centred.mean(0).abs() < 5 * (variance / count).sqrt()).all()


@structure
def test_rsample_gradients(cov):
    belief = Belief(normal(1, 3, 4).requires_grad_(), covariance=cov.mapped(lambda t, _: t.clone().requires_grad_()))
    generator = torch.Generator().manual_seed(0)
    leaves = pytree.tree_leaves(belief)
    grads = torch.autograd.grad(belief.rsample((5,), generator).square().sum(), leaves)
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
    assert not belief.sample((5,)).requires_grad


@structure
def test_intervals(cov):
    belief = belief_of(cov)
    low, high = belief.confidence_interval(0.9)
    std = belief.variance.sqrt().numpy()
    assert_close(low, torch.tensor(scipy.stats.norm.ppf(0.05, belief.mean.numpy(), std)), atol=1e-10, rtol=1e-10)
    assert_close(high, torch.tensor(scipy.stats.norm.ppf(0.95, belief.mean.numpy(), std)), atol=1e-10, rtol=1e-10)
    for level in (0.0, 1.0, math.nan):
        with pytest.raises(InvalidValue, match="level"):
            belief.confidence_interval(level)


@structure
def test_region_holds_its_level(cov):
    belief, count, level = belief_of(cov), 20_000, 0.8
    region = belief.confidence_region(level)
    assert_close(region.radius**2, scipy.stats.chi2.ppf(level, 4), atol=1e-9, rtol=1e-9)
    inside = region.contains(belief.sample((count,), generator=torch.Generator().manual_seed(3)))
    assert inside.shape == (count, 3)
    share = inside.double().mean(0)
    assert ((share - level).abs() < 5 * math.sqrt(level * (1 - level) / count)).all()
    assert region.contains(belief.mean).all()
    assert "level=0.8" in repr(region)


@pytest.mark.parametrize("dof", [1, 2, 3, 10, 100, 3072])
@pytest.mark.parametrize("level", [1e-6, 0.05, 0.5, 0.95, 0.9999999])
def test_chi_square_quantile(dof, level):
    assert_close(chi_square_quantile(level, dof), float(scipy.stats.chi2.ppf(level, dof)), rtol=1e-8, atol=0)


@every
def test_linear_scale_noise(belief, dense):
    n, b = dense.shape[-1], belief.batch_size
    weight, bias = normal(23, 3, n), normal(24, 3)
    image = belief.linear(weight, bias)
    assert_close(image.mean, belief.mean.reshape(b, n) @ weight.T + bias, atol=1e-11, rtol=1e-11)
    assert_close(image.covariance_matrix, weight @ dense @ weight.T, atol=1e-10, rtol=1e-10)
    scaled = belief.scale(-2.0)
    assert_close(scaled.mean, -2 * belief.mean)
    assert_close(scaled.covariance_matrix, 4 * dense, atol=1e-10, rtol=1e-10)
    c = normal(25, b)
    scaled = belief.scale(c)
    assert_close(scaled.mean, torch.stack([c[i] * belief.mean[i] for i in range(b)]) if b else belief.mean)
    assert_close(scaled.covariance_matrix, c.square()[:, None, None] * dense, atol=1e-10, rtol=1e-10)
    noisy = belief.with_noise(0.25)
    assert_close(noisy.covariance_matrix, dense + 0.25 * torch.eye(n, dtype=F64), atol=1e-10, rtol=1e-10)


@structure
def test_rows(cov):
    belief = belief_of(cov)
    for index in (
        1,
        -1,
        slice(0, 2),
        torch.tensor([2, 0]),
        torch.tensor([True, False, True]),
        [2, 1],
        torch.tensor(1),
    ):
        part = belief[index]
        wanted = [index] if isinstance(index, int) else index
        wanted = wanted.reshape(1) if isinstance(wanted, torch.Tensor) and wanted.dim() == 0 else wanted
        assert_close(part.mean, belief.mean[wanted])
        assert_close(part.covariance_matrix, belief.covariance_matrix[wanted], atol=1e-12, rtol=1e-12)
        assert type(part.covariance) is type(cov)
    with pytest.raises(IndexError):
        belief[3]
    assert len(belief) == 3


@structure
def test_to_and_detach(cov):
    belief = Belief(normal(1, 3, 4), covariance=cov.mapped(lambda t, _: t.clone().requires_grad_()))
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(belief.detach()))
    half = belief.with_noise(1.0).to(torch.bfloat16)
    assert {leaf.dtype for leaf in pytree.tree_leaves(half)} == {torch.bfloat16}
    y = half.mean + 1
    assert half.log_prob(y).dtype == half.entropy().dtype == torch.float32
    assert torch.isfinite(half.log_prob(y)).all()
    assert half.sample((2,)).dtype == torch.bfloat16
    assert half.to_distribution().log_prob(y.float()).dtype == torch.float32
    assert belief.cpu().device.type == "cpu"


def test_structure_properties_and_repr():
    belief = belief_of(STRUCTURES["factor"][0])
    assert belief.diag.shape == (3, 4) and belief.factor.shape == (2, 3, 4) and belief.rank == 2
    assert belief.directions is None
    assert repr(belief) == "Belief(batch=3, event=(4,), DiagonalPlusFactor(rank=2), float64)"
    for name in ("dense", "directional"):
        belief = belief_of(STRUCTURES[name][0])
        for attribute in ("diag", "factor"):
            with pytest.raises(UnsupportedOperation, match="as_diagonal_plus_factor"):
                getattr(belief, attribute)
        assert "\n" not in repr(belief)
    assert belief.directions.shape == (2, 3, 4)
    only_factor = Belief(torch.zeros(2, 3), factor=torch.ones(1, 2, 3))
    assert_close(only_factor.variance, torch.ones(2, 3))
    assert_close(only_factor.diag, torch.zeros(2, 3))
    assert Belief(torch.zeros(2, 3), diag=torch.ones(2, 3)).rank == 0
    assert isinstance(Belief(torch.zeros(2, 2, 2), covariance=torch.eye(4).expand(2, 4, 4)).covariance, Dense)


def test_point_has_no_density():
    point = Belief.point(torch.ones(2, 3))
    assert torch.equal(point.variance, torch.zeros(2, 3))
    assert torch.equal(point.sample((4,)), torch.ones(4, 2, 3))
    low, high = point.confidence_interval()
    assert torch.equal(low, high)
    for method in (lambda: point.log_prob(point.mean), point.entropy, point.to_distribution):
        with pytest.raises(NoDensity, match=r"2 of 2 .*rows \[0, 1\]"):
            method()
    assert torch.isfinite(point.with_noise(1.0).entropy()).all()


def test_to_distribution_refuses_a_singular_factor():
    for cov in (
        DiagonalPlusFactor(torch.zeros(1, 3), torch.ones(1, 1, 3)),
        Dense(torch.ones(1, 3, 3)),
        Directional(torch.zeros(1, 3), torch.eye(3)[:1, None], torch.ones(1, 1, 1)),
    ):
        with pytest.raises(NoDensity):
            Belief(torch.zeros(1, 3), covariance=cov).to_distribution()


def test_validation():
    zeros, ones = torch.zeros, torch.ones
    mean = zeros(2, 3)
    bad = mean.clone()
    bad[1, 2] = math.nan
    checks = [
        (InvalidType, "mean", lambda: Belief(mean.long())),
        (InvalidType, "mean", lambda: Belief([1.0])),
        (ShapeMismatch, "mean", lambda: Belief(torch.tensor(1.0))),
        (InvalidValue, r"`mean`.*nan at index \(1, 2\)", lambda: Belief(bad)),
        (InvalidValue, r"`mean`.*inf", lambda: Belief(bad.nan_to_num(nan=math.inf))),
        (ShapeMismatch, r"`diag`.*\(3,\).*\(2, 3\)", lambda: Belief(mean, ones(3))),
        (InvalidValue, r"`diag`.*-1.0 at index \(0, 0\)", lambda: Belief(mean, -ones(2, 3))),
        (InvalidValue, r"`diag`.*nan at index \(1, 2\)", lambda: Belief(mean, bad)),
        (ShapeMismatch, r"`factor`.*\(rank, 2, 3\)", lambda: Belief(mean, factor=ones(2, 3))),
        (InvalidValue, "`factor`", lambda: Belief(mean, factor=bad[None])),
        (InvalidType, "float64", lambda: Belief(mean, ones(2, 3).double())),
        (InvalidType, "not both", lambda: Belief(mean, ones(2, 3), covariance=ones(2, 3, 3))),
        (InvalidType, "list", lambda: Belief(mean, covariance=[1.0])),
        (ShapeMismatch, "`covariance`", lambda: Belief(mean, covariance=ones(2, 2, 2))),
        (ShapeMismatch, "`covariance`", lambda: Belief(mean, covariance=ones(1, 3, 3))),
        (
            InvalidValue,
            "diagonal of covariance",
            lambda: Belief(mean, covariance=-torch.eye(3).expand(2, 3, 3)),
        ),
        (InvalidValue, "`variance`", lambda: Belief(mean).with_noise(-1.0)),
        (ShapeMismatch, "`variance`", lambda: Belief(mean).with_noise(ones(4))),
        (ShapeMismatch, "`c`", lambda: Belief(mean).scale(ones(3))),
        (InvalidValue, "`c`", lambda: Belief(mean).covariance.scale(-1.0)),
        (ShapeMismatch, "`y`", lambda: Belief(mean, ones(2, 3)).log_prob(ones(3))),
        (ShapeMismatch, "`weight`", lambda: Belief(mean).linear(ones(2, 2))),
    ]
    for error, message, make in checks:
        with pytest.raises(error, match=message):
            make()
    Belief(bad, validate=False)


def test_low_rank_density_and_samples_never_form_a_matrix():
    batch, n, rank = 2, 500, 3
    belief = belief_of(spiked(rank, (n,), batch)[0])
    with Largest() as seen:
        (
            belief.log_prob(belief.mean),
            belief.entropy(),
            belief.solve(belief.mean),
            belief.sample(),
            belief.stddev,
        )
        belief.confidence_region(0.9).contains(belief.mean)
    assert 0 < seen.elements <= batch * (n + rank) * (rank + 1)


# ------------------------------------------------------------ compile and export


@structure
def test_compile_takes_and_returns_beliefs(cov):
    belief = belief_of(cov)
    weight = normal(30, 2, 4)

    def through(b, y):
        image = b.scale(2.0).with_noise(0.1)
        return (
            image,
            b.linear(weight),
            b.log_prob(y),
            b.entropy(),
            b.covariance.root_matmul(y[None]),
            b.solve(y),
        )

    y = belief.mean + 1
    eager = through(belief, y)
    compiled = torch.compile(through, fullgraph=True, backend="aot_eager")(belief, y)
    assert isinstance(compiled[0], Belief) and type(compiled[0].covariance) is type(cov)
    for a, b in zip(pytree.tree_leaves(compiled), pytree.tree_leaves(eager), strict=True):
        assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_constructs_and_samples(dynamic):
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def make(x):
        belief = Belief(x, diag=x.square(), factor=x[None])
        return belief, belief.sample((4,)), belief.confidence_interval(0.9), Belief.point(x)

    x = normal(31, 3, 4)
    belief, draws, (low, _), point = make(x)
    assert_close(belief.variance, 2 * x.square())
    assert draws.shape == (4, 3, 4)
    assert_close(low, belief.confidence_interval(0.9)[0])
    assert torch.equal(point.mean, x) and point.rank == 0


class Head(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 3, dtype=F64)

    def forward(self, x):
        mean = self.linear(x)
        if self.kind == "dense":
            return Belief(mean, covariance=torch.diag_embed(mean.square()))
        if self.kind == "directional":
            basis = torch.eye(3, dtype=F64)[:1, None].expand(1, mean.shape[0], 3)
            return Belief(mean, covariance=Directional(mean.square(), basis, mean[:, :1, None].square()))
        return Belief(mean, diag=mean.square(), factor=mean[None])


class Score(nn.Module):
    def forward(self, belief, y):
        return belief.log_prob(y), belief.scale(0.5)


@pytest.mark.parametrize("kind", ["factor", "dense", "directional"])
def test_export_returns_a_belief(kind):
    torch.manual_seed(0)
    head, x = Head(kind), normal(32, 5, 4)
    batch = torch.export.Dim("batch")
    program = torch.export.export(head, (x,), dynamic_shapes=({0: batch},), strict=False)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    for reloaded in (program, torch.export.load(buffer)):
        other = normal(33, 7, 4)
        out = reloaded.module()(other)
        assert isinstance(out, Belief)
        assert_close(out.covariance_matrix, head(other).covariance_matrix)


@structure
def test_export_takes_a_belief(cov):
    belief = belief_of(cov)
    y = belief.mean + 1
    program = torch.export.export(Score(), (belief, y), strict=False)
    log_prob, scaled = program.module()(belief, y)
    assert_close(log_prob, belief.log_prob(y))
    assert_close(scaled.covariance_matrix, 0.25 * belief.covariance_matrix)


def test_unflatten_accepts_placeholders():
    belief = belief_of(STRUCTURES["factor"][0])
    leaves, spec = pytree.tree_flatten(belief)
    assert len(leaves) == 3
    assert isinstance(pytree.tree_unflatten([object()] * 3, spec), Belief)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(belief)[0]]
    assert paths == [".mean", ".covariance.diag", ".covariance.factor"]
