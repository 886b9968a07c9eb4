"""The page at `/`: groups as boxes on their GPUs, the queue with its reasons, a job's live loss. It only shows; it changes nothing.

All HTML is made here, with autoescape; the script replaces what has changed and draws nothing by itself.
"""

from __future__ import annotations

import gzip
import re
import time
from functools import cache
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from sqlalchemy import Connection, Row, select

from tlora.api import ENDED, JobView, LoginLink
from tlora.service.access import caller_of
from tlora.service.database import job_rows
from tlora.service.database.tables import jobs
from tlora.service.live_state import PAUSED
from tlora.service.losses import read_losses
from tlora.service.problems import RefusedError, answer
from tlora.service.routes.cluster import show_cluster
from tlora.service.routes.jobs import REFUSALS, JobId
from tlora.service.services import Services, services_of
from tlora.service.signed import COOKIE_SECONDS, LINK_SECONDS
from tlora.version import __version__
from tlora.wording.numbers import DASH, count_text, duration_text, field_text, loss_text, place_names, ranges_text

_TEXT: dict[str, Any] = {"content": {"text/html": {"schema": {"type": "string"}}}}
# refusals are pages for browsers, and JSON for all others
_HTML: dict[int | str, dict[str, Any]] = {200: _TEXT, 401: REFUSALS[401] | _TEXT, 404: REFUSALS[404] | _TEXT}
_SCRIPT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/javascript": {}}}}
router = APIRouter(tags=["page"], responses=REFUSALS)
_GZIP = re.compile(r"(?<![^\s,])gzip\s*(?:,|$|;\s*q=(?!0(?:\.0*)?\s*(?:,|$)))", re.IGNORECASE)  # q=0 refuses it
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SPARK_BYTES, _SPARK_POINTS = 64 << 10, 60
_CHART_BYTES, _CHART_POINTS = 1 << 20, 400
_MOST_WAITING = 200  # shown of the queue
_LAST_ENDED = 12
_LAST_EVENTS = 30


@router.post("/v1/login-links", tags=["keys"], status_code=201)
def make_login_link(request: Request) -> LoginLink:
    """For a browser to see the page as the tenant of this key, with the right to read, for as long as the key is valid."""
    caller = caller_of(request)
    return LoginLink(path=services_of(request).browser_sessions.make_link(caller.key_id, caller.tenant), expires_in=LINK_SECONDS)


@router.get("/login", response_class=Response, responses=_HTML)
def show_login(request: Request) -> HTMLResponse:
    """Uses up the link whose token stands behind the `#`."""
    return _page("login.html", request.scope.get("root_path", ""))


@router.post("/login", status_code=204, response_class=Response)
def log_in(request: Request, token: Annotated[str, Body(embed=True, max_length=100)] = "") -> Response:
    """A cookie for the token of a link."""
    browser_sessions = services_of(request).browser_sessions
    cookie = browser_sessions.use_link(token)
    if cookie is None:
        return answer(401, "invalid_link", "this link is unknown, used or too old. `tlora login --page` makes another")
    found, path = Response(status_code=204), request.scope.get("root_path", "") or "/"
    secure = request.url.scheme == "https"
    found.set_cookie(browser_sessions.cookie_name, cookie, COOKIE_SECONDS, path=path, secure=secure, httponly=True, samesite="strict")
    return found


@router.get("/page/page.css", response_class=Response, responses={200: {"content": {"text/css": {}}}})
def read_style() -> Response:
    return _file("page.css", "text/css")


@router.get("/page/page.js", response_class=Response, responses=_SCRIPT)
def read_script() -> Response:
    return _file("page.js", "text/javascript")


@router.get("/page/login.js", response_class=Response, responses=_SCRIPT)
def read_login_script() -> Response:
    return _file("login.js", "text/javascript")


@router.get("/page/icon.svg", response_class=Response, responses={200: {"content": {"image/svg+xml": {}}}})
def read_icon() -> Response:
    """Named in each page, so that no browser asks for /favicon.ico."""
    return _file("icon.svg", "image/svg+xml")


def _file(name: str, kind: str) -> Response:
    """Asked for anew with each page: they are small, and a new version must not meet an old one's."""
    content = (resources.files("tlora.service") / "page" / name).read_bytes()
    return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})


