"""Commands about workers that a person starts: the worker itself, and what lets one in over TCP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlora.cli.terminal import exit_on_error, note, open_console, open_table, print_table, say

if TYPE_CHECKING:
    from tlora.cluster.credentials import WorkerToken

_DAY_HOURS = 24.0


def _of_host(metavar: str, what: str, default: str) -> Any:
    """An option of a worker that comes from another host."""
    return typer.Option(metavar=metavar, help=f"For tcp://: {what}", show_default=default)


def worker(
    connect: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="The output directory of a cluster or a server's, unix:/path/to/controller.sock, or tcp://host:port.",
            show_default=False,
        ),
    ],
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "--gpu",
            metavar="N|0,1|all",
            help="Its GPUs, by nvidia-smi's numbers; the worker sees no other. Of several, for tcp://, groups get any.",
            show_default="0, or the first that CUDA_VISIBLE_DEVICES leaves",
        ),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="sha256:HEX", help="For tcp://: of the controller's certificate, from `tlora worker-token`.", show_default=False
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For tcp://: a 0600 file with the token, instead of TLORA_WORKER_TOKEN.", show_default=False),
    ] = None,
    host: Annotated[str | None, _of_host("NAME", "what the cluster calls this host.", "TLORA_HOST, or its host name")] = None,
    failure_domain: Annotated[
        str | None, _of_host("NAME", "what fails with this host, such as its rack.", "TLORA_FAILURE_DOMAIN, or the host")
    ] = None,
    address: Annotated[
        str | None,
        _of_host(
            "ADDRESS",
            "of this host, where other hosts reach it for a job that spans them.",
            "TLORA_ADDRESS, or where the controller sees it",
        ),
    ] = None,
) -> None:
    """Train for a running cluster on GPUs of this host, which may be another than the cluster's, until it needs no more. Ctrl-C and SIGTERM
    save all jobs; the cluster goes on elsewhere.
    """
    from tlora.cluster.gpus import see_only
    from tlora.cluster.host_agent import keep_workers
    from tlora.cluster.hosts import ADDRESS, ANY_OF, FAILURE_DOMAIN, HOST, describe_host
    from tlora.engine.worker import run
    from tlora.link.address import is_tcp
    from tlora.link.endpoint import find_entrance

    names = {HOST: host, FAILURE_DOMAIN: failure_domain, ADDRESS: address}
    os.environ.update({variable: name for variable, name in names.items() if name is not None})
    with exit_on_error(debug=False):
        chosen = _choose_gpus(os.environ.get(ANY_OF, gpus))
        if len(chosen) > 1 and is_tcp(connect) and ANY_OF not in os.environ:
            raise typer.Exit(keep_workers(find_entrance(connect, fingerprint, token_file), chosen))
    run(connect, chosen, fingerprint, token_file, see_only, describe_host)


def _choose_gpus(named: str | None) -> tuple[int, ...]:
    """By the value of --gpus; the driver is asked for all of them alone. Raises ConfigError."""
    from tlora.cluster.gpus import left_visible, list_gpus
    from tlora.engine.worker import parse_gpus

    if named == "all":
        return left_visible() or tuple(list_gpus()) or (0,)
    return parse_gpus(named) if named is not None else (left_visible() or (0,))[:1]


def worker_token(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="The output directory of a cluster, or a server's.", show_default="the server's of this user"),
    ] = None,
    valid_hours: Annotated[
        float, typer.Option(min=0.01, max=1e6, metavar="H", help="A worker must come for the first time within so many hours.")
    ] = _DAY_HOURS,
    list_all: Annotated[bool, typer.Option("--list", help="List the tokens, without the tokens themselves.")] = False,
    revoke: Annotated[
        str | None, typer.Option(metavar="ID", help="Refuse a token from now on; its workers save their jobs and end.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a token with which workers may come over TCP, and print it, this once, with the certificate's fingerprint."""
    if list_all and revoke is not None:
        raise typer.BadParameter("--list and --revoke are two commands; give one of them")
    store = _store(directory)
    from tlora.cluster.credentials import WorkerTokens, open_certificate
    from tlora.errors import ConfigError

    tokens = WorkerTokens(store)
    if revoke is not None:
        if not tokens.revoke(revoke):
            raise ConfigError(f"token {revoke!r}: there is none of this id that is valid. `tlora worker-token --list` lists them")
        say(f"{revoke}: revoked")
    elif list_all:
        _print_tokens(tokens.all(), as_json)
    else:
        fingerprint = open_certificate(store)[1]
        created, secret = tokens.create(3600 * valid_hours)
        _print_made(created, secret, fingerprint, store, as_json)


def _store(directory: Path | None) -> Path:
    """The directory of a controller's files about workers. Raises ConfigError if there is no controller, or another user's."""
    from tlora.errors import ConfigError
    from tlora.server_directory import check_rights, default_directory

    root = directory or default_directory()
    check_rights(root)
    store = root / "workers"
    if not store.is_dir():
        raise ConfigError(
            f"{root}: no cluster and no server has its store there. Give the right directory, or start one there first: "
            "`tlora cluster` or `tlora serve`, with --worker-listen tcp://127.0.0.1:8322"
        )
    if store.stat().st_uid != os.geteuid():
        raise ConfigError(f"{root}: belongs to another user. Run this as that user")
    return store


def _print_made(created: WorkerToken, secret: str, fingerprint: str, store: Path, as_json: bool) -> None:
    """Print the token alone to stdout, so that a script can read it, and what else the user needs to stderr."""
    from tlora.cli.service_view import time_text
    from tlora.cluster.listeners import TCP_ADDRESS_FILE
    from tlora.link.endpoint import TOKEN

    listens = (store / TCP_ADDRESS_FILE).is_file()
    address = (store / TCP_ADDRESS_FILE).read_text(encoding="utf-8").strip() if listens else None
    if as_json:
        facts = {"id": created.id, "token": secret, "expires": created.expires, "fingerprint": fingerprint, "address": address}
        say(json.dumps(facts))
        return
    say(secret)
    lines = [
        f"{created.id}: for workers only, which must come first before {time_text(created.expires)}. It is not shown again",
        f"certificate {fingerprint}",
        f"with the token in {TOKEN}, or in a 0600 file and --token-file FILE:",
        f"tlora worker --connect {address or 'tcp://HOST:PORT'} --fingerprint {fingerprint} --gpus all",
    ]
    if not listens:
        lines.append("no controller of this directory has listened for TCP yet: start it with --worker-listen tcp://127.0.0.1:8322")
    for line in lines:
        note(line)


def _print_tokens(tokens: list[WorkerToken], as_json: bool) -> None:
    from tlora.cli.service_view import time_text

    if as_json:
        rows = [{"id": t.id, "created": t.created, "expires": t.expires, "revoked": t.revoked} for t in tokens]
        say(json.dumps(rows))
        return
    table = open_table()
    for name in ("id", "created", "expires", "revoked"):
        table.add_column(name, overflow="fold")
    for token in tokens:
        table.add_row(token.id, time_text(token.created), time_text(token.expires), time_text(token.revoked) if token.revoked else "")
    print_table(open_console(), table)
