"""The benchmark's arithmetic against independent references, and a whole small run. Nothing here asserts a time."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import favour
from favour_studies.bench import networks, record, samplers, suite, table
from favour_studies.bench.compare import compare, place
from favour_studies.bench.measure import Moments, Reference, Time, summary, time_all
from favour_studies.harness.memory import peak_memory


def normal_draws(n, seed, batch=3):
    """Draws of N(m, LLᵀ), (n, batch, 2), and the covariances."""
    generator = torch.Generator().manual_seed(seed)
    roots = torch.tensor([[[1.0, 0.0], [0.5, 0.3]], [[2.0, 0.0], [-1.0, 1.0]], [[0.1, 0.0], [0.0, 0.2]]]).double()
    z = torch.randn(n, batch, 2, generator=generator, dtype=torch.float64)
    return torch.einsum("bij,nbj->nbi", roots, z) + 100.0, roots @ roots.mT


def test_moments_in_pieces_equal_numpy():
    draws, _ = normal_draws(1000, 0)
    moments = Moments()
    for piece in draws.split(130):
        moments.add(piece)
    for b in range(3):
        expected = np.cov(draws[:, b].numpy().T)
        torch.testing.assert_close(moments.covariance[b], torch.from_numpy(expected), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(moments.mean, draws.mean(0))
    d = draws - draws.mean(0)
    scatter = d.square().sum(-1).square().mean(0) - moments.covariance.square().sum((1, 2))
    torch.testing.assert_close(moments.scatter, scatter, rtol=1e-9, atol=0)


def test_scatter_of_a_gaussian_is_known():
    """For Gaussian draws mean ‖d‖⁴ = (tr Σ)² + 2‖Σ‖², so V = (tr Σ)² + ‖Σ‖²."""
    draws, covariance = normal_draws(200_000, 1)
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    expected = trace.square() + covariance.square().sum((1, 2))
    torch.testing.assert_close(Moments().add(draws).scatter, expected, rtol=0.03, atol=0)


def gaussian_reference(n, seed=0):
    state = {"seed": seed}

    def sample(count):
        state["seed"] += 1
        return normal_draws(count, state["seed"])[0]

    return Reference.draw(sample, n, 5000, trials=(50, 200, 800), repeats=60)


def test_compiled_modules_of_one_class_do_not_share_code():
    """With guards on tensors only, as the benchmark has them, the first one's code would serve them all."""
    keep = getattr(torch.compiler, "keep_tensor_guards_unsafe", None)
    options = {} if keep is None else {"options": {"guard_filter_fn": keep}}
    x = torch.ones(2, 3)
    scaled = [samplers.compiled(samplers._Folded(nn.Identity(), draws), backend="eager", **options) for draws in (2, 5)]
    assert [call(x).shape[0] for call in scaled] == [2, 5]


def test_error_law_is_measured_as_the_fourth_moments_predict():
    reference = gaussian_reference(50_000)
    assert reference.constant == pytest.approx(reference.law, rel=0.1)
    for n, error in reference.measured.items():
        assert error == pytest.approx(reference.law / math.sqrt(n), rel=0.2)


def test_an_estimate_is_worth_the_samples_with_its_error():
    """A covariance off by a factor 1 + ε has the error ε; it is worth c²/ε² samples."""
    reference = gaussian_reference(50_000)
    _, exact = normal_draws(1, 0)
    mean = torch.full((3, 2), 100.0).double()
    judged = reference.judge(mean, 1.1 * exact)
    assert judged.net == pytest.approx(0.1, rel=0.1)
    assert judged.worth == pytest.approx(reference.constant**2 / 0.01, rel=0.2)
    assert not judged.capped
    perfect = reference.judge(mean, exact)
    assert perfect.capped and perfect.worth == reference.n
    assert perfect.error < 0.02 and perfect.mean_error < 0.02 and perfect.variance_error < 0.02


def test_speed_up_at_equal_error():
    costs = {"naive": {"seconds per draw": 2e-3, "once": 0.0}, "cached": {"seconds per draw": 1e-4, "once": 1e-3}}
    found = suite.merit(4e-3, 1000.0, costs)
    assert found["samples"] == {"naive": 2.0, "cached": pytest.approx(40.0)}
    assert found["speed-up"] == {"naive": pytest.approx(500.0), "cached": pytest.approx((1e-3 + 0.1) / 4e-3)}


def test_ratio_spread_adds_relative_spreads():
    found = suite.ratios(Time(4.0, 0.4, 5), Time(2.0, 0.1, 5), Time(1.0, 0.0, 5))
    assert found == {"forwards": 2.0, "forwards spread": pytest.approx(2 * 0.15), "compiled forwards": 4.0}


