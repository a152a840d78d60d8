"""Predictions over HTTP: `favour serve model.onnx`, or `favour.serving.create_app(path)` under any ASGI server.

    POST /predict        {"inputs": [[…], …]}, or {"inputs": {"name": [[…], …], …}} for a model with several inputs
                         → {"outputs": {"mean": [[…], …], …}, "rows": n}
    GET  /health         200 once the model answers
    GET  /model          names, shapes and meanings of inputs and outputs, limits, versions, digest of the file
    GET  /metrics        for Prometheus
    GET  /docs           a page about all this; GET /openapi.json for programs
    GET  /               a page to try the model on

Requests are refused before they reach the model, with a sentence that says why and the request's id in JSON; the table
of statuses is `favour.serving.openapi.STATUSES`. What one client does costs the others little: `Limits` says what one
request may hold and all together, `favour.serving.connections` how long a connection may take.
"""

from __future__ import annotations

from favour.serving.app import create_app
from favour.serving.limits import Limits
from favour.serving.server import run

__all__ = ["Limits", "create_app", "run"]
