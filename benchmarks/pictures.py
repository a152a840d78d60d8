"""Draw the pictures of the README and of the documentation's home page from the files under results/.

error-against-time.svg   results/bench.json (`favour bench`): samples as lines, one compiled pass as a mark
digits.svg               results/demo.json (`favour demo --out DIR` writes DIR/demo.json): three pictures
sine.svg                 results/paper: a regression's band beside that of samples

python benchmarks/pictures.py
"""

from __future__ import annotations

import json
import shutil
from html import escape
from pathlib import Path

from favour import pages
from favour.demo import figures

ROOT = Path(__file__).resolve().parent.parent
RESULTS, ASSETS = ROOT / "results", ROOT / "docs" / "assets"
NETWORK, BATCH = "mlp", 512
COUNTS = (10, 100, 1000, 10_000)
GROUPS = ("sure", "torn", "not a digit")


def error_against_time() -> str:
    """Log-log; times in forward passes of the same network."""
    record = json.loads((RESULTS / "bench.json").read_text())
    wanted = {"network": NETWORK, "batch": BATCH}
    rows = [r for r in record["rows"] if wanted.items() <= r.items() and r["method"] == "auto"]
    ours = next(r for r in rows if r["mode"] == "compiled")
    base = next(r for r in record["baselines"] if wanted.items() <= r.items())
    unit = ours["error"] * ours["worth"] ** 0.5  # of the covariance of one sample
    each = {k: 1 / base["samplers"][k]["draws per forward"] for k in ("naive", "cached")}
    most = 2 * ours["worth"]
    x = pages.Axis(1, most * each["naive"] * 5, "time in forward passes", log=True)
    y = pages.Axis(ours["error"] / 1.8, unit / 1.3, log=True)
    network = record["networks"][NETWORK]["title"]
    chart = pages.Chart(x, y, f"{network}: relative error of the covariance of its outputs", width=560, height=300)
    for kind, colour in (("naive", "c-naive"), ("cached", "c-cached")):
        ends = (2.5, most)
        chart.line([each[kind] * n for n in ends], [unit / n**0.5 for n in ends], f"line {colour}")
        for n in COUNTS:
            chart.mark(each[kind] * n, unit / n**0.5, "circle", f"{colour} full", f"{n:,} samples", 2.6)
            if kind == "naive":
                chart.text(each[kind] * n, unit / n**0.5, f"{n:,} samples", dx=6, dy=-5)
    equal = each["naive"] * ours["worth"]
    chart.line([ours["forwards"], equal], [ours["error"]] * 2, "line thin dash c-adjoint")
    chart.mark(ours["forwards"], ours["error"], "diamond", "c-adjoint full", "Favour", 5)
    chart.text(ours["forwards"], ours["error"], f"Favour: {ours['forwards']:.1f} forward passes", dx=10, dy=-8)
    legend = [
        ("circle", "c-naive", "samples, one by one (marks: 10, 100, …)"),
        ("circle", "c-cached", "samples as fast as we can draw them"),
        ("diamond", "c-adjoint", "Favour"),
    ]
    alt = f"Error against time: Favour has the error of {ours['worth']:,.0f} samples in {ours['forwards']:.1f} passes"
    return pages.sheet([chart], alt, 1, legend)


def digits() -> str:
    """A digit the network is sure of, one it is torn about, a letter it never saw."""
    record = json.loads((RESULTS / "demo.json").read_text())
    cases = [next(c for c in record["cases"] if c["group"] == group) for group in GROUPS]
    width, parts = figures.WIDTH + 16, []
    for i, (case, title) in enumerate(zip(cases, ("sure", "torn", "never seen"), strict=True)):
        inner = figures.case(case["picture"], case["probabilities"], case["spread"])
        box = f'x="{width * i + 4}" y="20" width="{figures.WIDTH}" height="{figures.HEIGHT}"'
        parts.append(f'<text class="title" x="{width * i + 4}" y="14">{title}</text><svg {box}>{inner}</svg>')
    w, h = width * len(cases), figures.HEIGHT + 24
    alt = escape("; ".join(f"{c['name']}: {c['said']}" for c in cases))
    style = f"{pages.PALETTE}{pages.CHART}{figures.STYLE}.case .title{{text-anchor:start;font-size:12px}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart case" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
        f'role="img"><title>{alt}</title><style>{style}</style>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    pages.write(ASSETS / "error-against-time.svg", error_against_time())
    pages.write(ASSETS / "digits.svg", digits())
    shutil.copyfile(RESULTS / "paper" / "figures" / "sine.svg", ASSETS / "sine.svg")
    print(f"wrote {ASSETS}/error-against-time.svg, digits.svg, sine.svg")


if __name__ == "__main__":
    main()
