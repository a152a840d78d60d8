"""Bad input: one clear error of the right kind that names the culprit, and nothing broken afterwards."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import favour
from favour import Belief, FavourError

float64 = torch.float64

# Each error of ours, and the built-in it also is.
VALUE = (favour.errors.InvalidValue, ValueError)
SHAPE = (favour.errors.ShapeMismatch, ValueError)
TYPE = (favour.errors.InvalidType, TypeError)
NAME = (favour.errors.UnknownName, KeyError)
BUILTINS = (ValueError, TypeError, RuntimeError, ImportError, ArithmeticError, MemoryError)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 2)).double()


X = torch.linspace(-1, 1, 12, dtype=float64).reshape(4, 3)


@pytest.fixture(scope="module")
def predict() -> favour.Predictor:
    torch.manual_seed(0)
    return favour.compile(mlp(), X)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(3, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.drop(self.a(x)) + y


def fails(call, kind: type[Exception], builtin: type[Exception], *words: str) -> None:
    """`call` raises `kind`, which is also a FavourError and a `builtin`; its message has all the words."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, FavourError)
    assert isinstance(caught.value, builtin)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def with_entry(value: float) -> Tensor:
    x = X.clone()
    x[2, 1] = value
    return x


BAD_CALLS = {
    "features": (
        lambda p: p(torch.zeros(4, 7, dtype=float64)),
        favour.errors.ShapeMismatch,
        ValueError,
        "(4, 7)",
        "(batch, 3)",
    ),
    "dimensions": (
        lambda p: p(torch.zeros(3, dtype=float64)),
        favour.errors.ShapeMismatch,
        ValueError,
        "(3,)",
        "(batch, 3)",
    ),
    "too many dimensions": (
        lambda p: p(torch.zeros(2, 4, 3, dtype=float64)),
        favour.errors.ShapeMismatch,
        ValueError,
        "(2, 4, 3)",
    ),
    "nan": (lambda p: p(with_entry(math.nan)), *VALUE, "input", "[2, 1]", "NaN"),
    "infinity": (lambda p: p(with_entry(-math.inf)), *VALUE, "[2, 1]"),
    "dtype": (lambda p: p(X.float()), *TYPE, "float32", "float64"),
    "integer": (lambda p: p(X.long()), *TYPE, "int64", "float64"),
    "no tensor": (lambda p: p("text"), *TYPE, "str"),
    "list of tensors": (lambda p: p(list(X)), *TYPE, "call it the way the example was given"),
    "none": (lambda p: p(None), *TYPE),
    "nothing": (lambda p: p(), *TYPE, "call it the way"),
    "two": (lambda p: p(X, X), *TYPE, "call it the way"),
    "keyword": (lambda p: p(input=X), *TYPE, "call it the way"),
    "belief features": (
        lambda p: p(Belief.point(torch.zeros(4, 7))),
        favour.errors.ShapeMismatch,
        ValueError,
        "(4, 7)",
    ),
    "belief dtype": (lambda p: p(Belief.point(X.float())), *TYPE, "float32"),
    "sample nan": (lambda p: p.sample(with_entry(math.nan), n=2), *VALUE, "[2, 1]"),
    "sample none": (lambda p: p.sample(X, n=0), *VALUE, "`n` is 0"),
    "sample half": (lambda p: p.sample(X, n=1.5), *TYPE, "1.5"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_is_refused_and_harmless(name: str, predict: favour.Predictor) -> None:
    call, kind, builtin, *words = BAD_CALLS[name]
    before = predict(X)
    fails(lambda: call(predict), kind, builtin, *words)
    after = predict(X)
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.covariance_matrix, after.covariance_matrix)


def test_two_inputs_of_different_batch() -> None:
    pair = favour.compile(Pair(), (torch.randn(4, 3), torch.randn(4, 2)))
    fails(lambda: pair(torch.randn(4, 3), torch.randn(5, 2)), *SHAPE, "`y`", "(5, 2)")
    fails(lambda: pair(torch.randn(4, 3), torch.full((4, 2), math.nan)), *VALUE, "`y`")
    assert pair(torch.randn(4, 3), torch.randn(4, 2)).mean.isfinite().all()


def test_the_values_of_the_example_do_not_matter() -> None:
    model = mlp()
    predict = favour.compile(model, torch.full((4, 3), math.nan, dtype=float64))
    assert torch.equal(predict(X).mean, favour.compile(model, X)(X).mean)


def test_nan_in_the_weights_at_compile_time() -> None:
    model = mlp()
    with torch.no_grad():
        model[3].weight[1, 2] = math.nan
    fails(lambda: favour.compile(model, X), *VALUE, "`3.weight`", "(2, 5)")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_in_the_weights_after_compile(value: float) -> None:
    model = mlp()
    predict = favour.compile(model, X)
    want = predict(X).mean
    sound = model[0].bias.detach().clone()
    with torch.no_grad():
        model[0].bias[0] = value
    for call in (lambda: predict(X), lambda: predict.sample(X, n=2), lambda: predict(X)):  # it stays refused
        fails(call, *VALUE, "`0.bias`")
    with torch.no_grad():
        model[0].bias.copy_(sound)
    assert torch.equal(predict(X).mean, want)


def test_nan_in_buffers_and_spreads() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), favour.nn.BayesLinear(3, 2)).double()
    predict = favour.compile(model, X)
    with torch.no_grad():
        model[1].weight_log_std[0, 0] = math.nan
    fails(lambda: predict(X), *VALUE, "`1.weight_log_std`")
    with torch.no_grad():
        model[1].weight_log_std[0, 0] = -2
        model[0].running_var[1] = math.inf
    fails(lambda: predict(X), *VALUE, "`0.running_var`")
    model[0].reset_running_stats()
    assert predict(X).variance.isfinite().all()


