"""How fast a rank's bytes come to a rank on another host: through the two ranks, the worker that leads and the one that lends.

    python -m bench.relay [--mib 512] [--repeats 3] [--json FILE]

Four processes of this machine: a rank sends pieces as `RelayedMemory.pass_on` does, the leader passes them on over TLS, the lender to its
rank, which copies them to their places. `rank to leader` is the first of the three lines alone. CPU seconds are of all processes: where
each has a core of its own the slowest one says how fast it goes, on fewer cores their sum.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from bench import machine
from tlora.engine.messages import FROM_RANK, TO_RANK, Sending, Written
from tlora.engine.ranks.lending_line import LENDING, Frame, framed, read_frame
from tlora.engine.ranks.link import encode, with_content
from tlora.link.lines import Line
from tlora.link.tls import TlsStream, make_certificate, server_context
from tlora.sharing.relayed_memory import RelayedMemory

PART = 64 << 20  # of a rank's memory, which is sent again and again, as a job's gradients are
SECONDS = 600.0  # after which a way is taken for broken
CPU = torch.device("cpu")


def send(connection: socket.socket, num_bytes: int, begin: Event) -> None:
    """As a rank does."""
    line = Line(connection)

    def put(to: int, start: int, content: memoryview) -> None:
        line.send(*encode(FROM_RANK, Sending(Written(0, 0, to, start, len(content)), content)))

    memory = RelayedMemory(PART, 0, [0, 1], CPU, put)
    begin.wait()
    for _ in range(num_bytes // PART):
        memory.pass_on(0, PART)


def lead(connection: socket.socket, network: socket.socket, certificate: Path) -> None:
    stream = TlsStream(network, server_context(certificate), server_side=True)
    stream.handshake(SECONDS)
    line, host = Line(connection), Line(stream)
    for received in line.lines():
        host.send(*framed(1, encode(TO_RANK, with_content(FROM_RANK.decode(received), line))))


def lend(network: socket.socket, connection: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    stream = TlsStream(network, context, server_side=False)
    stream.handshake(SECONDS)
    line, rank = Line(stream), Line(connection)
    for received in line.lines():
        frame = LENDING.decode(received)
        assert isinstance(frame, Frame)
        rank.send(*encode(TO_RANK, read_frame(line, frame, TO_RANK.decode)))


def take(connection: socket.socket, num_bytes: int, begin: Event, ended: Any) -> None:
    """As a rank does. Tells the seconds from `begin` to the last byte in its place."""
    line, memory, left = Line(connection), RelayedMemory(PART, 1, [0, 1], CPU, lambda *_: None), num_bytes
    begin.wait()
    began = time.perf_counter()
    while left:
        received = line.read_line()
        assert received is not None, "the line has ended"
        said = with_content(TO_RANK.decode(received), line)
        assert isinstance(said, Sending)
        memory.take(0, said.written.start, said.content)  # type: ignore[arg-type]
        left -= said.written.size
    ended.put(time.perf_counter() - began)


def measure(num_bytes: int, whole: bool, certificate: Path) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    begin, ended = context.Event(), context.Queue()
    sockets = [ours, leader] = [*socket.socketpair()]
    works: list[tuple[Any, tuple[Any, ...]]] = [(send, (ours, num_bytes, begin))]
    if whole:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here, there = socket.create_connection(listener.getsockname()), listener.accept()[0]
        lender, other = socket.socketpair()
        sockets += [here, there, lender, other]
        works += [(lead, (leader, here, certificate)), (lend, (there, lender)), (take, (other, num_bytes, begin, ended))]
    else:
        works.append((take, (leader, num_bytes, begin, ended)))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes = [context.Process(target=target, args=args, daemon=True) for target, args in works]
    for process in processes:
        process.start()
    for each in sockets:
        each.close()
    time.sleep(1.0)  # all have come in
    begin.set()
    seconds: float = ended.get(timeout=SECONDS)
    for process in processes:
        process.kill()
        process.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu, "gb_per_second": num_bytes / seconds / 1e9}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"benchmark": "relay", **machine.facts(CPU, args.commit), "mib": args.mib, "ways": {}}
    with tempfile.TemporaryDirectory() as name:
        certificate = Path(name) / "certificate.pem"
        certificate.write_text(make_certificate("relay")[0])
        for way, whole in (("rank to leader", False), ("rank to rank on another host", True)):
            rows = [measure(args.mib << 20, whole, certificate) for _ in range(args.repeats)]
            medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            found["ways"][way] = medians | {"rows": rows}
            print(f"{way}: {medians['gb_per_second']:.2f} GB/s, {medians['cpu_seconds']:.2f} CPU s for {args.mib} MiB", flush=True)
    machine.write(args.json, found)


if __name__ == "__main__":
    main()
