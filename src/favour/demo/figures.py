"""Pictures of the demo's cases as SVG: eight by eight pixels, and ten bars with whiskers beside them."""

from __future__ import annotations

from collections.abc import Sequence

STYLE = """
.case rect.pixel{fill:var(--ink)}.case rect.bar{fill:var(--adjoint)}
.case path{stroke:var(--ink);stroke-width:1.2;fill:none}
.case text{fill:var(--soft);font:9px var(--font);text-anchor:middle}
"""
WIDTH, HEIGHT = 204, 76


def case(picture: Sequence[Sequence[float]], probabilities: Sequence[float], spread: Sequence[float]) -> str:
    """What stands inside an `<svg>` of WIDTH by HEIGHT.

    Args:
        picture: Eight rows of eight values from 0 to 1.
        probabilities, spread: Of the ten classes, means and standard deviations.
    """
    parts = [
        f'<rect class="pixel" x="{6 * j}" y="{12 + 6 * i}" width="6.1" height="6.1" opacity="{v:.2f}"/>'
        for i, row in enumerate(picture)
        for j, v in enumerate(row)
        if v > 0.02
    ]
    for k, (p, s) in enumerate(zip(probabilities, spread, strict=True)):
        x = 62 + 14 * k
        low, high = max(p - s, 0.0), min(p + s, 1.0)
        parts.append(f'<rect class="bar" x="{x}" y="{62 - 56 * p:.1f}" width="9" height="{56 * p:.1f}"/>')
        if s > 0.005:
            parts.append(f'<path d="M{x + 4.5} {62 - 56 * low:.1f}V{62 - 56 * high:.1f}"/>')
        parts.append(f'<text x="{x + 4.5}" y="72">{k}</text>')
    return "".join(parts)