SETTINGS = {
    "method": ({"method": "magic"}, *VALUE, "'magic'", "adjoint", "dplr"),
    "activation": ({"activation": "gelu"}, *VALUE, "'gelu'", "price", "matched", "taylor"),
    "rank negative": ({"rank": -1}, *VALUE, "`rank` is -1"),
    "rank fraction": ({"rank": 1.5}, *TYPE, "`rank` is 1.5"),
    "rank bool": ({"rank": True}, *TYPE, "`rank`"),
    "rank text": ({"rank": "4"}, *TYPE, "`rank`"),
    "iterations negative": ({"iterations": -2}, *VALUE, "`iterations` is -2"),
    "iterations none": ({"iterations": None}, *TYPE, "`iterations`"),
    "weight rank": ({"weight_rank": 0}, *VALUE, "`weight_rank` is 0"),
    "memory": ({"memory": 0}, *VALUE, "`memory` is 0"),
    "precision": ({"precision": "int8"}, *VALUE, "int8"),
    "start": ({"start": "cold"}, *VALUE, "cold"),
    "start tensor": ({"start": torch.zeros(2, 2)}, FavourError, ValueError, "start"),
    "seed": ({"seed": "x"}, *TYPE, "`seed`"),
    "seed negative": ({"seed": -1}, *VALUE, "`seed` is -1"),
    "at": ({"at": "nowhere"}, *NAME, "nowhere", "'3'"),
    "dropout name": ({"dropout": {"drop": 0.1}}, *NAME, "drop", "'2'"),
    "dropout above": ({"dropout": {"2": 1.0}}, *VALUE, "`2`", "1.0"),
    "dropout below": ({"dropout": {"2": -0.1}}, *VALUE, "`2`", "-0.1"),
    "dropout nan": ({"dropout": {"2": math.nan}}, *VALUE, "`2`"),
    "dropout text": ({"dropout": {"2": "half"}}, *TYPE, "`2`"),
    "dropout tensor": ({"dropout": {"2": torch.tensor([0.1, 1.0, 0, 0, 0])}}, *VALUE, "`2`"),
    "dropout shape": ({"dropout": {"2": torch.zeros(4)}}, *SHAPE, "`2`", "(4,)", "(5)"),
    "posterior type": ({"posterior": 3}, *TYPE, "posterior"),
    "posterior name": ({"posterior": {"4.weight": torch.ones(2, 5)}}, *NAME, "4.weight", "3.weight"),
    "posterior shape": ({"posterior": {"3.weight": torch.ones(5, 2)}}, *SHAPE, "3.weight", "(5, 2)"),
    "posterior negative": ({"posterior": {"3.weight": -torch.ones(2, 5, dtype=float64)}}, *VALUE, "3.weight"),
    "posterior nan": (
        {"posterior": {"3.bias": torch.tensor([1.0, math.nan], dtype=float64)}},
        *VALUE,
        "3.bias",
    ),
    "posterior integer": ({"posterior": {"3.bias": torch.ones(2, dtype=torch.int64)}}, *TYPE, "3.bias"),
    "posterior number": ({"posterior": {"3.bias": 0.1}}, *TYPE, "3.bias"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_setting_is_refused(name: str) -> None:
    options, kind, builtin, *words = SETTINGS[name]
    fails(lambda: favour.compile(mlp(), X, **options), kind, builtin, *words)


def test_posterior_of_another_dtype_is_converted() -> None:
    model = mlp()
    predict = favour.compile(model, X, posterior={"3.weight": torch.full((2, 5), 0.01)})
    reference = favour.compile(model, X, posterior={"3.weight": torch.full((2, 5), 0.01).double()})
    torch.testing.assert_close(predict(X).covariance_matrix, reference(X).covariance_matrix)
    assert predict(X).covariance_matrix.dtype == float64


def test_posterior_on_an_operation_without_a_rule_for_it() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.argsort(self.weight)

    fails(
        lambda: favour.compile(Sorted().double(), X, posterior={"weight": torch.ones(3, dtype=float64)}),
        favour.errors.UnsupportedOperation,
        NotImplementedError,
        "argsort",
    )


def test_posterior_and_bayesian_layer_on_one_parameter() -> None:
    model = nn.Sequential(favour.nn.BayesLinear(3, 2)).double()
    options = {"posterior": {"0.weight": torch.ones(2, 3, dtype=float64)}}
    fails(lambda: favour.compile(model, X, **options), *VALUE, "0.weight", "both")


def test_dropout_rate_of_one_in_the_model() -> None:
    fails(
        lambda: favour.compile(nn.Sequential(nn.Linear(3, 2), nn.Dropout(1.0)).double(), X),
        *VALUE,
        "`1`",
        "1.0",
    )


BAD_SAMPLES = {
    "n": (lambda m: favour.sample(m, X, 0), *VALUE, "`n` is 0"),
    "n negative": (lambda m: favour.sample(m, X, -3), *VALUE, "-3"),
    "n fraction": (lambda m: favour.sample(m, X, 2.5), *TYPE, "2.5"),
    "model": (lambda m: favour.sample(torch.relu, X, 2), *TYPE, "torch.nn.Module"),
    "input": (lambda m: favour.sample(m, [X], 2), *TYPE, "list"),
    "nan": (lambda m: favour.sample(m, with_entry(math.nan), 2), *VALUE, "[2, 1]"),
    "posterior": (lambda m: favour.sample(m, X, 2, {"w": torch.ones(1)}), *NAME, "`w`"),
    "negative": (
        lambda m: favour.sample(m, X, 2, {"3.bias": -torch.ones(2, dtype=float64)}),
        *VALUE,
        "3.bias",
    ),
    "dropout": (lambda m: favour.sample(m, X, 2, dropout={"2": 2.0}), *VALUE, "2.0"),
    "memory": (lambda m: favour.sample(m, X, 2, memory=-1), *VALUE, "`memory` is -1"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_bad_sample_is_refused(name: str) -> None:
    model = mlp()
    call, kind, builtin, *words = BAD_SAMPLES[name]
    fails(lambda: call(model), kind, builtin, *words)
    assert favour.sample(model, X, 2).shape == (2, 4, 2)


def test_every_error_is_a_favour_error_and_a_builtin() -> None:
    for name in dir(favour.errors):
        kind = getattr(favour.errors, name)
        if isinstance(kind, type) and issubclass(kind, FavourError) and kind is not FavourError:
            assert any(issubclass(kind, b) for b in BUILTINS), name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", favour.errors.DeprecatedName)
                assert getattr(favour, name) is kind


def test_unknown_name_prints_its_message_plainly() -> None:
    assert str(favour.errors.UnknownName("no `x`")) == "no `x`"
    assert str(favour.errors.UnknownName()) == ""


def test_lines_inside_favours_own_layers_are_not_the_users():
    """A node of `favour.nn` names the line of the model that called the layer."""
    from favour.passes.capture import capture

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = favour.nn.Dropout(torch.tensor([0.1, 0.2]))

        def forward(self, x):
            return self.drop(x).sin()

    places = {node.place for node in capture(Model(), torch.randn(2, 2)).nodes if node.kind == "call"}
    assert places and all("test_errors.py" in place for place in places), places
