"""Uploads: bytes come back as they went in; whatever is hostile gets one 4xx, and nothing of it is kept."""

from __future__ import annotations

import errno
import gzip
import itertools
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.service.served import ROW, Served, listening, serving
from tlora.service import uploads
from tlora.service.housekeeping import Housekeeping, cut_log
from tlora.service.problems import RefusedError
from tlora.service.uploads import check_filename

_ROOTS = [
    "",
    "/",
    "../",
    "..\\",
    "C:\\",
    "./",
    "~/",
    "file:",
    "\\\\host\\share\\",
    "%2e%2e%2f",
    "a/../",
    "....//",
    "..;/",
    "\x00",
    "\u202e",
]
_PARTS = [
    "etc/passwd",
    "con",
    "a\x00b",
    "a\nb",
    "a\r\nSet-Cookie: x",
    "a\x1bb",
    "a<script>alert(1)</script>",
    "a'b",
    'a"b',
    "a|b",
    "a;rm -rf",
    "a$(id)",
    "a`id`",
    "a*",
    "a?",
    "a\u200bb",
    "\ufeffa",
    "a" * 300,
]


def hostile_names() -> list[str]:
    """At least 200 names that are no plain names of data files."""
    made = [f"{root}{part}.jsonl" for root, part in itertools.product(_ROOTS, _PARTS) if root or part not in ("con",)]
    endings = [
        "",
        ".",
        ".exe",
        ".jsonl.exe",
        ".pkl",
        ".py",
        ".gz",
        ".jsonl.gz",
        ".zip",
        ".parquet.zip",
        ".jsonl ",
        ".jsonl\t",
        ".JSONL\x00",
    ]
    return [*made, *(f"data{ending}" for ending in endings), ".jsonl", "..jsonl", "-rf.jsonl", " a.jsonl", "", "a..jsonl"]


def kept(served: Served) -> list[Path]:
    root = served.opened.services.config.directory / "files"
    return [path for path in root.rglob("*") if path.is_file()]


def test_hostile_names_are_refused_and_nothing_is_kept(served: Served) -> None:
    names = hostile_names()
    assert len(set(names)) >= 200
    for name in names:
        with pytest.raises(RefusedError) as refused:
            check_filename(name)
        assert refused.value.status == 400
    for name in names[::4]:  # and over HTTP, as a raw form: a client's library would clean some of them
        answer = post_form(served, name.encode("utf-8", "surrogatepass"), ROW)
        assert answer.status_code == 400, (name, answer.status_code)
        assert answer.json()["error"]["message"].isprintable()
    assert kept(served) == [] and served.ask("alice", "GET", "/v1/files", 200)["data"] == []


def post_form(served: Served, name: bytes, content: bytes, purpose: str = "fine-tune") -> Any:
    escaped = name.replace(b"\r", b"").replace(b"\n", b"\x01").replace(b'"', b'\\"')
    body = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode() + b"\r\n"
    body += b'--B\r\nContent-Disposition: form-data; name="file"; filename="' + escaped + b'"\r\n\r\n' + content + b"\r\n--B--\r\n"
    headers = {"X-API-Key": served.key("alice"), "Content-Type": "multipart/form-data; boundary=B"}
    return served.client.post("/v1/files", content=body, headers=headers)


def test_plain_names_of_all_scripts_are_kept_as_text(served: Served) -> None:
    names = ["data.jsonl", "Über daten (2).csv", "данные.json", "a.b.parquet", "x-1_2+3.TXT", "データ.arrow", "1.ndjson"]
    for number, name in enumerate(names):
        file = served.upload("alice", b"abc%d" % number, name)
        assert served.ask("alice", "GET", f"/v1/files/{file}", 200)["filename"] == name
        assert len(kept(served)) == number + 1
    assert not [(path, name) for path in kept(served) for name in names if path.name.split(".")[0] in name]


