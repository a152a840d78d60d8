"""Gaussians over parameters against dense covariances written out in loops, and draws against those."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from favour.errors import CorruptFile, InvalidType, InvalidValue, ShapeMismatch, UnknownName
from favour.posterior import Diagonal, Full, Kronecker, Posterior, Rows

F64 = torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def psd(n, rank=None, seed=0):
    root = normal(n, n if rank is None else rank, seed=seed)
    return root @ root.T


def gaussian_and_dense(kind, m=2, n=3):
    """A Gaussian of shape (m, n) and its covariance, entry by entry from the definition."""
    variance, factor = normal(m, n).square(), normal(2, m, n, seed=1)
    # inputs are singular, as a Kronecker factor from few examples is
    inputs, outputs, matrix = psd(n, rank=n - 1), psd(m, seed=2), psd(m * n, rank=m * n - 1, seed=3)
    made, entry = {
        "diagonal": (Diagonal(variance), lambda i, j, k, o: variance[i, j] * (i == k) * (j == o)),
        "rows": (
            Rows(variance, factor),
            lambda i, j, k, o: (i == k) * ((j == o) * variance[i, j] + factor[:, i, j] @ factor[:, i, o]),
        ),
        "kronecker": (Kronecker(inputs, outputs), lambda i, j, k, o: outputs[i, k] * inputs[j, o]),
        "full": (Full(matrix, (m, n)), lambda i, j, k, o: matrix[i * n + j, k * n + o]),
    }[kind]
    index = [(i, j) for i in range(m) for j in range(n)]
    dense = torch.tensor([[float(entry(*a, *b)) for b in index] for a in index], dtype=F64)
    return made, dense


KINDS = ["diagonal", "rows", "kronecker", "full"]


def assert_covariance(draws, dense):
    """E[(Ŝ − S)²] = (S_aa S_bb + S_ab²)/n for zero-mean Gaussian draws; six standard deviations of that."""
    n = len(draws)
    flat = draws.reshape(n, -1)
    estimate = flat.T @ flat / n
    d = dense.diagonal()
    bound = 6 * ((d[:, None] * d + dense.square()) / n).sqrt() + 1e-12
    assert bool(((estimate - dense).abs() <= bound).all())
    assert bool((flat.mean(0).abs() <= 6 * (d / n).sqrt() + 1e-12).all())


@pytest.mark.parametrize("kind", KINDS)
def test_gaussian_covariance_and_variance(kind):
    gaussian, dense = gaussian_and_dense(kind)
    gaussian.validate("w")
    assert gaussian.shape == (2, 3)
    torch.testing.assert_close(gaussian.covariance(), dense, atol=1e-12, rtol=0)
    torch.testing.assert_close(gaussian.variance(), dense.diagonal().reshape(2, 3), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gaussian_sample_covariance(kind):
    gaussian, dense = gaussian_and_dense(kind)
    draws = gaussian.sample(40_000, torch.Generator().manual_seed(0))
    assert draws.shape == (40_000, 2, 3) and draws.dtype == F64
    assert_covariance(draws, dense)


@pytest.mark.parametrize("kind", KINDS)
def test_gaussian_to_and_half_precision(kind):
    gaussian, dense = gaussian_and_dense(kind)
    half = gaussian.to(dtype=torch.bfloat16)
    half.validate("w")
    assert half.shape == gaussian.shape and half.sample(2).dtype == torch.bfloat16
    torch.testing.assert_close(half.covariance().to(F64), dense, atol=0.05 * float(dense.max()), rtol=0)
    with pytest.raises(AttributeError):
        half.shape = (1,)  # type: ignore[misc]


def test_rows_of_a_kernel_flatten_the_other_axes():
    diag, factor = normal(2, 3, 2).square(), normal(1, 2, 3, 2, seed=1)
    rows, flat = Rows(diag, factor), Rows(diag.reshape(2, 6), factor.reshape(1, 2, 6))
    torch.testing.assert_close(rows.covariance(), flat.covariance())
    assert_covariance(rows.sample(20_000, torch.Generator().manual_seed(1)), flat.covariance())


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_gaussian_degenerate_shapes(m, n, rank, draws):
    zeros = torch.zeros(m, n, dtype=F64)
    for gaussian in (
        Diagonal(zeros),
        Rows(zeros, normal(rank, m, n) * 0),
        Kronecker(torch.zeros(n, n, dtype=F64), torch.eye(m, dtype=F64)),
        Full(torch.zeros(m * n, m * n, dtype=F64), (m, n)),
    ):
        gaussian.validate("w")
        sample = gaussian.sample(draws)
        assert sample.shape == (draws, m, n) and not sample.any()
        assert gaussian.covariance().shape == (m * n, m * n)


def test_generator_reproduces_draws():
    for kind in KINDS:
        gaussian, _ = gaussian_and_dense(kind)
        a, b, c = (gaussian.sample(3, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
        assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize(
    ("gaussian", "error", "message"),
    [
        (Diagonal(torch.tensor([0.1, -0.2])), InvalidValue, "negative"),
        (Diagonal(torch.tensor([0.1, float("nan")])), InvalidValue, "NaN"),
        (Diagonal(torch.tensor([1, 2])), InvalidType, "int64"),
        (Rows(torch.ones(2, 3), torch.ones(2, 3)), ShapeMismatch, r"\(rank, m, n\)"),
        (Rows(torch.ones(3), torch.ones(1, 3)), ShapeMismatch, r"\(3,\)"),
        (Rows(torch.ones(2, 3), torch.full((1, 2, 3), float("inf"))), InvalidValue, "factor"),
        (Kronecker(torch.ones(2, 3), torch.eye(2)), ShapeMismatch, "inputs"),
        (Kronecker(torch.eye(3), -torch.eye(2)), InvalidValue, "outputs.*indefinite"),
        (Full(torch.eye(5), (2, 3)), ShapeMismatch, r"\(6, 6\)"),
        (Full(torch.tensor([[1.0, 0.5], [0.0, 1.0]]), (2,)), InvalidValue, "not symmetric"),
        (Full(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), (2,)), InvalidValue, "least eigenvalue is -1"),
    ],
)
def test_gaussian_validate_errors(gaussian, error, message):
    with pytest.raises(error, match=message) as caught:
        gaussian.validate("fc.weight")
    assert "fc.weight" in str(caught.value)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)).double()


def parameters(module=None):
    return dict((module or model()).named_parameters())


def mixed_posterior():
    """A joint key, a diagonal one, latents across both layers, and a replaced mean."""
    return Posterior(
        {("0.weight", "0.bias"): Full(psd(8), (2, 4)), "2.weight": normal(2, 2).square()},
        latents={"0.bias": normal(2, 2, seed=4), "2.weight": normal(2, 2, 2, seed=5)},
        means={"2.bias": torch.ones(2, dtype=F64)},
    )


def test_posterior_sample_joint_and_latent_covariance():
    posterior, values = mixed_posterior(), parameters()
    posterior.validate(values)
    draws = posterior.sample(values, 40_000, torch.Generator().manual_seed(0))
    assert set(draws) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    torch.testing.assert_close(draws["2.bias"], torch.ones(40_000, 2, dtype=F64))

    # reference over the 8 entries of [W | b] row-major, then the 4 of the second weight
    joint = torch.zeros(12, 12, dtype=F64)
    joint[:8, :8] = psd(8)
    joint[8:, 8:] = torch.diag(normal(2, 2).square().flatten())
    spread = torch.zeros(2, 12, dtype=F64)
    spread[:, [3, 7]] = normal(2, 2, seed=4)
    spread[:, 8:] = normal(2, 2, 2, seed=5).reshape(2, 4)
    joint += spread.T @ spread

    deviation = {name: (draws[name] - values[name]).detach() for name in ("0.weight", "0.bias", "2.weight")}
    augmented = torch.cat([deviation["0.weight"], deviation["0.bias"][..., None]], -1).flatten(1)
    assert_covariance(torch.cat([augmented, deviation["2.weight"].flatten(1)], 1), joint)

    variances = posterior.variances(values)
    torch.testing.assert_close(variances["0.weight"].flatten(), joint.diagonal()[[0, 1, 2, 4, 5, 6]])
    torch.testing.assert_close(variances["0.bias"], joint.diagonal()[[3, 7]])
    torch.testing.assert_close(variances["2.weight"].flatten(), joint.diagonal()[8:])


def test_posterior_sample_is_reproducible_and_in_the_parameters_dtype():
    posterior = mixed_posterior()
    single = {name: value.float() for name, value in parameters().items()}
    a, b = (posterior.sample(single, 3, torch.Generator().manual_seed(7)) for _ in range(2))
    for name, draw in a.items():
        assert torch.equal(draw, b[name]) and draw.dtype == torch.float32


def test_posterior_joint_with_a_kernel():
    conv = nn.Conv2d(2, 3, 2).double()
    posterior = Posterior({("weight", "bias"): Kronecker(psd(9), psd(3))})
    posterior.validate(parameters(conv))
    draws = posterior.sample(parameters(conv), 4)
    assert draws["weight"].shape == (4, 3, 2, 2, 2) and draws["bias"].shape == (4, 3)
    variances = posterior.variances(parameters(conv))
    torch.testing.assert_close(variances["bias"], psd(3).diagonal() * psd(9)[8, 8])
    torch.testing.assert_close(variances["weight"][1, 1, 0, 1], psd(3)[1, 1] * psd(9)[5, 5])


def test_posterior_names_keys_and_repr():
    posterior = mixed_posterior()
    assert posterior.names == ("0.weight", "0.bias", "2.weight")
    assert posterior.key("0.bias") == ("0.weight", "0.bias") and posterior.key("2.bias") is None
    assert posterior.gaussian("0.bias") is posterior.gaussian(("0.weight", "0.bias"))
    assert isinstance(posterior.gaussian("2.weight"), Diagonal) and posterior.gaussian("nothing") is None
    assert posterior.latent_rank == 2 and not posterior.is_empty
    assert repr(posterior) == (
        "Posterior([0.weight | 0.bias]: Full(2×4), 2.weight: Diagonal(2×2), "
        "2 latents over 0.bias, 2.weight, means of 2.bias)"
    )


def test_posterior_wrap():
    assert Posterior.wrap(None).is_empty and Posterior.wrap({}).is_empty
    posterior = Posterior.wrap({"0.weight": torch.ones(2, 3)})
    assert isinstance(posterior.gaussian("0.weight"), Diagonal) and Posterior.wrap(posterior) is posterior
    with pytest.raises(InvalidType, match="list"):
        Posterior.wrap([1])


def test_posterior_unknown_names_in_one_message():
    posterior = Posterior({"0.wieght": torch.ones(2, 3), "zzz": torch.ones(1)}, means={"2.bia": torch.ones(2)})
    with pytest.raises(UnknownName) as caught:
        posterior.validate(parameters())
    message = str(caught.value)
    assert "`0.wieght` (did you mean `0.weight`" in message and "`2.bias`" in message and "`zzz`" in message


def test_posterior_shape_errors_in_one_message():
    posterior = Posterior(
        {"0.weight": torch.ones(3, 2), ("2.weight", "2.bias"): Diagonal(torch.ones(2, 2))},
        latents={"0.bias": torch.ones(4, 3)},
    )
    with pytest.raises(ShapeMismatch) as caught:
        posterior.validate(parameters())
    message = str(caught.value)
    for part in (
        "0.weight",
        "(3, 2)",
        "(2, 3)",
        "[2.weight | 2.bias]",
        "(2, 2)",
        "0.bias",
        "(4, 3)",
        "(4, 2)",
    ):
        assert part in message
    with pytest.raises(ShapeMismatch, match="bias"):
        Posterior({("0.bias", "0.weight"): torch.ones(2, 2)}).validate(parameters())


def test_posterior_value_errors():
    for posterior in (
        Posterior({"0.bias": torch.tensor([1.0, -1.0])}),
        Posterior({"0.bias": torch.tensor([1.0, float("nan")])}),
        Posterior({}, latents={"0.bias": torch.full((1, 2), float("nan"))}),
        Posterior({}, means={"0.bias": torch.full((2,), float("inf"))}),
    ):
        with pytest.raises(InvalidValue, match=r"0\.bias"):
            posterior.validate(parameters())


def test_posterior_construction_errors():
    with pytest.raises(InvalidValue, match="covered twice"):
        Posterior({"w": torch.ones(2, 3), ("w", "b"): Diagonal(torch.ones(2, 4))})
    with pytest.raises(ShapeMismatch, match="one set of K"):
        Posterior({}, latents={"w": torch.ones(2, 3), "b": torch.ones(1, 3)})
    with pytest.raises(ShapeMismatch, match="w"):
        Posterior({"w": Full(torch.eye(2), (3,))})
    with pytest.raises(InvalidType, match="float"):
        Posterior({"w": 0.1})
    with pytest.raises(InvalidType, match="pair"):
        Posterior({("a", "b", "c"): torch.ones(1)})
    with pytest.raises(InvalidType, match="mean of `w`"):
        Posterior({}, means={"w": torch.ones(2, dtype=torch.int64)})


def test_posterior_refuses_a_tied_parameter_under_two_names():
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    values = dict(tied.named_parameters(remove_duplicate=False))
    Posterior({"1.weight": torch.ones(2, 2)}).validate(values)
    with pytest.raises(InvalidValue, match="same tensor"):
        Posterior({"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}).validate(values)


def test_posterior_merge_keeps_latents_independent():
    a = Posterior({"0.weight": torch.ones(2, 3)}, latents={"0.bias": torch.ones(1, 2)})
    b = Posterior({"2.weight": torch.ones(2, 2)}, latents={"2.bias": torch.ones(2, 2)})
    merged = a.merge(b)
    assert set(merged.names) == {"0.weight", "0.bias", "2.weight", "2.bias"} and merged.latent_rank == 3
    overlap = torch.einsum("ki,kj->ij", merged.latents["0.bias"], merged.latents["2.bias"])
    assert not overlap.any()
    merged.validate({name: value.float() for name, value in parameters().items()})
    with pytest.raises(InvalidValue, match=r"`0\.bias`, `0\.weight`"):
        a.merge(a)


def test_posterior_to():
    half = mixed_posterior().to(dtype=torch.float32)
    tensors, _ = half.state()
    assert {t.dtype for t in tensors.values()} == {torch.float32}


def test_posterior_state_round_trip():
    extra = {"a": Rows(torch.ones(2, 3), torch.ones(1, 2, 3)), "b": Kronecker(torch.eye(3), torch.eye(2))}
    posterior = mixed_posterior().merge(Posterior(extra))
    tensors, description = posterior.state()
    again = Posterior.from_state(tensors, json.loads(json.dumps(description)))
    assert repr(again) == repr(posterior) and list(again.gaussians) == list(posterior.gaussians)
    for key, gaussian in posterior.gaussians.items():
        assert type(again.gaussians[key]) is type(gaussian)
        assert torch.equal(again.gaussians[key].covariance(), gaussian.covariance())
    for name, factor in posterior.latents.items():
        assert torch.equal(again.latents[name], factor)
    assert torch.equal(again.means["2.bias"], posterior.means["2.bias"])
    with pytest.raises(CorruptFile, match="format"):
        Posterior.from_state(tensors, {})
    del tensors["latents.0"]
    with pytest.raises(CorruptFile, match=r"latents\.0"):
        Posterior.from_state(tensors, description)


class Own(nn.Linear):
    def favour_posterior(self):
        return {("weight", "bias"): Diagonal(torch.ones(self.out_features, self.in_features + 1))}


def test_posterior_from_module_collects_a_shared_module_once():
    shared = Own(2, 2)
    outer = nn.Sequential(shared, nn.Sequential(shared, Own(2, 3)))
    posterior = Posterior.from_module(outer)
    assert list(posterior.gaussians) == [("0.weight", "0.bias"), ("1.1.weight", "1.1.bias")]
    posterior.validate(parameters(outer))
    assert list(Posterior.from_module(shared).gaussians) == [("weight", "bias")]
    assert Posterior.from_module(nn.ReLU()).is_empty
