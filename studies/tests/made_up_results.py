"""Small made-up result files of every experiment, in the layout `favour reproduce` writes."""


def envelope(name, **body):
    head = {
        "experiment": name,
        "format": 1,
        "profile": {"name": "quick", "repeats": 2, "test_inputs": 1000},
        "environment": {"favour": "0.1.0", "commit": "abc1234", "python": "3.11", "torch": "2.13", "cpu": "a CPU"}
        | {"threads": 2, "gpu": None, "device": "cpu", "when": "2026-01-02"},
        "seeds": {"training": 0, "sampling": 1},
        "data": {"source": "a local folder"},
        "timing_environments": [{"cpu": "a timed CPU", "threads": 2, "gpu": "a GPU", "device": "cpu"}],
        "training": [],
        "complete": True,
        "notes": [f"A note on {name} & <more>."],
    }
    return head | body


def stat(mean):
    return {"mean": mean, "sd": 0.01, "values": [mean - 0.01, mean + 0.01]}


def times(seconds):
    return {"seconds": seconds, "forwards": seconds / 0.01, "naive_samples": 2.0, "cached_samples": 14.0}


def methods(metrics):
    listed = [("plain", "plain", None, 0.01, 0.30), ("adjoint", "adjoint", None, 0.05, 0.10)]
    listed += [(f"cached-{n}", "cached", n, 0.01 + n / 1000, 0.1 + 0.3 / n) for n in (1, 10, 1000)]
    listed += [(f"naive-{n}", "naive", n, 0.02 * n, 0.1 + 0.3 / n) for n in (1, 10)]
    listed += [(f"dplr r={r}", "dplr", None, 0.02 + r / 100, 0.2 - r / 50) for r in (1, 2, 3)]
    return [
        {"id": i, "family": f, "label": i, "settings": {}, "n": n}
        | {"metrics": {m["id"]: stat(v) for m in metrics}, "time": times(t)}
        | {"pareto": {m["id"]: i in ("plain", "adjoint", "dplr r=1") for m in metrics}}
        for i, f, n, t, v in listed
    ]


def boot(metric, verdict, **more):
    difference = {"worse": 0.002, "better": -0.002, "not worse": 0.0001}[verdict]
    return {"metric": metric, "ours": "adjoint", "theirs": "cached-1000", "better": "lower", "ours_mean": 0.1} | {
        "theirs_mean": 0.1,
        "difference": difference,
        "low": difference - 0.001,
        "high": difference + 0.001,
        "level": 0.95,
        "draws": 100,
        "verdict": verdict,
        **more,
    }


def head_of(worths, wins=()):
    return {"ours": "adjoint", "forwards": 5.2, "naive_samples": 2.0, "cached_samples": 14.0} | {
        "equivalent": {m: {"samples": n, "at_least": n == 1000, "at_most": n == 1} for m, n in worths.items()},
        "sampling_wins": list(wins),
        "sentence": "",
    }


def metric(name, better, **more):
    return {"id": name, "title": name.upper(), "better": better, **more}


CLASS_METRICS = [metric("accuracy", "higher"), metric("ece", "lower"), metric("nll", "lower")]
TABLE_METRICS = [metric("rmse", "lower"), metric("nll", "lower"), metric("coverage95", "target", target=0.95)]


def task(name, metrics, headline, bootstrap, **more):
    return {"task": name, "title": name.capitalize(), "model": "dropout10", "model_title": "MLP, dropout 10%"} | {
        "inputs": 100,
        "repeats": 2,
        "time_inputs": 100,
        "methods": methods(metrics),
        "bootstrap": bootstrap,
        "headline": headline,
        **more,
    }


def classification():
    training = {"task": "mnist", "model": "dropout10", "epochs": 100, "paper_epochs": 1000, "inputs": 60000}
    tasks = [
        task(
            "mnist",
            CLASS_METRICS,
            head_of({"nll": 64, "ece": 1000}) | {"estimator": "192 draws"},
            [
                boot("nll", "worse", estimator="192 draws", time=times(0.02)),
                boot("nll", "not worse", estimator="many draws", ours="adjoint many", time=times(0.05)),
                boot("nll", "not worse", estimator="fresh samples", ours="control", time=times(3.0)),
            ],
            other_headlines=[head_of({"nll": 640, "ece": 1000}) | {"ours": "adjoint many", "estimator": "many draws"}],
        ),
        task("cifar10", CLASS_METRICS, head_of({"nll": 3, "ece": 1}, ["nll", "ece"]), [boot("ece", "worse")]),
    ]
    return envelope("classification", metrics=CLASS_METRICS, tasks=tasks, training=[training])


