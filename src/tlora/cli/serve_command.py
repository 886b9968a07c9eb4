"""`tlora serve`: a server that jobs are submitted to, from its options and its config file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tlora.service.config import ServerConfig

WorkerListen = Annotated[
    str | None,
    typer.Option(
        metavar="tcp://HOST:PORT",
        help="Let workers that are started by hand come over TLS too; `tlora worker-token` says how.",
        show_default="off",
    ),
]


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
    gpus: Annotated[str | None, typer.Option(metavar="0,2", help="Numbers of the GPUs to use.", show_default="all")] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="As of `tlora cluster`.", show_default="residual_capacity")] = None,
    worker_listen: WorkerListen = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Serve an HTTP API for jobs, and train them on this machine. No option is needed."""
    from tlora.cli.terminal import exit_on_error

    with exit_on_error(debug):
        options: dict[str, object] = {
            "data_dir": str(data_dir) if data_dir else None,
            "host": host,
            "port": port,
            "base_models": named_bases(base_model) if base_model else None,
            "database_url": database_url,
            "device": device,
            "gpus": _numbers(gpus) if gpus else None,
            "policy": policy,
            "worker_listen": worker_listen,
        }
        settings = read_server_config(config, {key: value for key, value in options.items() if value is not None})
        from tlora.service.server import serve as run_server

        raise typer.Exit(run_server(settings, typer.echo))


def read_server_config(config: Path | None, options: Mapping[str, object]) -> ServerConfig:
    """Of the server on this machine. Raises ConfigError, also where the server's own packages are not installed."""
    from tlora.errors import ConfigError

    try:
        import_module("tlora.service.server")  # all that it needs
        from tlora.service.config import read_config
    except ModuleNotFoundError as error:
        raise ConfigError(f"a server needs the package {error.name!r}: pip install 'tlora[serve]'") from None
    return read_config(config, options)


def named_bases(given: list[str]) -> dict[str, str]:
    """`NAME=PATH`, or a path or hub id alone, which is its own name."""
    bases: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        path = path if equals else text
        here = Path(path).is_dir()
        bases[name if equals else Path(text).name if here else text] = str(Path(path).absolute()) if here else path
    return bases


def _numbers(text: str) -> list[int]:
    from tlora.errors import ConfigError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--gpus {text}: must be numbers of GPUs such as 0,2")
    return [int(part) for part in parts]