def test_times_are_taken_in_turns():
    order = []
    candidates = {name: lambda name=name: order.append(name) for name in "ab"}
    times = time_all(candidates, budget=0.0, rounds=(3, 3))
    assert times["a"].rounds == 3
    rounds = order[-2 * 3 * 100 :]  # instant calls are repeated a hundred times a round
    assert [rounds[i] for i in range(0, len(rounds), 100)] == ["a", "b"] * 3


def test_summary_of_one():
    assert summary([2.0]) == Time(2.0, 0.0, 1)


def test_peak_memory_counts_tensors():
    x = torch.zeros(1000)
    assert peak_memory(lambda: (x + 1) * 2, "cpu") == 8000


# ------------------------------------------------------------------------------------------------------- samplers


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    model = networks.mlp(6, 12, 8, 3, p=0.25).eval().requires_grad_(False)
    return model, torch.rand(4, 6)


@pytest.mark.parametrize("name", ["naive", "batched", "cached", "words"])
def test_samplers_draw_from_the_network(small, name):
    """Means and covariances within five standard errors of those of a loop over masks drawn here."""
    model, x = small
    with torch.no_grad():
        if name == "words":
            sampler = samplers.WordSampler(model.head, model.trunk(x), 500, None)
            draws = torch.cat([sampler(model.trunk(x)) for _ in range(8)])
        else:
            timed = {"naive": samplers.naive, "batched": samplers.batched}.get(
                name, lambda m, x: samplers.cached(m, x, None)
            )(model, x)
            calls = max(1, 4000 // timed.draws)
            torch.manual_seed(1)
            pieces = [timed.chunk().reshape(timed.draws, 4, 3) for _ in range(calls)]
            draws = torch.cat(pieces)
        own = []
        generator = torch.Generator().manual_seed(2)
        for _ in range(4000):
            h = model.trunk(x)
            for layer in model.head:
                mask = (torch.rand(h.shape, generator=generator) >= 0.25) / 0.75
                h = h * mask if isinstance(layer, nn.Dropout) else layer(h)
            own.append(h)
        own = torch.stack(own)
    n = min(len(draws), len(own))
    error = (own.var(0) * 2 / n).sqrt()
    assert ((draws.mean(0) - own.mean(0)).abs() < 5 * error).all()
    fourth = ((own - own.mean(0)) ** 4).mean(0)
    spread = ((fourth - own.var(0) ** 2) * 2 / n).sqrt()
    assert ((draws.var(0) - own.var(0)).abs() < 5 * spread).all()


def test_noisy_copy_draws_everywhere_and_keeps_norms():
    torch.manual_seed(0)
    model = networks.transformer(16, 1, p=0.5).eval()
    noisy = samplers.with_dropout(model)
    x = torch.rand(2, 1, 28, 28)
    with torch.no_grad():
        assert not torch.equal(noisy(x), noisy(x))
        assert torch.equal(model(x), model(x))
    for module in noisy.modules():
        if isinstance(module, nn.MultiheadAttention):
            assert module.training
    block = networks.resnet18((4, 8), 1)
    assert not any(m.training for m in samplers.with_dropout(block).modules() if isinstance(m, nn.BatchNorm2d))


def test_word_masks_have_the_rate_and_scale():
    mask = samplers.WordDropout(0.3)
    mask.words = torch.arange(-(2**15), 2**15).short()
    kept = mask(torch.ones(2**16, dtype=torch.float64))
    dropped = round(0.3 * 2**16)
    assert (kept == 0).sum() == dropped
    assert kept.mean().item() == pytest.approx(1.0, abs=1e-12)


def test_chunks_stay_within_memory():
    assert samplers.chunk_sizes(1, 10) == [512, 2048, 8192]
    assert samplers.chunk_sizes(512, 400) == [1, 4, 16]
    assert samplers.chunk_sizes(512, 2**20) == [1]


# ------------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_heads_begin_with_the_first_dropout(name):
    """Every network has noise, none of it in the trunk."""
    model = networks.NETWORKS[name].make()
    assert not any(isinstance(m, nn.Dropout) for m in model.trunk.modules())
    assert any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.head.modules())


def test_planted_data_are_reproducible_and_separable():
    x, y = networks.planted((8,), 3, 300)
    again, _ = networks.planted((8,), 3, 300)
    assert torch.equal(x, again)
    centres = torch.stack([x[y == c].mean(0) for c in range(3)])
    assert ((torch.cdist(x, centres).argmin(1) == y).float().mean()) > 0.8
    pictures, _ = networks.planted((1, 28, 28), 10, 4)
    assert pictures.shape == (4, 1, 28, 28) and pictures.min() >= 0 and pictures.max() <= 1


