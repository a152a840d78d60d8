"""The sampler: reproducible, right on average, one draw of a parameter for a whole batch."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import favour
from favour.graph.sizes import size_of
from favour.methods.sampling import MaskSource

float64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 2)).double()


def assert_moments(draws: Tensor, mean: Tensor, covariance: Tensor, z: float = 5.0) -> None:
    """Mean and covariance of n draws (n, batch, k) within z standard errors, as the draws estimate them."""
    n = draws.shape[0]
    deviation = draws - mean
    assert ((draws.mean(0) - mean).abs() <= z * draws.std(0) / n**0.5 + 1e-12).all()
    products = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)  # (n, batch, k, k)
    error = products.std(0) / n**0.5
    assert ((products.mean(0) - covariance).abs() <= z * error + 1e-12).all()


# ------------------------------------------------------------------- randomness


def test_sample_is_deterministic_given_a_generator() -> None:
    model, x = mlp(), torch.randn(4, 3, dtype=float64)
    one, two = (favour.sample(model, x, 7, generator=generator(1)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, favour.sample(model, x, 7, generator=generator(2)))
    shared = generator(1)
    first, second = (favour.sample(model, x, 7, generator=shared) for _ in range(2))
    assert torch.equal(first, one) and not torch.equal(second, one)


def test_sample_with_a_generator_leaves_everything_else_alone() -> None:
    model = nn.Sequential(favour.nn.BayesLinear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[2].eval()
    before = [m.training for m in model.modules()]
    versions = {k: (t._version, t.clone()) for k, t in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    favour.sample(model, torch.randn(4, 3, generator=generator()), 5, generator=generator())
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == before
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor._version == versions[name][0] and torch.equal(tensor, versions[name][1])


def test_sample_without_a_generator_follows_the_global_seed() -> None:
    model, x = mlp(), torch.randn(4, 3, dtype=float64)
    favour.sample(model, x, 1)  # captured
    torch.manual_seed(3)
    one = favour.sample(model, x, 5)
    two = favour.sample(model, x, 5)
    torch.manual_seed(3)
    assert torch.equal(favour.sample(model, x, 5), one)
    assert not torch.equal(one, two)


def test_sample_has_no_gradients() -> None:
    x = torch.randn(4, 3, dtype=float64, requires_grad=True)
    assert not favour.sample(mlp(), x, 3).requires_grad


# ---------------------------------------------------------------------- moments


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5, 0.97])
def test_sample_dropout_moments(p: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(p), nn.Linear(4, 2)).double()
    x = torch.randn(3, 3, dtype=float64)
    with torch.no_grad():
        h, W = model[0](x), model[2].weight
        covariance = torch.einsum("ij,bj,kj->bik", W, h.square() * p / (1 - p), W)
        assert_moments(favour.sample(model, x, 100_000, generator=generator()), model[2](h), covariance)


def test_sample_dropout_per_neuron_moments() -> None:
    p = torch.tensor([0.0, 0.3, 0.9, 0.0005], dtype=float64)
    model = nn.Sequential(favour.nn.Dropout(p), nn.Linear(4, 2).double())
    x = torch.randn(3, 4, dtype=float64)
    with torch.no_grad():
        W = model[1].weight
        covariance = torch.einsum("ij,bj,kj->bik", W, x.square() * p / (1 - p), W)
        draws = favour.sample(model, x, 200_000, generator=generator())
        assert_moments(draws, model[1](x), covariance)
        plain = nn.Sequential(nn.Dropout(0.5), model[1])
        draws = favour.sample(plain, x, 200_000, generator=generator(), dropout={"0": p})
        assert_moments(draws, model[1](x), covariance)


def test_sample_learned_rates() -> None:
    layer = favour.nn.Dropout(torch.tensor([0.2, 0.6]), learnable=True)
    x = torch.ones(1, 2)
    draws = favour.sample(layer, x, 100_000, generator=generator()).double()
    p = torch.tensor([0.2, 0.6], dtype=float64)
    assert_moments(draws, torch.ones(1, 2, dtype=float64), torch.diag(p / (1 - p)).unsqueeze(0))


@pytest.mark.parametrize("p", [1e-7, 3e-5, 0.1, 1 / 3, 0.5, 1 - 1e-4, 1 - 1e-9])
def test_mask_is_unbiased(p: float) -> None:
    """The scale is that of the rounded rate: its mean is 1 whatever the rate, even where p rounds to 1."""
    n = 400_000
    for rate in (p, torch.full((4,), p, dtype=float64)):
        mask = MaskSource(generator(), torch.device("cpu")).scaled_mask((n // 4, 4), rate, float64)
        kept = mask[mask > 0]
        assert len(torch.unique(kept)) <= 1
        if len(kept):
            q = 1 / kept[0].item()
            assert abs(q - (1 - p)) <= 1.0001e-4 * min(p, 1 - p) + 2**-32
        expected = n * (1 - p)
        assert abs(len(kept) - expected) <= 5 * (n * p * (1 - p)) ** 0.5 + 1


def test_mask_entries_are_independent() -> None:
    mask = MaskSource(generator(), torch.device("cpu")).scaled_mask((100_000, 6), 0.5, float64)
    correlation = torch.corrcoef(mask.T) - torch.eye(6, dtype=float64)
    assert correlation.abs().max() < 5 / 100_000**0.5
    later = (mask[1:] - 1) * (mask[:-1] - 1)
    assert later.mean().abs() < 5 / later.numel() ** 0.5


def test_sample_masks_differ_between_inputs() -> None:
    draws = favour.sample(nn.Dropout(0.5), torch.ones(2, 64), 50, generator=generator())
    assert not torch.equal(draws[:, 0], draws[:, 1])


def test_sample_bayesian_weights_moments() -> None:
    model = nn.Sequential(favour.nn.BayesLinear(3, 2, initial_std=0.3)).double()
    x = torch.randn(4, 3, dtype=float64)
    draws = favour.sample(model, x, 100_000, generator=generator())
    with torch.no_grad():
        variance = 0.09 * (x.square().sum(1, keepdim=True) + 1).expand(4, 2)
        assert_moments(draws, F.linear(x, model[0].weight, model[0].bias), torch.diag_embed(variance))


def test_sample_draws_a_parameter_once_for_the_batch() -> None:
    """Rows share the draw, so that the outputs of equal inputs are equal, and Cov(y_a, y_b) = σ²(x_a·x_b)."""
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.tensor([[1.0, 2, 0], [1, 2, 0], [2, -1, 0], [0, 0, 1]], dtype=float64)
    draws = favour.sample(model, x, 100_000, {"weight": torch.full((1, 3), 0.25, dtype=float64)}, generator())[..., 0]
    assert torch.equal(draws[:, 0], draws[:, 1])
    with torch.no_grad():
        assert_moments(draws.unsqueeze(1), model(x).T, 0.25 * (x @ x.T).unsqueeze(0))


def test_sample_shared_module_is_one_draw() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(1, 1, bias=False)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) - self.b(x)

    for name in ("a.weight", "b.weight"):
        draws = favour.sample(Twice(), torch.ones(2, 1), 100, {name: torch.ones(1, 1)}, generator())
        assert draws.abs().max() == 0


def test_sample_correlated_posteriors() -> None:
    """Joint Gaussian over [W | b], and latents shared between layers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    root = torch.randn(6, 6, dtype=float64) / 3
    joint = favour.Posterior({("0.weight", "0.bias"): favour.Full(root @ root.T, (2, 3))})
    x = torch.randn(1, 2, dtype=float64)
    with torch.no_grad():
        padded = torch.cat([x[0], torch.ones(1, dtype=float64)])
        J = model[1].weight @ torch.kron(torch.eye(2, dtype=float64), padded.unsqueeze(0))
        draws = favour.sample(model, x, 100_000, joint, generator())
        assert_moments(draws, model(x), (J @ root @ root.T @ J.T).unsqueeze(0))
        latents = favour.Posterior(
            {}, latents={"0.bias": torch.ones(1, 2).double(), "1.bias": -torch.ones(1, 1).double()}
        )
        draws = favour.sample(model, x, 100_000, latents, generator())
        total = model[1].weight.sum() - 1
        assert_moments(draws, model(x), total.square().reshape(1, 1, 1))


