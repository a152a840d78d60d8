"""The tables of measured numbers, from the files under results/; run, it writes the README's.

The documentation takes the others (`docs/tables.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from favour_studies.report.load import load
from favour_studies.report.readme import main_table

ROOT = Path(__file__).resolve().parent.parent
SHOWN = [
    "adjoint",
    "adjoint, rank-8 marginals",
    "adjoint, secants",
    "adjoint, 16 groups of pairs",
    "dplr r=16 K=2",
    "dplr r=4 K=2",
    "dplr r=2 K=2",
    "dplr r=2 K=2 q=40",
    "diag",
]


def worth() -> str:
    data = json.loads((ROOT / "results" / "worth.json").read_text())
    networks = data["networks"]
    lines = ["| | " + " | ".join(networks) + " |", "|---" * (len(networks) + 1) + "|"]
    for method in SHOWN:
        cells = []
        for result in networks.values():
            row = result["rows"][method]
            cells.append(f"{row['covariance error']:.3f} ({row['worth samples']:,.0f})")
        bold = "**" if method == "adjoint" else ""
        lines.append(f"| `{method}` | " + " | ".join(f"{bold}{cell}{bold}" for cell in cells) + " |")
    for n in (10, 100, 1000):
        cells = [f"{result['rows'][f'{n} samples']['covariance error']:.3f}" for result in networks.values()]
        lines.append(f"| {n} samples | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _where(data)])


def cost() -> str:
    data = json.loads((ROOT / "results" / "cost.json").read_text())
    errors = json.loads((ROOT / "results" / "worth.json").read_text())["networks"]["MNIST, depth 2"]["rows"]
    lines = [
        f"{data['network']}, `torch.compile`, and the covariance error of the same setting on MNIST:",
        "",
        "| pass | forward passes | dropout samples | covariance error |",
        "|---|---|---|---|",
    ]
    for name, row in data["rows"].items():
        if name.endswith("| compiled"):
            setting = name.split(" |")[0]
            error = errors.get(setting.replace(", 10 outputs", ""), {}).get("covariance error")
            shown = "" if error is None else f"{error:.3f}"
            lines.append(f"| {setting} | {row['forwards']:.1f} | {row['samples']:.1f} | {shown} |")
    return "\n".join([*lines, "", _where(data)])


def decisions() -> str:
    data = json.loads((ROOT / "results" / "decisions.json").read_text())
    lines = [
        "LeNet on MNIST, dropout before the two top layers; distance to the class probabilities of 10,000 samples:",
        "",
        "| dropout | estimate | NLL | ECE | total variation | forward passes |",
        "|---|---|---|---|---|---|",
    ]
    for rate, result in data["classification"].items():
        rows = result["rows"]
        for name in ("plain", "nodes", "head", "100 samples", "1000 samples"):
            row = rows[name]
            chosen = name == result["default"]
            label = f"`{name}`" + (", the default" if chosen else "") if name in ("nodes", "head") else name
            forwards = row.get("forwards") or int(name.split()[0]) * rows["one sample"]["forwards"]
            numbers = f"{row['nll']:.4f} | {row['ece']:.4f} | {row['total variation']:.4f} | {forwards:,.1f}"
            cells = [f"{float(rate):.0%}", label, *numbers.split(" | ")]
            lines.append("| " + " | ".join(f"**{c}**" if chosen else c for c in cells) + " |")
    return "\n".join([*lines, "", _where(data)])


ARCHITECTURE_ROWS = ["adjoint", "plain linearisation", "10 samples", "100 samples", "1000 samples"]


def architectures() -> str:
    data = json.loads((ROOT / "results" / "architectures.json").read_text())
    methods = [m if m.endswith("samples") else f"`{m}`" if m == "adjoint" else m for m in ARCHITECTURE_ROWS]
    lines = ["| | " + " | ".join(methods) + " | forward passes |", "|---" * (len(methods) + 2) + "|"]
    for name, rows in data["networks"].items():
        cells = []
        for method in ARCHITECTURE_ROWS:
            row = rows[method]
            cell = f"{row['covariance error']:.3f} / {row['mean error in standard deviations']:.2f}"
            cells.append(f"**{cell}**" if method == "adjoint" else cell)
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {rows['adjoint']['forwards']:.0f} |")
    seconds = ", ".join(f"{name} {s:.1f}" for name, s in data["compile seconds"].items())
    return "\n".join(
        [*lines, "", f"Seconds that `favour.compile` takes for models of `transformers`: {seconds}.", "", _where(data)]
    )


def memory() -> str:
    data = json.loads((ROOT / "results" / "memory.json").read_text())
    lines = [
        f"{data['network']}:",
        "",
        "| pass | tensors | over layer outputs | resident | over layer outputs |",
        "|---" * 5 + "|",
    ]
    for name, row in data["rows"].items():
        sizes = [
            f"{row[f'{kind}, bytes'] / 2**20:,.0f} MiB | {row[f'{kind} over layer outputs']:.1f}"
            for kind in ("tensors", "resident")
        ]
        lines.append(f"| {name} | " + " | ".join(sizes) + " |")
    return "\n".join([*lines, "", _where(data)])


def bench() -> str:
    """Compiled passes at each network's largest batch, on the CPU and, where it was measured, on a GPU."""
    lines = [
        "| network | trained | device | error | samples of the same error | forward passes | "
        "faster than a naive sampler | than the trunk-cached, compiled one |",
        "|---" * 8 + "|",
    ]
    feet = []
    for name in ("bench", "bench_gpu"):
        path = ROOT / "results" / f"{name}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        usual = max(row["batch"] for row in data["rows"])
        for row in data["rows"]:
            largest = max(r["batch"] for r in data["rows"] if r["network"] == row["network"])
            if (row["method"], row["mode"], row["batch"]) != ("auto", "compiled", largest):
                continue
            ours = f"{row['error']:.3f} | {'≥ ' * row['capped']}{row['worth']:,.0f} | {row['forwards']:.1f}"
            gains = " | ".join(f"{row['speed-up'][k]:,.0f}×" for k in ("naive", "cached"))
            network = data["networks"][row["network"]]
            title = network["title"] + (f", batch {largest}" if largest != usual else "")
            lines.append(
                f"| {title} | {network['weights']} | {data['environment']['gpu'] or 'CPU'} | {ours} | {gains} |"
            )
        feet.append(_where(data) + _versions(data))
    return "\n".join([*lines, "", *feet])


