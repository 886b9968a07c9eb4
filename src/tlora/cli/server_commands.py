"""Commands about a server itself: serving, logging in, keys, base models, draining, backups."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote

import typer

from tlora.cli.service_commands import Json, connected
from tlora.cli.terminal import add_command, bytes_text, note, open_console, path_text, say, say_json
from tlora.wording.numbers import quantity

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from tlora.client.connection import Connection as ClientConnection
    from tlora.cluster.ray_keeper import RayOptions
    from tlora.service.config import ServerConfig


_LOOK_SECONDS = 2.0  # between two looks whether all has ended
WorkerListen = Annotated[
    str | None,
    typer.Option(
        metavar="tcp://HOST:PORT",
        help="Let workers that are started by hand come over TLS too; `tlora worker-token` says how.",
        show_default="off",
    ),
]


Backend = Annotated[
    str, typer.Option(metavar="local|ray", help="What starts workers: this machine's controller, or Ray on the hosts of its cluster.")
]
RayAddress = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Of a Ray cluster's head.", show_default="a Ray of this machine")]
MinHosts = Annotated[int, typer.Option(min=0, metavar="N", help="With Ray: so many hosts always have workers.")]
MaxHosts = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="With Ray: ask its autoscaler for up to so many hosts.", show_default="those there are"),
]


def ray_options(
    backend: str, ray_address: str | None, min_hosts: int, max_hosts: int | None, worker_listen: str | None
) -> RayOptions | None:
    """None for the back end of this machine. Raises ConfigError."""
    from tlora.cluster.host_keeper import HostLimits
    from tlora.cluster.ray_keeper import RayOptions
    from tlora.errors import ConfigError

    if backend not in ("local", "ray"):
        raise ConfigError(f"--backend {backend}: is neither local nor ray. Give one of the two")
    if backend == "local":
        if ray_address is not None or min_hosts or max_hosts is not None:
            raise ConfigError("--ray-address, --min-hosts and --max-hosts are for --backend ray. Give that too, or leave them out")
        return None
    options = RayOptions(ray_address or "", worker_listen, HostLimits(min_hosts, max_hosts))
    options.check()
    return options


def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings in YAML (docs/reference/server.md).", show_default=False)
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where everything of the server lies.", show_default=False)] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 for any free one.", show_default="8321")] = None,
    base_model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A base that orders may name: a directory or hub id. Repeatable.", show_default=False),
    ] = None,
    database_url: Annotated[str | None, typer.Option(help="postgresql://… instead of SQLite.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="By default the GPUs, if any.", show_default=False)] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="0,2|none", help="Numbers of the GPUs to use; none: only other hosts train.", show_default="all")
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="As of `tlora cluster`.", show_default="residual_capacity")] = None,
    worker_listen: WorkerListen = None,
    standby: Annotated[bool, typer.Option("--standby", help="Wait while another server has the store, and follow it.")] = False,
    backend: Annotated[str | None, typer.Option(metavar="local|ray", help="As of `tlora cluster`.", show_default="local")] = None,
    ray_address: RayAddress = None,
    min_hosts: Annotated[int | None, typer.Option(min=0, metavar="N", help="As of `tlora cluster`.", show_default="0")] = None,
    max_hosts: MaxHosts = None,
) -> None:
    """Serve an HTTP API for jobs, and train them on this machine. No option is needed."""
    options: dict[str, object] = {
        "data_dir": str(data_dir) if data_dir else None,
        "host": host,
        "port": port,
        "base_models": named_bases(base_model) if base_model else None,
        "database_url": database_url,
        "device": device,
        "gpus": _numbers(gpus) if gpus else None,
        "standby": standby or None,
        "backend": backend,
        "ray_address": ray_address,
        "min_hosts": min_hosts,
        "max_hosts": max_hosts,
        "policy": policy,
        "worker_listen": worker_listen,
    }
    settings = read_server_config(config, {key: value for key, value in options.items() if value is not None})
    from tlora.service.server import serve as run_server

    raise typer.Exit(run_server(settings, typer.echo))


def read_server_config(config: Path | None, options: Mapping[str, object]) -> ServerConfig:
    """The settings of the server on this machine. Raises ConfigError, also if the server's packages are not installed."""
    from tlora.errors import ConfigError

    try:
        import_module("tlora.service.server")  # all that it needs
        from tlora.service.config import read_config
    except ModuleNotFoundError as error:
        raise ConfigError(f"a server needs the package {error.name!r}: pip install 'tlora[serve]'") from None
    return read_config(config, options)


def named_bases(given: list[str]) -> dict[str, str]:
    """Base models by name, from `NAME=PATH`, or from a path or hub id alone, which also is the name."""
    bases: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        path = path if equals else text
        here = Path(path).is_dir()
        bases[name if equals else Path(text).name if here else text] = str(Path(path).absolute()) if here else path
    return bases


def _numbers(text: str) -> list[int]:
    from tlora.errors import ConfigError

    if text == "none":
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--gpus {text}: must be numbers of GPUs such as 0,2, or none")
    return [int(part) for part in parts]


