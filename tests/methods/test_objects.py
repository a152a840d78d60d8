"""Methods as objects: the same as names and keywords, printed, refused and written like them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import favour
from favour import methods
from favour.errors import InvalidType, InvalidValue
from favour.methods.auto import PAIRS
from favour.methods.keywords import DEFAULTS, method_of

F64 = torch.float64

SAME: list[tuple[methods.Method, dict[str, Any]]] = [
    (methods.Adjoint(), {"method": "adjoint"}),
    (methods.Adjoint(directions=2, pairs=4), {"method": "adjoint", "directions": 2, "pairs": 4}),
    (methods.Adjoint(rank=3, secant=True), {"method": "adjoint", "rank": 3, "secant": True}),
    (
        methods.DPLR(rank=2, iterations=1, start="random"),
        {"method": "dplr", "rank": 2, "iterations": 1, "start": "random"},
    ),
    (methods.Full(), {"method": "full"}),
    (methods.Diag(), {"method": "diag"}),
    (methods.Linearised(directions=2), {"method": "linearised", "directions": 2}),
    (methods.Sampling(), {"method": "sampling"}),
    (methods.Auto(task="classification"), {"task": "classification"}),
    (methods.Adjoint(secant=False), {"effort": "fast"}),
    (methods.Adjoint(secant=True, pairs=PAIRS), {"effort": "best"}),
    (methods.Adjoint(secant=True, pairs=0), {"effort": "best", "pairs": 0}),
    (methods.Adjoint(secant=True, pairs=PAIRS), {"method": "adjoint", "effort": "best"}),
]


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3))
    return nn.Sequential(*layers).double(), torch.randn(5, 4, dtype=F64)


@pytest.mark.parametrize(("method", "keywords"), SAME, ids=lambda v: repr(v))
def test_an_object_is_its_name_and_keywords(method: methods.Method, keywords: dict[str, Any]) -> None:
    model, x = network()
    one, other = (favour.compile(model, x, check=False, **given)(x) for given in ({"method": method}, keywords))
    assert torch.equal(one.mean, other.mean) and torch.equal(one.covariance_matrix, other.covariance_matrix)


@pytest.mark.parametrize("method", [method for method, _ in SAME], ids=repr)
def test_an_object_is_saved_with_its_parameters(method: methods.Method, tmp_path: Path) -> None:
    model, x = network()
    predict = favour.compile(model, x, method=method, check=False, seed=3)
    predict.save(tmp_path / "saved.favour")
    loaded = favour.load(tmp_path / "saved.favour")
    assert repr(loaded.asked) == repr(method) and loaded.numerics == predict.numerics
    assert torch.equal(loaded(x).covariance_matrix, predict(x).covariance_matrix)


def test_objects_are_printed_by_what_is_not_default() -> None:
    assert repr(methods.DPLR(rank=2)) == "DPLR(rank=2)"
    assert repr(methods.Adjoint(directions=torch.eye(3))) == "Adjoint(directions=(tensor of shape (3, 3)))"


def test_keywords_beside_an_object_are_refused_and_numerics_are_not() -> None:
    model, x = network()
    for keyword, value in {"effort": "best", "rank": 3, "pairs": 8, "directions": 2, "task": "classification"}.items():
        with pytest.raises(InvalidValue, match=f"`{keyword}` beside method=Diag\\(\\)"):
            favour.compile(model, x, method=methods.Diag(), **{keyword: value})
    assert set(DEFAULTS) == set(methods.Auto.__dataclass_fields__)
    favour.compile(model, x, method=methods.Diag(), activation="taylor", seed=1, memory=2**30, check=False)


def test_what_is_no_method_is_refused() -> None:
    model, x = network()
    with pytest.raises(InvalidType, match="`method` is a int; give a name or an object"):
        favour.compile(model, x, method=3)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidValue, match="choose one of adjoint, auto, diag, dplr, full, linearised, pooled, sampling"
    ):
        favour.compile(model, x, method="Adjoint")
    with pytest.raises(InvalidValue, match="`rank` is -1"):
        favour.compile(model, x, method=methods.DPLR(rank=-1))
    for given in ({}, {"method": "adjoint"}):
        with pytest.raises(InvalidValue, match="`effort` is 'more'; choose one of fast, balanced, best"):
            favour.compile(model, x, effort="more", **given)
    with pytest.raises(InvalidValue, match="`effort` belongs to the reverse sweep; `method` is 'dplr'"):
        favour.compile(model, x, method="dplr", effort="best")


def test_effort_leaves_the_choice_of_a_method_alone() -> None:
    """Only what is asked for by hand keeps the reverse sweep where all outputs are too dear."""
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 3000), nn.Unflatten(1, (50, 60)))
    with pytest.warns(favour.errors.ReducedCovariance):
        predict = favour.compile(model, torch.randn(2, 8), effort="best", check=False)
    assert predict.method.name == "pooled" and predict.method.n > 50


def test_every_method_by_name_takes_its_own_keywords() -> None:
    for name, cls in methods.METHODS.items():
        assert type(method_of(name)) is cls and cls.name == name
        assert repr(method_of(name)) == f"{cls.__name__}()"