def test_unknown_names_are_listed():
    with pytest.raises(favour.errors.UnknownName, match="there are regression, mlp"):
        networks.chosen("mlp,none")
    with pytest.raises(favour.errors.UnknownName, match="there are auto"):
        suite.methods("none")
    with pytest.raises(favour.errors.InvalidValue, match="modes"):
        suite.run("mlp", modes=("fast",))
    with pytest.raises(favour.errors.InvalidValue, match="batches"):
        suite.run("mlp", batches=(0,))


# ------------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    options = {"modes": ("eager",), "samples": 0.004, "budget": 0.01, "checkpoints": str(folder), "tell": len}
    path = folder / "bench.json"
    found = suite.run("regression", "auto,diag,directions", batches=(1, 4), out=path, **options)
    return found, path, options


def test_run_measures_every_row(result):
    found, path, _ = result
    assert record.read(path)["rows"] == json.loads(json.dumps(found["rows"]))
    places = {(r["method"], r["batch"], r["mode"]) for r in found["rows"]}
    assert places == {(m, b, "eager") for m in ("auto", "diag") for b in (1, 4)}
    for row in found["rows"]:
        assert (
            row["forwards"] > 0 and row["memory over forward"] > 1 and set(row["speed-up"]) == set(samplers_of(found))
        )
        cost = next(b for b in found["baselines"] if b["batch"] == row["batch"])["samplers"]["naive"]
        expected = row["worth"] * cost["seconds per draw"] / row["time"]["seconds"]
        assert row["speed-up"]["naive"] == pytest.approx(expected)
    auto, diag = (next(r for r in found["rows"] if r["method"] == m) for m in ("auto", "diag"))
    assert auto["error"] < diag["error"]
    assert {s["method"] for s in found["skipped"]} == {"directions"}


def samplers_of(found):
    return found["baselines"][0]["samplers"]


def test_run_appends_and_reads_checkpoints(result):
    found, path, options = result
    more = suite.run("regression", "auto", batches=(4, 8), out=path, append=True, **options)
    assert {(r["method"], r["batch"]) for r in more["rows"]} == {("auto", 1), ("diag", 1), ("auto", 4), ("auto", 8)}
    again = next(r for r in more["rows"] if r["batch"] == 8)
    assert again["error"] == pytest.approx(next(r for r in found["rows"] if r["method"] == "auto")["error"])


def test_slow_networks_are_skipped_with_a_reason(result):
    _, _, options = result
    found = suite.run("regression", "diag", batches=(4,), limit=0.0, **options)
    assert not found["rows"] and "over the limit" in found["skipped"][0]["why"]
    assert "over the limit" in table.skipped(found)[0]


def test_table_shows_every_row(result):
    found = result[0]
    text = table.plain(found)
    assert len(table.lines(found)) == len(found["rows"])
    assert "3 directions of 1 output" in text and "MLP 2×100" in text
    table.show(found)


def test_figure_is_drawn(result, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    from favour_studies.bench import figure

    assert figure.draw(result[0], tmp_path / "bench.png").stat().st_size > 10_000
    with pytest.raises(favour.errors.InvalidValue, match="at batch 77"):
        figure.draw(result[0], tmp_path / "none.png", batch=77)


def test_comparison_flags_what_is_beyond_the_spreads(result):
    old = json.loads(json.dumps(result[0]))
    for row in old["rows"]:
        row["forwards"], row["forwards spread"], row["error"] = 10.0, 0.5, 0.5
    new = json.loads(json.dumps(old))
    assert compare(old, new).changes == []
    new["rows"][0]["forwards"] = 10.9  # within 0.5 + 0.5
    new["rows"][1]["forwards"] = 11.1
    new["rows"][2]["error"] = 5.0
    gone = new["rows"].pop()
    new["environment"]["threads"] = 99
    found = compare(old, new)
    assert [(c.what, c.new) for c in found.changes] == [("forwards", 11.1), ("error", 5.0)]
    assert not found.changes[0].better and found.changes[0].ratio == pytest.approx(1.11)
    assert found.removed == [place(gone)] and found.added == [] and found.compared == len(old["rows"]) - 1
    text = str(found)
    assert "threads was" in text and "2 changed beyond noise" in text


def test_files_that_are_no_record_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"rows": []}')
    with pytest.raises(favour.errors.CorruptFile, match="no result of `favour bench`"):
        record.read(path)


def test_command_compares_two_files(result, tmp_path):
    typer = pytest.importorskip("typer.testing")
    from favour.cli import build

    old, new = tmp_path / "old.json", tmp_path / "new.json"
    record.write(old, result[0])
    record.write(new, result[0])
    command = ["bench", "--out", str(new), "--compare", str(old), "--only-compare"]
    done = typer.CliRunner().invoke(build(), command)
    assert done.exit_code == 0 and "4 rows compared, 0 changed beyond noise." in done.output
    done = typer.CliRunner().invoke(build(), ["bench", "--only-compare"])
    assert isinstance(done.exception, favour.errors.InvalidValue)