def _versions(data: dict) -> str:
    """Which networks were measured with another version of the code than the last."""
    last = data["environment"]["code"]
    older = [n["title"] for n in data["networks"].values() if n["code"] != last]
    return f" <sub>(measured with earlier versions: {'; '.join(older)})</sub>" if older else ""


def gpu_cost() -> str:
    data = json.loads((ROOT / "results" / "gpu_cost.json").read_text())
    lines = [
        f"{data['network']}, against the float32 forward pass of {data['environment']['gpu']}:",
        "",
        "| pass | ms | forward passes | distance from float32 | products at the peak | share of it reached |",
        "|---" * 6 + "|",
    ]
    for name, row in data["rows"].items():
        peak = row.get("roofline milliseconds")
        roof = "| |" if peak is None else f"{peak:.1f} ms | {row['products, share of the peak']:.0%} |"
        distance = row["covariance distance from float32 adjoint"]
        lines.append(f"| {name} | {row['milliseconds']:.1f} | {row['forwards']:.2f} | {distance:.4f} | {roof}")
    small = data["LeNet, noise in the two top layers, by batch"]
    parts = [
        f"{r['in eager forwards']:.2f} eager or {r['in compiled forwards']:.2f} compiled forwards at batch {b}"
        for b, r in small.items()
    ]
    return "\n".join([*lines, "", f"LeNet with noise in its two top layers, CUDA graphs: {'; '.join(parts)}.", ""]) + (
        "\n" + _where(data)
    )


PEERS = {"trained": "mean-field weights, briefly trained", "random": "mean-field weights", "inputs": "noisy inputs"}


def peers() -> str:
    data = json.loads((ROOT / "results" / "peers.json").read_text())
    lines = [
        f"{data['network'].split(', inputs')[0]}, against {data['samples']:,} samples:",
        "",
        "| posterior | method | forward passes | error of variances | of the covariance | beside it |",
        "|---|---|---|---|---|---|",
    ]
    for table, title in PEERS.items():
        for name, row in data["tables"][table].items():
            if name.endswith(", eager"):
                continue
            bold = "**" if name == "favour, compiled" else ""
            cells = [f"{row['forwards']:,.1f}", f"{row['variance error']:.3f}", f"{row['covariance error']:.3f}"]
            shown = " | ".join(f"{bold}{cell}{bold}" for cell in (title, name, *cells))
            lines.append(f"| {shown} | {row.get('verdict', '')} |")
    return "\n".join([*lines, "", _where(data)])


def paper() -> str:
    return main_table(load(ROOT / "results" / "paper"))


NUMBERS = ("mlp", "lenet-all", "resnet18")  # what goes well, and what is hard


def numbers() -> str:
    """Worth and cost of one pass, three networks on the CPU."""
    data = json.loads((ROOT / "results" / "bench.json").read_text())
    lines = [
        "| network, all its outputs | its covariance is as accurate as that of | one call takes the time of | "
        "faster than those samples, one by one / as fast as we can draw them |",
        "|---" * 4 + "|",
    ]
    for name in NUMBERS:
        rows = [r for r in data["rows"] if (r["network"], r["method"], r["mode"]) == (name, "auto", "compiled")]
        row = max(rows, key=lambda r: r["batch"])
        least, speed = "at least " * row["capped"], row["speed-up"]
        worth = f"{least}{row['worth']:,.0f} samples"
        faster = f"{least}{speed['naive']:,.0f}× / {speed['cached']:,.0f}×"
        title = f"{data['networks'][name]['title']}, batch {row['batch']}"
        lines.append(f"| {title} | {worth} | {row['forwards']:.1f} forward passes | {faster} |")
    return "\n".join([*lines, "", _where(data)])


def _where(data: dict) -> str:
    e = data["environment"]
    version = f"torch {e['torch']}, favour {e['favour']} ({e['commit']})"
    threads = f"{e['threads']} thread{'s' * (e['threads'] != 1)}"
    return f"<sub>{e['cpu']}, {threads}, {version}, {e['when']}</sub>"


def main() -> None:
    path = ROOT / "README.md"
    begin, end = "<!-- numbers:begin -->", "<!-- numbers:end -->"
    head, rest = path.read_text().split(begin)
    path.write_text(head + begin + "\n" + numbers() + "\n" + end + rest.split(end)[1])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
