"""`favour.fit`: what is learned, what is left alone, and what is refused."""

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import favour
from favour.learn.learner import LEARN, Learner
from favour.learn.rows import rows_of

F64 = torch.float64


def rows(n: int = 200, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, n, dtype=dtype)[:, None]
    return x, torch.sin(2 * x) + 0.1 * torch.randn(n, 1, dtype=dtype)


def net(p: float = 0.0, out: int = 1) -> nn.Sequential:
    hidden = [nn.Linear(1, 8), nn.Tanh(), *([nn.Dropout(p)] if p else []), nn.Linear(8, out)]
    return nn.Sequential(*hidden)


def trained(p: float = 0.0) -> tuple[nn.Module, Tensor, Tensor]:
    (x, y), model = rows(), net(p)
    optimiser = torch.optim.Adam(model.parameters(), 3e-2)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    return model, x, y


def fit(model: nn.Module, loader, **how):
    given = {"likelihood": "gaussian", "epochs": 2, "batch_size": 64, "check": False, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", favour.errors.OutOfRange)  # few steps to choose a weight by
        return favour.fit(model, loader, **(given | how))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ------------------------------------------------------------------- what is learned


def test_all_of_it_raises_the_bound_and_leaves_the_model_alone() -> None:
    model = net(0.2).train()
    before = state(model)
    fitted = fit(model, rows(), epochs=15, lr=3e-2)
    assert same(before, state(model)) and model.training and all(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    bounds = [record.bound for record in fitted.history]
    assert bounds[-1] > bounds[0] + 20
    assert not same(before, state(fitted.model))
    assert set(fitted.posterior.names) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert fitted.rates.keys() == {"2"} and fitted.model[2].p == pytest.approx(float(fitted.rates["2"]))
    assert type(fitted.model[2]) is nn.Dropout
    assert fitted.noise_variance.shape == (1,) and set(fitted.prior_std) == set(fitted.posterior.names)
    assert fitted.best.held_nll == min(record.held_nll for record in fitted.history)


def test_linear_regression_finds_the_exact_posterior() -> None:
    """y = wx + ε with known noise: the mean-field optimum has the posterior's mean and 1/diag of its precision."""
    x, noise = torch.randn(60, 2, dtype=F64), 0.3
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=F64) + noise**0.5 * torch.randn(60, 1, dtype=F64)
    model = nn.Linear(2, 1, bias=False).double()
    how = {"learn": ("means", "variances"), "prior": 1.0, "noise": noise, "validation": 0, "batch_size": 60}
    fitted = fit(model, (x, y), epochs=300, lr=5e-2, **how)
    precision = torch.eye(2, dtype=F64) + x.mT @ x / noise
    mean = torch.linalg.solve(precision, x.mT @ y / noise).mT
    torch.testing.assert_close(fitted.model.weight.detach(), mean, atol=2e-3, rtol=0)
    torch.testing.assert_close(fitted.posterior.gaussian("weight").diag[0], 1 / precision.diagonal(), rtol=2e-2, atol=0)
    assert float(fitted.noise_variance) == pytest.approx(noise)


@pytest.mark.parametrize("kind", ["mean_field", "rows", "low_rank", "last_layer"])
def test_after_the_fact_every_posterior(kind: str) -> None:
    model, x, y = trained()
    before = state(model)
    fitted = fit(model, (x, y), learn=("variances", "noise"), posterior=kind, epochs=10)
    assert same(before, state(fitted.model))
    assert fitted.kl_weight in {record.kl_weight for record in fitted.history} and len(fitted.history) > 1
    belief = fitted.predict(x)
    torch.testing.assert_close(belief.mean, favour.compile(fitted.model, x, posterior=fitted.posterior)(x).mean)
    assert bool((belief.variance > 0).all()) and 0 < float(fitted.noise_variance) < 0.1
    assert bool(fitted.posterior.latents) == (kind == "low_rank")


def test_a_kept_state_is_the_best_on_held_out_rows() -> None:
    model, x, y = trained()
    held = (x[::3], y[::3])
    fitted = fit(model, (x, y), learn=("variances", "noise"), epochs=10, validation=held)
    got = favour.losses.predictive_nll(fitted.predict(held[0]), held[1], "gaussian", noise=fitted.noise_variance)
    assert float(got.detach()) == pytest.approx(fitted.best.held_nll, abs=1e-4)
    assert fitted.best.held_nll == min(record.held_nll for record in fitted.history)


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Dropout2d(0.3), favour.nn.Dropout(0.3)])
def test_rates_alone(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), layer, nn.Flatten(), nn.Linear(12, 2))
    before = state(model)
    x, y = torch.randn(60, 1, 4, 4), torch.randint(2, (60,))
    fitted = fit(model, (x, y), likelihood="categorical", learn=("rates",), kl_weight=0.01, epochs=3)
    (p,) = fitted.rates.values()
    assert 0 < float(p) < 1 and abs(float(p) - 0.3) > 1e-3
    assert type(fitted.model[2]) is type(layer) and float(fitted.model[2].p) == pytest.approx(float(p))
    trained_weights = {k: v for k, v in state(fitted.model).items() if not k.startswith("2.")}
    assert same({k: v for k, v in before.items() if not k.startswith("2.")}, trained_weights)


