"""Requests to one server: the key to its own origin alone, retries where they are safe, and one error for each way to fail."""

from __future__ import annotations

import ssl
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

import httpx
from pydantic import BaseModel, ValidationError

from tlora.api import TENANT_HEADER, EventList, FileList, JobList, TenantJobList
from tlora.client.access import Access, origin_of
from tlora.errors import ServiceError
from tlora.job import NAME_PATTERN
from tlora.server_directory import HOME
from tlora.version import __version__

Answer = TypeVar("Answer", bound=BaseModel)
Page = TypeVar("Page", JobList, TenantJobList, FileList, EventList)
VERSION_HEADER = "tlora-version"
_DELAYS = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds before each new try
_LONGEST_WAIT = 30.0  # seconds, that an answer may ask to wait
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_BUSY = (502, 503, 504)
_FINAL_CODES = ("draining",)  # of answers that another try would get too


class Connection:
    """A context manager. Raises ServiceError for whatever is not the answer that was asked for."""

    def __init__(
        self,
        access: Access,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        tenant: str | None = None,
    ) -> None:
        """`tenant`: the name of another than the key's, on whose jobs and files all requests act. The key needs the scope admin then.
        Raises ServiceError for a name that no tenant can have.
        """
        if tenant is not None and not NAME_PATTERN.fullmatch(tenant):  # nor does a header carry any name
            raise ServiceError(f"there is no tenant {tenant[:100]!r}. `tlora keys list` names those that there are")
        self.access, self._tenant = access, tenant
        self._sleep = sleep
        self._met = False  # whether the server has answered: one that never did is not waited for
        self._theirs = ""  # the server's version
        origin_of(access.url)
        # a proxy of the environment would read what goes without TLS
        plain = access.is_plain
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True  # trusts none, and is not used: all others' take 40 ms to read
        self._http = httpx.Client(transport=transport, timeout=_TIMEOUT, follow_redirects=False, trust_env=not plain, verify=verify)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def get(self, path: str, kind: type[Answer], **params: str | int | None) -> Answer:
        asked = {key: value for key, value in params.items() if value is not None}
        return self._read(self._repeat(lambda: self._http.request("GET", self._url(path), params=asked, headers=self._headers())), kind)

    def pages(self, path: str, kind: type[Page], most: int | None = None, size: int = 100, **params: str | None) -> Iterator[Page]:
        """Of a list, `size` entries each, until `most` entries or its end."""
        cursor, count = None, 0
        while most is None or count < most:
            limit = size if most is None else min(size, most - count)
            page = self.get(path, kind, limit=limit, cursor=cursor, **params)
            yield page
            cursor, count = page.next_cursor, count + len(page.data)
            if cursor is None:
                return

    def send(self, method: str, path: str, kind: type[Answer], body: Mapping[str, Any] | None = None) -> Answer:
        """With a key of its own, so that it is done once however often it is sent."""
        headers = self._headers() | {"Idempotency-Key": uuid.uuid4().hex}
        return self._read(self._repeat(lambda: self._http.request(method, self._url(path), json=body, headers=headers)), kind)

    def send_form(self, path: str, kind: type[Answer], make: Callable[[], tuple[dict[str, Any], dict[str, str]]]) -> Answer:
        """A form with files; `make` opens them, anew for each try."""
        headers = self._headers() | {"Idempotency-Key": uuid.uuid4().hex}

        def post() -> httpx.Response:
            files, data = make()
            try:
                return self._http.request("POST", self._url(path), files=files, data=data, headers=headers)
            finally:
                for _, stream in files.values():
                    stream.close()

        return self._read(self._repeat(post), kind)

    @contextmanager
    def stream(self, path: str) -> Generator[httpx.Response]:
        """An answer whose bytes are read as they come; one that is cut off is a ServiceError."""
        try:
            with self._http.stream("GET", self._url(path), headers=self._headers()) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self._judge(answer)
                yield answer
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _url(self, path: str) -> str:
        return self.access.url + path

    def _headers(self) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.access.key}", "User-Agent": f"tlora/{__version__}"}
        return headers | ({TENANT_HEADER: self._tenant} if self._tenant is not None else {})

    def _repeat(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        """What is asked may be done twice without harm: reading, changes that are the same twice, requests with an Idempotency-Key."""
        for delay in (*_DELAYS, None):
            try:
                answer = ask()
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if delay is None or not self._met:
                    raise self._unreachable(error) from None
            except httpx.HTTPError as error:
                if delay is None:
                    raise self._unreachable(error) from None
            else:
                self._met = True
                wait = _wait_of(answer)
                if delay is None or wait is None:
                    return answer
                delay = max(delay, wait)
            self._sleep(delay)
        raise AssertionError("the last try returns or raises")

    def _read(self, answer: httpx.Response, kind: type[Answer]) -> Answer:
        self._judge(answer)
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ServiceError(
                f"{self.access.url}: its answer is not understood ({where}: {first['msg']}){self._versions(always=True)}"
            ) from None

    def _judge(self, answer: httpx.Response) -> None:
        """Raises ServiceError for an answer that is none of a tlora server, or a refusal."""
        status, url = answer.status_code, self.access.url
        if answer.is_redirect:
            target = answer.headers.get("location", "")
            raise ServiceError(
                f"{url}: redirects to {target}, and a key is not sent across redirects. Set TLORA_URL to the server's own", status
            )
        theirs = answer.headers.get(VERSION_HEADER)
        if theirs is None:
            proxy = ". A proxy before the server may say so while it restarts" if status in _BUSY else ""
            raise ServiceError(f"{url}: something answers there ({status}), but no tlora server. Check the address{proxy}", status)
        self._theirs = str(theirs)
        if status < 400:
            return
        code, message = _error_of(answer)
        if status == 401:
            message = f"{url}: the key from {self.access.key_from} {self._unknown_key()}"
        elif status == 403:
            message = f"{message} (this key is from {self.access.key_from})"
        elif status == 421:
            message = f"{url}: {message}"
        raise ServiceError(message + self._versions(always=False, status=status), status, code)

    def _unknown_key(self) -> str:
        """What is wrong with the key, and what helps."""
        if (directory := self.access.of_directory) is None:
            return "is unknown there, or revoked. Save another with `tlora login`"
        return (
            f"is unknown there: it is of the server that was last started over {directory}, or revoked. If the one there has a --data-dir "
            f"of its own, set {HOME} to that; else save a key with `tlora login`"
        )

    def _versions(self, always: bool, status: int = 0) -> str:
        """Where another version may be the reason."""
        if self._theirs == __version__ or not (always or status in (405, 422) or status >= 500):
            return ""
        return f". The server is tlora {self._theirs}, and this is {__version__}; use the same version"

    def _unreachable(self, error: httpx.HTTPError) -> ServiceError:
        url, where = self.access.url, self.access.url_from
        if isinstance(error, httpx.ConnectError):
            remedy = "Start one with `tlora serve`" if self.access.is_plain else "Check the address, or ask its operator"
            return ServiceError(f"{url}: no server answers there ({_reason(error)}); the address is from {where}. {remedy}")
        if isinstance(error, httpx.TimeoutException):
            return ServiceError(f"{url}: the server does not answer in time. Try again later")
        return ServiceError(f"{url}: the connection broke ({_reason(error)}). Try again")


def _reason(error: httpx.HTTPError) -> str:
    text = str(error) or type(error).__name__
    return text.partition("] ")[2] or text  # without "[Errno 111]"


def _wait_of(answer: httpx.Response) -> float | None:
    """Seconds until another try may go better; None where the answer stands."""
    code = _error_of(answer)[0] if answer.status_code >= 400 else ""
    busy = answer.status_code in _BUSY and code not in _FINAL_CODES
    if not busy and not (answer.status_code == 429 and code == "too_many_requests"):
        return None
    asked = answer.headers.get("retry-after", "")
    return min(float(asked), _LONGEST_WAIT) if asked.isdecimal() else 0.0


def _error_of(answer: httpx.Response) -> tuple[str, str]:
    """Code and message of a refusal, in whatever shape it comes."""
    try:
        body: object = answer.json()
    except (ValueError, httpx.ResponseNotRead):
        body = None
    found = cast("dict[str, object]", body).get("error") if isinstance(body, dict) else None
    error = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    return str(error.get("code") or ""), str(error.get("message") or f"the server refuses ({answer.status_code})")
