"""The first sections: the headline, what was run, and how near the trainings come to the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from favour.pages import DASH, cell, count, group_row, head, number, paragraph, reading, row, row_head, seconds, table
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
    """Cards, the table of worth and cost, and the tallies of the bootstrap."""
    every = settings(results)
    if not every:
        return ""
    groups = {name: [s for s in every if s.experiment == name] for name in PRIMARY}
    groups = {name: own for name, own in groups.items() if own}
    cards = [_card(name, [s for s in own if s.part == "test"]) for name, own in groups.items()]
    wins = sum(bool(s.headline.get("sampling_wins")) for s in every)
    sentences = [
        "Worth: the number of samples whose quality one pass of Favour matches. Cost: what that pass takes, in forward "
        "passes of plain inference and in samples of the sampler that runs the deterministic part of the network "
        "only once, the strongest one compared with.",
        f"In {wins} of {len(every)} settings sampling of equal time is better in at least one measure; the last column "
        "says in which."
        if wins
        else "Sampling of equal time is better in no measure of any setting.",
    ]
    if any((results[name].get("profile") or {}).get("name") == "tiny" for name in results.files):
        sentences.insert(0, "This was a trial in seconds (profile tiny): its numbers mean nothing.")
    judged = {name: [s for s in groups.get(name, []) if s.part == "test"] for name in PRIMARY}
    wanted = [("classification", "nll"), ("classification", "ece"), ("regression", "nll"), ("ood", "auroc")]
    found = [
        t
        for name, m in wanted
        if name in results
        for t in tallies(judged[name], m, f"{TITLES[name]}, ", goal(results[name]))
    ]
    return "".join(
        [
            f'<div class="cards">{"".join(cards)}</div>',
            reading(sentences),
            _table(groups),
            "<h3>Paired bootstrap over test inputs</h3>",
            paragraph("One adjoint pass against the largest number of samples; 95% intervals."),
            reading(found),
        ]
    )


def _card(name: str, own: Sequence[Setting]) -> str:
    metric = PRIMARY[name]
    middle = medians(own, metric)
    lost = [s for s in own if metric in (s.headline.get("sampling_wins") or [])]
    odd = sum(unmatched(s.headline, metric) for s in own)
    unit = "setting" if len(own) == 1 else "settings"
    note = (
        f'<p class="bad">Sampling of equal time wins in {len(lost)} of {len(own)} {unit}.</p>'
        if lost
        else f'<p class="good">Sampling of equal time wins in none of {len(own)} {unit}.</p>'
    )
    return (
        f'<div class="card"><h3>{escape(TITLES[name])}: {escape(metric_name(metric))}</h3>'
        f'<p class="big">{escape(plural(middle["worth"]))}</p>'
        f"<p>matched by one pass, which takes as long as {escape(middle['cached'])} samples or "
        f"{escape(middle['forwards'])} forward passes (medians).</p>{note}"
        + (
            f"<p>In {odd} {unit} few samples score better and many worse: no number equals it.</p></div>"
            if odd
            else "</div>"
        )
    )


def _table(groups: Mapping[str, Sequence[Setting]]) -> str:
    titles = ["Setting", "Estimator", "Worth in samples", "Cost in forwards", "in cached samples", "in naive samples"]
    titles += ["Worth ÷ cost", "Sampling of equal time"]
    body = []
    for name, own in groups.items():
        body.append(group_row(TITLES[name], len(titles)))
        for setting, i, h in ((s, i, h) for s in own for i, h in enumerate((s.headline, *s.others))):
            equivalent = {m: e for m, e in h["equivalent"].items() if e}
            matched = " · ".join(f"{metric_name(m)} {worth_of(h, m)}" for m in equivalent) or DASH
            cost, wins = h.get("cached_samples"), h.get("sampling_wins") or []
            metric = PRIMARY[name]
            verdict = DASH if cost is None else "wins in " + ", ".join(map(metric_name, wins)) if wins else "loses"
            body.append(
                row(
                    [
                        *([row_head(setting.title, 1 + len(setting.others))] if i == 0 else []),
                        cell(h.get("estimator") or "", "left"),
                        cell(matched, "left"),
                        cell(count(h.get("forwards"))),
                        cell(count(cost)),
                        cell(count(h.get("naive_samples"))),
                        cell(gain(h, metric)),
                        cell(verdict, "left tight bad" if wins else "left tight"),
                    ]
                )
            )
    return table(
        "headline-table",
        "How many samples one adjoint pass is worth, and what it costs. ≥: better than the largest number run; "
        "≤: the smallest is as good; *: but more samples, those of equal time among them, score worse than the pass. "
        "Worth ÷ cost: of the first measure, in cached samples.",
        head(titles, ["Estimator", "Worth in samples", "Sampling of equal time"]),
        body,
    )


def what_was_run(results: Results) -> str:
    """Environment, profile, seeds and versions; what differs between experiments stands in a table of its own."""
    facts = {name: _facts(file) for name, file in results.files.items()}
    keys = list(next(iter(facts.values())))
    keys = [k for k in keys if any(f[k] != DASH for f in facts.values())]
    common = [k for k in keys if len({f[k] for f in facts.values()}) == 1]
    body = [row([row_head(k), cell(next(iter(facts.values()))[k], "left wrap")]) for k in common]
    parts = [
        table("runs-table", "The same for everything in this report", head(["Property", "Value"], ["Value"]), body)
    ]
    varying = [k for k in keys if k not in common]
    if varying:
        rows = [row([row_head(NAMES[n]), *(cell(f[k], "left") for k in varying)]) for n, f in facts.items()]
        titles = ["Experiment", *varying]
        parts.append(table("runs-differences", "What differs between experiments", head(titles, varying), rows))
    unfinished = [NAMES[n] for n, f in results.files.items() if f.get("complete") is False]
    if unfinished:
        text = f"Not finished when this was written: {', '.join(unfinished)}. The same command continues it."
        parts.append(reading([text], warning=True))
    return "".join([*parts, _trainings(results)])


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
    rows: list[dict[str, str]] = []
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
            rows.append(
                {
                    "Network": network,
                    "Experiment": NAMES[name],
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
    if not rows:
        return ""
    left = ("Experiment", "Device")
    titles = [k for k in rows[0] if any(r[k] != DASH for r in rows)]
    body = [row([row_head(r["Network"]), *(cell(r[k], "left" if k in left else "") for k in titles[1:])]) for r in rows]
    caption = "Trainings, and how near they come to the paper's epochs. Time: of all networks trained together."
    shown = table("trainings-table", caption if shares else "Trainings", head(titles, left), body)
    return "<h3>Trainings</h3>" + reading(_nearness(shares)) + shown


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