def test_channel_masks_give_the_beliefs_of_dropout2d() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(5, 1, 4, 4, dtype=F64)
    learner = Learner(model, x, likelihood="categorical", learn=("rates",))
    got, want = learner(x), favour.compile(model, x)(x)
    torch.testing.assert_close(got.mean, want.mean)
    torch.testing.assert_close(got.covariance_matrix, want.covariance_matrix)


def test_bayesian_layers_of_the_model_are_learned() -> None:
    model = nn.Sequential(favour.nn.BayesLinear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    before = state(model)
    fitted = fit(model, rows(), learn=("variances",), kl_weight=1.0)
    assert not torch.equal(fitted.model[0].weight_log_std, before["0.weight_log_std"])
    assert torch.equal(fitted.model[0].weight, before["0.weight"])
    assert same(before, state(model))


def test_a_given_posterior_is_where_it_begins() -> None:
    model, x, y = trained()
    start = favour.Posterior({("2.weight", "2.bias"): favour.Full(0.01 * torch.eye(9), (1, 9))})
    fitted = fit(model, (x, y), learn=("variances", "noise"), posterior=start, epochs=5)
    matrix = fitted.posterior.gaussian("2.weight").matrix
    assert matrix.shape == (9, 9) and not torch.equal(matrix, 0.01 * torch.eye(9))
    kept = fit(model, (x, y), learn=("noise",), posterior=start, kl_weight=1.0)
    torch.testing.assert_close(kept.posterior.gaussian("2.weight").matrix, 0.01 * torch.eye(9))


def test_layers_and_labels() -> None:
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3))
    x = torch.randn(120, 2)
    fitted = fit(model, (x, x.argmax(1)), likelihood="categorical", learn=("variances",), layers=["2", "3"])
    assert fitted.posterior.names == ("2.0.weight", "2.0.bias", "3.weight", "3.bias")
    assert fitted.best.calibration is not None and fitted.noise_variance is None
    few = fit(model, (x, x.argmax(1)), likelihood=favour.losses.Categorical("bound"), directions=1)
    assert few.predict(x).rank == 1


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        ("student_t", torch.randn(80, 2)),
        ("poisson", torch.ones(80, 2)),
        ("bernoulli", torch.ones(80, 2)),
        ("heteroscedastic", torch.randn(80, 1)),
    ],
)
def test_other_likelihoods(likelihood: str, y: Tensor) -> None:
    fitted = fit(net(out=2), (torch.randn(80, 1), y), likelihood=likelihood)
    assert math.isfinite(fitted.best.held_nll)


# ----------------------------------------------------------- loaders, seeds, going on


