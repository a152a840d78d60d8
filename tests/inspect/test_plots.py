"""Pictures: what is drawn where, and that matplotlib is needed only to draw."""

import math
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch

from favour import metrics, plots
from favour.belief import Belief
from favour.errors import InvalidValue, MissingExtra, ShapeMismatch

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # the backend comes first


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def drawn(ax):
    ax.figure.canvas.draw()  # layout and text errors show only here
    return ax


def test_plots_draw_into_given_axes():
    _, ax = plt.subplots()
    p, y = torch.softmax(torch.randn(50, 3), 1), torch.randint(3, (50,))
    assert plots.reliability(p, y, ax=ax) is ax
    assert plots.risk_coverage({"u": torch.rand(50)}, torch.rand(50), ax=ax) is ax


def test_reliability_bars_are_the_fraction_right():
    p = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.75, 0.25]])
    ax = drawn(plots.reliability(p, torch.tensor([0, 1, 0]), bins=10))
    heights = {round(bar.get_x(), 2): bar.get_height() for bar in ax.patches if bar.get_width() == pytest.approx(0.1)}
    assert heights == {0.9: 0.5, 0.7: 1.0}
    assert f"{metrics.ece(p, torch.tensor([0, 1, 0]), 10):.3f}" in ax.texts[0].get_text()


def test_simplex_puts_certain_classes_into_their_corners():
    sources = {
        "first": Belief.point(torch.tensor([[50.0, 0.0, 0.0]])),
        "second": Belief.point(torch.tensor([[0.0, 50.0, 0.0]])),
        "third": torch.tensor([[0.0, 0.0, 50.0]]).expand(10, 3),
    }
    ax = drawn(plots.simplex(sources, ("a", "b", "c")))
    centres = [c.get_offsets().mean(0) for c in ax.collections[1::2]]
    np.testing.assert_allclose(centres, [[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]], atol=1e-6)
    assert [t.get_text() for t in ax.texts] == ["a", "b", "c"]
    with pytest.raises(ShapeMismatch, match=r"\(400, 4\)"):
        plots.simplex({"four": Belief.point(torch.zeros(1, 4))})
    with pytest.raises(InvalidValue, match="2 names"):
        plots.simplex(sources, ("a", "b"))


def test_band_is_sorted_and_holds_its_interval():
    x = torch.tensor([2.0, 0.0, 1.0])
    belief = Belief(x[:, None] ** 2, diag=torch.ones(3, 1))
    ax = drawn(plots.band(x, belief, noise=1.0, data=(x, x), truth=x))
    mean = next(line for line in ax.lines if line.get_label() == "mean")
    np.testing.assert_allclose(mean.get_xydata(), [[0, 0], [1, 1], [2, 4]])
    edge = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert edge.max() == pytest.approx(4 + 1.95996, abs=1e-4)
    with pytest.raises(ShapeMismatch, match="one number per input"):
        plots.band(x, Belief.point(torch.zeros(3, 2)))


def test_histogram_and_roc_show_the_area():
    usual, unusual = torch.rand(100), torch.rand(80) + 0.5
    area = metrics.auroc(torch.cat([usual, unusual]), torch.cat([torch.zeros(100), torch.ones(80)]))
    ax = drawn(plots.histogram(usual, unusual))
    assert f"{area:.3f}" in ax.get_legend().get_title().get_text()
    assert sum(bar.get_height() for bar in ax.patches) == pytest.approx(2)
    ax = drawn(plots.roc({"score": (usual, unusual)}))
    assert f"{area:.3f}" in ax.get_legend().get_texts()[0].get_text()
    wide = drawn(plots.histogram(10 ** (4 * torch.rand(50)), 10 ** (4 * torch.rand(50))))
    assert wide.get_xscale() == "log"
    with pytest.raises(InvalidValue, match="nan"):
        plots.histogram(usual, torch.tensor([math.nan]))


def test_risk_coverage_draws_the_metric():
    u, loss = torch.rand(30), (torch.rand(30) < 0.3).double()
    ax = drawn(plots.risk_coverage({"u": u}, loss))
    covered, risk = metrics.risk_coverage(u, loss)
    np.testing.assert_allclose(ax.lines[0].get_xydata(), np.stack([covered, risk], 1))
    assert f"{metrics.aurc(u, loss):.4f}" in ax.get_legend().get_texts()[0].get_text()


def test_importing_favour_leaves_matplotlib_and_scikit_learn_alone():
    code = "import sys, favour; assert favour.plots; print([m for m in ('matplotlib', 'sklearn') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingExtra, match=r"favour\[plots\]"):
        plots.risk_coverage({"u": torch.rand(3)}, torch.rand(3))
