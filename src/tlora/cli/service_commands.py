"""Commands about jobs on a server: submitted, watched, changed, downloaded. Each imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tlora.cli.terminal import add_command, note, open_console, path_text, printable, say, say_error, say_json

T = TypeVar("T")
if TYPE_CHECKING:
    from rich.console import Console

    from tlora.api import JobView
    from tlora.client.connection import Connection
    from tlora.client.jobs import Sight

Json = Annotated[bool, typer.Option("--json", help="Print what the server answered.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Its id or its name.", show_default=False)]
Jobs = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids or names.", show_default=False)]
JobsFile = Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="As for `tlora train`.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the file, as in train.", show_default=False)
]
Limit = Annotated[int, typer.Option(min=1, help="So many at most.")]
Every = Annotated[bool, typer.Option("--all", help="Without a limit.")]
AllTenants = Annotated[bool, typer.Option("--all-tenants", help="Those of all tenants. A key with the scope admin is needed.")]
OfTenant = Annotated[
    str | None,
    typer.Option("--tenant", metavar="TENANT", help="Of another tenant. A key with the scope admin is needed.", show_default=False),
]
Follow = Annotated[bool, typer.Option("--follow", help="Watch the jobs until they have ended; Ctrl-C leaves them running.")]


files = typer.Typer(help="Files of yours on a server, which jobs learn from.", no_args_is_help=True)


@contextmanager
def connected(tenant: str | None = None) -> Generator[Connection]:
    """A connection to the server of $TLORA_URL, `tlora login` or this machine; `tenant` as of `Connection`. Raises ConfigError if there is
    none.
    """
    from tlora.client.access import find_access
    from tlora.client.connection import Connection

    with Connection(find_access(), tenant=tenant) as connection:
        yield connection


def submit(
    jobs_file: JobsFile,
    settings: Settings = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="Continue the adapter of a job that has succeeded, or JOB:checkpoint-STEP of one.", show_default=False
        ),
    ] = None,
    follow: Follow = False,
    as_json: Json = False,
) -> None:
    """Submit the jobs of the file to a server: its data is uploaded, each file once; a sweep is one request."""
    from tlora.client.orders import plan_orders
    from tlora.jobs_file import read_jobs_file, read_sweeps

    plan = plan_orders(read_jobs_file(jobs_file, settings or []), read_sweeps(jobs_file, settings or []))
    with connected() as connection:
        from tlora.cli.submission import submit_plan

        for line in plan.notes:
            note(f"note: {line}")
        accepted = submit_plan(connection, plan, start_from, note if as_json else say)
        if as_json:
            say_json(accepted)
        if follow:
            raise typer.Exit(_follow(connection, open_console(stderr=as_json), accepted))


def jobs(
    status: Annotated[str | None, typer.Option(metavar="STATUS", help="Such as running or failed.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Jobs of this name.", show_default=False)] = None,
    all_tenants: AllTenants = False,
    tenant: Annotated[str | None, typer.Option(metavar="TENANT", help="Those of one tenant; as --all-tenants.", show_default=False)] = None,
    limit: Limit = 50,
    every: Every = False,
    as_json: Json = False,
) -> None:
    """List your jobs on the server, the newest first."""
    with connected() as connection:
        from tlora.cli.service_view import print_jobs
        from tlora.client.jobs import list_all_jobs, list_jobs

        most, whole = None if every else limit + 1, all_tenants or tenant is not None
        found = list_all_jobs(connection, most, tenant, status, name) if whole else list_jobs(connection, most, status, name)
        listing = _newest(found, None if every else limit)
        if as_json:
            say_json(listing)
        else:
            is_whole = status is None and name is None and not whole
            empty = "no jobs; `tlora submit jobs.yaml` submits some" if is_whole else "no such jobs"
            print_jobs(open_console(), listing, empty)


def show(
    job: Job,
    follow: Follow = False,
    logs: Annotated[bool, typer.Option("--logs", help="Print what its workers said of it.")] = False,
    tenant: OfTenant = None,
    as_json: Json = False,
) -> None:
    """Show one job: where it stands and why, its settings, losses and events."""
    with connected(tenant) as connection:
        from tlora.api import LogText
        from tlora.cli.service_view import print_job
        from tlora.client.jobs import find_job, list_events

        view, console = find_job(connection, job), open_console()
        if follow:
            raise typer.Exit(_follow(connection, console, [view]))
        if logs:
            for line in connection.get(f"/v1/jobs/{view.id}/logs", LogText).lines:
                say(line)
        elif as_json:
            say_json(view)
        else:
            print_job(console, view, list(list_events(connection, view.id)))


def pause(jobs: Jobs, tenant: OfTenant = None) -> None:
    """Pause jobs: each checkpoints and gives its place up, until `tlora resume`."""
    _change(jobs, tenant, "pause")


def resume(jobs: Jobs, tenant: OfTenant = None) -> None:
    """Let paused jobs go on from their checkpoints."""
    _change(jobs, tenant, "resume")


def cancel(jobs: Jobs, tenant: OfTenant = None) -> None:
    """End jobs. They have no adapter then; `tlora clone` begins one anew."""
    _change(jobs, tenant, "cancel")


def clone(
    job: Job,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="What is to differ, such as r=8.", show_default=False)
    ] = None,
    follow: Follow = False,
    as_json: Json = False,
) -> None:
    """Submit a job once more, with other settings: `tlora clone sql --set learning_rate=1e-4`. Its name tells what was set."""
    with connected() as connection:
        from tlora.cli.submission import clone_job
        from tlora.client.jobs import find_job

        cloned = clone_job(connection, find_job(connection, job), settings or [])
        if as_json:
            say_json(cloned)
        else:
            say(f"{cloned.name}: accepted as {cloned.id}")
        if follow:
            raise typer.Exit(_follow(connection, open_console(stderr=as_json), [cloned]))


def download(
    jobs: Jobs,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The adapter goes to DIR/NAME.")] = Path(),
    tenant: OfTenant = None,
) -> None:
    """Download adapters, each as a directory that PEFT and `tlora generate --base-model DIRECTORY` load: a server's name of a base means
    nothing elsewhere. Nothing that is there is replaced.
    """
    with connected(tenant) as connection:
        from tlora.client.jobs import find_job
        from tlora.client.transfers import download_adapter

        for name in jobs:
            say(path_text(download_adapter(connection, find_job(connection, name, ("succeeded",)), out)))


def queue(all_tenants: AllTenants = False, as_json: Json = False) -> None:
    """Show the cluster of the server: which jobs share which GPU, and what the others wait for."""
    with connected() as connection:
        from tlora.cli.service_view import print_cluster
        from tlora.client.jobs import list_all_jobs, list_jobs
        from tlora.cluster_api import ClusterView

        cluster = connection.get("/v1/tenants/cluster" if all_tenants else "/v1/cluster", ClusterView)
        if as_json:
            say_json(cluster)
            return
        running: dict[str, JobView] = {}
        if any(group.jobs for group in cluster.groups):
            list_them = list_all_jobs if all_tenants else list_jobs
            running = {job.id: job for job in list_them(connection, 1000, status="running")}
        print_cluster(open_console(), cluster, running, all_tenants)


def list_files(limit: Limit = 50, every: Every = False, as_json: Json = False) -> None:
    """List your uploaded files on the server, the newest first, and how much of the tenant's storage is used."""
    with connected() as connection:
        from tlora.api import StorageView
        from tlora.cli.service_view import print_files
        from tlora.client.transfers import list_files as list_uploads

        listing = _newest(list_uploads(connection, None if every else limit + 1), None if every else limit)
        if as_json:
            say_json(listing)
        else:
            print_files(open_console(), listing, connection.get("/v1/storage", StorageView))


