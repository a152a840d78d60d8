"""Files and pickles that favour wrote before its methods became objects still load, and answer what they answered then.

`auto` chooses anew, though, and takes secants in small networks now; what it took then is asked for.

`written/` holds one of each way to choose a method, of a multilayer perceptron with three inputs and four outputs, in
double precision, and what the code that wrote them predicted.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import favour

WRITTEN = Path(__file__).with_name("written")
NAMES = sorted(path.stem for path in WRITTEN.glob("*.favour"))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return torch.load(WRITTEN / "expected.pt", weights_only=True)


def then(predict: favour.Predictor) -> favour.Predictor:
    """With the choice of the code that wrote it."""
    asked = predict.asked
    if not isinstance(asked, favour.methods.Auto):
        return predict
    assert asked.secant is None and predict.method.takes_secants
    return favour.Predictor(predict.program.clone(method=replace(asked, secant=False)))


def same(belief: favour.Belief, name: str, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(belief.mean, expected[f"{name}.mean"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(belief.covariance_matrix, expected[f"{name}.covariance"], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_before_answers_as_before(name: str, expected: dict[str, Tensor]) -> None:
    same(then(favour.load(WRITTEN / f"{name}.favour"))(expected["x"]), name, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_before_is_written_again(name: str, expected: dict[str, Tensor], tmp_path: Path) -> None:
    favour.load(WRITTEN / f"{name}.favour").save(tmp_path / "again.favour")
    same(then(favour.load(tmp_path / "again.favour"))(expected["x"]), name, expected)


def test_a_pickle_of_before_answers_as_before(expected: dict[str, Tensor]) -> None:
    same(then(pickle.loads((WRITTEN / "pickled.pickle").read_bytes()))(expected["x"]), "pickled", expected)
