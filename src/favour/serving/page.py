"""The page at `/`: type or paste an input, see the prediction and how sure it is. One file, no request but to us."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from favour.pages import PALETTE
from favour.serving.script import SCRIPT

STYLE = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 var(--font)}
main{max-width:66rem;margin:0 auto;padding:1.2rem 1rem 4rem}
h1{font-size:1.5rem;margin:.2rem 0 .1rem;letter-spacing:-.01em}
h2{font-size:1.05rem;margin:0 0 .6rem}
p{margin:.4rem 0}.soft{color:var(--soft);font-size:.92rem}
.columns{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1.15fr);gap:1rem;margin-top:1rem;align-items:start}
@media(max-width:46rem){.columns{grid-template-columns:minmax(0,1fr)}}
section{background:var(--raised);border-radius:10px;padding:1rem 1.1rem;min-width:0}
textarea{width:100%;min-height:5.5rem;font:14px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
 color:var(--ink);background:var(--page);border:1px solid var(--rule);border-radius:6px;padding:.5rem .6rem;
 resize:vertical}
label{display:block;font-size:.9rem;margin:.5rem 0 .2rem}
.fields{display:grid;gap:.15rem .8rem;margin:.4rem 0}
.field{display:grid;grid-template-columns:minmax(2rem,max-content) 1fr 4.6rem;gap:.6rem;align-items:center;
 font-size:.88rem}
.field input[type=range]{width:100%;accent-color:var(--adjoint);min-height:1.8rem}
.field input[type=number]{width:100%;font:inherit;color:var(--ink);background:var(--page);border:1px solid var(--rule);
 border-radius:5px;padding:.2rem .3rem}
.row{display:flex;flex-wrap:wrap;gap:.5rem;margin:.6rem 0 0}
button{font:inherit;font-size:.92rem;padding:.45rem .8rem;min-height:2.5rem;border-radius:7px;
 border:1px solid var(--rule);background:var(--page);color:var(--ink);cursor:pointer}
button.main{background:var(--link);border-color:var(--link);color:var(--page);font-weight:600}
button:focus-visible,textarea:focus-visible,input:focus-visible,summary:focus-visible{outline:2px solid var(--link);
 outline-offset:1px}
#error{border-left:3px solid var(--bad);background:var(--page);padding:.5rem .8rem;margin:.8rem 0 0;
 border-radius:0 6px 6px 0;overflow-wrap:anywhere}
[hidden]{display:none!important}
.verdict{font-size:1.35rem;font-weight:650;line-height:1.25;margin:.1rem 0 .2rem;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;margin:.6rem 0}
svg.square{max-width:26rem;margin:.6rem auto}
svg text{font:12px var(--font);fill:var(--ink)}svg .faint{fill:var(--soft)}
svg .end{text-anchor:end}svg .middle{text-anchor:middle}
.bar{fill:var(--adjoint)}.other{fill:var(--adjoint);opacity:.4}.track{fill:var(--rule);opacity:.5}
.edge{stroke:var(--soft);fill:none}.grid{stroke:var(--rule);fill:none}
.draw{fill:var(--adjoint);opacity:.38}.point{fill:var(--ink);stroke:var(--page);stroke-width:1.5}
.wide{stroke:var(--adjoint);stroke-width:2}.thick{stroke:var(--adjoint);stroke-width:9;opacity:.55}
.whisker{stroke:var(--ink);stroke-width:1.4;fill:none}.past{opacity:.35}.old{opacity:.4}
.meter{height:.6rem;border-radius:.3rem;background:color-mix(in srgb,var(--rule) 60%,transparent);overflow:hidden}
.meter div{height:100%;background:var(--cached);border-radius:.3rem}
.scores{display:grid;gap:.7rem;margin:.8rem 0 0}
.scores .line{font-size:.9rem}
details{margin-top:.9rem}summary{cursor:pointer;font-size:.9rem;color:var(--soft);padding:.3rem 0}
pre{overflow-x:auto;background:var(--page);border:1px solid var(--rule);border-radius:6px;padding:.6rem;margin:.3rem 0;
 font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
"""


def page(model: Mapping[str, Any]) -> str:
    """The HTML for a model as `/model` describes it."""
    described = json.dumps(model).replace("<", "\\u003c")  # no way out of the script element
    kind = "classifier" if model["kind"] == "classification" else "regression"
    inputs = "; ".join(f"{escape(p['name'])} {_shape(p['shape'])}" for p in model["inputs"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Favour: try the model</title>
<style>{PALETTE}{STYLE}</style>
</head>
<body>
<main>
<h1>Try the model</h1>
<p class="soft">A {kind} with error bars, in one pass without sampling. Input: {inputs}.</p>
<div class="columns">
<section aria-labelledby="input-title">
<h2 id="input-title">Input</h2>
<div id="fields" class="fields" hidden></div>
<div id="texts"></div>
<div class="row" id="presets" aria-label="Presets"></div>
<div class="row"><button class="main" id="predict" type="button">Predict</button></div>
<div id="error" role="alert" hidden></div>
<noscript><p>This page needs JavaScript; the API does not.</p></noscript>
</section>
<section aria-labelledby="result-title" aria-live="polite">
<h2 id="result-title">Prediction</h2>
<div id="result"><p class="soft">Nothing yet.</p></div>
<details id="raw" hidden><summary>Request and answer</summary><pre id="request"></pre><pre id="answer"></pre></details>
</section>
</div>
</main>
<script type="application/json" id="model">{described}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _shape(shape: list[int | None]) -> str:
    sizes = " × ".join("any" if size is None else str(size) for size in shape[1:])
    return f"({sizes or 'one number'})"
