"""The page: who sees what, links that work once, cookies that fall with their key, and names that stay text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tests.service.served import Served, listening, until
from tlora.service.database.tables import jobs
from tlora.service.keys import revoke_key
from tlora.service.routes import page
from tlora.service.signed import COOKIE_SECONDS

HTML = {"Accept": "text/html"}


class Elements(HTMLParser):
    """Names of all elements, their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def log_in(served: Served, tenant: str) -> dict[str, str]:
    """Headers of a browser that has used a link of the tenant's."""
    made = served.ask(tenant, "POST", "/v1/login-links", 201)
    answer = served.client.post("/login", json={"token": made["path"].partition("#")[2]})
    assert answer.status_code == 204, answer.text
    served.client.cookies.clear()
    return HTML | {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


def test_a_link_works_once_and_its_cookie_is_kept_from_scripts_and_other_sites(served: Served) -> None:
    made = served.ask("alice", "POST", "/v1/login-links", 201)
    token = made["path"].partition("#")[2]
    assert served.client.get("/login").status_code == 200  # looking at the page uses nothing up
    answer = served.client.post("/login", json={"token": token})
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={COOKIE_SECONDS}"))
    served.client.cookies.clear()
    again = served.client.post("/login", json={"token": token})
    assert again.status_code == 401 and "set-cookie" not in again.headers
    for body in ({}, {"token": "x"}, {"token": "x" * 1000}, {"token": 3}):
        assert served.client.post("/login", json=body).status_code in (401, 422)


def test_a_browser_without_a_cookie_is_told_how_to_log_in(served: Served) -> None:
    for path in ("/", "/jobs/job-0"):
        found = served.client.get(path, headers=HTML)
        assert found.status_code == 401 and "tlora login --page" in found.text and "login.js" in found.text
        assert served.client.get(path).json()["error"]["code"] == "invalid_key"  # not a browser


def test_a_cookie_reads_its_tenants_jobs_and_changes_nothing(served: Served) -> None:
    job = served.submit("alice", name="of-alice")
    alice, bob = log_in(served, "alice"), log_in(served, "bob")
    until(lambda: served.cluster.tick() or "of-alice" in served.client.get("/", headers=alice).text)
    assert "of-alice" not in served.client.get("/", headers=bob).text
    assert served.client.get(f"/jobs/{job['id']}", headers=alice).status_code == 200
    missing = served.client.get(f"/jobs/{job['id']}", headers=bob)
    assert missing.status_code == 404 and "No such job" in missing.text and "of-alice" not in missing.text
    assert served.client.get("/v1/jobs", headers=alice).status_code == 200
    for method, path in (
        ("POST", f"/v1/jobs/{job['id']}/cancel"),
        ("POST", "/v1/jobs"),
        ("DELETE", "/v1/files/file-0"),
        ("POST", "/v1/login-links"),
    ):
        assert served.client.request(method, path, headers=alice).status_code == 401
    assert served.client.get("/v1/keys", headers=alice).status_code == 403


def test_a_cookie_falls_with_its_key_and_forged_ones_are_none(served: Served) -> None:
    alice = log_in(served, "alice")
    name, _, value = alice["Cookie"].partition("=")
    for forged in (value[:-2] + "AA", "AAAA", "!", "", "é"):
        assert served.client.get("/", headers={"Cookie": f"{name}={forged}".encode()} | {"Accept": b"text/html"}).status_code == 401
    services = served.opened.services
    key_id = services.ring.find(served.key("alice")).key_id  # type: ignore[union-attr]
    link = served.ask("alice", "POST", "/v1/login-links", 201)["path"].partition("#")[2]
    services.writer.do(lambda connection: revoke_key(connection, key_id))
    services.ring.forget()
    assert served.client.get("/", headers=alice).status_code == 401
    assert served.client.post("/login", json={"token": link}).status_code == 401


def test_links_and_cookies_have_an_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.service.signed.COOKIE_SECONDS", -1)
    assert served.client.get("/", headers=log_in(served, "alice")).status_code == 401
    monkeypatch.setattr("tlora.service.signed.LINK_SECONDS", -1)
    token = served.ask("alice", "POST", "/v1/login-links", 201)["path"].partition("#")[2]
    assert served.client.post("/login", json={"token": token}).status_code == 401
    monkeypatch.setattr("tlora.service.signed._MOST_LINKS", 2)
    monkeypatch.setattr("tlora.service.signed.LINK_SECONDS", 600)
    browser_sessions = served.opened.services.browser_sessions
    first, *_ = [browser_sessions.make_link("key-0", "tenant-0") for _ in range(3)]
    assert browser_sessions.use_link(first.partition("#")[2]) is None


def test_names_reasons_and_settings_with_markup_stay_text(served_slowly: Served) -> None:
    served, evil = served_slowly, "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>{{ 7*7 }}"
    job = served.submit("alice", target_modules=["q_proj"])
    until(lambda: job["id"] in served.cluster.placed)
    _write_metrics(served, job["id"], [{"step": 1, "loss": 2.0}])
    served.cluster.step(job["id"], 1)
    served.wait("alice", job["id"], "running")
    alice = log_in(served, "alice")
    served.cluster.fail(job["id"], evil)
    served.wait("alice", job["id"], "failed")
    # no name may have markup: what else might bring it in is written into the store itself
    served.opened.services.writer.do(
        lambda connection: connection.execute(update(jobs).values(name=evil, base_model=evil, cloned_from=evil))
    )
    for path in ("/", f"/jobs/{job['id']}"):
        found = served.client.get(path, headers=alice)
        page = Elements(found.text)
        assert found.status_code == 200 and evil in page.text, found.text
        assert "img" not in page.names and page.names.count("script") == 1
        assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
        assert "script-src 'self'" in found.headers["content-security-policy"] and "unsafe" not in found.headers["content-security-policy"]


def _write_metrics(served: Served, job_id: str, rows: list[dict[str, Any]]) -> Path:
    path = served.opened.services.config.directory / "jobs" / job_id / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_groups_the_queue_and_a_jobs_live_loss(served_slowly: Served) -> None:
    served = served_slowly
    job, other = served.submit("alice", name="first"), served.submit("bob", name="second")
    for one in (job, other):
        until(lambda one=one: one["id"] in served.cluster.placed)
        served.cluster.step(one["id"], 4)
    served.wait("alice", job["id"], "running")
    paused = served.submit("alice", name="held")
    served.ask("alice", "POST", f"/v1/jobs/{paused['id']}/pause", 200)
    alice = log_in(served, "alice")
    _write_metrics(served, job["id"], [{"step": step, "loss": 3.0 - step / 10, "tokens_per_second": 99.0} for step in range(1, 5)])

    def seen() -> bool:
        served.cluster.tick()
        text = Elements(served.client.get("/", headers=alice).text).text
        return all(words in text for words in ("step 4 of 10", "of other tenants"))  # each comes by a report of its own

    until(seen)
    page = Elements(served.client.get("/", headers=alice).text)
    assert "loss 2.7500" in page.text and "99 tokens/s" in page.text and "polyline" in page.names
    assert "paused" in page.text and "second" not in page.text and "of other tenants" in page.text
    assert "train loss 2.7500" in Elements(served.client.get(f"/jobs/{job['id']}", headers=alice).text).text
    _write_metrics(served, job["id"], [{"step": 1, "loss": 1.5}, {"step": 1, "eval_loss": 1.25}])
    later = Elements(served.client.get(f"/jobs/{job['id']}", headers=alice).text)
    assert "train loss 1.5000" in later.text and "eval loss 1.2500" in later.text


def train_wide(served: Served, name: str) -> None:
    """A job of alice's on both GPUs."""
    job = served.submit("alice", name=name, gpus=2, batch_size=4)
    until(lambda: job["id"] in served.cluster.placed)
    served.cluster.step(job["id"], 4)
    served.wait("alice", job["id"], "running")


def test_each_job_stands_in_one_place_with_what_it_waits_for(served_slowly: Served) -> None:
    """One that is in a group and not in its worker yet in its box, one that is paused under that, and neither in the queue."""
    served = served_slowly
    train_wide(served, "trains")
    joins, paused = served.submit("alice", name="joins"), served.submit("alice", name="rests")
    served.ask("alice", "POST", f"/v1/jobs/{paused['id']}/pause", 200)
    until(lambda: joins["id"] in served.cluster.placed)
    alice, box = log_in(served, "alice"), "waits for its group on CPU processes 0, 1 to load the base and let it in"
    until(lambda: served.cluster.tick() or box in Elements(served.client.get("/", headers=alice).text).text)
    text = Elements(served.client.get("/", headers=alice).text).text
    assert all(text.count(name) == 1 for name in ("trains", "joins", "rests")), text
    queue, rest = text.partition("Waiting")[2].split("Paused")
    assert "No job of yours waits." in queue and "rests" in rest and f"tlora resume {paused['id']}" in rest
    text = Elements(served.client.get(f"/jobs/{paused['id']}", headers=alice).text).text
    assert "paused;" in text and f"tlora resume {paused['id']}" in text and "Waits for" not in text


def test_the_page_says_where_earlier_jobs_are(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows the last that have ended."""
    visitor, earlier = log_in(served, "alice"), "and earlier ones: tlora jobs lists them"
    monkeypatch.setattr(page, "_LAST_ENDED", 1)
    for name, more in (("first", False), ("second", True)):
        served.wait("alice", served.submit("alice", name=name)["id"], "succeeded")
        text = Elements(served.client.get("/", headers=visitor).text).text
        assert name in text and (earlier in text) == more
    assert "first" not in text


def test_pages_are_compressed_for_clients_that_take_it_and_name_their_icon(served: Served) -> None:
    visitor = log_in(served, "alice")
    for path in ("/", f"/jobs/{served.submit('alice', metadata={'note': 'x' * 500})['id']}"):
        packed = served.client.get(path, headers=visitor | {"Accept-Encoding": "gzip"})
        for taken, how in (
            (False, "gzip;q=0"),
            (False, "br, gzip; q=0.0, x"),
            (True, "br;q=0, gzip;q=0.5"),
            (True, "deflate, GZIP"),
            (False, "x-gzip"),
        ):
            found = served.client.get(path, headers=visitor | {"Accept-Encoding": how})
            assert ("content-encoding" in found.headers) == taken, how
        plain = served.client.get(path, headers=visitor | {"Accept-Encoding": "identity"})
        assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
        assert packed.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
        assert int(packed.headers["content-length"]) < len(plain.content) and "</html>" in packed.text
    icon = re.search('<link rel="icon" href="([^"]+)">', plain.text)
    assert icon is not None
    answer = served.client.get(icon[1])  # a browser may send no cookie for it
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/svg+xml"


def test_files_of_the_page_hold_no_inline_script_or_style(served: Served) -> None:
    for path, kind in (("/page/page.css", "text/css"), ("/page/page.js", "text/javascript"), ("/page/login.js", "text/javascript")):
        found = served.client.get(path)
        assert found.status_code == 200 and found.headers["content-type"].startswith(kind)
        assert not re.search(r"innerHTML\s*=[^=]|eval\(", found.text) and "http:" not in found.text and "https:" not in found.text


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or ""


@pytest.mark.skipif(not BROWSER, reason="chromium is not installed: apt-get install chromium")
def test_in_a_browser(tmp_path: Path) -> None:
    """Headless Chromium follows a link, is logged in, and sees the job."""
    with listening(tmp_path / "server") as (served, url):
        job = served.submit("alice", name="a-name-of-sixty-three-letters-" + "x" * 33)
        served.wait("alice", job["id"], "succeeded")
        link = served.ask("alice", "POST", "/v1/login-links", 201)["path"]
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=400,900"]
        for target in (url + link, f"{url}/jobs/{job['id']}"):
            command = [BROWSER, *options, "--virtual-time-budget=6000", "--dump-dom", target]
            found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
            assert job["name"] in found and "succeeded" in found, found
