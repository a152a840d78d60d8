"""Rules of the report beyond those of every page: its widest tables, and legends."""

from __future__ import annotations

WIDE = """
.pm{white-space:normal}.pm small{white-space:nowrap}
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
