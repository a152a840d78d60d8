"""`favour demo`: what it chooses, what it says, and that terminal, page and record say the same."""

import dataclasses
import json

import pytest
import torch
from browsing import assert_page_fits, started
from typer.testing import CliRunner

import favour.cli
from favour.demo import digits, report, story

TRAINING = {"epochs": 5, "inputs": 1257, "seed": 0}


@pytest.fixture(scope="module")
def trained():
    data, model = digits.load(), digits.network()
    losses = list(digits.train(model, data, epochs=5))
    assert losses[-1] < losses[0] and not model.training
    return data, model


@pytest.fixture(scope="module")
def told(trained):
    data, model = trained
    small = dataclasses.replace(data, test_x=data.test_x[:200], test_y=data.test_y[:200])
    return story.tell(model, small, samples=500, compiled=False)


def test_demo_passes_its_options_on(monkeypatch, tmp_path, trained, told):
    given = {}
    monkeypatch.setattr(digits, "load", lambda seed: given.update(seed=seed) or trained[0])
    monkeypatch.setattr(digits, "train", lambda model, data, epochs, seed: given.update(epochs=epochs) or ())
    monkeypatch.setattr(story, "tell", lambda *_, compiled, seed: given.update(compiled=compiled) or told)
    before = torch.get_num_threads()
    try:
        words = ["demo", "--epochs", "7", "--seed", "3", "--threads", "2", "--eager", "--out", str(tmp_path / "x")]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(favour.cli.build(), words)
        assert result.exit_code == 0 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert given == {"epochs": 7, "seed": 3, "compiled": False}
    record = json.loads((tmp_path / "x" / "demo.json").read_text())
    page = (tmp_path / "x" / "report.html").read_text()
    assert record["training"] == {"epochs": 7, "inputs": 1257, "seed": 3}
    assert result.stdout.splitlines()[-1] == f"Now your own model: {report.TRY}"
    for sentence in (record["answer"], *(case["said"] for case in record["cases"]), report.TRY):
        assert sentence in result.stdout and sentence in page
    for row in record["rows"]:
        assert f"{row['error']:.1%}" in result.stdout and f">{row['error']:.1%}</td>" in page


def test_error_falls_with_samples_and_ours_meets_it(told):
    rows = {name: (error, cost) for name, error, cost in report.rows(told)}
    ten, hundred = rows["10 samples"], rows["100 samples"]
    assert ten[0] / hundred[0] == pytest.approx(10**0.5) and hundred[1] / ten[1] == pytest.approx(10)
    matched, ours = rows[f"{report.report.samples(told.trial)} samples"], rows["Favour, eager"]
    assert matched[0] == ours[0] < hundred[0]


def test_cases_are_what_they_are_called(told):
    groups = {name: [case for case in told.cases if case.group == name] for name in story.GROUPS}
    assert all(len(cases) == 3 for cases in groups.values())
    assert len({case.name for case in groups["sure"]}) == 3
    assert min(case.probabilities.max() for case in groups["sure"]) > 0.95
    assert max(float(case.probabilities.topk(2).values.diff().abs()) for case in groups["torn"]) < 0.3
    assert min(case.unfamiliar for case in groups["not a digit"]) > max(case.unfamiliar for case in groups["sure"])
    for case in told.cases:
        assert case.picture.shape == (8, 8) and 0 <= float(case.picture.min()) <= float(case.picture.max()) <= 1
        torch.testing.assert_close(case.probabilities.sum(), torch.tensor(1.0), atol=1e-4, rtol=0)


def test_bins_hold_every_image_once():
    p = torch.tensor([[0.91, 0.09], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6], [0.95, 0.05]], dtype=torch.float64)
    found = story.bins(p, torch.tensor([0, 1, 1, 0, 0]))
    assert [b.count for b in found] == [1, 2, 2]
    assert [b.confidence for b in found] == pytest.approx([0.6, 0.75, 0.93])
    assert [b.right for b in found] == [0, 0.5, 1]


def test_demo_training_leaves_the_random_state_alone():
    data, model = digits.load(), digits.network()
    before = torch.get_rng_state()
    for _ in digits.train(model, data, epochs=2):
        assert torch.equal(torch.get_rng_state(), before)


def test_demo_refuses_zero_epochs():
    assert CliRunner().invoke(favour.cli.build(), ["demo", "--epochs", "0"]).exit_code == 2


@pytest.mark.browser
def test_page_fits(told, tmp_path):
    with started() as browser:
        assert_page_fits(browser, report.write(told, TRAINING, tmp_path))
