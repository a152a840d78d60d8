"""Colours and rules of every page that Favour writes.

A colour is a custom property with a light and a dark value. The dark ones apply on screens only, so that paper stays
white.
"""

from __future__ import annotations

LIGHT = {
    "page": "#ffffff",
    "raised": "#f4f6f8",
    "ink": "#1b222c",
    "soft": "#566170",
    "rule": "#d9dee4",
    "link": "#1f5fbf",
    "good": "#17794b",
    "bad": "#b3362b",
    "plain": "#5b6470",
    "naive": "#a24b8c",
    "cached": "#c2611f",
    "dplr": "#15805a",
    "adjoint": "#1f5fd0",
    "truth": "#1b222c",
}
DARK = {
    "page": "#14181e",
    "raised": "#1d232b",
    "ink": "#e7eaee",
    "soft": "#a3adba",
    "rule": "#343c47",
    "link": "#84b4ff",
    "good": "#58cc93",
    "bad": "#ff8f80",
    "plain": "#aab3bf",
    "naive": "#dd92cb",
    "cached": "#ff9f63",
    "dplr": "#4fcc9a",
    "adjoint": "#77acff",
    "truth": "#e7eaee",
}
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


PALETTE = (
    f":root{{{_variables(LIGHT)}--font:{FONT}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}\n"
)

PAGE = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.6 var(--font);overflow-wrap:break-word}
.shell{max-width:78rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:.2em 0 .3em;letter-spacing:-.015em}
h2{font-size:1.4rem;line-height:1.25;margin:3rem 0 .6rem;padding-top:1rem;border-top:1px solid var(--rule)}
h3{font-size:1.1rem;margin:2rem 0 .5rem}
p,ul{max-width:46rem;margin:.6rem 0}
li{margin:.25rem 0}
a{color:var(--link);text-underline-offset:2px}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--raised);padding:.1em .35em;
 border-radius:4px}