def regression():
    tasks = [
        task(
            name, TABLE_METRICS, head_of({"nll": 50, "rmse": 1}), [boot("nll", "better")] * (part == "test"), part=part
        )
        for name in ("boston", "energy")
        for part in ("test", "validation")
    ]
    return envelope("regression", metrics=TABLE_METRICS, tasks=tasks, complete=False)


def ood():
    scores = [{"id": "jsd", "title": "JSD"}, {"id": "entropy", "title": "Ent."}]
    rows = []
    for inference, title in (("plain", "Freq."), ("favour-adjoint", "Favour, adjoint"), ("samples-1000", "MC")):
        area = {"jsd": None if inference == "plain" else stat(0.912), "entropy": stat(0.8)}
        paper = {"jsd": None if inference == "plain" else {"mean": 77.7, "sd": 0.3}, "entropy": None}
        rows.append(
            {"id": inference, "family": "adjoint", "label": title, "settings": {}, "n": None, "inference": inference}
            | {"title": title, "auroc": area, "aupr": area, "time": times(0.02)}
            | {"paper": {"row": "x", "auroc": paper, "aupr": {}}}
        )
    models = [
        {"model": name, "title": title, "rows": rows, "accuracy": stat(0.9), "headline": head_of({"jsd": worth}, wins)}
        | {"bootstrap": [boot("auroc", verdict, score="jsd")]}
        | {"curve": [{"n": n, "auroc": 0.9 + n / 1e5} for n in (2, 10, 1000)]}
        for name, title, worth, wins, verdict in (
            ("vi", "Bayes", 55, [], "not worse"),
            ("dropout10", "DO 10%", 1, [], "worse"),
        )
    ]
    pair = {"id": "mnist-svhn", "trained_on": "MNIST", "unusual": "SVHN", "available": True, "why": None}
    gone = {"id": "cifar10-cifar100", "trained_on": "CIFAR-10", "unusual": "CIFAR-100", "available": False}
    return envelope(
        "ood",
        scores=scores,
        tables=[
            {"id": "table1", "title": "One pair", "measure": "auroc", "pairs": ["mnist-svhn"], "scores": ["jsd"]},
            {"id": "table2", "title": "ROC", "measure": "auroc", "scores": ["jsd", "entropy"]}
            | {"pairs": ["mnist-svhn", "cifar10-cifar100"]},
            {"id": "table3", "title": "PR", "measure": "aupr", "pairs": ["mnist-svhn"], "scores": ["entropy"]},
        ],
        pairs=[
            pair | {"inputs": 10, "unusual_inputs": 12, "repeats": 2, "models": models},
            gone | {"why": "no network <here>", "inputs": None, "unusual_inputs": None, "repeats": 2, "models": []},
        ],
        summary={"settings": 2, "not_worse": 1, "worse": [], "required": 2},
    )


def jsd():
    found = {"lin": 0.93, "pearson": 0.95, "ratio": 1.5}
    values = [0.1, 0.2, 0.3, 0.4]
    panel = {"lemma": values, "nodes": values, "sampled": {"10": values, "1000": values}, "reference_n": 5000}
    panel |= {"concordance": {"10": found, "1000": found}, "concordance_nodes": {"10": found, "1000": found}}
    panel |= {"error": {"lemma": 0.1, "nodes": 0.02, "10": 0.3, "1000": 0.03}}
    network = {"task": "mnist", "title": "MNIST", "model": "dropout10"} | panel
    return envelope("jsd", panels=[{"id": "small", "title": "small", "scale": 0.3} | panel], networks=[network])


def figures():
    x = [i / 5 - 2 for i in range(21)]
    part = {"mean": x, "stddev": [0.1 + abs(v) for v in x]}
    sine = {"train_x": [-1.0, 0.0, 1.0], "train_y": [-1.0, 0.0, 1.0], "x": x, "truth": x, "favour": part}
    sine |= {"samples": {"n": 1000} | part, "curves": [x, x], "noise": 0.04, "model": "m", "covariance_error": 0.05}
    points = [[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]
    panels = [
        {"id": i, "title": t, "favour_mean": [0.2, 0.3, 0.5], "favour_points": points, "sample_points": points}
        | {"jsd": j, "jsd_samples": j, "entropy": 0.3, "point": [0, 0]}
        for i, t, j in (("a", "Sure", 0.01), ("b", "Ambiguous", 0.02), ("c", "Far", 0.5))
    ]
    return envelope("figures", sine=sine, simplex={"classes": ["A", "B", "C"], "panels": panels})


ALL = {"classification": classification, "regression": regression, "ood": ood, "jsd": jsd, "figures": figures}
