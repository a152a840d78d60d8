"""The paper's experiments: training side by side, bootstrap, headline, and a whole tiny run that is interrupted."""

import dataclasses
import json
import math
import multiprocessing
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import favour
from favour import metrics
from favour_studies.experiments import bootstrap, data, figures, jsd, ood, paper, regression, selection
from favour_studies.experiments.checkpoint import decode, encode
from favour_studies.experiments.classification import compared, judged, nested
from favour_studies.experiments.headline import at_time, equivalent, headline, pareto
from favour_studies.experiments.methods import ADJOINT, HEAD_MANY, MANY, Subject, generator, live, methods, times
from favour_studies.experiments.models import LeNet, Perceptron, rate, seed_of
from favour_studies.experiments.pack import pack
from favour_studies.experiments.profiles import PROFILES, profile
from favour_studies.experiments.record import Units, plain, read_json, stat, write_json
from favour_studies.experiments.reproduce import _work, reproduce
from favour_studies.experiments.run import Run, Turns
from favour_studies.experiments.stack import CONVOLUTIONS, TABLE_KL_WEIGHT, Stack, build
from favour_studies.experiments.tasks import Group, groups, table, training_set
from favour_studies.experiments.train_all import stages, train_all
from favour_studies.experiments.training import history, network, read, train

TINY = profile("tiny")