.lead{font-size:1.08rem;color:var(--soft)}
.notes,.small-print{color:var(--soft);font-size:.88rem}
nav{font-size:.92rem;margin:1.2rem 0}
nav strong{display:block;margin-bottom:.3rem}
nav ol{list-style:none;margin:0;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
nav li{margin:0}
.reading{background:var(--raised);border-left:3px solid var(--adjoint);border-radius:0 6px 6px 0;padding:.6rem 1rem;
 max-width:48rem;margin:1rem 0}
.reading p,.reading ul{margin:.35rem 0}.reading ul{padding-left:1.2rem}
.warning{border-left-color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:.8rem;margin:1.2rem 0}
.card{background:var(--raised);border-radius:8px;padding:.9rem 1.1rem}
.card h3{margin:0;font-size:.9rem;color:var(--soft);font-weight:600}
.card .big{font-size:1.6rem;font-weight:650;line-height:1.25;margin:.15rem 0;letter-spacing:-.01em}
.card p{margin:.15rem 0;font-size:.9rem}
.good{color:var(--good)}.bad{color:var(--bad)}.muted{color:var(--soft)}
.scroll{container-type:inline-size;overflow:auto;max-height:88vh;margin:1rem 0;border:1px solid var(--rule);
 border-radius:8px}
.scroll:focus-visible{outline:2px solid var(--link)}
table{border-collapse:collapse;width:100%;font-size:.86rem;line-height:1.4;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding:0}
caption span{display:block;position:sticky;left:0;padding:.6rem .8rem;max-width:100cqw}
th,td{padding:.32rem .7rem;text-align:right;white-space:nowrap;vertical-align:top}
thead{position:sticky;top:0;z-index:2;background:var(--page)}
thead th[aria-sort]{cursor:pointer}thead th[aria-sort]:is(:hover,:focus-visible){color:var(--link)}
th[aria-sort=ascending]::after{content:" ↑"}th[aria-sort=descending]::after{content:" ↓"}
thead th{font-weight:600;color:var(--soft);border-bottom:1px solid var(--rule);vertical-align:bottom;white-space:normal;
 min-width:4rem}
thead th[colspan]{text-align:center}
th:first-child,td:first-child,thead th.left,.left{text-align:left}
tbody tr+tr>*{border-top:1px solid color-mix(in srgb,var(--rule) 55%,transparent)}
tbody th{font-weight:500;white-space:normal}
tbody th[scope^=row]:first-child{position:sticky;left:0;z-index:1;background:var(--page)}
tr.ours>th:first-child{background:color-mix(in srgb,var(--adjoint) 9%,var(--page))!important}
small{font-size:.85em;color:var(--soft)}
.wrap{white-space:normal;min-width:13rem}.tight{white-space:normal;min-width:6rem}
tbody th[scope=rowgroup]{white-space:normal;min-width:7rem;max-width:12rem}
tr.group>th{background:var(--raised);text-align:left;font-weight:650}
tr.group>th span{position:sticky;left:.7rem;display:inline-block;white-space:normal;max-width:calc(100cqw - 1.4rem)}
tr.ours>*{background:color-mix(in srgb,var(--adjoint) 9%,transparent)}
tr.first>*{border-top:1px solid var(--rule)!important}
td b{font-weight:700}
figure{margin:1.4rem 0}.says{font-weight:600}
figcaption{color:var(--soft);font-size:.9rem;max-width:48rem;margin-top:.4rem}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,18.5rem),1fr));gap:.6rem 1rem}
.panels.wide{grid-template-columns:minmax(0,46rem)}
.chart{width:100%;height:auto;display:block}
details{margin:1rem 0}
summary{cursor:pointer;color:var(--link);font-size:.95rem}
footer{margin-top:4rem;color:var(--soft);font-size:.85rem;border-top:1px solid var(--rule);padding-top:1rem}
@media (max-width:40rem){
 .scroll{max-height:none}
 tbody th[scope^=row]:first-child{white-space:normal;min-width:8.5rem;max-width:9rem}
}
@container (max-width:38rem){
 table:not(.many) :is(th,td){white-space:normal;min-width:0;padding:.3rem .35rem;font-size:.8rem;hyphens:auto}
 table:not(.many) tbody th[scope^=row]:first-child{min-width:5.5rem;max-width:9rem}
 .many td{white-space:normal}.many,.many :is(tbody,tr,caption){display:block}.many thead{display:none}
 .many tr{padding:.3rem .8rem}.many tr+tr{border-top:1px solid var(--rule)}
 .many tr>*{display:block;border:0!important;padding:.1rem 0;text-align:left;min-width:0!important;
  max-width:none!important}
 .many td[data-label]{display:flex;justify-content:space-between;gap:1rem;text-align:right}
 .many td[data-label]::before{content:attr(data-label);color:var(--soft);text-align:left;flex:none;max-width:55%}
}
@media (min-width:72rem){
 .shell{display:grid;grid-template-columns:12.5rem minmax(0,1fr);column-gap:2.5rem}
 .shell>nav{position:sticky;top:1.5rem;align-self:start;max-height:calc(100vh - 3rem);overflow-y:auto}
 nav ol{display:block}nav li{margin:.3rem 0}
 .shell>footer{grid-column:2}
}
@media print{
 body{font-size:10pt}
 .shell{display:block;max-width:none;padding:0}
 nav{display:none}
 h2{break-after:avoid}h3{break-after:avoid}
 figure,.card,.reading,tr{break-inside:avoid}
 thead{display:table-header-group}
 .scroll{container-type:normal;overflow:visible;max-height:none;border:0}
 tbody th[scope^=row]:first-child{position:static}caption span{max-width:none}
 table{font-size:7pt}th,td{padding:.15rem .3rem;min-width:0!important}
 :is(th,td).left,tbody th,tr.group>th span{white-space:normal;max-width:none}
 .panels{grid-template-columns:repeat(3,1fr)}.panels.wide{grid-template-columns:1fr}
 details::details-content{content-visibility:visible;block-size:auto}
 summary{color:var(--ink)}
}
"""

# A figure's element has a class `c-NAME`; it sets `--c`, and the rules for markers, lines and bands use that.
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
