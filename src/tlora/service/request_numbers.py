"""How many requests were answered, with which codes, for which tenants, and how soon: for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from tlora.service.request_log import Answered

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RequestNumbers:
    """Of one server. Use in one thread; `registry` may be read in any."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        text = "Requests that were answered; tenant is empty where no key was accepted."
        self._answered = Counter("tlora_requests", text, ["method", "code", "tenant"], registry=self.registry)
        text = "From a request's header to the beginning of its answer."
        self._seconds = Histogram("tlora_request_seconds", text, ["method"], buckets=_BUCKETS, registry=self.registry)

    def see(self, answered: Answered) -> None:
        method = answered.method if answered.method in _METHODS else "other"  # a client may send any word
        self._answered.labels(method, answered.code, answered.tenant).inc()
        self._seconds.labels(method).observe(answered.seconds)