def test_bytes_come_back_as_they_went_in_and_equal_ones_are_kept_once(served: Served) -> None:
    content = os.urandom(3 << 20)
    one, two = (served.upload("alice", content, f"{name}.parquet") for name in ("a", "b"))
    other = served.upload("bob", content, "a.parquet")
    assert len({one, two, other}) == 3
    for tenant, file in (("alice", one), ("alice", two), ("bob", other)):
        assert served.ask(tenant, "GET", f"/v1/files/{file}/content", 200).content == content
    places = kept(served)
    assert len(places) == 2 and places[0].name == places[1].name, "once a tenant, and never shared by two"
    assert {path.stat().st_mode & 0o077 for path in [served.opened.services.config.directory]} == {0}


@pytest.mark.parametrize(
    ("content", "name", "status", "code"),
    [
        (b"", "a.jsonl", 400, "empty_file"),
        (gzip.compress(bytes(10 << 20)), "a.jsonl", 400, "compressed"),
        (b"PK\x03\x04" + bytes(100), "a.parquet", 400, "compressed"),
        (b"x" * (1 << 20), "a.jsonl", 413, "line_too_long"),
        (ROW + b'"' + b"x" * (1 << 20) + b'"\n' + ROW, "a.csv", 413, "line_too_long"),
    ],
)
def test_bombs_get_one_clear_refusal(served: Served, content: bytes, name: str, status: int, code: str) -> None:
    refused = served.ask("alice", "POST", "/v1/files", status, files={"file": (name, content)}, data={"purpose": "fine-tune"})
    assert refused["error"]["code"] == code
    assert kept(served) == [] and served.ask("alice", "GET", "/v1/files", 200)["data"] == []


def test_the_line_that_is_too_long_is_named(served: Served) -> None:
    content = ROW * 2 + b"x" * (1 << 20)
    refused = served.ask("alice", "POST", "/v1/files", 413, files={"file": ("a.jsonl", content)}, data={"purpose": "fine-tune"})
    assert refused["error"]["message"].startswith("line 3 has more than 524,288 bytes")


def test_rows_and_bytes_have_limits(tmp_path: Path) -> None:
    with serving(tmp_path, limits={"file_rows": 5, "upload_bytes": 1000}) as served:
        for content, code in ((b"{}\n" * 7, "too_many_rows"), (b"{}" * 501, "too_large")):
            refused = served.ask("alice", "POST", "/v1/files", 413, files={"file": ("a.jsonl", content)}, data={"purpose": "fine-tune"})
            assert refused["error"]["code"] == code
        assert kept(served) == []
        served.upload("alice", b"{}\n" * 5)


NO_FORMS = [
    (b"{}", "application/json"),
    (b"", "multipart/form-data; boundary=B"),
    (b"nonsense", "multipart/form-data; boundary=B"),
    (b"--B\r\nContent-Disposition: form-data\r\n\r\nx\r\n--B--\r\n", "multipart/form-data; boundary=B"),
    (b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--B--\r\n', "multipart/form-data; boundary=B"),
    (
        b'--B\r\nContent-Disposition: form-data; name="other"; filename="a.jsonl"\r\n\r\nx\r\n--B--\r\n',
        "multipart/form-data; boundary=B",
    ),
    (b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 2000, "multipart/form-data; boundary=B"),
    (b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 20, "multipart/form-data; boundary=B"),
    (b"--B\r\n" + b"X-Long: " + b"y" * 100_000, "multipart/form-data; boundary=B"),
    (b"x", "multipart/form-data"),
    (b"x", ""),
]


def test_forms_that_are_none(served: Served) -> None:
    for body, kind in NO_FORMS:
        headers = {"X-API-Key": served.key("alice"), "Content-Type": kind}
        answer = served.client.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "bad_form", (body[:100], kind, answer.text)
        assert kept(served) == [], (body[:100], kind)


def test_an_endless_chunked_upload_and_one_that_breaks_off_leave_nothing(tmp_path: Path) -> None:
    with listening(tmp_path / "server", limits={"upload_bytes": 1 << 20, "line_bytes": 1 << 30}) as (served, url):
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {served.key('alice')}\r\nTransfer-Encoding: chunked\r\n"
        head += "Content-Type: multipart/form-data; boundary=B\r\n\r\n"
        begin = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + b"%x\r\n%s\r\n" % (len(begin), begin))
            sent = 0
            try:
                while sent < 1 << 30:
                    client.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                    sent += 65536
            except OSError:
                pass
            assert sent < 1 << 28, "it took what it could not use"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + b"%x\r\n%s\r\n" % (len(begin), begin))
            client.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        while kept(served):
            pass  # ends by pytest's limit: the scratch file goes with the request
        assert served.ask("alice", "GET", "/v1/files", 200)["data"] == []