def test_every_kind_of_loader() -> None:
    x, y = rows(120)
    data = TensorDataset(x, y)
    batches = [(x[i : i + 40], y[i : i + 40]) for i in (0, 40, 80)]
    for loader, count in (
        ((x, y), 108),
        (DataLoader(data, 40, shuffle=True), 108),
        (batches, 108),
        ([({"input": a}, b) for a, b in batches], 108),
        ([((a,), b) for a, b in batches], 108),
    ):
        fitted = fit(net(), loader)
        divergence, record = fitted.history[-1].divergence, fitted.history[-1]
        assert record.bound == pytest.approx(-(count * record.nll + divergence))


def test_held_out_rows_are_never_trained_on() -> None:
    x, y = rows(100)
    for loader in ((x, y), DataLoader(TensorDataset(x, y), 16, shuffle=True), [(x[:50], y[:50]), (x[50:], y[50:])]):
        split = rows_of(loader, 0.2, 16, 3)
        held = {float(v) for a, _ in split.held for v in a}
        for _ in range(3):
            seen = {float(v) for a, _ in split.batches() for v in a}
            assert len(seen) == split.count == 80 and not seen & held and len(held) == 20


def test_a_seed_fixes_everything_and_touches_nothing() -> None:
    model, data = net(0.1), rows()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (fit(model, data, posterior="low_rank", seed=1) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert same(state(first.model), state(second.model))
    assert [r.nll for r in first.history] == [r.nll for r in second.history]
    assert [r.nll for r in fit(model, data, posterior="low_rank", seed=2).history] != [r.nll for r in first.history]


@pytest.mark.parametrize("learn", [LEARN, ("variances", "noise")])
def test_an_interrupted_fit_goes_on(tmp_path, learn: tuple[str, ...]) -> None:
    model, data, file = net(0.1), rows(), tmp_path / "fit.pt"
    how = {"learn": learn, "epochs": 30 if learn != LEARN else 4}
    whole = fit(model, data, **how)

    class Stop(Exception):
        pass

    def interrupt(learner: Learner, record) -> None:
        if record.epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        fit(model, data, **how, checkpoint=file, callbacks=[interrupt])
    resumed = fit(model, data, **how, checkpoint=file)
    assert [r.nll for r in resumed.history] == [r.nll for r in whole.history]
    torch.testing.assert_close(resumed.noise_variance, whole.noise_variance)
    assert same(state(resumed.model), state(whole.model))
    again = fit(model, data, **how, checkpoint=file)  # nothing is left to do, and the best is behind
    torch.testing.assert_close(again.noise_variance, whole.noise_variance)
    assert same(state(again.model), state(whole.model)) and again.best == resumed.best
    for other in ({"seed": 9}, {"lr": 1e-4}, {"likelihood": "student_t"}):
        with pytest.raises(favour.errors.InvalidValue, match="of another fit"):
            fit(model, data, **how, checkpoint=file, **other)


def test_saved_and_loaded(tmp_path) -> None:
    x, y = rows()
    fitted = fit(net(0.2), (x, y), posterior="rows")
    fitted.save(tmp_path / "fitted.pt")
    loaded = favour.Fitted.load(tmp_path / "fitted.pt")
    torch.testing.assert_close(loaded.predict(x).variance, fitted.predict(x).variance)
    torch.testing.assert_close(loaded.noise_variance, fitted.noise_variance)
    assert loaded.history == fitted.history and loaded.best == fitted.best and loaded.model is None
    assert repr(loaded) == repr(fitted)
    (tmp_path / "fitted.pt").write_bytes(b"no")
    with pytest.raises(favour.errors.CorruptFile):
        favour.Fitted.load(tmp_path / "fitted.pt")


def test_callbacks_and_patience_end_a_fit() -> None:
    found = []
    assert len(fit(net(), rows(), epochs=5, callbacks=[lambda learner, record: record.epoch == 2]).history) == 2
    fitted = fit(net(), rows(), epochs=40, lr=0.3, patience=2, callbacks=[lambda _, r: found.append(r.held_nll)])
    assert len(fitted.history) < 40 and len(found) == len(fitted.history)
    assert fitted.best.held_nll == min(found)


def test_in_a_plain_training_loop() -> None:
    x, y = rows()
    learner = Learner(net(), x, likelihood="gaussian", noise=1.0)
    optimiser = torch.optim.Adam(learner.parameters(), 2e-2)
    found = []
    for _ in range(30):
        loss = learner.loss(x, y, rows=len(x))
        optimiser.zero_grad()
        loss.total.backward()
        optimiser.step()
        found.append(float(loss.total.detach()))
    assert found[-1] < found[0] - 0.1
    fitted = learner.fitted_model()
    predict = favour.compile(fitted, x, posterior=learner.posterior())
    torch.testing.assert_close(predict(x).variance, learner(x).variance)


def test_gradients_of_the_whole_objective() -> None:
    """Means, variances, rates and noise, by finite differences."""
    x, y = rows(6, F64)
    learner = Learner(net(0.2).double(), x, likelihood="gaussian", noise=0.5)
    for name, parameter in learner.named_parameters():
        (gradient,) = torch.autograd.grad(learner.loss(x, y, 20).total, parameter)
        flat, step = parameter.data.view(-1), 1e-6
        for i in range(min(3, flat.numel())):
            value, ends = float(flat[i]), []
            for sign in (1, -1):
                flat[i] = value + sign * step
                ends.append(float(learner.loss(x, y, 20).total.detach()))
            flat[i] = value
            want = (ends[0] - ends[1]) / (2 * step)
            assert float(gradient.view(-1)[i]) == pytest.approx(want, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("how", [{"secant": False}, {"secant": True}, {"pairs": 4}])
def test_gradients_are_finite_where_units_never_fire(how: dict) -> None:
    """Moments of such units are 0 or denormal numbers, where roots and quotients have no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1)
    )
    x, y = torch.randn(1000, 8), torch.randn(1000, 1)
    learner = Learner(model, x[:2], likelihood="gaussian", noise=1.0, method="adjoint", **how)
    learner.loss(x, y, rows=1000).total.backward()
    assert all(bool(p.grad.isfinite().all()) for p in learner.parameters())


def test_gradients_are_finite_behind_pooling() -> None:
    torch.manual_seed(0)
    pooled = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, 1)]
    x = torch.rand(40, 1, 12, 12)
    learner = Learner(nn.Sequential(*pooled), x[:2], likelihood="gaussian", noise=1.0)
    learner.loss(x, torch.zeros(40, 1), rows=40).total.backward()
    assert all(bool(p.grad.isfinite().all()) for p in learner.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # inductor's own
def test_compiled_objectives() -> None:
    """Values and gradients of two learners at once, batches of another shape, targets that are refused, a copy."""
    x, y = rows(32)
    learners = [Learner(net(0.2), x, likelihood="gaussian", noise=0.5, compiled=True) for _ in range(2)]
    for learner in learners:
        plain = Learner(net(0.2), x, likelihood="gaussian", noise=0.5)
        plain.load_state_dict(learner.state_dict())
        for n, weight in ((32, 1.0), (32, 0.1), (7, 1.0)):
            for each in (learner, plain):
                each.zero_grad()
                each.loss(x[:n], y[:n], 50, weight).total.backward()
            torch.testing.assert_close(learner.loss(x[:n], y[:n], 50, weight), plain.loss(x[:n], y[:n], 50, weight))
            for name, parameter in learner.named_parameters():
                want = plain.get_parameter(name).grad
                torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))
    with pytest.raises(favour.errors.InvalidValue, match="nan"):
        learners[0].loss(x, torch.full_like(y, math.nan), 50)
    twin = copy.deepcopy(learners[0])
    with torch.no_grad():
        twin.network.model[0].weight.mul_(2)
    assert float(twin.loss(x, y, 50).total.detach()) != float(learners[0].loss(x, y, 50).total.detach())


def test_what_cannot_be_compiled_says_so(monkeypatch) -> None:
    x, y = rows(32)
    learner = Learner(net(), x, likelihood="gaussian", noise=0.5, compiled=True)
    plain = learner._objective(x, y, 1 / 32)

    def refuse(*_: Tensor) -> Tensor:
        raise torch._dynamo.exc.Unsupported("no such operation")

    monkeypatch.setattr("favour.learn.learner.optimised", lambda _: refuse)
    with pytest.warns(favour.errors.FavourWarning, match="no such operation"):
        assert torch.equal(learner.loss(x, y, 32).total, plain[0])
    learner.loss(x, y, 32)


# ----------------------------------------------------------------------- refusals


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(1), torch.zeros(1))])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x), self.fc(x)


X, Y = torch.zeros(40, 1), torch.zeros(40, 1)
NAN = torch.full((40, 1), math.nan)
LABELS = torch.zeros(40).long()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"loader": []}, favour.errors.InvalidValue, "empty"),
        ({"loader": iter([])}, favour.errors.InvalidValue, "validation="),
        ({"loader": iter([]), "validation": 0}, favour.errors.InvalidValue, "empty"),
        ({"loader": DataLoader(Endless())}, favour.errors.InvalidValue, "validation="),
        ({"loader": 3}, favour.errors.InvalidType, "int"),
        ({"loader": (X.numpy(), Y.numpy())}, favour.errors.InvalidType, "torch.as_tensor"),
        ({"loader": (torch.zeros(40, 3), Y)}, favour.errors.InvalidValue, r"cannot be called.*\(36, 3\) float32"),
        ({"loader": (X.double(), Y)}, favour.errors.InvalidValue, "cannot be called.*float64"),
        (
            {"model": net(out=3), "loader": (X, LABELS), "validation": (X, LABELS + 7), "likelihood": "categorical"},
            favour.errors.InvalidValue,
            "label 7",
        ),
        ({"batch_size": 0}, favour.errors.InvalidValue, "batch_size"),
        ({"rank": -1, "posterior": "low_rank"}, favour.errors.InvalidValue, "rank"),
        ({"patience": 0}, favour.errors.InvalidValue, "patience"),
        ({"seed": "a"}, favour.errors.InvalidType, "seed"),
        ({"callbacks": [3]}, favour.errors.InvalidType, "callbacks"),
        ({"noise": torch.ones(5)}, favour.errors.ShapeMismatch, r"\(5,\)"),
        ({"checkpoint": "."}, favour.errors.InvalidValue, "checkpoint"),
        ({"checkpoint": "no/such/folder/fit.pt"}, favour.errors.InvalidValue, "checkpoint"),
        ({"loader": [X]}, favour.errors.InvalidType, "pairs"),
        ({"loader": (X, Y[:3])}, favour.errors.ShapeMismatch, "40 inputs and 3 targets"),
        ({"loader": [(X, Y[:3])]}, favour.errors.ShapeMismatch, "40 inputs and 3 targets"),
        ({"loader": (NAN, Y)}, favour.errors.InvalidValue, "inputs.*NaN"),
        ({"loader": [(X, Y), (X, NAN)]}, favour.errors.InvalidValue, "targets of batch 1.*NaN"),
        ({"loader": (X[:2], Y[:2])}, favour.errors.InvalidValue, "too few"),
        ({"loader": (X, torch.zeros(40, 2))}, favour.errors.ShapeMismatch, r"\(\d+, 1\)"),
        ({"loader": (X, LABELS), "likelihood": "categorical"}, favour.errors.ShapeMismatch, "at least two"),
        (
            {"model": net(out=3), "loader": (X, LABELS + 3), "likelihood": "categorical"},
            favour.errors.InvalidValue,
            "label 3",
        ),
        ({"model": net(out=3), "likelihood": "heteroscedastic"}, favour.errors.ShapeMismatch, "2d"),
        ({"likelihood": "normal"}, favour.errors.InvalidValue, "choose one of"),
        ({"learn": ("variance",)}, favour.errors.InvalidValue, "'variance'"),
        ({"learn": "variances"}, favour.errors.InvalidType, "tuple"),
        ({"learn": ()}, favour.errors.InvalidValue, "empty"),
        ({"learn": ("rates",), "kl_weight": 1.0}, favour.errors.InvalidValue, "no rate"),
        ({"learn": ("noise",), "likelihood": "poisson"}, favour.errors.InvalidValue, "no noise"),
        ({"posterior": "full"}, favour.errors.InvalidValue, "choose one of mean_field"),
        ({"posterior": {"0.wieght": torch.ones(8, 1)}}, favour.errors.UnknownName, "0.weight"),
        ({"posterior": {"0.weight": torch.ones(2, 2)}}, favour.errors.ShapeMismatch, r"\(2, 2\)"),
        ({"posterior": {"0.weight": torch.zeros(8, 1)}}, favour.errors.InvalidValue, "above 0"),
        ({"layers": ["head"]}, favour.errors.UnknownName, "`head`"),
        ({"prior": {"head": 1.0}, "learn": ("means", "variances")}, favour.errors.UnknownName, "`head`"),
        ({"prior": 1.0}, favour.errors.InvalidValue, "leave one out"),
        ({"prior": "each"}, favour.errors.InvalidValue, "layer"),
        ({"noise": -1.0}, favour.errors.InvalidValue, "above 0"),
        ({"noise": 1.0, "likelihood": "poisson"}, favour.errors.InvalidValue, "has none"),
        ({"epochs": 0}, favour.errors.InvalidValue, "epochs"),
        ({"kl_weight": -1.0}, favour.errors.InvalidValue, "kl_weight"),
        ({"lr": {"weights": 1.0}}, favour.errors.InvalidValue, "'weights'"),
        ({"lr": 0.0}, favour.errors.InvalidValue, "positive"),
        ({"validation": 1.5}, favour.errors.InvalidValue, "share"),
        ({"validation": []}, favour.errors.InvalidValue, "empty"),
        ({"learn": ("variances",), "validation": 0}, favour.errors.InvalidValue, "held-out"),
        ({"model": Two()}, favour.errors.InvalidType, "one tensor"),
        ({"model": nn.ReLU()}, favour.errors.InvalidValue, "no linear"),
    ],
)
def test_bad_input(how: dict, error: type[Exception], words: str) -> None:
    how = dict(how)
    model = how.pop("model", None) or net()
    before = copy.deepcopy(state(model))
    with pytest.raises(error, match=words):
        fit(model, how.pop("loader", (X, Y)), **how)
    assert same(before, state(model)) and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("content", [b"PK\x03\x04abc", {"description": "no JSON"}, {"state": {}}])
def test_damaged_checkpoints(tmp_path, content: object) -> None:
    path = tmp_path / "fit.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(favour.errors.CorruptFile, match=r"fit\.pt"):
        fit(net(), (X, Y), checkpoint=path)
    with pytest.raises(favour.errors.InvalidType, match=r"torch\.nn\.Module"):
        fit(lambda x: x, (X, Y))


def test_a_diverging_fit_gives_its_last_good_state() -> None:
    x, y = rows()

    def spoil(learner: Learner, record) -> None:
        if record.epoch == 2:
            with torch.no_grad():
                learner.log_noise.fill_(-80.0)

    with pytest.raises(favour.errors.DivergedFit, match=r"epoch 3.*Lower `lr`") as caught:
        fit(net(), (x, y), epochs=5, callbacks=[spoil])
    fitted = caught.value.fitted
    assert len(fitted.history) == 2 and bool(fitted.predict(x).mean.isfinite().all())
    with pytest.raises(favour.errors.DivergedFit):
        fit(net(), (1e18 * x, y), epochs=5, lr=1e6, validation=0)
