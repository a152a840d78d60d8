"""The site's tables of measured numbers, each made from a file under results/ that a benchmark wrote.

`<!-- table: NAME -->` on a page stands for the function NAME here. The README's tables are the same functions
(benchmarks/readme.py). A missing row is an error; where a whole file is missing, the page says which benchmark writes
it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, quantiles

ROOT = Path(__file__).resolve().parent.parent

_spec = importlib.util.spec_from_file_location("favour_readme", ROOT / "benchmarks" / "readme.py")
assert _spec is not None and _spec.loader is not None
_readme = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_readme)

worth, cost, architectures = _readme.worth, _readme.cost, _readme.architectures
memory, decisions = _readme.memory, _readme.decisions
bench, gpu_cost, peers, paper = _readme.bench, _readme.gpu_cost, _readme.peers, _readme.paper


def modes() -> str:
    """The error of the covariance with each way to treat an activation."""
    data = _load("worth")
    names = {"price": "adjoint", "taylor": "adjoint, taylor", "matched": "adjoint, matched"}
    rows = [
        [f"`{mode}`", *(f"{network['rows'][row]['covariance error']:.3f}" for network in data["networks"].values())]
        for mode, row in names.items()
    ]
    return _table(["`activation=`", *data["networks"]], rows, data)


def directions() -> str:
    """The price and the error of a few output directions."""
    data, errors = _load("cost"), _load("worth")["networks"]["MNIST, depth 2"]["rows"]
    rows = []
    for name in ("adjoint", "adjoint, 3 directions", "adjoint, bf16 sweeps", "adjoint, 3 directions, bf16 sweeps"):
        timed = name if "directions" in name else name.replace("adjoint", "adjoint, 10 outputs")
        forwards = data["rows"][f"{timed} | compiled"]["forwards"]
        rows.append([name, f"{forwards:.1f}", f"{errors[name]['covariance error']:.3f}"])
    return _table(["pass", "forward passes", "covariance error"], rows, data)


def choice() -> str:
    """What `"auto"` takes, with its own prediction of the cost beside the measured one."""
    data = _load("choice")
    rows = []
    for row in data["rows"]:
        covectors = "" if row["covectors"] is None else f", {row['covectors']} directions"
        taken = f"`{row['method']}`{covectors}" if row["settings"] == "auto" else ""
        predicted, measured = row["predicted forwards"], row["measured forwards"]
        rows.append([row["network"], row["settings"], taken, f"{predicted:.1f}", f"{measured:.1f}"])
    return _table(["network", "asked for", "taken", "forward passes, predicted", "measured"], rows, data)


def selfcheck() -> str:
    """What the check at compile time finds."""
    data = _load("selfcheck")
    found = data["summary"]
    meanings = {
        "good": "good: covariance off by at most 15%, mean by .15 standard deviations",
        "fair": "in between",
        "bad": "bad: covariance off by more than 30%, or mean by .3 standard deviations",
    }
    rows = [[text, str(found[k]["networks"]), f"{found[k]['suspected']:.1%}"] for k, text in meanings.items()]
    return _table(["beliefs that are", "networks", "warned of"], rows, data)


def algorithm1() -> str:
    """√ρ after K iterations over its limit, averaged over layers and seeds."""
    data = _load("algorithm1")
    starts = sorted({row["start"] for row in data["rows"]})
    ranks = sorted({row["rank"] for row in data["rows"]})
    rows = []
    for iterations in sorted({row["K"] for row in data["rows"]}):
        cells = [
            mean(
                mean(row["ratio"])
                for row in data["rows"]
                if (row["start"], row["rank"], row["K"]) == (start, rank, iterations)
            )
            for start in starts
            for rank in ranks
        ]
        rows.append([str(iterations), *(f"{cell:.3f}" for cell in cells)])
    header = ["K", *(f"{start} start, r = {rank}" for start in starts for rank in ranks)]
    return _table(header, rows, data)


def rank_and_iterations() -> str:
    """The error of `dplr` on a LeNet against r and K."""
    data = _load("dplr_lenet")
    iterations = sorted({row["K"] for row in data["rows"]})
    rows = []
    for rank in sorted({row["r"] for row in data["rows"]}):
        found = {row["K"]: row for row in data["rows"] if row["r"] == rank}
        rows.append([str(rank), *(_cell(found.get(k)) for k in iterations)])
    return _table(["r", *(f"K = {k}" for k in iterations)], rows, data)


def _cell(row: dict | None) -> str:
    return "" if row is None else f"{row['covariance error']:.3f} ({row['forward passes']:.0f})"


def gpu() -> str:
    """Cost on a GPU, and what lower precision moves."""
    data = _load("gpu_cost")
    rows = [
        [
            name,
            f"{row['forwards']:.1f}",
            f"{row['peak GiB over weights and input']:.1f} GiB",
            f"{row['covariance distance from float32 adjoint']:.1e}",
        ]
        for name, row in data["rows"].items()
    ]
    header = ["pass", "forward passes", "memory over weights and input", "distance from float32 `adjoint`"]
    return f"{data['network']}, {data['environment']['gpu']}:\n\n" + _table(header, rows, data)


def estimators() -> str:
    """Every estimator of class probabilities at one rate of dropout."""
    data = _load("decisions")
    rate = "0.5"
    rows = [
        [f"`{name}`", f"{row['nll']:.4f}", f"{row['ece']:.4f}", f"{row['total variation']:.4f}"]
        for name, row in data["classification"][rate]["rows"].items()
        if name in ("nodes", "probit", "bridge", "head")
    ]
    return _table(["`estimator=`", "NLL", "ECE", "total variation"], rows, data)


def intervals() -> str:
    """Conformal intervals of level 90 % beside intervals of one width for all inputs."""
    data = _load("decisions")
    rows = []
    for name, result in data["regression"].items():
        for kind, row in result["rows"].items():
            width = f"{row['width in standard deviations of y']:.2f}"
            rows.append([name, kind, f"{row['coverage']:.3f}", width, f"{row['over constant width']:.2f}"])
    return _table(["data set", "interval", "coverage", "mean width / sd of y", "over constant width"], rows, data)


def concordance() -> str:
    """The closed form of the JSD and n samples, both against the truth."""
    data = _load("concordance")
    rows = []
    for result in data["covariances"].values():
        found = result["rows"]
        sampled = {n: row["sampled against the truth"] for n, row in found.items() if n.isdigit()}
        estimates = {"closed form": found["lemma against the truth"], **{f"{n} samples": r for n, r in sampled.items()}}
        for name, row in estimates.items():
            difference = f"{row['relative difference']:.3f}"
            rows.append([f"{result['largest scale']}", name, difference, f"{row['concordance']:.4f}"])
    return _table(["largest standard deviation", "estimate", "relative difference", "concordance"], rows, data)


def adapters() -> str:
    """Posteriors of other libraries against their own samplers."""
    data = _load("adapters")
    rows = []
    for name, row in data["rows"].items():
        sampled = f"{row['covariance error of 100 samples']:.3f} / {row['covariance error of 1000 samples']:.3f}"
        times = f"{row['our milliseconds, compiled']:.1f} ms", f"{row['their seconds for the samples']:.1f} s"
        rows.append(
            [name, f"{row['covariance error']:.3f}", sampled, *times, f"{row['their samples in our time']:.1f}"]
        )
    header = [
        "posterior",
        "covariance error",
        "100 / 1000 of their samples",
        "one pass, compiled",
        "their 10,000 samples",
    ]
    return f"{data['network']}:\n\n" + _table([*header, "their samples in our time"], rows, data)


def optimisation() -> str:
    """Simple regret of Bayesian optimisation, the median over seeds and its quartiles."""
    data = _load("bayesopt")
    rows = []
    for problem, result in data["problems"].items():
        for method, found in result["methods"].items():
            final = [regret[-1] for regret in found["regret"]]
            low, middle, high = quantiles(final, n=4, method="inclusive")
            seconds = f"{found['seconds per acquisition']:.1f} s"
            evaluations = str(result["evaluations"][-1])
            rows.append([problem, method, evaluations, f"{middle:.3f} ({low:.3f} to {high:.3f})", seconds])
    header = ["function", "method", "evaluations", "simple regret (quartiles)", "a round"]
    return _table(header, rows, data)


def learning_posthoc() -> str:
    """A posterior after the fact beside what else a LeNet can get; in brackets what the bootstrap says of `fit`."""
    data = _load("learning_posthoc")
    names = {
        "plain": "plain",
        "temperature": "temperature",
        "fit": "**`fit`**, two top layers",
        "fit_last": "`fit`, last layer, Kronecker",
        "laplace": "Laplace, last layer, full",
        "mc_dropout": "MC dropout, a network of its own",
        "ensemble": "ensemble of the repeats",
    }
    rows = []
    for pictures in ("mnist", "fashion_mnist", "cifar10"):
        found = data.get(pictures)
        if found is None:
            continue
        verdicts = {(v["metric"], v["theirs"]): v["verdict"] for v in found["paired"] if v["ours"] == "fit"}
        for method, name in names.items():
            if method not in found["methods"]:
                continue
            entry = found["methods"][method]
            cells = [_mean(entry[k], 4) for k in ("nll", "ece")]
            for i, kind in enumerate(("nll", "ece")):
                if (kind, method) in verdicts:
                    cells[i] += f" ({verdicts[kind, method]})"
            areas = [_mean(entry[k], 3) if k in entry else "" for k in ("auroc_chosen", "auroc_max", "auroc_jsd")]
            rows.append([f"{pictures}, {found['repeats']} ×", name, *cells, _mean(entry["accuracy"], 4), *areas])
    header = ["pictures, repeats", "method", "NLL", "ECE", "accuracy", "AUROC, score chosen", "maximum", "JSD"]
    return _table(header, rows, data)


def learning_uci() -> str:
    """Test log-likelihoods of tables, and how far `fit` is above, paired over splits."""
    data = _load("learning_uci")
    names = {
        "sampled1": "1 draw, same updates",
        "sampled10": "10 draws, same updates",
        "sampled1@time": "1 draw, same time",
        "sampled10@time": "10 draws, same time",
        "mc_dropout": "MC dropout",
    }
    rows = []
    for table, found in data["summary"].items():
        methods, cells = found["methods"], []
        for method in names:
            entry = methods[method]
            cells.append(f"{_mean(entry['ll'], 2)} ({_mean(entry['closed_less_this'], 2, sign=True)})")
        seconds = [f"{methods[m]['seconds']['mean']:.0f}" for m in ("closed", "sampled1", "sampled10")]
        closed = f"**{_mean(methods['closed']['ll'], 2)}**"
        rows.append([f"{table}, {found['splits']}", str(found["updates"]), closed, *cells, " / ".join(seconds)])
    header = ["table, splits", "updates", "`fit`", *names.values(), "seconds: `fit` / 1 / 10 draws"]
    return _table(header, rows, data)


def learning_rates() -> str:
    """Learned dropout rates beside the best of a grid."""
    data = _load("learning_rates")
    found = data["summary"]
    rows = []
    for name in ("learned", "best of the grid", "median of the grid", "learned less best"):
        seconds = {"learned": "learned", "best of the grid": "the grid", "median of the grid": "one point"}.get(name)
        spent = "" if seconds is None else f"{found['seconds'][seconds]['mean']:.1f}"
        rows.append([name, *(_mean(found[k][name], 4) for k in ("validation", "test")), spent])
    header = [f"{found['splits']} splits, {found['trainings of the grid']} points", "validation", "test", "CPU seconds"]
    return _table(header, rows, data)


def learning_cost() -> str:
    """A step of learning through beliefs, in plain training steps."""
    data = _load("learning_cost")
    rows = []
    for name, row in data["rows"].items():
        rows.append([*name.split(" | "), f"{row['milliseconds']:.1f}", f"{row['plain steps']:.1f}"])
    return _table(["learned", "", "ms of one thread", "plain training steps"], rows, data)


def refine() -> str:
    """A hundred draws: plain, corrected and combined, beside the belief alone."""
    data = _load("refine")
    rows = []
    for network, found in data["networks"].items():
        at = found["draws"]["100"]
        named = {"belief": found["belief"], **{name: at[name] for name in ("samples", "refined", "combined")}}
        cells = [f"{e['covariance error']:.3f} / {e['mean error in standard deviations']:.3f}" for e in named.values()]
        rows.append([network, *cells, f"{found['share of variance left']:.1%}"])
    header = ["network", "belief alone", "100 samples", "corrected by them", "combined", "share of variance left"]
    return _table(header, rows, data)


def effort() -> str:
    """Errors of the covariance by setting, with forward passes."""
    data = _load("effort")
    settings = ("effort='fast'", "default", "secants", "rank 8", "effort='best'")
    rows = []
    for network, found in data["networks"].items():
        cells = [f"{found[s]['covariance error']:.3f} ({found[s]['forward passes']:.1f})" for s in settings]
        rows.append([network, *cells])
    return _table(["network", *settings], rows, data)


def _mean(found: dict | float, digits: int, sign: bool = False) -> str:
    """Mean ± standard error, as far as there are several values."""
    if not isinstance(found, dict):
        return f"{found:.{digits}f}"
    mean_ = f"{found['mean']:{'+' if sign else ''}.{digits}f}"
    return mean_ if found["se"] is None else f"{mean_} ± {found['se']:.{digits}f}"


def rating() -> str:
    """Rows per second of `favour rate`, and what else a large job is reckoned from."""
    data = _load("rate")
    rows = []
    for name, found in data["models"].items():
        one, pool = found["one thread"], found["ray"]
        cells = [
            f"{one['rows_per_cpu_second']:,.0f}",
            f"{one['rows_per_second']:,.0f}",
            f"{pool['rows_per_second']:,.0f}",
        ]
        start = f"{pool['first_part_after_s']:.0f} s"
        rows.append(
            [name, *cells, f"{pool['efficiency']:.2f}", start, str(one["batch"]), f"{one['bytes_per_row']:.0f}"]
        )
    workers = max(found["ray"]["workers"] for found in data["models"].values())
    header = ["network", "$r$: rows / CPU second", "rows / s, one thread", f"rows / s, {workers} Ray workers", "$e$"]
    others = data["others"]
    below = (
        f"Joining parts: $j$ = {others['rows_joined_per_second']:,.0f} rows/s. Scanning CSV of 8 columns: "
        f"{others['csv_rows_counted_per_second']:,.0f} rows/s."
    )
    if data["load before"] > 0.5:
        below += (
            f" Other work was on the machine (load {data['load before']:.1f} on {data['cores']} cores): all but the "
            "rows per CPU second are rough."
        )
    return _table([*header, "$t_0$", "batch", "bytes / row"], rows, data) + "\n\n" + below


def billion() -> str:
    """The formula of the page with the numbers of `rating`, at e = 1 and without start-up."""
    data = _load("rate")
    rows = []
    for name, found in data["models"].items():
        hours = 1e9 / found["one thread"]["rows_per_cpu_second"] / 3600
        disk = found["one thread"]["bytes_per_row"]
        rows.append([name, f"{hours:,.0f} h", *(f"{hours / w:,.1f} h" for w in (16, 64, 256)), f"{disk:.0f} GB"])
    header = ["network", "core hours", "16 cores", "64 cores", "256 cores", "result"]
    return _table(header, rows, data)


def zoo() -> str:
    """Every model of the zoo, failures included, and the counts."""
    data = _load("zoo")
    texts = []
    for title, key, which in (("Tried while working", "rows", "summary"), ("Held out", "held out rows", "held out")):
        told = data[which]
        exports = ", ".join(f"{n} to {form}" for form, n in told["exported"].items())
        texts.append(
            f"### {title}\n\n{told['models']} models of {told['packages']} packages: {told['compile']} compile, "
            f"{told['right']} are right, {len(told['wrong in silence'])} are wrong in silence. Of "
            f"{told['export tried']} that were exported, {exports} (within 30 seconds of one processor: "
            f"{', '.join(f'{n} to {form}' for form, n in told['exported within 30 s'].items())}).\n"
        )
        rows = [_zoo_row(name, row) for name, row in data[key].items()]
        header = ["model", "method", "outputs", "forward passes", "covariance error", "mean error", "`check`", "files"]
        texts.append(_table(header, rows, data))
    return "\n".join(texts)


def _zoo_row(name: str, row: dict) -> list[str]:
    if not row["compiles"]:
        words = (row.get("refused") or row.get("broke")).split("\n")[0].replace("|", "/")[:160]
        return [name, f"does not compile: {words}", "", "", "", "", "", ""]
    files = row.get("files", {})
    wrote = [f"{form} {t:.0f} s" if isinstance(t, float) else f"no {form}" for form, t in files.items()]
    numbers = [f"{row['forward passes']:.0f}", f"{row['covariance error']:.3f}", f"{row['mean error']:.3f}"]
    return [name, row["method"], str(row["outputs"]), *numbers, row["verdict"], ", ".join(wrote)]


def _load(name: str) -> dict:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def _table(header: list[str], rows: Iterable[list[str]], data: dict) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join([*lines, "", _readme._where(data)])
