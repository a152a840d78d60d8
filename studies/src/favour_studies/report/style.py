"""Rules of the report beyond those of every page: its figures, and its widest tables.

A figure's element has a class `c-NAME`; it sets `--c`, and the rules for markers, lines and bands use that.
"""

from __future__ import annotations

COLOURED = ("plain", "naive", "cached", "dplr", "adjoint", "truth", "soft")

CHART = (
    """
.chart text{fill:var(--soft);font:11px var(--font)}
.chart .title{fill:var(--ink);font-weight:600;font-size:12.5px}
.chart .end{text-anchor:end}.chart .middle{text-anchor:middle}
.chart .grid{stroke:var(--rule);stroke-width:1;fill:none}
.chart .frame{stroke:var(--soft);stroke-width:1;fill:none}
.chart .line{stroke:var(--c);stroke-width:1.7;fill:none;stroke-linejoin:round}
.chart .thin{stroke-width:.8;opacity:.45}.chart .dash{stroke-dasharray:5 3}
.chart .frontier{stroke:var(--ink);stroke-width:1;stroke-dasharray:2 3;fill:none}
.chart .band{fill:var(--c);opacity:.18}
.chart .dots{stroke:var(--c);stroke-width:4;stroke-linecap:round;fill:none;opacity:.55}
.chart .small{stroke-width:3.2}
.chart .mark{stroke:var(--c);stroke-width:1.2;fill:var(--page)}
.chart .full{fill:var(--c)}
.chart .strong{stroke-width:2}
"""
    + "\n".join(f".c-{name}{{--c:var(--{name})}}" for name in COLOURED)
    + "\n"
)

WIDE = """
td.paper,th.paper{color:var(--soft);font-weight:400;padding-left:0;font-size:.93em}
[id^=table-ood]{font-size:.82rem}[id^=table-ood] tbody th[scope=rowgroup]{min-width:0}
[id^=table-ood] :is(td,th){min-width:0;padding-left:.3rem;padding-right:.45rem}
[id^=table-ood] :is(th:first-child,td[colspan]){padding-left:.7rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.86rem;margin:.2rem 0 .6rem;padding:0;list-style:none;
 max-width:none}
.legend li{display:flex;align-items:center;gap:.4rem;margin:0}
.legend svg{width:22px;height:14px;flex:none}
@media (max-width:40rem){
 [id^=table-ood] tbody th[scope^=row]:first-child{min-width:0}
}
@media print{
 [id^=table-ood]{font-size:7pt}
}
"""
