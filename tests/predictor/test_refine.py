"""`predict.refine` against exact enumeration of masks, and its standard errors against what they claim."""

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import favour
from favour.belief.refined import refined
from favour.errors import InvalidType, InvalidValue, UnsupportedOperation
from favour.methods.control import control_of

P = 0.25  # a multiple of 2⁻¹⁶, so that masks are drawn at this very rate


def tiny(p: float = P, channels: bool = False) -> nn.Module:
    torch.manual_seed(1)
    first = [nn.Dropout1d(p)] if channels else [nn.Dropout(p)]
    shape = [nn.Unflatten(1, (3, 2)), *first, nn.Flatten()] if channels else first
    wide = 6 if channels else 3
    head = nn.Linear(wide, 3)
    head.weight.data *= 4  # so that the belief is off
    model = nn.Sequential(nn.Linear(2, wide), nn.Tanh(), *shape, head, nn.Tanh(), nn.Dropout(p), nn.Linear(3, 2))
    return model.double().eval().requires_grad_(False)


def compiled(model: nn.Module, x: object, **settings: object) -> favour.Predictor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", favour.FavourWarning)
        return favour.compile(model, x, check=False, **settings)


def enumerated(predict: favour.Predictor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every mask of a network with three units in two dropouts: probabilities, masks and outputs."""
    bits = torch.tensor(list(itertools.product((0.0, 1.0), repeat=6)), dtype=x.dtype)
    weights = ((1 - P) ** bits.sum(1)) * P ** (6 - bits.sum(1))
    return weights, (bits / (1 - P)).unflatten(1, (2, 3)), x


def moments(predict: favour.Predictor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The exact mean and covariance of `tiny`, by enumeration."""
    model = predict.program.origin.model
    weights, masks, x = enumerated(predict, x)
    drops = [i for i, m in enumerate(model) if isinstance(m, nn.Dropout | nn.Dropout1d)]
    y = []
    for first, second in masks:
        h = x
        for i, module in enumerate(model):
            if i == drops[0]:
                h = h * (first if h.ndim == 2 else first[:, None])
            elif i == drops[1]:
                h = h * second
            else:
                h = module(h)
        y.append(h)
    outputs = torch.stack(y)
    mean = torch.einsum("n,nbi->bi", weights, outputs)
    d = outputs - mean
    return mean, torch.einsum("n,nbi,nbj->bij", weights, d, d)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("settings", [{}, {"secant": True}, {"method": "linearised"}, {"method": "dplr"}], ids=str)
def test_the_linear_part_has_mean_zero_and_the_covariance_it_claims(channels, settings):
    model, x = tiny(channels=channels), torch.randn(3, 2, dtype=torch.float64)
    predict = compiled(model, x, **settings)
    bound, method = predict.program.bind([x])
    control, _ = control_of(method, bound, 0)
    assert control.missing == ()
    weights, masks, _ = enumerated(predict, x)
    shape = (len(masks), 3, 3, 1) if channels else (len(masks), 3, 3)
    first, second = (n for n in predict.graph.nodes if n.draw is not None)
    drawn = {first.name: masks[:, :1].expand(-1, 3, -1).reshape(shape), second.name: masks[:, 1:].expand(-1, 3, -1)}
    line = control.at(drawn)
    torch.testing.assert_close(torch.einsum("n,nbi->bi", weights, line), torch.zeros(3, 2, dtype=x.dtype))
    torch.testing.assert_close(torch.einsum("n,nbi,nbj->bij", weights, line, line), control.covariance)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("n", [2, 7])
def test_refined_means_and_covariances_have_no_bias(channels, n):
    """The mean over 20,000 corrections by a few draws each is within five standard errors of the truth."""
    model, x = tiny(channels=channels), torch.tensor([[0.7, -0.4]], dtype=torch.float64)
    predict = compiled(model, x)
    mean, covariance = moments(predict, x)
    found = predict.refine(x.expand(20_000, 2), n, generator=torch.Generator().manual_seed(n))
    for estimates, truth in ((found.mean, mean), (found.covariance_matrix, covariance)):
        error = estimates.std(0) / len(estimates) ** 0.5
        assert ((estimates.mean(0) - truth[0]).abs() < 5 * error).all()
    assert (found.mean.mean(0) - found.analytic.mean[0]).abs().max() > 1e-3  # the belief itself is off


def test_standard_errors_cover_what_they_claim():
    """95% intervals hold the truth in 95% of 4,000 cases, within four standard errors of that share."""
    x = torch.tensor([[0.7, -0.4]], dtype=torch.float64)
    predict = compiled(tiny(), x)
    mean, covariance = moments(predict, x)
    found = predict.refine(x.expand(4000, 2), 400, generator=torch.Generator().manual_seed(3))
    tolerance = 4 * math.sqrt(0.95 * 0.05 / 4000)
    for estimate, error, truth in (
        (found.mean, found.mean_error, mean),
        (found.covariance_matrix, found.covariance_error, covariance),
    ):
        covered = ((estimate - truth).abs() < 1.96 * error).double().mean(0)
        assert ((covered - 0.95).abs() < tolerance).all(), covered
    assert found.share < 0.4


def test_the_share_left_is_what_the_errors_show():
    """Errors of the mean, refined over plain, as the share says."""
    x = torch.tensor([[0.7, -0.4]], dtype=torch.float64)
    predict = compiled(tiny(), x)
    mean, _ = moments(predict, x)
    rows, n, generator = x.expand(3000, 2), 50, torch.Generator().manual_seed(0)
    found = predict.refine(rows, n, generator=generator)
    plain = predict.sample(rows, n=n, generator=generator).mean(0)
    ratio = (found.mean - mean).square().sum() / (plain - mean).square().sum()
    assert ratio.item() == pytest.approx(found.share, rel=0.15)
    assert found.worth == pytest.approx(n / found.share)


def test_a_gaussian_posterior_is_followed_in_weight_space():
    """ℓ is linear in the weights' draws, and its covariance is J Σ_w Jᵀ: tied weights are one source."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.rand(3))

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x))) * self.scale

    torch.manual_seed(0)
    model, x = Tied().double().eval(), torch.randn(2, 3, dtype=torch.float64)
    variances = {name: torch.rand_like(p) * 0.1 for name, p in model.named_parameters()}
    predict = compiled(model, x, posterior=variances)
    bound, method = predict.program.bind([x])
    with torch.no_grad():
        control, _ = control_of(method, bound, 0)
    assert control.missing == ()
    nodes = {n.name: (variances[n.target], getattr_path(model, n.target)) for n in predict.graph.nodes
             if n.kind == "parameter"}  # fmt: skip
    total = torch.zeros_like(control.covariance)
    for name, (variance, mean) in nodes.items():
        steps = torch.eye(mean.numel(), dtype=mean.dtype).unflatten(1, mean.shape) * variance.sqrt()
        drawn = {other: m.detach().expand(len(steps), *m.shape) for other, (_, m) in nodes.items()}
        drawn[name] = (drawn[name] + steps).detach()
        line = control.at(drawn)
        total += torch.einsum("nbi,nbj->bij", line, line)
    torch.testing.assert_close(total, control.covariance)
    found = predict.refine(x, 4000, generator=torch.Generator().manual_seed(0))
    reference = predict.sample(x, n=40_000, generator=torch.Generator().manual_seed(1))
    assert found.share < 0.75
    # Inputs share their weights, so that one bound serves for all.
    z = (found.mean - reference.mean(0)) / torch.hypot(found.mean_error, reference.std(0) / 200)
    assert z.abs().max() < 4.5


def getattr_path(model: nn.Module, path: str) -> Tensor:
    return dict(model.named_parameters())[path]


def test_inputs_that_are_beliefs_are_drawn_with_their_covariance():
    torch.manual_seed(0)
    model, x = tiny(), torch.randn(3, 2, dtype=torch.float64)
    belief = favour.Belief(x, diag=0.05 * torch.ones_like(x), factor=0.4 * torch.randn(1, 3, 2, dtype=x.dtype))
    predict = compiled(model, x)
    found = predict.refine(belief, 20_000, generator=torch.Generator().manual_seed(0))
    draws = predict.sample(belief.sample((4000,)).flatten(0, 1), n=1)[0].unflatten(0, (-1, 3))
    z = (found.mean - draws.mean(0)) / torch.hypot(found.mean_error, draws.std(0) / 4000**0.5)
    assert found.missing == () and found.share < 0.5 and z.abs().max() < 4.5
    shares = found.variance / draws.var(0)
    assert ((shares - 1).abs() < 0.15).all()


def test_draws_that_cannot_be_followed_are_named_and_sampled():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.Dropout(0.3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 2)
    ).eval()
    x = torch.randn(2, 1, 8)
    predict = compiled(model, x)
    found = predict.refine(x, 2000, generator=torch.Generator().manual_seed(0))
    assert found.missing == ("1",) and "Not followed, so sampled plainly: 1." in str(found)
    reference = predict.sample(x, n=20_000, generator=torch.Generator().manual_seed(1))
    z = (found.mean - reference.mean(0)) / torch.hypot(found.mean_error, reference.std(0) / 20_000**0.5)
    assert z.abs().max() < 4.5 and 0.1 < found.share < 0.9


@pytest.mark.parametrize(
    "method", ["adjoint", "dplr", "diag", "full", "linearised", "sampling", favour.methods.Adjoint(pairs=4)], ids=str
)
@pytest.mark.parametrize("combine", [False, True])
def test_every_method_is_corrected(method, combine):
    torch.manual_seed(0)
    model, x = tiny(), torch.randn(40, 2, dtype=torch.float64)
    predict = compiled(model, x, method=method)
    mean, covariance = moments(predict, x)
    found = predict.refine(x, 300, generator=torch.Generator().manual_seed(5), combine=combine)
    spread = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((found.mean - mean) / spread).square().mean().sqrt() < 0.045  # √(1/300) is .058
    gap = (found.covariance_matrix - covariance).norm(dim=(1, 2)) / covariance.norm(dim=(1, 2))
    assert gap.square().mean().sqrt() < 0.08
    assert torch.linalg.eigvalsh(found.belief().covariance_matrix).min() > -1e-12


@pytest.mark.parametrize("n", [2, 10, 100, 1000])
@pytest.mark.parametrize("off", [0.0, 0.02, 0.3], ids="off by {}".format)
def test_combined_is_never_worse_than_plain_samples_and_corrected_ones(n, off):
    """With a belief that is right, a bit off and far off."""
    generator = torch.Generator().manual_seed(n)
    rows = 400
    noise = torch.randn(n, rows, 3, generator=generator, dtype=torch.float64)
    line = noise + 0.5 * torch.randn(n, rows, 3, generator=generator, dtype=torch.float64)
    variance = 1.25 * torch.eye(3, dtype=torch.float64).expand(rows, 3, 3)
    belief = favour.Belief(torch.full((rows, 3), off, dtype=torch.float64), covariance=(1 + off) * variance / 1.25)
    combined, fair = (refined(noise, line, variance, belief, combine) for combine in (True, False))

    def errors(mean: Tensor, covariance: Tensor) -> Tensor:
        return torch.stack([mean.square().mean(), (covariance - torch.eye(3)).square().mean()])

    plain = errors(noise.mean(0), torch.einsum("nbi,nbj->bij", *2 * [noise - noise.mean(0)]) / (n - 1))
    found = errors(combined.mean, combined.covariance_matrix)
    assert (found < 1.1 * plain).all()
    assert (found < 1.1 * errors(fair.mean, fair.covariance_matrix)).all()
    if not off and n > 2:
        assert (found < 0.2 * plain).all()


def test_a_linear_part_of_no_use_is_left_out_by_combine():
    generator = torch.Generator().manual_seed(0)
    f, line = (torch.randn(100, 50, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    known = torch.eye(2, dtype=torch.float64).expand(50, 2, 2)
    belief = favour.Belief(torch.ones(50, 2, dtype=torch.float64), covariance=known)
    assert refined(f, line, known, belief, False).share == pytest.approx(2, rel=0.1)
    assert refined(f, line, known, belief, True).share == pytest.approx(1, rel=0.05)


def test_a_seed_makes_it_reproducible_and_slices_change_nothing_of_the_rest():
    model, x = tiny(), torch.randn(5, 2, dtype=torch.float64)
    predict = compiled(model, x)
    once, again = (predict.refine(x, 20, generator=torch.Generator().manual_seed(2)) for _ in range(2))
    torch.testing.assert_close(once.mean, again.mean, rtol=0, atol=0)
    small = compiled(model, x, memory=2**12).refine(x, 400, generator=torch.Generator().manual_seed(2))
    assert small.mean.shape == (5, 2) and small.covariance_matrix.shape == (5, 2, 2)
    torch.testing.assert_close(small.analytic.mean, once.analytic.mean)
    z = (small.mean - predict.refine(x, 4000).mean) / small.mean_error
    assert z.abs().max() < 5


def test_what_makes_no_sense_is_refused():
    model, x = tiny(), torch.randn(2, 2, dtype=torch.float64)
    predict = compiled(model, x)
    with pytest.raises(InvalidValue, match="at least two draws"):
        predict.refine(x, 1)
    with pytest.raises(InvalidValue, match="at least one sample"):
        predict.refine(x, 0)
    with pytest.raises(InvalidType, match="whole number"):
        predict.refine(x, 2.5)
    wide = compiled(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 600)), x.float())
    with pytest.raises(UnsupportedOperation, match="600 here and at most 512"):
        wide.refine(x.float(), 10)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x), x.sum(-1)

    two = compiled(Two(), x)
    with pytest.raises(InvalidValue, match="the model has 2 outputs"):
        two.refine(x, 10)
    with pytest.raises(InvalidValue, match="`output` is 2"):
        two.refine(x, 10, output=2)
    assert two.refine(x, 10, output=0).mean.shape == (2, 2)
    certain = two.refine(x, 10, output=1)
    torch.testing.assert_close(certain.mean, x.sum(-1))
    assert not certain.variance.any() and certain.worth == math.inf


def test_nothing_uncertain_and_no_inputs(tmp_path):
    x = torch.randn(3, 2)
    silent = compiled(nn.Linear(2, 2), x).refine(x, 5, combine=True)
    assert not silent.variance.any() and silent.share == 0
    predict = compiled(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)), x)
    with pytest.raises(InvalidValue, match="empty batch"):
        predict.refine(x[:0], 5)
    predict.save(tmp_path / "p.favour")
    loaded = favour.load(tmp_path / "p.favour")
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    torch.testing.assert_close(
        loaded.refine(x, 9, generator=seeds[0]).mean, predict.refine(x, 9, generator=seeds[1]).mean
    )


def test_a_noise_that_is_not_as_its_rule_says_is_found_out(monkeypatch):
    """Known moments that the draws do not have would bias the answer: then everything is sampled plainly."""
    x = torch.tensor([[0.7, -0.4]], dtype=torch.float64)
    predict = compiled(tiny(), x)
    _, covariance = moments(predict, x)

    def wrong(*args, **kwargs):
        control, values = control_of(*args, **kwargs)
        control.covariance = 2 * control.covariance
        return control, values

    monkeypatch.setattr("favour.program.refine.control_of", wrong)
    found = predict.refine(x, 20_000, generator=torch.Generator().manual_seed(0))
    assert found.missing == ("everything, since a noise is not as its rule says",)
    assert found.share == 1
    assert ((found.covariance_matrix - covariance).abs() < 4.5 * found.covariance_error).all()
