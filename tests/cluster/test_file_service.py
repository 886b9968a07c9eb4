"""Files over the line: real TLS on loopback, a worker that sees nothing of the store, lines that are cut and bytes that are flipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_listeners import OWN, TcpStation
from tlora import durable
from tlora.engine.job_copy import JobCopy
from tlora.job import JobSpec
from tlora.link import transfer
from tlora.link.authentication import AuthResponse
from tlora.link.endpoint import Endpoint
from tlora.link.job_lease import CLAIMS, HeldError, take_claim
from tlora.link.transfer import (
    AgainError,
    AskStaged,
    Done,
    ListTree,
    OpenStore,
    Piece,
    PutInPlace,
    PutRows,
    ReadPiece,
    StoreClient,
    TransferError,
    TreeFiles,
    facts_of,
    fetch_tree,
    stage_file,
)
from tlora.worker_protocol import PROTOCOL, Finished, Join

MINE, JOB = "of-b", "a"


class Far:
    """A worker of another host, by hand: `client` reaches the store, of which `here` is no part."""

    def __init__(self, station: TcpStation, root: Path) -> None:
        self.root, self.station, self.files = root, station, station.worker_pool.remote_hosts.files
        self.base = root / "base"
        (self.base / "sub").mkdir(parents=True)
        (self.base / "weights").write_bytes(os.urandom(300_000))
        (self.base / "sub" / "config.json").write_text("{}")
        (self.base / ".hidden").write_text("no")
        self.client = self.dial(MINE)
        self.grant(7)

    def dial(self, incarnation: str, protocol: int = PROTOCOL) -> StoreClient:
        listener = self.station.listener
        return StoreClient(Endpoint(listener.address, listener.fingerprint, self.station.secret), OpenStore(incarnation, protocol))

    def grant(self, attempt: int, incarnation: str = MINE) -> None:
        join = Join(JobSpec.model_validate({"name": JOB, "data": "d.jsonl"}), str(self.base / "sub"), attempt=attempt)
        self.files.grant(incarnation, str(self.base), {JOB: (attempt, join)})

    @property
    def job(self) -> Path:
        return self.root / "store" / "jobs" / JOB

    def fetch(self, tree: str = "base") -> Path | None:
        (self.root / "trees").mkdir(exist_ok=True)
        return fetch_tree(self.client, tree, self.root / "trees", lambda: False, lambda: None)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """Neither of this host nor in sight of the store; pieces are small."""
    monkeypatch.setattr("tlora.link.authentication.identify", lambda _: replace(OWN, boot="of another host"))
    monkeypatch.setattr("tlora.link.authentication.prove", lambda _: AuthResponse(problem="No such file or directory"))
    for module in ("tlora.link.transfer", "tlora.cluster.file_service", "tlora.engine.job_copy"):
        monkeypatch.setattr(f"{module}.PIECE_BYTES", 65_536)
    station = TcpStation(tmp_path / "store" / "workers")
    made = Far(station, tmp_path)
    yield made
    made.client.close()
    station.close()


def checkpoint(directory: Path, step: int, content: bytes) -> Path:
    durable.write_directory(directory / f"checkpoint-{step}", lambda scratch: (scratch / "weights").write_bytes(content) and None)
    return directory / f"checkpoint-{step}"


def test_a_tree_comes_once_by_hash_and_goes_on_where_it_was_cut(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    exchange = StoreClient._exchange

    def cut(client: StoreClient, request: Any, content: bytes) -> Any:
        if isinstance(request, ReadPiece) and request.name == "weights":
            asked.append(request.offset)
            if len(asked) == 3 and client._line is not None:
                client._line.end()  # within the file; what follows dials again
        return exchange(client, request, content)

    monkeypatch.setattr(StoreClient, "_exchange", cut)
    place = far.fetch()
    assert place is not None and (place / "weights").read_bytes() == (far.base / "weights").read_bytes()
    assert asked == [0, 65_536, 131_072, 131_072, 196_608, 262_144], "no piece came twice"
    assert sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()) == ["sub/config.json", "weights"]
    asked.clear()
    assert far.fetch() == place and not asked
    assert far.fetch("train:a") is not None and far.fetch("eval:a") is None and far.fetch("start:a") is None
    assert far.fetch("job:a") is None


def test_a_file_with_flipped_bytes_is_fetched_again_and_never_taken(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [2]
    exchange = StoreClient._exchange

    def flip(client: StoreClient, request: Any, content: bytes) -> Any:
        answer, following = exchange(client, request, content)
        if isinstance(answer, Piece) and following and wrong[0] > 0:
            wrong[0] -= 1
            following = bytes([following[0] ^ 1]) + following[1:]
        return answer, following

    monkeypatch.setattr(StoreClient, "_exchange", flip)
    place = far.fetch()
    assert place is not None and (place / "weights").read_bytes() == (far.base / "weights").read_bytes()
    (far.base / "weights").write_bytes(os.urandom(100_000))
    wrong[0] = 10**6
    with pytest.raises(TransferError, match="has another content than the .* that was announced, 3 times"):
        far.fetch()
    assert len(list((far.root / "trees").glob("*.part"))) == 1


def test_what_is_sent_is_in_place_whole_or_not_at_all(far: Far) -> None:
    made = checkpoint(far.root, 4, os.urandom(200_000))
    facts = facts_of(made / "weights", "weights")
    with pytest.raises(AgainError, match="arrived damaged"):
        far.client.ask(PutInPlace(JOB, 7, (facts,), "checkpoint-4"), Done)
    flipped = made.with_name("flipped")
    flipped.write_bytes(bytes([(made / "weights").read_bytes()[0] ^ 1]) + (made / "weights").read_bytes()[1:])
    stage_file(far.client, JOB, facts, flipped)
    with pytest.raises(AgainError, match="arrived damaged"):
        far.client.ask(PutInPlace(JOB, 7, (facts,), "checkpoint-4"), Done)
    assert not far.job.exists() or not list(far.job.iterdir())
    stage_file(far.client, JOB, facts, made / "weights")
    far.client.ask(PutInPlace(JOB, 7, (facts,), "checkpoint-4"), Done)
    durable.verify(far.job / "checkpoint-4")
    assert (far.job / "checkpoint-4" / "MANIFEST.json").read_bytes() == (made / "MANIFEST.json").read_bytes()
    assert far.client.ask(AskStaged(JOB, facts.sha256), Done)[0].num_bytes == 200_000, "under a second name it need not come again"


def test_an_attempt_that_was_replaced_writes_nothing(far: Far) -> None:
    """All that it may send: as another worker's, after its lease, with an old number, and where a later one has begun by itself."""
    made = checkpoint(far.root, 4, b"old" * 1000)
    facts = facts_of(made / "weights", "weights")
    stage_file(far.client, JOB, facts, made / "weights")
    far.client.ask(PutRows(JOB, 7, "metrics.jsonl", 0, 3), Done, b"{}\n")
    with pytest.raises(HeldError, match="held by process"):
        take_claim(far.job.parent, JOB, 8, 0.0)  # by a worker of this host, while this one holds it
    far.files.keep(MINE, {JOB: 7})
    attempts: list[Any] = [PutInPlace(JOB, 7, (facts,), "checkpoint-4"), PutInPlace(JOB, 7, (facts,)), ListTree("job:a")]
    attempts += [transfer.Remove(JOB, 7, "metrics.jsonl"), AskStaged(JOB, facts.sha256), transfer.PutRows(JOB, 7, "metrics.jsonl", 0, 0)]
    far.files.keep(MINE, {})  # its lease has ended
    for request in attempts:
        with pytest.raises(TransferError, match="is not this worker's, or no longer. Nothing is written"):
            far.client.ask(request, Done)
    far.grant(8, "of-c")
    with pytest.raises(TransferError, match="is not this worker's"):
        far.client.ask(attempts[0], Done)
    far.grant(9)
    with pytest.raises(TransferError, match="attempt 9 writes it, and this is 7"):
        far.client.ask(attempts[0], Done)
    take_claim(far.job.parent, JOB, 10, 0.0).release()
    with pytest.raises(TransferError, match="attempt 10 has begun, and this is 9"):
        far.client.ask(PutRows(JOB, 9, "metrics.jsonl", 0, 0), Done)
    assert [path.name for path in far.job.iterdir()] == ["metrics.jsonl"] and (far.job / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("tree", ["train:b", "job:../a", "job:", "eval:a", "shell:a", "/etc", "base:x/../.."])
def test_no_tree_but_ones_own_is_given(far: Far, tree: str) -> None:
    if tree.startswith("base"):
        assert far.client.ask(ListTree(tree), TreeFiles)[0].files == far.client.ask(ListTree("base"), TreeFiles)[0].files
        assert not far.client.ask(ReadPiece(tree, "../store/workers/worker-tokens.json", 0), Piece)[1]
        return
    try:
        assert far.client.ask(ListTree(tree), TreeFiles)[0].files == ()
    except TransferError as error:
        assert "is not this worker's" in str(error)


@pytest.mark.parametrize("name", ["../b", "a/b", ".hidden", "", "x" * 300])
def test_no_file_is_put_where_a_job_has_none(far: Far, name: str) -> None:
    made = checkpoint(far.root, 4, b"x")
    facts = facts_of(made / "weights", name)
    stage_file(far.client, JOB, facts, made / "weights")
    with pytest.raises(TransferError, match="of files that no job has"):
        far.client.ask(PutInPlace(JOB, 7, (facts,)), Done)
    with pytest.raises(TransferError):
        far.client.ask(PutInPlace(JOB, 7, (replace(facts, name="weights"),), name or ".."), Done)
    with pytest.raises(TransferError, match="no file of rows"):
        far.client.ask(PutRows(JOB, 7, f"{name}.json", 0, 0), Done)


def test_an_earlier_versions_worker_and_one_that_was_never_let_in_get_nothing(far: Far) -> None:
    old, stranger = far.dial(MINE, PROTOCOL - 1), far.dial("nobody")
    with pytest.raises(TransferError, match=f"protocol {PROTOCOL - 1}"):
        old.ask(ListTree("base"), TreeFiles)
    assert stranger.ask(ListTree("base"), TreeFiles)[0].files == ()
    with pytest.raises(TransferError, match="is not this worker's"):
        stranger.ask(ListTree("job:a"), TreeFiles)
    old.close()
    stranger.close()


def test_a_jobs_directory_goes_there_and_back(far: Far) -> None:
    """What a resume needs goes while it trains, the rest at its end; what was removed goes there too; paths are each host's own."""
    far.job.mkdir(parents=True)
    checkpoint(far.job, 2, b"two")
    (far.job / "job.json").write_text(json.dumps({"adapter_path": "/there/adapter"}))
    (far.job / "result.json").write_text("{}")
    (far.job / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    (far.job / "notes").mkdir()
    here = far.root / "copy"
    copy = JobCopy(far.client, JOB, 7, here, {str(here): str(far.job), "/cache/adapter": "/there/adapter"})
    copy.fetch(lambda: False, lambda: None)
    assert sorted(path.name for path in here.iterdir()) == ["checkpoint-2", "job.json", "metrics.jsonl", "result.json"]
    assert json.loads((here / "job.json").read_text()) == {"adapter_path": "/cache/adapter"}
    (here / "result.json").unlink()
    (here / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    copy.send(last=False)
    assert not (far.job / "result.json").exists() and (far.job / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    with (here / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 3}\n{"st')
    made = checkpoint(here, 4, b"four" * 50_000)
    durable.remove_checkpoints(here, {"checkpoint-4"})
    (here / "adapter_model.safetensors").hardlink_to(made / "weights")
    copy.send(last=False)
    assert sorted(path.name for path in far.job.iterdir()) == ["checkpoint-4", "job.json", "metrics.jsonl", "notes"]
    assert (far.job / "metrics.jsonl").read_text().endswith('{"step": 3}\n')
    (here / "result.json").write_text(json.dumps({"path": str(here)}))
    copy.send(last=True)
    assert json.loads((far.job / "result.json").read_text()) == {"path": str(far.job)}
    assert json.loads((far.job / "job.json").read_text()) == {"adapter_path": "/there/adapter"}
    assert (far.job / "adapter_model.safetensors").read_bytes() == b"four" * 50_000
    ended = copy.named_there(Finished(JOB, {"path": str(here), "steps": 4}, 7))
    assert isinstance(ended, Finished) and ended.result == {"path": str(far.job), "steps": 4}
    assert not list((far.root / "store" / "workers" / "incoming" / MINE).iterdir())
    assert (far.job.parent / CLAIMS / JOB).read_text().startswith("7 ")
