"""What comes in an archive is written only if it is an adapter, whole, and where it belongs."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import httpx
import pytest

from tlora.api import JobView, OrderedData, OrderSpec
from tlora.base_digest import trained_over
from tlora.client.access import Access
from tlora.client.connection import Connection
from tlora.client.transfers import download_adapter, plain_name, upload_files
from tlora.errors import ConfigError, DataError, ServiceError
from tlora.service.archives import entries_of, stream_tar, tar_bytes
from tlora.service.uploads import check_filename
from tlora.version import __version__

HEADERS = {"tlora-version": __version__}
ORDER = OrderSpec(name="sql", base_model="base", data=OrderedData(file="file-1"))
JOB = JobView(id="job-1", name="sql", status="succeeded", base_model="base", created_at=1.0, order=ORDER)


def adapter(directory: Path) -> bytes:
    """The archive that a server makes."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"w" * 5000)
    entries = entries_of(directory, "sql", "base", {})
    content = b"".join(stream_tar(entries))
    assert len(content) == tar_bytes(entries)
    return content


def archive(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return target.getvalue()


def special(kind: bytes, name: str = "sql/link", target: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def sending(content: bytes, status: int = 200) -> Connection:
    access = Access("https://host.example", "tml-secret-key", "x", "x")
    return Connection(access, httpx.MockTransport(lambda _: httpx.Response(status, stream=httpx.ByteStream(content), headers=HEADERS)))


def test_an_adapter_comes_as_it_was_sent(tmp_path: Path) -> None:
    found = download_adapter(sending(adapter(tmp_path / "source")), JOB, tmp_path / "out" / "deep")
    assert found == tmp_path / "out" / "deep" / "sql"
    assert (found / "adapter_model.safetensors").read_bytes() == b"w" * 5000
    with pytest.raises(ConfigError, match="is there already"):
        download_adapter(sending(b""), JOB, tmp_path / "out" / "deep")


def test_a_base_that_is_a_directory_of_the_server_goes_by_its_name_and_digest(tmp_path: Path) -> None:
    """Of one with a public name the digest alone is sent; of neither is there more than is known."""
    digest = {"base_files": {"quick": "d", "sha256": {}}}
    for number, (named, facts, sent) in enumerate(
        [
            ("/srv/llama", {"base_model": "/srv/llama", "dtype": "auto"} | digest, {"base_model": "base", "served": True} | digest),
            ("/srv/llama", None, {"base_model": "base", "served": True}),
            ("org/llama", {"base_model": "org/llama"} | digest, {"base_model": "org/llama"} | digest),
            ("org/llama", None, None),
        ]
    ):
        source, out = tmp_path / f"source{number}", tmp_path / f"out{number}"
        source.mkdir()
        (source / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        (source / "adapter_model.safetensors").write_bytes(b"w")
        if facts is not None:
            (source / "base.json").write_text(json.dumps(facts))
        found = download_adapter(sending(b"".join(stream_tar(entries_of(source, "sql", "base", {})))), JOB, out)
        assert (json.loads((found / "base.json").read_text()) if (found / "base.json").exists() else None) == sent
        over = trained_over(found)
        assert (over is not None and over.served) == (named == "/srv/llama")


@pytest.mark.parametrize("cut", [1, 512, 700, 3000, 6000, 7000])
def test_an_archive_that_is_cut_off_leaves_nothing(tmp_path: Path, cut: int) -> None:
    content = adapter(tmp_path / "source")[:cut]
    with pytest.raises(DataError, match="nothing was kept"):
        download_adapter(sending(content), JOB, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    content = bytearray(adapter(tmp_path / "source"))
    content[content.index(b"wwww") + 1000] ^= 1
    with pytest.raises(DataError, match="is damaged: expected sha256"):
        download_adapter(sending(bytes(content)), JOB, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        archive(("sql/../../evil", b"x")),
        archive(("/etc/evil", b"x")),
        archive(("sql/a/b", b"x")),
        archive(("sql/.hidden", b"x")),
        archive(("sql", b"x")),
        archive(("sql/a", b"x"), ("other/a", b"y")),
        archive(special(tarfile.SYMTYPE)),
        archive(special(tarfile.LNKTYPE)),
        archive(special(tarfile.FIFOTYPE)),
        archive(special(tarfile.DIRTYPE, "sql/a")),
        archive(*((f"sql/{number}", b"") for number in range(1001))),
        archive(("sql/adapter_config.json", b"{}"), ("sql/adapter_model.safetensors", b"w")),  # no manifest
        b"not an archive" * 100,
        b"",
    ],
)
def test_an_archive_that_is_no_adapter_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="nothing was kept"):
        download_adapter(sending(content), JOB, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [] and not (tmp_path / "evil").exists()


def test_a_refusal_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no adapter"):
        download_adapter(sending(b'{"error": {"message": "there is no adapter", "code": "no_adapter"}}', 409), JOB, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["my file's.jsonl", "..jsonl", "_x.jsonl", "a..b.json", "ä ö.CSV", "x" * 240 + ".txt", "-.jsonl", "a\tb.parquet"]
)
def test_every_name_of_a_file_becomes_one_that_the_server_takes(name: str) -> None:
    assert name.lower().endswith(check_filename(plain_name(name)))


def test_a_file_that_changes_or_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("{}\n")
    body = {"id": "file-1", "sha256": "0" * 64, "filename": "data.jsonl", "bytes": 3, "created_at": 1, "purpose": "fine-tune"}
    answers = [httpx.Response(200, json={"data": [], "has_more": False}, headers=HEADERS), httpx.Response(200, json=body, headers=HEADERS)]
    access = Access("https://host.example", "tml-secret-key", "x", "x")
    connection = Connection(access, httpx.MockTransport(lambda request: answers[request.method == "POST"]))
    with pytest.raises(DataError, match="changed while it was uploaded"):
        upload_files(connection, [path], lambda *_: None)
    with pytest.raises(DataError, match="cannot be read"):
        upload_files(connection, [tmp_path / "missing.jsonl"], lambda *_: None)
