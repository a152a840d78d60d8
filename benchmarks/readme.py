"""Write the README's tables from the files under results/."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = [
    "adjoint",
    "adjoint, rank-8 marginals",
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
            error = errors.get(setting, {}).get("covariance error")
            shown = "" if error is None else f"{error:.3f}"
            lines.append(f"| {setting} | {row['forwards']:.1f} | {row['samples']:.1f} | {shown} |")
    return "\n".join([*lines, "", _where(data)])


def _where(data: dict) -> str:
    e = data["environment"]
    version = f"torch {e['torch']}, favour {e['favour']} ({e['commit']})"
    return f"<sub>{e['cpu']}, {e['threads']} threads, {version}, {e['when']}</sub>"


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    for name, table in (("worth", worth()), ("cost", cost())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, rest = text.split(begin)
        text = head + begin + "\n" + table + "\n" + end + rest.split(end)[1]
    path.write_text(text)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