def test_a_file_in_use_stays_and_what_nobody_uses_goes_after_a_grace_period(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, eager=False) as served:
        keeper, file = Housekeeping(served.opened.services), served.upload("alice")
        job = served.submit("alice", file=file)["id"]
        assert served.ask("alice", "DELETE", f"/v1/files/{file}", 409)["error"]["code"] == "file_in_use"
        served.ask("alice", "POST", f"/v1/jobs/{job}/cancel", 200)
        twin = served.upload("alice")  # of the same content
        orphan = kept(served)[0].parent / ("0" * 64 + ".jsonl")
        orphan.write_bytes(b"renamed, and then the server was killed")
        (orphan.parent / "tmp-dead").write_bytes(b"half")
        served.ask("alice", "DELETE", f"/v1/files/{file}", 200)
        served.ask("alice", "GET", f"/v1/files/{file}", 404)
        keeper.sweep()
        assert len(kept(served)) == 3, "all are younger than the grace period"
        later = kept(served)[0].stat().st_mtime + 3601
        keeper.sweep(later)
        assert len(kept(served)) == 2, "the twin's bytes, and what the store has no record of"
        served.ask("alice", "DELETE", f"/v1/files/{twin}", 200)
        keeper.sweep(later)
        assert kept(served) == [orphan], "never deleted without a record"
        assert [record.message for record in caplog.records if "no record" in record.message] == [
            f"{orphan}: the store has no record of it; it is left alone. Put the newest copy of the database back, or remove it by hand"
        ], "listed once"


def test_an_upload_beyond_the_storage_leaves_no_bytes_behind(tmp_path: Path) -> None:
    with serving(tmp_path, limits={"storage_bytes": len(ROW)}) as served:
        served.upload("alice", ROW)
        found = served.ask("alice", "POST", "/v1/files", 413, files={"file": ("a.jsonl", ROW * 2)}, data={"purpose": "fine-tune"})
        assert found["error"]["code"] == "storage_full" and len(kept(served)) == 1
        served.ask("alice", "POST", "/v1/files", 413, files={"file": ("a.jsonl", ROW)}, data={"purpose": "fine-tune"})
        assert len(kept(served)) == 1, "the first file's own bytes stay"


def test_jobs_past_their_retention_go_with_their_directories(tmp_path: Path) -> None:
    with serving(tmp_path, retention={"ended_jobs_seconds": 100}) as served:
        job = served.submit("alice")["id"]
        ended = served.wait("alice", job, "succeeded")["ended_at"]
        keeper = Housekeeping(served.opened.services)
        keeper.sweep(ended + 50)
        served.ask("alice", "GET", f"/v1/jobs/{job}", 200)
        keeper.sweep(ended + 101)
        served.ask("alice", "GET", f"/v1/jobs/{job}", 404)
        assert not (served.opened.services.config.directory / "jobs" / job).exists()


def test_a_full_disk_refuses_an_upload_and_keeps_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(uploads._Scratch, name, full)
            refused = served.ask("alice", "POST", "/v1/files", 507, files={"file": ("a.jsonl", ROW)}, data={"purpose": "fine-tune"})
            assert refused["error"]["code"] == "disk"
    assert kept(served) == []
    monkeypatch.setattr(uploads.durable, "make_directory", full)
    assert served.ask("alice", "POST", "/v1/files", 507, files={"file": ("a.jsonl", ROW)}, data={"purpose": "fine-tune"})


def test_a_log_is_cut_to_its_younger_half_at_a_line(tmp_path: Path) -> None:
    log = tmp_path / "gpu0.log"
    log.write_bytes(b"".join(b"line %04d\n" % number for number in range(1000)))
    cut_log(log, 20_000)
    assert len(log.read_bytes()) == 10_000
    cut_log(log, 1_000)
    assert 450 <= len(log.read_bytes()) <= 500 and log.read_bytes().startswith(b"line ") and log.read_bytes().endswith(b"line 0999\n")