T = TypeVar("T")
DataDir = Annotated[Path | None, typer.Option(help="Of the server, as of `tlora serve`.", show_default=False)]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="The server's settings, as of `tlora serve`.", show_default=False)]
Local = Annotated[bool, typer.Option("--local", help="In the store on this machine, without a server: for who owns it.")]

keys = typer.Typer(help="Keys of a server: made, listed, revoked. A key with the scope admin is needed, or --local.", no_args_is_help=True)
bases = typer.Typer(help="Base models that a server's jobs may name.", no_args_is_help=True)


def login(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="Of the server.", show_default="the one in use")] = None,
    page: Annotated[bool, typer.Option("--page", help="Print a link that logs a browser in, once.")] = False,
) -> None:
    """Save a key for a server, which commands then use; asks for it, or reads it from stdin. --page opens the server's page instead."""
    from tlora.api import BaseList, LoginLink
    from tlora.client.access import Access, check_key, find_url, save_key
    from tlora.client.connection import Connection

    if page:
        if url is not None:
            raise typer.BadParameter("--page takes the server in use; set TLORA_URL for another")
        with connected() as connection:
            link = connection.send("POST", "/v1/login-links", LoginLink)
            say(f"{connection.access.url}{link.path}")
            note(f"good once, for {link.expires_in // 60} minutes")
        return
    where = url if url is not None else find_url()[0]
    given = typer.prompt(f"key for {where}", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()
    key = check_key(str(given).strip(), "the key")
    with Connection(Access(where.rstrip("/"), key, "the command line", "the command line")) as connection:
        connection.get("/v1/bases", BaseList)
    say(f"the key for {where} is saved in {path_text(save_key(where, key))}")


def create_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is for, such as ci.", show_default=False)],
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Whose jobs and files it sees; made if there is none.")] = "default",
    scope: Annotated[
        list[str] | None, typer.Option(metavar="SCOPE", help="read, submit or admin. Repeatable.", show_default="read, submit")
    ] = None,
    local: Local = False,
    data_dir: DataDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it, this once."""
    from tlora.api import NewKeyView

    scopes = scope or ["read", "submit"]
    _check_scopes(scopes)
    if local:
        from tlora.service.keys import create_key as create
        from tlora.service.services import new_key_view

        created = _in_store(_config(config, data_dir), lambda connection: create(connection, tenant, name, scopes))
        key = new_key_view(created, tenant)
    else:
        with connected() as connection:
            key = connection.send("POST", "/v1/keys", NewKeyView, {"tenant": tenant, "name": name, "scopes": scopes})
    if as_json:
        say_json(key)
        return
    say(key.key)
    note(f"{key.id}: tenant {key.tenant}, {', '.join(key.scopes)}. It is not shown again")
    if "submit" in scopes and "read" not in scopes:
        note("without read it sends orders and files, and sees none: `tlora submit` needs --scope read --scope submit, the default")


def _check_scopes(given: list[str]) -> None:
    """Raises ConfigError, as for `read,submit` in one."""
    from tlora.api import SCOPES
    from tlora.errors import ConfigError

    for scope in given:
        if scope not in SCOPES:
            several = "Give --scope once for each: --scope read --scope submit"
            raise ConfigError(f"--scope {scope!r}: is not one of {', '.join(SCOPES)}. {several}")


def list_keys(local: Local = False, data_dir: DataDir = None, config: Config = None, as_json: Json = False) -> None:
    """List the keys of all tenants, without the keys themselves."""
    from tlora.api import KeyList
    from tlora.cli.service_view import print_keys

    if local:
        from tlora.service.routes.keys import read_keys

        listing = _in_store(_config(config, data_dir), read_keys)
    else:
        with connected() as connection:
            listing = connection.get("/v1/keys", KeyList)
    if as_json:
        say_json(listing)
    else:
        print_keys(open_console(), listing.data)


def revoke_key(
    key: Annotated[str, typer.Argument(metavar="ID", help="Of the key, as `tlora keys list` has it.", show_default=False)],
    local: Local = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Refuse a key from now on; what streams with it ends within seconds."""
    from tlora.api import Deleted
    from tlora.errors import ConfigError

    if local:
        from tlora.service.keys import revoke_key as revoke

        if not _in_store(_config(config, data_dir), lambda connection: revoke(connection, key)):
            raise ConfigError(f"key {key!r}: there is none of this id that is valid. `tlora keys list --local` lists them")
    else:
        with connected() as connection:
            connection.send("DELETE", f"/v1/keys/{_plain_id(key)}", Deleted)
    say(f"{key}: revoked")


def list_bases(as_json: Json = False) -> None:
    """List the base models."""
    with connected() as connection:
        from tlora.api import BaseList
        from tlora.cli.service_view import print_bases

        listing = connection.get("/v1/bases", BaseList)
        if as_json:
            say_json(listing)
        else:
            print_bases(open_console(), listing.data)


def add_base(
    base: Annotated[str, typer.Argument(metavar="NAME=PATH", help="A directory of the server's machine, or a hub id.", show_default=False)],
) -> None:
    """Let jobs name a base model. A key with the scope admin is needed."""
    with connected() as connection:
        from tlora.api import BaseView

        [(name, path)] = named_bases([base]).items()
        added = connection.send("POST", "/v1/bases", BaseView, {"name": name, "path": path})
        say(f"{added.name}: served from {path}; `tlora bases list` says whether it can be trained over")


def drain(
    undo: Annotated[bool, typer.Option("--undo", help="Accept jobs again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when all jobs have ended, or the host has none.")] = False,
    host: Annotated[str | None, typer.Option("--host", help="Leave this host alone; the others train on.", show_default=False)] = None,
    finish: Annotated[bool, typer.Option("--finish", help="With --host: its jobs end there; else they go on elsewhere.")] = False,
) -> None:
    """Let the server refuse new jobs; those that it has accepted are trained. With --host, start nothing on one host any more. It lasts
    until --undo or a restart; --wait then ends with status 1.
    """
    if finish and host is None:
        raise typer.BadParameter("is of a host: give --host too", param_hint="--finish")
    with connected() as connection:
        from tlora.cluster_api import Drained

        if host is not None:
            drain_host(connection, host, undo=undo, finish=finish, wait=wait)
            return
        drained = connection.send("PUT", "/v1/drain", Drained, {"draining": not undo})
        while wait and drained.draining and drained.open_jobs:
            time.sleep(_LOOK_SECONDS)
            drained = connection.get("/v1/drain", Drained)
        undone = not undo and not drained.draining
        again = " again (the drain was undone, or the server was started anew)" if undone else ""
        state = "refuses new jobs" if drained.draining else f"accepts jobs{again}"
        say(f"the server {state}; {quantity(drained.open_jobs, 'job')} left to end")
        if undone:
            raise typer.Exit(1)


def drain_host(connection: ClientConnection, host: str, *, undo: bool, finish: bool, wait: bool) -> None:
    """Ask for it, and wait until the host has no job."""
    from tlora.cluster_api import ClusterView, HostDrained

    order = {"draining": not undo, "finish": finish}
    drained = connection.send("PUT", f"/v1/hosts/{quote(host, safe='')}/drain", HostDrained, order)
    in_use, begun = 1, False
    while wait and drained.draining and in_use:
        time.sleep(_LOOK_SECONDS)
        there = [one for one in connection.get("/v1/cluster", ClusterView).hosts if one.name == host]
        leaves = all(one.draining for one in there)
        begun |= leaves
        if begun and not leaves:
            say(f"host {host} is used again (the drain was undone, or the server was started anew)")
            raise typer.Exit(1)
        in_use = sum(one.in_use for one in there) or not leaves
    free = ", and has no job" if drained.draining and not in_use else ""
    say(f"host {host} gets {'no new jobs' if drained.draining else 'jobs again'}{free}")


def backup(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for the copy.", show_default=False)],
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Copy a server's store, files and jobs on this machine, while it runs or not."""
    settings = _config(config, data_dir)
    from tlora.service.backup import back_up

    copy = back_up(settings, out)
    say(f"{path_text(out)}: {quantity(copy.jobs, 'job')}, {quantity(copy.files, 'file')}, {bytes_text(copy.bytes)}")


def restore(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="What `tlora backup` made.", show_default=False)],
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Make a server's directory from a backup. One that holds anything is left alone."""
    settings = _config(config, data_dir)
    from tlora.service.backup import restore as restore_store

    restored = restore_store(settings, source)
    to_end = f"; `tlora serve` continues {quantity(restored, 'unfinished job')} from the last checkpoint" if restored else ""
    say(f"{settings.directory}: restored{to_end}")


def _config(config: Path | None, data_dir: Path | None) -> ServerConfig:
    return read_server_config(config, {"data_dir": str(data_dir)} if data_dir else {})


def _in_store(config: ServerConfig, operation: Callable[[Connection], T]) -> T:
    """Run `operation` on this user's store. Raises ConfigError if there is none, or it belongs to another user."""
    from tlora.errors import ConfigError
    from tlora.service.database.store import DATABASE
    from tlora.service.server import with_store
    from tlora.service.store_id import check_store

    directory = config.directory
    if config.database_url is None:
        check_store(directory)
        if (directory / DATABASE).stat().st_uid != os.getuid():
            raise ConfigError(f"{directory}: belongs to another user. Run this as that user, or ask the server with an admin key")
    result: Any = with_store(config, operation)
    return result


def _plain_id(key: str) -> str:
    from tlora.errors import ConfigError

    if not key.replace("-", "").isalnum():
        raise ConfigError(f"{key!r} is no id of a key; `tlora keys list` lists them")
    return key


for _name, _command in {"create": create_key, "list": list_keys, "revoke": revoke_key}.items():
    add_command(keys, _command, _name)
for _name, _command in {"list": list_bases, "add": add_base}.items():
    add_command(bases, _command, _name)