def test_sample_replaced_means() -> None:
    model = nn.Linear(2, 1).double()
    posterior = favour.Posterior({}, means={"weight": torch.ones(1, 2, dtype=float64)})
    draws = favour.sample(model, torch.ones(1, 2, dtype=float64), 3, posterior)
    torch.testing.assert_close(draws, (2 + model.bias).detach().expand(3, 1, 1))


def test_sample_view_after_drawn_weights() -> None:
    """Vectorising over draws must not break operations that depend on the memory layout."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).view(x.shape[0], 2, 4).transpose(1, 2)
            return y.reshape(y.shape[0], -1).view(-1, 4, 2).flatten(1)

    model, x = Viewing(), torch.randn(5, 3)
    variance = torch.full((8, 3), 1e-12)
    draws = favour.sample(model, x, 4, {"layer.weight": variance}, generator())
    torch.testing.assert_close(draws, model(x).detach().expand(4, 5, 8), atol=1e-4, rtol=0)


# ---------------------------------------------------------------- shapes and limits


def test_sample_chunks() -> None:
    model, x = mlp(), torch.randn(4, 3, dtype=float64)
    whole = favour.sample(model, x, 9, generator=generator())
    pieces = favour.sample(model, x, 9, generator=generator(), memory=1)
    assert whole.shape == pieces.shape == (9, 4, 2)
    assert not torch.equal(pieces[0], pieces[1])
    several = favour.sample(model, x, 20_000, generator=generator(), memory=100_000)
    with torch.no_grad():
        h, W = torch.tanh(model[0](x)), model[3].weight
        covariance = torch.einsum("ij,bj,kj->bik", W, h.square() * 3 / 7, W)
        assert_moments(several, model[3](h), covariance)


def test_sample_memory_counts_the_weights() -> None:
    """A draw of a large matrix is a copy of it: the budget must cover that too."""
    model, x = nn.Linear(100, 100), torch.randn(1, 100)
    seen: list[int] = []
    posterior = favour.Posterior({"weight": torch.ones(100, 100)})
    original = favour.Posterior.sample

    def watched(self, parameters, n, generator=None):
        seen.append(n)
        return original(self, parameters, n, generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(favour.Posterior, "sample", watched)
        favour.sample(model, x, 10, posterior, memory=4 * 10_000 * 3)
    assert max(seen) <= 3 and sum(seen) == 10


def test_sample_one_draw_one_row() -> None:
    assert favour.sample(mlp(), torch.randn(1, 3, dtype=float64), 1).shape == (1, 1, 2)


def test_sample_empty_batch() -> None:
    assert favour.sample(mlp(), torch.randn(0, 3, dtype=float64), 3).shape == (3, 0, 2)


def test_sample_without_noise_repeats_the_output() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    draws = favour.sample(model, x, 3)
    assert torch.equal(draws, model(x).detach().expand(3, 4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample_dtype(dtype: torch.dtype) -> None:
    assert favour.sample(mlp().to(dtype), torch.randn(4, 3, dtype=dtype), 3).dtype == dtype


def test_sample_on_symbolic_sizes() -> None:
    """Dropout on a tensor whose sizes are computed from the batch."""

    class Folding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(x.reshape(-1, 2), 0.5, self.training)
            return y.reshape(x.shape[0], -1)

    draws = favour.sample(Folding(), torch.ones(3, 6), 4000, generator=generator())
    assert draws.shape == (4000, 3, 6)
    assert abs(draws.mean() - 1) < 5 / (4000 * 18) ** 0.5


def test_symbolic_sizes_are_read_as_arithmetic() -> None:
    sizes = {"s0": 7, "s1": 3}
    for text, value in {
        "s0": 7,
        "2*s0 - 1": 13,
        "(s0 + s1)//2": 5,
        "Max(1, s1 - s0)": 1,
        "-s1**2": -9,
        "Mod(s0, 4)": 3,
    }.items():
        assert size_of(text, sizes) == value
    assert size_of(5, {}) == 5
    for text in ("s2", "s0.bit_length()", "__import__('os')", "s0 if s1 else 2", "print(1)"):
        with pytest.raises(favour.errors.UnsupportedOperation):
            size_of(text, sizes)


def test_sample_follows_the_weights() -> None:
    model, x = mlp(), torch.randn(4, 3, dtype=float64)
    favour.sample(model, x, 1)
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.fill_(4)
    assert torch.equal(favour.sample(model, x, 2), torch.full((2, 4, 2), 4.0, dtype=float64))
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()}, assign=True)
    assert favour.sample(model, x, 2).abs().max() == 0


def test_sample_notices_a_changed_model() -> None:
    """The capture is kept between calls, but not past a change of structure or of plain attributes."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = 2.0, nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    model, x = Scaled(), torch.ones(2, 3)
    assert (favour.sample(model, x, 1) == 2).all()
    model.scale = 3.0
    assert (favour.sample(model, x, 1) == 3).all()
    model.layer = nn.Linear(3, 3, bias=False)
    nn.init.constant_(model.layer.weight, 1.0)
    assert (favour.sample(model, x, 1) == 9).all()
    model.layer.bias = nn.Parameter(torch.ones(3))
    assert (favour.sample(model, x, 1) == 12).all()


def test_sample_does_not_keep_the_model_alive() -> None:
    model = mlp()
    favour.sample(model, torch.randn(2, 3, dtype=float64), 1)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_predictor_samples_the_same_network() -> None:
    model, x = mlp(), torch.randn(4, 3, dtype=float64)
    predict = favour.compile(model, x, dropout={"2": 0.1})
    draws = predict.sample(x, n=50_000, generator=generator())
    belief = predict(x).detach()
    assert_moments(draws, belief.mean, belief.covariance_matrix)
    with pytest.raises(favour.errors.InvalidType, match="plain tensors"):
        predict.sample(favour.Belief.point(x), n=2)