def delete_files(names: Annotated[list[str], typer.Argument(metavar="FILE...", help="Ids or names.", show_default=False)]) -> None:
    """Delete uploaded files. Refused of one while a job that has not ended learns from it."""
    from tlora.api import Deleted
    from tlora.client.transfers import find_file

    def delete(connection: Connection, name: str) -> str:
        found = find_file(connection, name)
        connection.send("DELETE", f"/v1/files/{found}", Deleted)
        return f"{name} ({found}): deleted" if found != name else f"{name}: deleted"

    _for_each(names, delete)


def _newest(found: Iterable[T], limit: int | None) -> list[T]:
    """`limit` of them, if it is given; what is left out is said."""
    listing = list(found)
    if limit is not None and len(listing) > limit:
        note(f"the newest {limit:,}; --all lists the others too")
    return listing[:limit]


def _change(names: Sequence[str], tenant: str | None, verb: str) -> None:
    """Change all jobs that can be changed."""
    from tlora.api import OPEN, JobView
    from tlora.client.jobs import find_job

    def change(connection: Connection, name: str) -> str:
        view = find_job(connection, name, OPEN)
        changed = connection.send("POST", f"/v1/jobs/{view.id}/{verb}", JobView)
        return f"{changed.name}: {changed.status}"

    _for_each(names, change, tenant)


def _for_each(names: Sequence[str], act: Callable[[Connection, str], str], tenant: str | None = None) -> None:
    """Print what `act` returns of each name, or why the server refuses it; then exit with status 2."""
    with connected(tenant) as connection:
        from tlora.errors import ServiceError

        refused = False
        for name in names:
            try:
                say(act(connection, name))
            except ServiceError as error:
                if not error.status:
                    raise
                refused = True
                say_error(str(error))
        if refused:
            raise typer.Exit(2)


def _follow(connection: Connection, console: Console, jobs: Sequence[JobView]) -> int:
    """Follow the jobs. Returns the exit status: 0 if all have succeeded, 1 if one has not, 130 after Ctrl-C, which ends no job."""
    from rich.text import Text

    from tlora.cli.service_view import follow
    from tlora.client.jobs import EventStream, watch

    latest = {job.id: job for job in jobs}

    def keep_latest(sights: Iterable[Sight]) -> Iterator[Sight]:
        for sight in sights:
            latest.update((job.id, job) for job in sight.jobs)
            yield sight

    try:
        with EventStream(connection) as event_stream:
            follow(console, keep_latest(watch(connection, list(latest), event_stream=event_stream)))
    except KeyboardInterrupt:
        if going := [job for job in latest.values() if not job.has_ended]:
            subject = f"{printable(going[0].name)} goes" if len(going) == 1 else f"{len(going)} jobs go"
            again = f"tlora show {going[0].id} --follow" if len(going) == 1 else "tlora jobs"
            ended = f"; {len(latest) - len(going)} of {len(latest)} ended" if len(going) < len(latest) else ""
            console.print(Text(f"\n{subject} on at {connection.access.url}{ended}. See: {again}"), soft_wrap=True)
            return 130
    return 0 if all(job.status == "succeeded" for job in latest.values()) else 1


for _name, _command in {"list": list_files, "delete": delete_files}.items():
    add_command(files, _command, _name)
