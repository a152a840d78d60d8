"""The API in words: `/openapi.json` (OpenAPI 3.1) and `/docs`, a page of it that asks for nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

import favour
from favour.pages import PALETTE

STATUSES = {
    400: "The body is not JSON, or the request is not HTTP.",
    404: "There is no such path.",
    405: "The path has other methods; the header `allow` names them.",
    408: "The head or the body arrived too slowly.",
    413: "More bytes or more values than one request may hold.",
    415: "Another content type or encoding than plain JSON.",
    421: "A host name that the server was not told about.",
    422: "Wrong shape or type, NaN or infinity, too many rows; or the answer is not finite.",
    431: "Too many header fields, or too large ones.",
    500: "The model failed; the log says why, under the id of the request.",
    503: "Too much waits; try again after `retry-after` seconds.",
    504: "No answer in time; the server is busy.",
}
Json = dict[str, Any]


def openapi(model: Mapping[str, Any]) -> Json:
    """The description of the API for a model as `/model` describes it."""
    inputs = {port["name"]: _port(port, model["max_batch"]) for port in model["inputs"]}
    named = _object(inputs)
    choices = [next(iter(inputs.values())), named] if len(inputs) == 1 else [named]
    request = _object({"inputs": {"oneOf": choices} if len(choices) > 1 else named})
    outputs = _object({port["name"]: _port(port, None) for port in model["outputs"]})
    answer = _object({"outputs": outputs, "rows": {"type": "integer", "minimum": 1}})
    example = {port["name"]: _example(port["shape"], port["dtype"]) for port in model["inputs"]}
    shown = example if len(example) > 1 else next(iter(example.values()))
    body = {"schema": _ref("Request"), "example": {"inputs": shown}}
    predict = {
        "operationId": "predict",
        "summary": "Predict for one or more rows",
        "parameters": [
            {
                "name": "X-Request-ID",
                "in": "header",
                "required": False,
                "schema": {"type": "string"},
                "description": "Comes back in the header of the answer, in errors and in the server's log.",
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": _content("The predictions, a row for every row.", _ref("Answer"))} | _errors(),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Predictions with error bars",
            "version": str(model["version"] or "unknown"),
            "description": f"A {model['kind']} model served by favour {favour.__version__}.",
        },
        "paths": {
            "/predict": {"post": predict},
            "/health": {"get": _get("health", "Whether the server answers", {"type": "object"}, 503)},
            "/model": {"get": _get("model", "Inputs, outputs, limits and versions", {"type": "object"})},
            "/metrics": {"get": _get("metrics", "Counters for Prometheus", {"type": "string"}, kind="text/plain")},
        },
        "components": {
            "schemas": {
                "Request": request,
                "Answer": answer,
                "Error": _object({"error": {"type": "string"}, "request": {"type": "string"}}),
            }
        },
    }


def _object(properties: Mapping[str, Json]) -> Json:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(words: str, schema: Json, kind: str = "application/json") -> Json:
    return {"description": words, "content": {kind: {"schema": schema}}}


def _errors() -> Json:
    return {str(status): _content(words, _ref("Error")) for status, words in STATUSES.items()}


def _get(name: str, words: str, schema: Json, *statuses: int, kind: str = "application/json") -> Json:
    errors = {str(status): _content(STATUSES[status], _ref("Error")) for status in (421, *statuses)}
    return {"operationId": name, "summary": words, "responses": {"200": _content("OK", schema, kind)} | errors}


def _port(port: Mapping[str, Any], max_batch: int | None) -> Json:
    """A nested list; the first size is the batch where it may change."""
    schema: Json = {"type": "number" if port["dtype"].startswith("float") else "integer"}
    for axis, size in reversed(list(enumerate(port["shape"]))):
        schema = {"type": "array", "items": schema}
        if size is not None:
            schema |= {"minItems": size, "maxItems": size}
        elif axis == 0:
            schema |= {"minItems": 1} | ({} if max_batch is None else {"maxItems": max_batch})
    if port["meaning"]:
        schema["description"] = port["meaning"]
    return schema


def _example(shape: list[int | None], dtype: str) -> Any:
    value: Any = 0.5 if dtype.startswith("float") else 1
    for axis, size in reversed(list(enumerate(shape))):
        value = [value] * (size if size is not None else 1 if axis == 0 else 4)
    return value


# ---- the page

STYLE = """
:root{color-scheme:light dark}*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 var(--font)}
main{max-width:52rem;margin:0 auto;padding:1.2rem 1rem 4rem}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:0 0 .3rem}h3{font-size:.95rem;margin:.9rem 0 .2rem}
section{background:var(--raised);border-radius:10px;padding:1rem 1.1rem;margin-top:1rem}
.soft{color:var(--soft);font-size:.92rem}a{color:var(--link)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.92rem}td,th{text-align:left;vertical-align:top;padding:.2rem .9rem .2rem 0}
code,pre{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{overflow-x:auto;background:var(--page);border:1px solid var(--rule);border-radius:6px;padding:.6rem;margin:.3rem 0}
"""
SHOWN = 1500


def docs(model: Mapping[str, Any]) -> str:
    """The HTML of `/docs`."""
    described = openapi(model)
    predict = described["paths"]["/predict"]["post"]
    example = json.dumps(predict["requestBody"]["content"]["application/json"]["example"])
    shown = example if len(example) <= SHOWN else example[:SHOWN] + " …"
    curl = f"curl -X POST http://HOST:PORT/predict \\\n  -H 'Content-Type: application/json' \\\n  -d '{shown}'"
    others = "".join(
        f"<tr><td><code>GET {path}</code></td><td>{escape(operations['get']['summary'])}</td></tr>"
        for path, operations in described["paths"].items()
        if "get" in operations
    )
    errors = "".join(f"<tr><td>{status}</td><td>{escape(words)}</td></tr>" for status, words in STATUSES.items())
    identity = escape(predict["parameters"][0]["description"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Favour: the API</title>
<style>{PALETTE}{STYLE}</style>
</head>
<body>
<main>
<h1>The API</h1>
<p class="soft">{escape(described["info"]["description"])} Model version {escape(described["info"]["version"])}.
For programs: <a href="openapi.json">openapi.json</a>.</p>
<section>
<h2><code>POST /predict</code></h2>
<p>{escape(predict["summary"])}: between 1 and {model["max_batch"]} at a time, at most {model["max_body"]} bytes and
{model["max_values"]} values.</p>
<h3>Inputs</h3>
{_ports(model["inputs"])}
<h3>Outputs</h3>
{_ports(model["outputs"])}
<h3>Example</h3>
<pre>{escape(curl)}</pre>
<pre>{{"outputs": {{{escape(", ".join(f'"{p["name"]}": […]' for p in model["outputs"]))}}}, "rows": 1}}</pre>
</section>
<section>
<h2>Others</h2>
<div class="scroll"><table>{others}</table></div>
</section>
<section>
<h2>Errors</h2>
<p>Every error is JSON, <code>{{"error": "what was wrong and what is required", "request": "its id"}}</code>. The header
<code>X-Request-ID</code>: {identity[0].lower()}{identity[1:]}</p>
<div class="scroll"><table>{errors}</table></div>
</section>
</main>
</body>
</html>
"""


def _ports(ports: list[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(p['name'])}</code></td><td>{escape(p['dtype'])}</td>"
        f"<td>{_shape(p['shape'])}</td><td>{escape(p['meaning'])}</td></tr>"
        for p in ports
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def _shape(shape: list[int | None]) -> str:
    sizes = ["rows" if i == 0 and s is None else "any" if s is None else str(s) for i, s in enumerate(shape)]
    return f"({', '.join(sizes)})"
