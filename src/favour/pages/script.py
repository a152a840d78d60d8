"""The one script of a page: a click on a column's title sorts its table, another turns it round, a third undoes it.

It asks for nothing and is allowed by its digest; without it a page is whole, only unsorted.
"""

from __future__ import annotations

import base64
import hashlib

SORT = """
document.querySelectorAll("table").forEach(table => {
  const body = table.tBodies[0], original = [...body.rows];
  const heads = [...table.querySelectorAll("thead th[data-label]")];
  if (original.length < 3) return;
  const flat = () => {  // every row with a head of its own, and no rows that are titles
    const rows = original.filter(r => !r.matches(".group") && r.cells.length > 1).map(r => r.cloneNode(true));
    let head = null, left = 0;
    for (const row of rows) {
      const own = row.querySelector("th[scope=rowgroup]");
      if (own) { left = own.rowSpan; own.rowSpan = 1; head = own; }
      else if (left > 0) row.prepend(head.cloneNode(true));
      left -= 1;
    }
    return rows;
  };
  const value = (row, label) => {
    const cell = [...row.cells].find(c => c.dataset.label === label);
    const text = cell ? cell.textContent.trim().replace(/,/g, "").replace(/−/g, "-") : "";
    const found = text.match(/^(?:at least |[≥≤±] ?)*([-+]?\\d+\\.?\\d*(?:e[-+]?\\d+)?) ?(µs|ms)?/);
    return found ? parseFloat(found[1]) * ({"µs": 1e-6, "ms": 1e-3}[found[2]] || 1) : text === "–" ? "" : text;
  };
  const compare = (a, b) => {
    if (a === "" || b === "") return 0;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return typeof a === "number" ? a - b : a.localeCompare(b);
  };
  const sort = head => {
    const next = {ascending: "descending", descending: "none"}[head.getAttribute("aria-sort")] || "ascending";
    heads.forEach(h => h.setAttribute("aria-sort", h === head ? next : "none"));
    const sign = next === "descending" ? -1 : 1;
    const rows = next === "none" ? original : flat()
      .map(row => [value(row, head.dataset.label), row])
      .sort(([a], [b]) => (a === "") - (b === "") || sign * compare(a, b)).map(([, row]) => row);
    body.replaceChildren(...rows);
  };
  heads.forEach(head => {
    head.tabIndex = 0;
    head.setAttribute("aria-sort", "none");
    head.addEventListener("click", () => sort(head));
    head.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(head); }
    });
  });
});
"""
DIGEST = "sha256-" + base64.b64encode(hashlib.sha256(SORT.encode()).digest()).decode()
