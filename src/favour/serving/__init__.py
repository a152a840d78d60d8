"""Predictions over HTTP: `favour serve model.onnx`, or `favour.serving.create_app(path)` under any ASGI server.

    POST /predict   {"inputs": [[…], …]}, or {"inputs": {"name": [[…], …], …}} for a model with several inputs
                    → {"outputs": {"mean": [[…], …], …}, "rows": n}
    GET  /health    200 once the model answers
    GET  /model     names, shapes and meanings of inputs and outputs
    GET  /metrics   for Prometheus
    GET  /          a page to try the model on

Requests are refused, with a sentence that says why, before they reach the model:

    400   not JSON                                       413   body larger than the limit, while it is being read
    415   another content type                           422   wrong shape or type, NaN, infinity, too many rows
    503   the queue is full                              504   no answer in time
"""

from __future__ import annotations

from favour.serving.app import Limits, create_app, run

__all__ = ["Limits", "create_app", "run"]
