"""The first section and the last: the answer in short; what was run, and how near the trainings come to the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from favour.pages import (
    DASH,
    cell,
    count,
    details,
    figure,
    group_row,
    head,
    number,
    reading,
    row,
    row_head,
    seconds,
    table,
)
from favour_studies.report import pictures
from favour_studies.report.load import Results
from favour_studies.report.markup import metric_name, model_name, plural
from favour_studies.report.verdicts import (
    PRIMARY,
    TITLES,
    Setting,
    gain,
    goal,
    medians,
    settings,
    tallies,
    tally_table,
    unmatched,
    worth_of,
)

Json = Mapping[str, Any]
NAMES = {
    "classification": "Calibration, classification",
    "regression": "Calibration, regression",
    "ood": "Unfamiliar inputs",
    "jsd": "JSD: closed form against samples",
    "figures": "The sine and the simplex",
}


def headline(results: Results) -> str:
    """What a person forwards: cards, a picture and a table of worth and cost; the details are folded."""
    every = settings(results)
    if not every:
        return ""
    groups = {name: [s for s in every if s.experiment == name] for name in PRIMARY}
    groups = {name: own for name, own in groups.items() if own}
    tested = {name: [s for s in own if s.part == "test"] for name, own in groups.items()}
    wanted = [("classification", "nll"), ("classification", "ece"), ("regression", "nll"), ("ood", "auroc")]
    found = [t for name, m in wanted if tested.get(name) for t in tallies(tested[name], m, goal(results[name]))]
    parts = [f'<div class="cards">{"".join(_card(name, own) for name, own in tested.items())}</div>']
    if any((results[name].get("profile") or {}).get("name") == "tiny" for name in results.files):
        parts.append(reading(["This was a trial in seconds (profile tiny): its numbers mean nothing."], warning=True))
    points = {name: [(s.title, s.headline, PRIMARY[name]) for s in own] for name, own in tested.items()}
    chart, above, drawn = pictures.worth_and_cost(points)
    if drawn:
        says = (
            f"In {above} of {drawn} settings a pass matches more samples than fit into its time: above the dashed line."
        )
        caption = (
            "Samples that one pass matches, against the samples that take as long, in the first measure of each "
            "setting. The sampler is the strongest one: it runs the deterministic part of the network only once."
        )
        left_out = sum(map(len, points.values())) - drawn
        if left_out:
            caption += f" {left_out} have no such number and are left out."
        legend = pictures.legend(
            [(m, f"full {c}", TITLES[n]) for n, (m, c) in pictures.EXPERIMENTS.items() if n in tested]
        )
        parts.append(figure("figure-worth", [chart.svg(says)], caption, legend, wide=True, says=says))
    parts += [_short_table(tested), details("All measures and estimators", _table(groups))]
    if found:
        parts.append(details("Beside the largest number of samples", tally_table(found)))
    return "".join(parts)


def _card(name: str, own: Sequence[Setting]) -> str:
    metric = PRIMARY[name]
    middle = medians(own, metric)
    lost = [s for s in own if metric in (s.headline.get("sampling_wins") or [])]
    odd = sum(unmatched(s.headline, metric) for s in own)
    unit = "setting" if len(own) == 1 else "settings"
    note = f"Samples of equal time are better in {len(lost) or 'none'} of {len(own)} {unit}."
    return (
        f'<div class="card"><h3>{escape(TITLES[name])}: {escape(metric_name(metric))}</h3>'
        f'<p class="big">{escape(plural(middle["worth"]))}</p>'
        f"<p>One pass matches them. It needs the time of {escape(plural(middle['cached']))}, or "
        f'{escape(middle["forwards"])} forward passes (medians).</p><p class="{"bad" if lost else "good"}">{note}</p>'
        + (f"<p>In {odd} {unit} few samples score better and many worse: no number equals it.</p>" if odd else "")
        + "</div>"
    )


def _short_table(groups: Mapping[str, Sequence[Setting]]) -> str:
    """One line for each setting: what the pass matches in the first measure, what it needs, and which is better."""
    titles = ["Setting", "Matches", "Needs", "Gain", "Samples of equal time"]
    body = []
    for name, own in groups.items():
        metric = PRIMARY[name]
        body.append(group_row(f"{TITLES[name]}, by {metric_name(metric)}", len(titles)))
        for s in own:
            wins = s.headline.get("sampling_wins") or []
            timed = s.headline.get("cached_samples") is not None
            body.append(
                row(
                    [
                        row_head(s.title),
                        cell(worth_of(s.headline, metric)),
                        cell(count(s.headline.get("cached_samples"))),
                        cell(gain(s.headline, metric)),
                        cell(
                            "better in " + ", ".join(map(metric_name, wins)) if wins else "worse" if timed else DASH,
                            "left tight bad" if wins else "left tight",
                        ),
                    ]
                )
            )
    caption = (
        "Samples that one pass matches, and samples that fit into the time it needs. ≥: better than the largest number "
        "run; ≤: the smallest is as good; *: but more samples, those of equal time among them, score worse."
    )
    return table("headline-table", caption, head(titles, ["Samples of equal time"]), body)


def _table(groups: Mapping[str, Sequence[Setting]]) -> str:
    """Every estimator of every setting, in all measures."""
    titles = ["Setting", "Estimator", "Matches", "Needs forwards", "Needs samples", "Or whole-network samples"]
    titles += ["Gain", "Samples of equal time"]
    body = []
    for name, own in groups.items():
        body.append(group_row(TITLES[name], len(titles)))
        for setting, i, h in ((s, i, h) for s in own for i, h in enumerate((s.headline, *s.others))):
            equivalent = {m: e for m, e in h["equivalent"].items() if e}
            matched = " · ".join(f"{metric_name(m)} {worth_of(h, m)}" for m in equivalent) or DASH
            cost, wins = h.get("cached_samples"), h.get("sampling_wins") or []
            verdict = DASH if cost is None else "better in " + ", ".join(map(metric_name, wins)) if wins else "worse"
            body.append(
                row(
                    [
                        *([row_head(setting.title, 1 + len(setting.others))] if i == 0 else []),
                        cell(h.get("estimator") or DASH, "left tight"),
                        cell(matched, "left tight"),
                        cell(count(h.get("forwards"))),
                        cell(count(cost)),
                        cell(count(h.get("naive_samples"))),
                        cell(gain(h, PRIMARY[name])),
                        cell(verdict, "left tight bad" if wins else "left tight"),
                    ]
                )
            )
    caption = "What one pass matches in every measure, and what it needs. Gain: in the first measure."
    return table("worth-table", caption, head(titles, ["Estimator", "Matches", "Samples of equal time"]), body)


def what_was_run(results: Results) -> str:
    """Environment, profile, seeds and versions; what differs between experiments stands in a table of its own."""
    facts = {name: _facts(file) for name, file in results.files.items()}
    keys = list(next(iter(facts.values())))
    keys = [k for k in keys if any(f[k] != DASH for f in facts.values())]
    common = [k for k in keys if len({f[k] for f in facts.values()}) == 1]
    parts = []
    unfinished = [NAMES[n] for n, f in results.files.items() if f.get("complete") is False]
    if unfinished:
        text = f"Not finished when this was written: {', '.join(unfinished)}. The same command continues it."
        parts.append(reading([text], warning=True))
    body = [row([row_head(k), cell(next(iter(facts.values()))[k], "left wrap")]) for k in common]
    same = table("runs-table", "The same for everything in this report", head(["Property", "Value"], ["Value"]), body)
    parts.append(details("The same for everything", same))
    varying = [k for k in keys if k not in common]
    if varying:
        names = [NAMES[n] for n in facts]
        rows = [row([row_head(k), *(cell(f[k], "left tight") for f in facts.values())]) for k in varying]
        parts.append(
            details(
                "What differs between experiments",
                table("runs-differences", "What differs between experiments", head(["Property", *names], names), rows),
            )
        )
    return "".join([_trainings(results), *parts])


def _facts(file: Json) -> dict[str, str]:
    env, profile, seeds = file["environment"], file["profile"], file["seeds"]
    machine = env.get("gpu") if str(env.get("device", "")).startswith("cuda") else env.get("cpu")
    inputs = profile.get("test_inputs") or ("all" if "test_inputs" in profile else file.get("inputs"))
    data = file.get("data") or {}
    source = "embedded in scikit-learn" if data.get("source") == "embedded" else data.get("source")
    facts = {
        "Profile": profile.get("name"),
        "Repeats": profile.get("repeats"),
        "Splits of the UCI sets": profile.get("splits"),
        "Test inputs": f"{inputs:,}" if isinstance(inputs, int) else inputs,
        "Data": ", ".join(s for s in (source, data.get("note")) if s),
        "Device of the inference": machine or env.get("device"),
        "Threads": env.get("threads"),
        "Times are of": _clock(file.get("timing_environments") or []),
        "Seed of training": seeds.get("training"),
        "Seed of sampling": seeds.get("sampling"),
        "favour": env.get("favour"),
        "Code version": env.get("commit"),
        "Digest of the source": env.get("code"),
        "Python": env.get("python"),
        "torch": env.get("torch"),
        "Date": env.get("when"),
    }
    return {k: DASH if v is None or v == "" else str(v) for k, v in facts.items()}


def _clock(environments: Sequence[Json]) -> str:
    """The machines that methods were timed on."""
    found = []
    for e in environments:
        gpu = str(e.get("device", "")).startswith("cuda")
        found.append(
            str(e.get("gpu")) if gpu else f"{e.get('cpu')}, {e.get('threads')} thread{'s' * (e.get('threads') != 1)}"
        )
    return "; ".join(dict.fromkeys(found))


def _names(results: Results) -> dict[str, str]:
    """Titles of tasks by the names trainings use."""
    names = {}
    for name in ("classification", "regression"):
        for task in results[name]["tasks"] if name in results else []:
            names[task["task"]] = task["title"]
    for pair in results["ood"]["pairs"] if "ood" in results else []:
        names[pair["id"].partition("-")[0]] = pair["trained_on"]
    return names


def _network(training: Json, names: Mapping[str, str]) -> str:
    return f"{names.get(training['task'], training['task'])}, {model_name(training['model'])}"


def _trainings(results: Results) -> str:
    """How near they come to the paper's, in a sentence and, folded, one by one."""
    rows: dict[str, list[dict[str, str]]] = {}
    shares: list[tuple[float, str]] = []
    names = _names(results)
    for name, file in results.files.items():
        for t in file.get("training") or []:
            with results.reading(name):
                network = _network(t, names)
                paper, epochs = t.get("paper_epochs"), t.get("epochs")
                share = epochs / paper if paper and epochs is not None else None
            if share is not None:
                shares.append((share, network))
            rows.setdefault(name, []).append(
                {
                    "Network": network,
                    "Epochs": _whole(epochs),
                    "The paper's": _whole(paper),
                    "Share": DASH if share is None else f"{number(100 * share, 2)}%",
                    "Inputs": _whole(t.get("inputs")),
                    "Batch": _whole(t.get("batch")),
                    "Networks": _whole(t.get("networks")),
                    "Device": t.get("device") or DASH,
                    "Time": seconds(t.get("seconds")),
                }
            )
    every = [r for own in rows.values() for r in own]
    if not every:
        return ""
    titles = [k for k in every[0] if any(r[k] != DASH for r in every)]
    body = []
    for name, own in rows.items():
        body.append(group_row(NAMES[name], len(titles)))
        for r in own:
            kinds = ("left tight" if k == "Device" else "" for k in titles[1:])
            body.append(
                row([row_head(r["Network"]), *(cell(r[k], kind) for k, kind in zip(titles[1:], kinds, strict=True))])
            )
    caption = "Trainings, and how near they come to the paper's epochs. Time: of all networks trained together."
    shown = table("trainings-table", caption if shares else "Trainings", head(titles, ["Device"]), body)
    return reading(_nearness(shares)) + details("Trainings, one by one", shown)


def _nearness(shares: list[tuple[float, str]]) -> list[str]:
    """How near the trainings come to the paper's epochs; nothing where the paper has no such network."""
    if not shares:
        return []
    low, high = min(shares), max(shares)
    if low[0] >= 1:
        return ["Every network was trained for at least as many epochs as the paper's."]
    if low[0] == high[0]:
        return [f"Every network was trained for {number(100 * low[0], 2)}% of the paper's epochs."]
    full = sum(s >= 1 for s, _ in shares)
    return [
        f"Networks were trained for {number(100 * low[0], 2)}% ({low[1]}) to {number(100 * high[0], 2)}% "
        f"({high[1]}) of the paper's epochs; {full} of {len(shares)} reach the paper's."
    ]


def _whole(value: Any) -> str:
    return DASH if value is None else f"{value:,}"
