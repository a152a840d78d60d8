"""What Prometheus is told."""

from __future__ import annotations

from typing import Any


class Metrics:
    """Counters of one application, in a registry of its own."""

    def __init__(self, prometheus: Any) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "favour_requests", "Requests to /predict; 499: the client left", ["status"], registry=registry
        )
        self.rows = prometheus.Counter("favour_rows", "Rows predicted", registry=registry)
        self.calls = prometheus.Counter("favour_model_calls", "Calls of the model", registry=registry)
        self.batch_rows = prometheus.Histogram(
            "favour_batch_rows", "Rows in a call of the model", buckets=[2**k for k in range(11)], registry=registry
        )
        steps = [0.001 * 2**k for k in range(14)]
        self.request_seconds = prometheus.Histogram(
            "favour_request_seconds", "From the request's head to its answer", buckets=steps, registry=registry
        )
        self.model_seconds = prometheus.Histogram(
            "favour_model_seconds", "One call of the model", buckets=steps, registry=registry
        )
        self.waiting = prometheus.Gauge("favour_waiting_requests", "Requests in the queue", registry=registry)
        self.held = prometheus.Gauge("favour_held_values", "Values of requests being answered", registry=registry)
        self.connections = prometheus.Gauge("favour_connections", "Open connections", registry=registry)
        self.closed = prometheus.Counter(
            "favour_connections_ended", "Connections that the server ended, by reason", ["reason"], registry=registry
        )
        prometheus.ProcessCollector(registry=registry)

    def observe_call(self, rows: int, requests: int) -> None:
        self.calls.inc()
        self.batch_rows.observe(rows)

    def observe_request(self, path: str, status: int, seconds: float) -> None:
        if path == "/predict":
            self.requests.labels(str(status)).inc()
            self.request_seconds.observe(seconds)

    def observe_end(self, reason: str) -> None:
        self.closed.labels(reason).inc()
