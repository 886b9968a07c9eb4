"""Exactly once: what a request with an Idempotency-Key was answered, and creations whose client names no key."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, select, update

from tlora.api import OrderSpec
from tlora.service.database.tables import answers, creations
from tlora.service.problems import RefusedError

_FIND = select(answers).where(answers.c.tenant == bindparam("tenant"), answers.c.key == bindparam("key"))
_INSERT = answers.insert()
_SORTED = "s:"  # of payloads whose keys were sorted; one that an older server kept cannot be compared with these, and its key alone counts
RETRY_SECONDS = 600.0  # that a retry without a key finds the creation it repeats


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: str  # JSON


def hash_payload(route: str, body: bytes) -> str:
    """Of what was asked, so that another question under the same key is seen."""
    return hashlib.sha256(route.encode() + b"\0" + body).hexdigest()


def hash_orders(route: str, orders: Sequence[OrderSpec]) -> str:
    """As `hash_payload`, and the same in whatever order a version of tlora has an order's keys."""
    fields = [order.model_dump(mode="json", exclude_unset=True) for order in orders]
    return _SORTED + hash_payload(route, json.dumps(fields, sort_keys=True).encode())[len(_SORTED) :]


def once(connection: Connection, tenant: str, key: str | None, payload: str, work: Callable[[], Answer]) -> Answer:
    """What `work` gives, or gave when it was asked under this `key` before. Raises RefusedError 409 for another question under the key.

    In the caller's transaction: the answer is remembered if and only if the work is done.
    """
    if key is None:
        return work()
    known = find_answer(connection, tenant, key, payload)
    if known is None:
        known = work()
        keep_answers(connection, [(tenant, key, payload, known)])
    return known


def find_answer(connection: Connection, tenant: str, key: str, payload: str) -> Answer | None:
    """What was answered under this `key`, if it was used. Raises RefusedError 409 where it was for another question."""
    known = connection.execute(_FIND, {"tenant": tenant, "key": key}).first()
    if known is None:
        return None
    if known.payload != payload and (known.payload.startswith(_SORTED) or not payload.startswith(_SORTED)):
        message = f"Idempotency-Key {key!a} was used for another request. Take a new key for a new request"
        raise RefusedError(409, "idempotency_key_reused", message)
    return Answer(known.status, known.body)


def keep_answers(connection: Connection, found: Sequence[tuple[str, str, str, Answer]]) -> None:
    """Tenant, key, payload and answer of each."""
    now = time.time()
    rows = [
        {"tenant": tenant, "key": key, "payload": payload, "status": answer.status, "body": answer.body, "created": now}
        for tenant, key, payload, answer in found
    ]
    if rows:
        connection.execute(_INSERT, rows)


def find_retried(connection: Connection, tenant: str, payload: str) -> str | None:
    """The job of a creation that this retry repeats: one whose answer was not sent as a whole and that no retry has matched before."""
    query = select(creations.c.serial, creations.c.job).where(
        creations.c.tenant == tenant,
        creations.c.payload == payload,
        creations.c.sent.is_(False),
        creations.c.matched.is_(False),
        creations.c.created > time.time() - RETRY_SECONDS,
    )
    found = connection.execute(query.order_by(creations.c.serial.desc()).limit(1)).first()
    if found is None:
        return None
    connection.execute(update(creations).where(creations.c.serial == found.serial).values(matched=True))
    return found.job


def add_creation(connection: Connection, tenant: str, payload: str, job: str) -> None:
    connection.execute(creations.insert().values(tenant=tenant, payload=payload, job=job, created=time.time(), sent=False, matched=False))


def mark_sent(connection: Connection, job: str) -> None:
    """The answer to the creation of `job` has gone out as a whole."""
    connection.execute(update(creations).where(creations.c.job == job).values(sent=True))


def forget_answers(connection: Connection, seconds: float, now: float) -> None:
    """Those older than `seconds` at the time `now`, and creations that no retry can match any more."""
    connection.execute(delete(answers).where(answers.c.created < now - seconds))
    connection.execute(delete(creations).where(creations.c.created < now - 2 * RETRY_SECONDS))