# ---- networks side by side


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["loop", "grouped", "patches"])
def test_stack_equals_single_networks(channels, name):
    models = ["dropout10", "dropout50", "dropout25"]
    nets = [build(m, i, channels=channels).double().eval() for i, m in enumerate(models)]
    stack = Stack(nets, models).double().eval()
    stack.convolution = CONVOLUTIONS[name]
    side = 28 if channels == 1 else 32
    x = torch.randn(3, 4, channels, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = [net(a) for net, a in zip(nets, x, strict=True)]
    got = stack(x.permute(0, 1, 3, 4, 2))
    torch.testing.assert_close(got, torch.stack(want))
    got.square().sum().backward()
    for output in want:
        output.square().sum().backward()
    for parameter in stack.names:
        single = torch.stack([dict(net.named_parameters())[parameter].grad for net in nets])
        torch.testing.assert_close(stack.get(parameter).grad, single)


def test_stack_bf16_convolution_is_near():
    nets = [build("dropout10", i) for i in range(2)]
    stack = Stack(nets, ["dropout10"] * 2).eval()
    x = torch.rand(2, 4, 28, 28, 1, generator=torch.Generator().manual_seed(0))
    exact = stack(x)
    stack.convolution = CONVOLUTIONS["bf16 patches"]
    assert (stack(x) - exact).abs().max() < 0.02 * exact.abs().max()


def test_stack_vi_kl_and_spread():
    nets = [build("vi", i, inputs=5) for i in range(2)]
    stack = Stack(nets, ["vi", "vi"]).train()
    want = torch.stack([favour.nn.kl(net) for net in nets])
    torch.testing.assert_close(stack.kl(), want)
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    n = 1000
    draws = torch.stack([stack(x) for _ in range(n)]).squeeze(-1)
    for e, net in enumerate(nets):
        reference = favour.sample(net, x[e], n, generator=torch.Generator().manual_seed(1)).squeeze(-1)
        error = draws[:, e].std(0) * math.sqrt(2 / n)
        torch.testing.assert_close(draws[:, e].mean(0), reference.mean(0), rtol=0, atol=5 * error.max().item())
        assert ((draws[:, e].std(0) / reference.std(0)).log().abs() < 5 * math.sqrt(1 / n)).all()


def test_stack_dropout_rates_by_member():
    nets = [build(m, 0, inputs=4) for m in ("dropout10", "dropout50")]
    stack = Stack(nets, ["dropout10", "dropout50"]).train()
    torch.manual_seed(0)
    kept = (stack._drop(torch.ones(2, 100, 100)) > 0).double().mean((1, 2))
    assert (kept - torch.tensor([0.9, 0.5], dtype=torch.float64)).abs().max() < 5 * 0.5 / 100


def test_model_names():
    with pytest.raises(favour.FavourError, match="dropout99"):
        rate("dropout99")
    assert seed_of("a", 1) != seed_of("a", 2)
    assert LeNet("vi", 3, 10)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert Perceptron("dropout50", 3)(torch.zeros(2, 3)).shape == (2, 1)


# ---- files


def test_checkpoint_is_safetensors(tmp_path):
    tensors = {"a.weight": torch.randn(2, 3), "b": torch.randn(()), "empty": torch.zeros(0, 2)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode(tensors, {"k": "v"}))
    safe = pytest.importorskip("safetensors.torch")
    for name, tensor in safe.load_file(path).items():
        assert torch.equal(tensor, tensors[name])
    back, metadata = decode(path)
    assert metadata == {"k": "v"} and all(torch.equal(back[k], t) for k, t in tensors.items())


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, None])
def test_checkpoint_damaged(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    whole = encode({"a": torch.ones(100)}, {})
    path.write_bytes(whole[:-10] if damage is None else damage)
    with pytest.raises(favour.errors.CorruptFile, match=r"x\.safetensors"):
        decode(path)


def test_units_are_computed_once(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return {"number": 1.5, "nan": math.nan, "array": np.arange(3)}

    for _ in range(2):
        value = Units(tmp_path, {"seed": 0}, {}).get(("a b", 1), {"epochs": 1}, compute)
        assert value["number"] == 1.5 and value["nan"] is None and value["array"].tolist() == [0, 1, 2]
    assert len(calls) == 1
    Units(tmp_path, {"seed": 0}, {}).get(("a b", 1), {"epochs": 2}, compute)
    assert len(calls) == 2
    Units(tmp_path, {}, {}).path("a b", 1).write_text("{")  # damaged
    Units(tmp_path, {"seed": 0}, {}).get(("a b", 1), {"epochs": 2}, compute)
    assert len(calls) == 3


def test_json_is_plain(tmp_path):
    path = write_json(tmp_path / "x" / "y.json", {"t": torch.tensor([1.0, math.inf]), "n": np.float64(2)})
    assert json.loads(path.read_text()) == {"t": [1.0, None], "n": 2.0}
    assert plain((1, 2)) == [1, 2]
    path.write_text("{")
    with pytest.raises(favour.errors.CorruptFile, match=r"y\.json"):
        read_json(path)
    assert stat([1.0])["sd"] is None


# ---- training


def test_training_resumes_exactly(tmp_path):
    small = dataclasses.replace(TINY, train_inputs=64)
    longer = dataclasses.replace(small, epochs={"*": 3}, least={})
    for tasks in (["digits07"], ["diabetes"]):
        assert train_all(longer, "embedded", tmp_path / "whole", tasks=tasks)
        assert train_all(dataclasses.replace(small, epochs={"*": 1}), "embedded", tmp_path / "parts", tasks=tasks)
        assert train_all(longer, "embedded", tmp_path / "parts", tasks=tasks)
    paths = sorted((tmp_path / "whole").glob("*.safetensors"))
    assert len(paths) == 8
    for path in paths:
        (a, first), (b, second) = read(path), read(tmp_path / "parts" / path.name)
        assert first.epochs == second.epochs == 3 and first.loss == second.loss
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_training_learns_and_a_member_does_not_depend_on_the_others(tmp_path):
    group = Group("diabetes", "dropout", (("dropout10", 0), ("dropout50", 1)))
    data = training_set(group, "embedded")
    first = train(group, data, tmp_path, 1, 32)
    last = train(group, data, tmp_path, 40, 32)
    assert last.epochs == 40 and max(last.loss) < 0.9 * min(first.loss)
    net, trained = network(group, "dropout50", 1, tmp_path)
    assert trained.members == [("dropout10", 0), ("dropout50", 1)] and not net.training
    fresh = build("dropout50", seed_of(0, "diabetes", "dropout50", 1), inputs=10)
    assert not torch.equal(fresh.fc1.weight, net.fc1.weight)
    with pytest.raises(favour.FavourError, match="dropout25"):
        network(group, "dropout25", 0, tmp_path)
    with pytest.raises(favour.FavourError, match="another folder"):
        train(Group("diabetes", "dropout", (("dropout10", 0),)), data, tmp_path, 41, 32)


def test_training_stops_in_time_and_stages(tmp_path):
    long = dataclasses.replace(TINY, epochs={"*": 1000}, least={"*": 100})
    assert not train_all(long, "embedded", tmp_path, tasks=["diabetes"], minutes=0.001)
    group = groups(long, "embedded", ["diabetes"])[0]
    done = history(tmp_path / f"{group.name}.safetensors")
    assert done is None or done.epochs < 1000
    assert stages(long, group) == [100, 325, 550, 775, 1000]
    assert history(tmp_path / "nothing") is None


def test_groups_cover_the_experiments():
    members = {g.name: g.members for g in groups(PROFILES["paper"], "/folder")}
    assert len(members["mnist-dropout"]) == 30 and len(members["cifar10-vi"]) == 10
    assert members["fashion_mnist-dropout"] == tuple(("dropout10", r) for r in range(10))
    assert len(members["power-dropout"]) == 40


def test_table_is_standardised_and_disjoint():
    t = table("diabetes", 3, "embedded")
    torch.testing.assert_close(t.train.x.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(t.train.y.std(), torch.tensor(1.0))
    assert len(t.train) + len(t.validation) + len(t.test) == 442


# ---- comparison


def test_bootstrap_of_means_matches_the_normal_interval():
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d = bootstrap.means(x, torch.zeros_like(x), 1000, 0)
    assert d.std().item() == pytest.approx(x.std().item() / math.sqrt(4000), rel=0.1)
    assert d.mean().item() == pytest.approx(x.mean().item(), abs=4 * x.std().item() / math.sqrt(4000 * 1000))


def test_bootstrap_auroc_with_unit_counts_is_the_area():
    random = torch.Generator().manual_seed(0)
    usual = torch.randint(5, (40,), generator=random).double()
    unusual = torch.randint(7, (30,), generator=random).double()
    want = sum(float(b > a) + 0.5 * float(b == a) for a in usual for b in unusual) / (40 * 30)
    area = bootstrap.weighted_auroc(usual, unusual)
    assert area(torch.ones(1, 40).double(), torch.ones(1, 30).double()).item() == pytest.approx(want, abs=1e-12)
    # Counts of two stand for inputs listed twice.
    counts = torch.ones(1, 40).double()
    counts[0, :10] = 2
    other = bootstrap.weighted_auroc(torch.cat([usual, usual[:10]]), unusual)
    assert area(counts, torch.ones(1, 30).double()).item() == pytest.approx(
        other(torch.ones(1, 50).double(), torch.ones(1, 30).double()).item(), abs=1e-12
    )


def test_bootstrap_ece_with_unit_counts(monkeypatch):
    random = torch.Generator().manual_seed(0)
    p, q = (torch.randn(200, 4, generator=random).softmax(1) for _ in range(2))
    y = torch.randint(4, (200,), generator=random)
    monkeypatch.setattr(bootstrap, "counts", lambda n, r, g: iter([torch.ones(1, n, dtype=torch.float64)]))
    d = bootstrap.ece([p], [q], y, 1, 0)
    assert d.item() == pytest.approx(metrics.ece(p, y) - metrics.ece(q, y), abs=1e-12)


@pytest.mark.parametrize(
    ("better", "shift", "want"),
    [("lower", 1, "worse"), ("lower", -1, "better"), ("lower", 0, "not worse"), ("higher", 1, "better")],
)
def test_bootstrap_verdict(better, shift, want):
    d = shift + 0.1 * torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert bootstrap.verdict("m", better, 1.0, 1.0 - shift, d)["verdict"] == want


def test_methods_ask_for_draws(monkeypatch):
    assert ADJOINT.asked == {} and HEAD_MANY.asked == {"estimator": "head", "draws": MANY}
    assert HEAD_MANY in methods(TINY) and HEAD_MANY not in methods(TINY, pictures=False)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)).eval()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    predict = favour.compile(net, x[:2])
    with torch.no_grad():
        z = predict.draws(x, n=MANY)
        assert z.shape == (MANY, 4, 3)
        torch.testing.assert_close(predict.probabilities(x, **HEAD_MANY.asked), z.softmax(-1).mean(0))


def test_headline_counts_samples():
    curve = [(1, 4.0), (10, 2.0), (100, 1.0)]
    assert equivalent(curve, 0.5) == {"samples": 100.0, "at_least": True, "at_most": False}
    assert equivalent(curve, 5.0) == {"samples": 1.0, "at_least": False, "at_most": True}
    assert equivalent(curve, 1.5)["samples"] == pytest.approx(10**1.5, rel=0.01)
    assert equivalent([(n, -q) for n, q in curve], -1.5, "higher")["samples"] == pytest.approx(10**1.5, rel=0.01)
    assert at_time(curve, 10**0.5) == pytest.approx(3.0)
    assert equivalent(curve, 2.0, "higher")["samples"] is None  # the more samples, the worse
    time = {"forwards": 2.0, "naive_samples": 1.5, "cached_samples": 50.0}
    head = headline("T", {"nll": curve}, {"nll": 1.5}, {"nll": "lower"}, time)
    assert head["sampling_wins"] == ["nll"] and "better in NLL" in head["sentence"]
    assert headline("T", {"nll": curve}, {"nll": 1.1}, {"nll": "lower"}, time)["sampling_wins"] == []


def test_pareto():
    assert pareto([(1.0, 2.0), (2.0, 1.0), (2.5, 1.5)]) == [True, True, False]


def test_times_are_ratios():
    every = methods(TINY)
    seconds = {m.id: 1.0 for m in every}
    seconds |= {"cached-1": 1.0, "cached-4": 4.0, "cached-16": 16.0, "naive-1": 2.0, "naive-4": 8.0, "adjoint": 10.0}
    block = times(seconds, every)["adjoint"]
    assert block == {"seconds": 10.0, "forwards": 10.0, "naive_samples": 5.0, "cached_samples": 10.0}
    assert times({k: v for k, v in seconds.items() if k != "naive-4"}, every)["naive-4"]["extrapolated"]


def test_classification_metrics_and_comparison():
    random = torch.Generator().manual_seed(0)
    p = torch.randn(300, 5, generator=random).softmax(1)
    y = torch.multinomial(p, 1, generator=random).squeeze(1)
    found = judged(p, y)
    assert found["nll"] == pytest.approx(metrics.nll(p, y), rel=1e-9) and 0 < found["pavpu"] < 1
    worse = (0.5 * p + 0.1).contiguous()
    tests = {b["metric"]: b for b in compared([worse, worse], [p, p], y, "cached-9", 200, 0)}
    assert tests["nll"]["verdict"] == "worse" and tests["nll"]["theirs"] == "cached-9"
    assert tests["accuracy"]["difference"] == 0


def test_naive_and_cached_sampler_agree(tmp_path):
    group = Group("digits", "dropout", (("dropout50", 0),))
    data = training_set(group, "embedded", 64)
    train(group, data, tmp_path, 1, 32)
    subject = Subject(group, "dropout50", tmp_path)
    net = subject.load(0)
    x = (data.x[:3].permute(0, 3, 1, 2)).contiguous()
    with torch.no_grad():
        a, b = (nested(subject, x, [2, 800], 0, family) for family in ("naive", "cached"))
    draws = favour.sample(net, x / 255, 800, generator=generator(torch.device("cpu"), 5)).softmax(-1)
    bound = 6 * draws.std(0) / math.sqrt(400)
    assert ((a[800] - b[800]).abs() < bound + 1e-6).all()
    assert not net.drop1.training
    with live(net):
        assert net.drop1.training


def test_regression_noise_and_scores():
    random = torch.Generator().manual_seed(0)
    rows = table("diabetes", 0, "embedded")
    held, y = rows.validation.y, rows.test.y

    def moments(target):
        noise = 0.5 * torch.randn(target.shape, generator=random)
        return (target + noise).double(), torch.full_like(target, 0.01).double()

    found = regression.judged(moments(held), moments(y), rows)
    assert found["noise"] / rows.scale**2 == pytest.approx(0.24, rel=0.5)
    assert found["test"]["rmse"] == pytest.approx(0.5 * rows.scale, rel=0.3)
    assert found["test"]["nll"] == pytest.approx(found["row_nll"].mean(), rel=1e-9)
    assert found["test"]["coverage95"] > 0.8


def test_validated_fits_each_half_to_the_other():
    y = torch.tensor([0.0, 2.0, 0.0, 6.0], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    want = torch.tensor([18.0, 18.0, 2.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(regression.validated((zero, zero), y), want, rtol=1e-5, atol=0)  # found by iteration


def test_selection_of_the_kl_weight_reads_no_test_row(monkeypatch):
    reads = []

    def spoiled(task, split, source):
        found = table(task, split, source)
        reads.append(split)
        return dataclasses.replace(found, test=None)

    monkeypatch.setattr(selection, "table", spoiled)
    monkeypatch.setattr(selection, "SAMPLES", 20)
    found = selection.validation_nll("diabetes", "embedded", (1e4, 0.1), splits=2, epochs=15)
    assert set(found) == {"10000", "0.1"} and all(len(v) == 2 for v in found.values()) and set(reads) == {0, 1}
    assert selection.best({"diabetes": found})[0] == "0.1"  # the other is held at the prior


def test_kl_weight_is_kept(tmp_path):
    group = Group("diabetes", "vi", (("vi", 0),))
    data = training_set(group, "embedded")
    assert train(group, data, tmp_path, 1, 32).kl_weight == TABLE_KL_WEIGHT
    strong = train(group, data, tmp_path / "strong", 1, 32, kl_weight=50.0)
    assert history(tmp_path / "strong" / "diabetes-vi.safetensors").kl_weight == strong.kl_weight == 50
    dropout = Group("diabetes", "dropout", (("dropout10", 0),))
    assert train(dropout, data, tmp_path, 1, 32).kl_weight is None


def test_jsd_concordance():
    x = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert jsd.concordance(x, x)["lin"] == pytest.approx(1)
    shifted = jsd.concordance(x, x + 1)
    assert shifted["pearson"] == pytest.approx(1) and shifted["lin"] < 0.3
    z = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0))
    p = z.double().softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    mean = p.mean(0)
    want = -(mean * mean.log()).sum(-1) - entropy.mean(0)
    pieces = iter(z.split(25))
    original, jsd._HELD = jsd._HELD, 25 * 12
    try:
        torch.testing.assert_close(jsd.divergence(lambda n: next(pieces), 50, 4, 3), want)
    finally:
        jsd._HELD = original


def test_paper_numbers():
    assert len(paper.TABLES["auroc"]) == len(paper.TABLES["aupr"]) == 36
    assert paper.numbers("aupr", "cifar10-svhn", "vi", "MC")["kl"] == {"mean": 81.8, "sd": 0.1}
    assert paper.numbers("auroc", "mnist-fashion_mnist", "dropout50", "Freq.")["jsd"] is None
    assert paper.numbers("auroc", "cifar10-cifar100", "vi", "MC") == {}


def test_figures_show_what_they_should():
    found = plain(figures.simplex(0, 400))
    confident, ambiguous, unfamiliar = found["panels"]
    assert max(confident["favour_mean"]) > 0.9 > max(ambiguous["favour_mean"])
    assert unfamiliar["jsd_samples"] > 3 * confident["jsd_samples"]
    curve = plain(figures.sine(0, 300))
    assert len(curve["x"]) == len(curve["favour"]["mean"]) == 201 and curve["covariance_error"] < 0.2


# ---- the whole


@pytest.fixture
def no_report(monkeypatch):
    module = types.ModuleType("favour_studies.report")
    module.build = lambda folder: Path(folder) / "report.html"
    monkeypatch.setitem(sys.modules, "favour_studies.report", module)


def test_reproduce_everything_and_resume(tmp_path, no_report, monkeypatch):
    small = dataclasses.replace(TINY, test_inputs=30, train_inputs=64, jsd_inputs=4, jsd_reference=100)
    monkeypatch.setitem(PROFILES, "tiny", small)

    class Stopped(Exception):
        pass

    count = {"units": 0, "stop": 15}
    original = Units.get

    def counted(self, names, key, compute):
        def once():
            count["units"] += 1
            if count["units"] == count["stop"]:
                raise Stopped
            return compute()

        return original(self, names, key, once)

    monkeypatch.setattr(Units, "get", counted)
    with pytest.raises(Stopped):
        reproduce("all", "tiny", out=tmp_path, quiet=True)
    done = len(list((tmp_path / "units").rglob("*.json")))
    assert done == 14
    count["stop"] = -1
    report = reproduce("all", "tiny", out=tmp_path, quiet=True)
    total = len(list((tmp_path / "units").rglob("*.json")))
    assert count["units"] == 15 + total - done  # none was computed twice but the one that was stopped
    assert report.parent == tmp_path
    before = count["units"]
    reproduce("ood", "tiny", out=tmp_path, quiet=True)
    assert count["units"] == before
    _check_results(tmp_path)


def test_workers_share_the_units(tmp_path, no_report):
    """Two processes leave the files that one does, but for times."""
    small = {"which": "regression", "profile_name": "tiny", "quiet": True}
    reproduce(**small, out=tmp_path / "one")
    reproduce(**small, out=tmp_path / "two", checkpoints=tmp_path / "one" / "checkpoints", workers=2)
    folders = [tmp_path / name / "units" for name in ("one", "two")]
    one, two = (sorted(p.relative_to(f) for p in f.rglob("*.json")) for f in folders)
    assert one == two and len(one) > 30
    for path in one:
        a, b = (read_json(f / path) for f in folders)
        assert a["key"] == b["key"] and (path.stem == "timing" or a["value"] == b["value"])
    tables = [read_json(tmp_path / name / "regression.json")["tasks"] for name in ("one", "two")]
    assert [t["bootstrap"] for t in tables[0]] == [t["bootstrap"] for t in tables[1]]


def test_what_a_lost_process_leaves_is_computed_at_the_end(tmp_path, no_report):
    taken = multiprocessing.Value("q", 0)
    assert Turns(taken).mine()  # by a process that ends before it computes anything
    reproduce("regression", "tiny", out=tmp_path / "one", quiet=True)
    trained = tmp_path / "one" / "checkpoints"
    run = Run(TINY, "embedded", trained, tmp_path / "two", quiet=True)
    _work(run, ["regression"], taken)
    total, done = (len(list((tmp_path / name).rglob("units/**/*.json"))) for name in ("one", "two"))
    assert done == total - 1
    reproduce("regression", "tiny", out=tmp_path / "two", checkpoints=trained, quiet=True)
    assert len(list((tmp_path / "two").rglob("units/**/*.json"))) == total
    tables = [read_json(tmp_path / name / "regression.json")["tasks"] for name in ("one", "two")]
    assert [t["bootstrap"] for t in tables[0]] == [t["bootstrap"] for t in tables[1]]


def test_turns_are_taken_once():
    jobs, shared = 40, multiprocessing.Value("q", 0)
    every = [Turns(shared) for _ in range(3)]
    seen, done = [0, 0, 0], []
    order = random.Random(0)
    while min(seen) < jobs:  # processes of different speeds
        k = order.choices(range(3), [5, 2, 1])[0]
        if seen[k] < jobs:
            if every[k].mine():
                done.append(seen[k])
            seen[k] += 1
    assert sorted(done) == list(range(jobs))


def test_summary_of_verdicts():
    entry = {"difference": 0.1, "low": 0.05, "high": 0.2}
    found = bootstrap.tally([("a", entry | {"verdict": "worse"}), ("b", entry | {"verdict": "better"})])
    assert found == {"settings": 2, "not_worse": 1, "worse": [{"setting": "a"} | entry]}


def _check_results(folder: Path) -> None:
    files = {
        name: read_json(folder / f"{name}.json") for name in ("classification", "regression", "ood", "jsd", "figures")
    }
    for name, content in files.items():
        assert content["experiment"] == name and content["complete"] and content["environment"]["torch"]
    (task,) = files["classification"]["tasks"]
    ids = [m["id"] for m in task["methods"]]
    assert ids == [m.id for m in methods(PROFILES["tiny"])]
    assert {b["metric"] for b in task["bootstrap"]} == {"nll", "ece", "accuracy", "brier"}
    assert [b["ours"] for b in task["bootstrap"][::4]] == [
        "adjoint",
        "adjoint nodes",
        f"adjoint head {MANY}",
        "control",
    ]
    assert all(b["time"]["forwards"] > 0 and b["estimator"] for b in task["bootstrap"])
    for name in ("classification", "regression", "ood"):
        (clock,) = files[name]["timing_environments"]
        assert clock["device"] == "cpu" and clock["threads"] == torch.get_num_threads()
    assert all(len(m["metrics"]["nll"]["values"]) == 2 for m in task["methods"])
    for metric in ("nll", "accuracy"):
        assert any(m["pareto"][metric] for m in task["methods"])
    assert [(t["model"], t["part"]) for t in files["regression"]["tasks"]] == [
        (model, part) for model in ("dropout10", "dropout50", "vi") for part in ("test", "validation")
    ]
    (pair,) = files["ood"]["pairs"]
    assert [m["model"] for m in pair["models"]] == ["vi", "dropout10", "dropout25", "dropout50"]
    for model in pair["models"]:
        rows = {r["inference"]: r for r in model["rows"]}
        assert rows["plain"]["auroc"]["jsd"] is None and rows["plain"]["auroc"]["entropy"]["mean"] > 0
        assert all(rows[k]["auroc"]["jsd"] is not None for k in rows if k != "plain")
    assert files["ood"]["summary"]["settings"] == 4 and files["ood"]["summary"]["ours"] == HEAD_MANY.id
    assert files["classification"]["summary"]["nll"]["settings"] == files["classification"]["summary"]["required"] == 1
    assert files["regression"]["summary"]["nll"]["settings"] == 3
    assert set(files["ood"]["summary"]["by_estimator"]) == {
        "jsd",
        "jsd_nodes",
        "jsd_head",
        "jsd_head_many",
        "jsd_control",
    }
    assert {p["id"] for p in files["jsd"]["panels"]} == {"small", "large"}


def test_ood_without_the_hub(monkeypatch, tmp_path):
    def unreachable(*arguments):
        raise favour.errors.CorruptFile("no network")

    monkeypatch.setattr(ood, "pictures", unreachable)
    run = Run(TINY, "/folder", tmp_path, tmp_path)
    row, models = ood.one_pair(run, ("cifar10", "cifar100"))
    assert row["available"] is False and "could not be reached" in row["why"] and list(models) == []
    with pytest.raises(favour.errors.CorruptFile):
        ood.one_pair(run, ("cifar10", "svhn"))


@pytest.mark.parametrize(
    ("options", "match"),
    [({"which": "al"}, "no experiment"), ({"data": "/nowhere"}, "no folder"), ({"workers": 0}, "at least one process")],
)
def test_reproduce_refuses(tmp_path, options, match):
    with pytest.raises(favour.FavourError, match=match):
        reproduce(**{"which": "jsd", "profile_name": "tiny", "out": tmp_path} | options)
    with pytest.raises(favour.FavourError, match="no profile"):
        profile("slow")


def test_the_hub_is_asked_once(monkeypatch):
    """Where it does not answer, `datasets` looks into its cache only."""
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    asked, offline = [], []

    def info(self, name, timeout):
        asked.append((name, timeout))
        raise OSError("no route")

    def load(source, split):
        offline.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("not in the cache")

    monkeypatch.setattr(hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(favour.errors.CorruptFile, match="cifar100"):
        data.images("cifar100", "test", "hub")
    assert len(asked) == 1 and asked[0][1] <= 5 and offline == [True]
    assert before == datasets.config.HF_HUB_OFFLINE


def test_pack_round_trip(tmp_path):
    from favour_studies.experiments.data import images

    paths = pack("digits", "test", "unused", tmp_path, megabytes=0.02)
    assert len(paths) > 1
    for i, path in enumerate(paths):
        path.rename(tmp_path / f"mnist-test-{i}.npz")
    back, want = images("mnist", "test", tmp_path), images("digits", "test")
    assert torch.equal(back.x, want.x) and torch.equal(back.y.long(), want.y.long())
    (tmp_path / "mnist-test-0.npz").write_bytes(b"no")
    with pytest.raises(favour.errors.CorruptFile, match="mnist-test-0"):
        images("mnist", "test", tmp_path)


def test_methods_are_named_once():
    for name in ("quick", "paper"):
        ids = [m.id for m in methods(profile(name))]
        assert len(ids) == len(set(ids)) and "adjoint" in ids and "cached-1000" in ids
    assert ADJOINT.identity()["n"] is None
    assert isinstance(build("dropout10", 0), nn.Module)