@router.get("/", response_class=Response, responses=_HTML)
def show_page(request: Request) -> HTMLResponse:
    """The cluster as this tenant sees it."""
    services, tenant = services_of(request), caller_of(request).tenant
    cluster = show_cluster(request)
    placed = [job for group in cluster.groups for job in group.jobs]
    found = {row.id: services.view(row) for row in services.read(lambda connection: _rows(connection, tenant, placed))}
    ended = [services.view(row) for row in services.read(lambda connection: _ended(connection, tenant))]
    paused = {one.job: one for one in cluster.waiting if one.reason == PAUSED}
    in_boxes = found.keys() - paused.keys()  # a group may not have let go of one yet
    boxes = [
        {
            "gpus": group.gpus,
            "kinds": cluster.kinds_of(group.gpus),
            "base": group.base_model,
            "jobs": [_card(services, found[job]) for job in group.jobs if job in in_boxes],
        }
        | {"others": group.other_jobs}
        for group in sorted(cluster.groups, key=lambda group: group.gpus)
    ]
    waiting = [one for one in cluster.waiting if one.job not in paused and one.job not in found]  # those in a box say there what for
    place, places = place_names(cluster.device)
    used = {gpu for group in cluster.groups for gpu in group.gpus}
    page = _page(
        "cluster.html",
        request.scope.get("root_path", ""),
        cluster=cluster,
        place=place,
        places=places,
        boxes=boxes,
        free=[(gpu, cluster.unlike.get(gpu, "")) for gpu in cluster.gpus if gpu not in used],
        hosts=cluster.hosts,
        states=cluster.states,
        waiting=waiting[:_MOST_WAITING],
        more_waiting=max(0, len(waiting) - _MOST_WAITING),
        paused=list(paused.values())[:_MOST_WAITING],
        more_paused=max(0, len(paused) - _MOST_WAITING),
        ended=ended[:_LAST_ENDED],
        more_ended=len(ended) > _LAST_ENDED,
        fault=services.live.fault,
    )
    return _packed(request, page)


@router.get("/jobs/{job_id}", response_class=Response, responses=_HTML)
def show_job_page(job_id: JobId, request: Request) -> Response:
    """One job and its losses, as they come."""
    services, tenant, root = services_of(request), caller_of(request).tenant, request.scope.get("root_path", "")
    try:
        row = services.read(lambda connection: job_rows.find_job(connection, tenant, job_id))
    except RefusedError as error:
        if "text/html" not in request.headers.get("accept", ""):
            raise
        return _page("missing.html", root, status=error.status, job_id=job_id)
    events = services.read(lambda connection: job_rows.newest_events(connection, tenant, job_id, _LAST_EVENTS))
    job = services.view(row)
    losses = read_losses(_metrics(services, job_id), _CHART_BYTES, _CHART_POINTS)
    found = {"deadline": row.created + (row.order.get("deadline_seconds") or 0.0), "settings": _settings(row.order)}
    page = _page("job.html", root, job=job, losses=losses, events=events, ended=job.status in ENDED, **found)
    return _packed(request, page)


def login_page(root_path: str) -> HTMLResponse:
    """For a browser that came without a cookie."""
    return _page("login.html", root_path, 401)


def _rows(connection: Connection, tenant: str, ids: list[str]) -> list[Row[Any]]:
    return list(connection.execute(select(jobs).where(jobs.c.tenant == tenant, jobs.c.id.in_(ids[:1000]))))


def _ended(connection: Connection, tenant: str) -> list[Row[Any]]:
    query = select(jobs).where(jobs.c.tenant == tenant, jobs.c.ended.is_not(None)).order_by(jobs.c.ended.desc())
    return list(connection.execute(query.limit(_LAST_ENDED + 1)))


def _card(services: Services, job: JobView) -> dict[str, Any]:
    return {"job": job, "losses": read_losses(_metrics(services, job.id), _SPARK_BYTES, _SPARK_POINTS)}


def _metrics(services: Services, job_id: str) -> Any:
    return services.config.directory / "jobs" / job_id / "metrics.jsonl"


def _settings(order: dict[str, Any]) -> dict[str, str]:
    """What was ordered, each value as it is written."""
    found = {key: value for key, value in order.items() if key not in ("name", "base_model", "data")} | order["data"]
    return {key: field_text(value) for key, value in found.items()}


def _page(template: str, root: str, status: int = 200, **values: Any) -> HTMLResponse:
    text = _environment().get_template(template).render(root=root, **values)
    return HTMLResponse(text, status, headers={"Content-Security-Policy": _POLICY})


def _packed(request: Request, page: HTMLResponse) -> HTMLResponse:
    """Compressed for a client that takes it: a page is asked for every two seconds."""
    page.headers["Vary"] = "Accept-Encoding"
    if _GZIP.search(request.headers.get("accept-encoding", "")):
        page.body = gzip.compress(page.body, compresslevel=5, mtime=0)
        page.headers["Content-Encoding"], page.headers["Content-Length"] = "gzip", str(len(page.body))
    return page


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tlora.service", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"version": __version__, "dash": DASH}
    environment.filters |= {
        "loss": loss_text,
        "count": count_text,
        "duration": duration_text,
        "ago": _ago,
        "clock": _clock,
        "ranges": ranges_text,
    }
    return environment


def _ago(at: float) -> str:
    return f"{duration_text(max(0.0, time.time() - at))} ago"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
