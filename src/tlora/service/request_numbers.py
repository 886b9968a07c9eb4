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
        self._known: dict[tuple[str, int, str], tuple[Counter, Histogram]] = {}  # to look them up by labels takes longer

    def see(self, answered: Answered) -> None:
        method = answered.method if answered.method in _METHODS else "other"  # a client may send any word
        key = (method, answered.code, answered.tenant)
        if key not in self._known:
            self._known[key] = self._answered.labels(*key), self._seconds.labels(method)
        count, seconds = self._known[key]
        count.inc()
        seconds.observe(answered.seconds)
