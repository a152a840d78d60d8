"""`favour check`: five models, the numbers behind its answer, and its page."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from browsing import assert_page_fits, started
from torch import nn
from typer.testing import CliRunner

import favour
import favour.cli
from favour.errors import InvalidValue
from favour.trial import reading

MODELS = '''
import torch
from torch import nn


def own():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    return BertForSequenceClassification(BertConfig(**small, num_labels=3, max_position_embeddings=16))


def quiet():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


class Squares(nn.Module):
    """The tangent of a square at the mean knows nothing of its curvature."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return (self.drop(x) - x).square().sum(-1, keepdim=True)


def still():
    return Squares()  # (±x)²: random inside, constant outside


def failing():
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 2))
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trial_models.py").write_text(MODELS)
    np.save("x.npy", np.random.default_rng(0).normal(size=(30, 8)))  # float64, as numpy has it
    yield tmp_path
    sys.modules.pop("trial_models", None)


def run(*arguments, samples=200, rows=8):
    words = ["check", *arguments, "--eager", "--samples", str(samples), "--rows", str(rows)]
    return CliRunner(env={"COLUMNS": "200"}).invoke(favour.cli.build(), words)


def record(folder):
    return json.loads((folder / "check-report" / "check.json").read_text())


def test_own_model_is_trusted_and_its_worth_is_said(folder):
    result = run("trial_models:own", "x.npy", samples=1000)
    assert result.exit_code == 0, result.output
    found = record(folder)
    assert found["verdict"] == "trust it" and "1 source of noise: dropout in `2`" in found["facts"]["noise"]
    page = (folder / "check-report" / "check.html").read_text()
    for text in (found["answer"], *found["facts"].values()):  # terminal, page and record say the same
        assert text in " ".join(result.output.split())
        assert text.replace("'", "&#x27;").replace("`", "") in page
    assert found["samples matched"] > 100 and found["forward passes"]["compiled"] is None
    assert found["advice"][-1].startswith("σ is the spread")


def test_a_saved_predictor_needs_no_code(folder):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    favour.compile(net, torch.zeros(2, 8)).save("net.favour")
    assert run("net.favour", "x.npy").exit_code in (0, 3)
    assert record(folder)["model"] == "net.favour"


@pytest.mark.filterwarnings("ignore")
def test_transformer_takes_arrays_by_argument_name(folder):
    pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    np.savez("tokens.npz", input_ids=rng.integers(0, 50, (8, 7)), attention_mask=np.ones((8, 7), dtype=np.int64))
    result = run("trial_models:bert", "tokens.npz", samples=50, rows=4)
    assert result.exit_code in (0, 3), result.output
    assert record(folder)["facts"]["inputs, outputs"] == "4, 3 each"


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_exported_graphs_are_refused_with_the_reason(folder, name):
    (folder / name).write_bytes(b"graph")
    error = run(name, "x.npy").exception
    assert isinstance(error, InvalidValue) and "nothing left to sample" in str(error)


def test_model_without_noise_is_told_what_would_give_it_some(folder):
    result = run("trial_models:quiet", "x.npy")
    assert result.exit_code == 3
    assert record(folder)["verdict"] == "nothing to trust" and "posterior" in record(folder)["advice"][0]
    assert "forward passes" not in record(folder)["facts"]
    assert (folder / "check-report" / "check.html").read_text().count("<svg") == 0


def test_belief_that_forgets_correlations_is_found_out(folder):
    result = run("trial_models:own", "x.npy", "--method", "diag", samples=1000)
    assert result.exit_code == 3 and record(folder)["verdict"] == "use more rank"
    assert record(folder)["samples matched"] < 100


def test_belief_about_what_never_varies_is_wrong(folder):
    result = run("trial_models:still", "x.npy")
    assert result.exit_code == 3 and record(folder)["verdict"] in ("don't", "nothing to trust"), result.output
    assert record(folder)["samples matched"] is None


def test_model_that_fails_is_quoted(folder):
    error = run("trial_models:failing", "x.npy").exception
    assert isinstance(error, favour.FavourError) and "8" in str(error) and "5" in str(error)


def test_errors_name_what_to_change(folder):
    for arguments, told in (
        (("trial_models:own", "missing.npy"), "no file `missing.npy`"),
        (("trial_models:own", "trial_models.py"), "is not of a kind"),
        (("nowhere", "x.npy"), "`package.module:factory`"),
        (("trial_models:none", "x.npy"), "it has "),
    ):
        error = run(*arguments).exception
        assert isinstance(error, favour.FavourError) and told in str(error), error


def test_tables_are_read_by_columns(folder):
    (folder / "t.csv").write_text("name,a,b,y\nfirst,1,2,0\nsecond,3,4,1\nthird,5,6,0\n")
    torch.testing.assert_close(reading.read("t.csv", 2), torch.tensor([[1.0, 2, 0], [3, 4, 1]], dtype=torch.float64))
    chosen = reading.read("t.csv", 9, ["b", "a"])
    torch.testing.assert_close(chosen, torch.tensor([[2.0, 1], [4, 3], [6, 5]], dtype=torch.float64))
    (folder / "bare.tsv").write_text("1\t2\n3\t4\n")
    assert reading.read("bare.tsv", 5).shape == (2, 2)
    for columns, told in ((["z"], "no column z"), (["name"], "other things than numbers")):
        with pytest.raises(InvalidValue, match=rf"{told}.*--columns"):
            reading.read("t.csv", 5, columns)


def test_tensors_are_read_without_pickled_code(folder):
    torch.save({"a": torch.ones(4, 2), "b": torch.zeros(4, 3)}, "x.pt")
    assert {name: tuple(t.shape) for name, t in reading.read("x.pt", 3).items()} == {"a": (3, 2), "b": (3, 3)}
    np.savez("one.npz", x=np.ones((4, 2)))
    assert reading.read("one.npz", 3).shape == (3, 2)
    torch.save(nn.Linear(2, 2), "code.pt")
    with pytest.raises(InvalidValue, match="pickled code"):
        reading.read("code.pt", 3)


def test_samples_matched_is_the_law_of_samples():
    """A belief made of m samples is worth m samples, to chance."""
    m, n, inputs, outputs = 400, 4000, 60, 3
    g = torch.Generator().manual_seed(0)
    own = torch.randn(m, inputs, outputs, generator=g, dtype=torch.float64)
    d = own - own.mean(0)

    class Sampled:
        """A predictor whose belief is the mean and covariance of m draws."""

        method = favour.methods.Adjoint()

        def __call__(self, x):
            covariance = torch.einsum("nbi,nbj->bij", d, d) / m
            return favour.Belief(torch.zeros(inputs, outputs, dtype=torch.float64), covariance=covariance)

        def sample(self, x, n, generator):
            return torch.randn(n, inputs, outputs, generator=generator, dtype=torch.float64)

    found = favour.check(Sampled(), torch.zeros(inputs, 1), n, torch.Generator().manual_seed(1))
    # For Gaussian draws E‖S − Σ‖² = (‖Σ‖² + tr² Σ)/n; over 60 inputs that mean is known to some 15%.
    assert found.sampling_error == pytest.approx(math.sqrt((outputs + outputs**2) / n / outputs), rel=0.05)
    matched, least = found.samples_matched()
    assert not least and matched == pytest.approx(m, rel=0.35)


@pytest.mark.browser
def test_page_fits(folder):
    assert run("trial_models:own", "x.npy").exit_code in (0, 3)
    with started() as browser:
        assert_page_fits(browser, folder / "check-report" / "check.html")
