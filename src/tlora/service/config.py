"""What an operator may set of a server: a YAML file, options of `tlora serve` over it, and defaults that need neither."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tlora.byte_size import Bytes
from tlora.errors import ConfigError
from tlora.job import BasePrecision, DType, MemoryLimit, Recompute, UnusedWeights, WorkerLayout
from tlora.jobs_file import suggest
from tlora.jobs_file.located import Problem, join_problems, plain, read_yaml
from tlora.link.address import tcp_place
from tlora.server_directory import default_directory

if TYPE_CHECKING:
    from tlora.cluster.ray_keeper import RayOptions

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MOST_CONFIG_BYTES = 1 << 20
# As `scheduler.policies.LIVE_POLICIES`.
PolicyName = Literal["residual_capacity", "residual_capacity-growth", "fifo", "backfill", "easy", "sjf", "srtf", "las"]
Count = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]


class Limits(BaseModel):
    """What one tenant may ask for. A request beyond a limit gets one 4xx with the limit in it; nothing of it is kept."""

    model_config = _STRICT

    body_bytes: Bytes = 1 << 20  # of a request that uploads no file
    upload_bytes: Bytes = 4 << 30  # of one file
    line_bytes: Bytes = 512 << 10  # of one row of a file
    file_rows: Count = 10_000_000  # of one file
    rank: Annotated[int, Field(ge=1, le=256)] = 256
    sweep_jobs: Count = 1_000  # of one sweep
    open_jobs: Count = 10_000  # of a tenant: accepted and not ended
    storage_bytes: Bytes = 200 << 30  # of a tenant's files
    requests_per_second: Annotated[float, Field(gt=0, le=1e6)] = 1_000.0  # of a tenant, with bursts of as many
    body_seconds: Seconds = 30.0  # that a request's body may be waited for, beyond what its bytes are worth
    body_bytes_per_second: Annotated[float, Field(gt=0, le=1e9)] = 1_024.0  # what they are worth: slower bodies are cut
    streams: Count = 100  # of a tenant that are open at a time: events, metrics, adapters
    intake_memory_bytes: Bytes = 4 << 30  # of the process that reads a tenant's file
    intake_cpu_seconds: Count = 3_600  # of one job's data
    intake_seconds: Seconds = 7_200.0  # of one job's data


class ConnectionLimits(BaseModel):
    """How many connections there may be, and how long one may keep the server waiting, whoever is at its other end."""

    model_config = _STRICT

    most: Count = 4_096
    per_address: Count = 512  # of one address, or IPv6 /64; behind a trusted proxy: of requests at a time
    header_seconds: Seconds = 10.0  # from a connection, or a next request's first byte, until its header has come, TLS included
    keep_alive_seconds: Seconds = 30.0  # that a connection is kept for a next request
    write_seconds: Seconds = 60.0  # that the server waits for a client to read its answer, beyond what is read in them
    write_bytes_per_second: Annotated[float, Field(gt=0, le=1e9)] = 1_024.0  # what that is worth: slower readers are cut


class Retention(BaseModel):
    """How long what has ended is kept. None: for ever."""

    model_config = _STRICT

    ended_jobs_seconds: Seconds | None = None  # a job that has ended, with its directory
    deleted_files_seconds: Seconds = 3_600.0  # bytes that no file and no job refers to
    answers_seconds: Seconds = 86_400.0  # idempotent answers


class ServerConfig(BaseModel):
    """One server. Relative paths are under the current directory."""

    model_config = _STRICT

    data_dir: str = ""  # empty: $TLORA_HOME, or tlora/server in the user's data directory
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8321  # 0: any free one
    database_url: str | None = None  # None: SQLite in data_dir; or postgresql://user@host/name
    standby: bool = False  # while another server has this data_dir and database: wait until it is gone, instead of refusing to start
    base_models: dict[str, str] = {}  # name that orders give -> directory or hub id
    device: Literal["cuda", "cpu"] | None = None  # None: the GPUs, or a CPU where there are none
    gpus: list[Annotated[int, Field(ge=0, le=1023)]] | None = None  # None: all; []: none, only other hosts'; of a CPU: as many processes
    policy: PolicyName = "residual_capacity"
    usage_half_life_seconds: Seconds = 86_400.0  # of the GPU time that a tenant has used: so old, it counts half
    dtype: DType = "auto"
    base_precision: BasePrecision | None = None
    layout: WorkerLayout = "auto"
    unused_weights: UnusedWeights = "refuse"
    deterministic: bool = False
    recompute: Recompute = "auto"
    memory_limit: MemoryLimit = "auto"
    allowed_hosts: list[str] = []  # names in the Host header, beside the address that is listened on
    root_path: str = ""  # the prefix at a proxy
    trusted_proxies: list[str] = []  # addresses or networks whose X-Forwarded-* headers count; "*": all
    tls_certificate: str | None = None
    tls_key: str | None = None
    backend: Literal["local", "ray"] = "local"  # what starts workers: this server, or Ray on its hosts
    ray_address: str | None = None  # host:port of a Ray cluster's head; None: a Ray of this machine
    min_hosts: Annotated[int, Field(ge=0, le=100_000)] = 0  # of Ray: so many always have workers
    max_hosts: Annotated[int, Field(ge=1, le=100_000)] | None = None  # of Ray: it is asked for more when jobs wait; None: those there are
    host_idle_seconds: Seconds = 300.0  # without a job, after which a host of Ray's is given back
    worker_listen: str | None = None  # tcp://host:port, where workers may come over TLS; None: over the unix socket only
    limits: Limits = Limits()
    connections: ConnectionLimits = ConnectionLimits()
    retention: Retention = Retention()
    log_file_bytes: Annotated[Bytes, Field(ge=1 << 16, le=1 << 40)] = 10 << 20  # of access.log, audit.log, events.jsonl; then a new file

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, url: str | None) -> str | None:
        if url is not None and url.partition(":")[0] not in ("sqlite", "postgresql"):
            raise ValueError(f"database_url {url.partition(':')[0]!r}: must begin with sqlite:/// or postgresql://; or leave it out")
        return url

    @field_validator("root_path")
    @classmethod
    def _check_root_path(cls, path: str) -> str:
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", path):
            raise ValueError(f"root_path {path!r}: must be a prefix such as /tlora, without a slash at its end")
        return path

    @field_validator("trusted_proxies")
    @classmethod
    def _check_trusted_proxies(cls, proxies: list[str]) -> list[str]:
        for proxy in proxies:
            try:
                ipaddress.ip_network("0.0.0.0/0" if proxy == "*" else proxy)
            except ValueError:
                raise ValueError(f"trusted_proxies {proxy!r}: must be an address or a network such as 10.0.0.0/8, or *") from None
        return proxies

    @field_validator("worker_listen")
    @classmethod
    def _check_worker_listen(cls, address: str | None) -> str | None:
        if address is not None:
            tcp_place(address)
        return address

    @model_validator(mode="after")
    def _check_growth(self) -> ServerConfig:
        if self.deterministic and self.policy == "residual_capacity-growth":
            raise ValueError(
                f"policy {self.policy} with deterministic: a job then has as many replicas as its gpus say, and more GPUs do not make it "
                "faster. Choose residual_capacity"
            )
        return self

    @model_validator(mode="after")
    def _check_hosts(self) -> ServerConfig:
        if self.backend == "local" and self.ray_address is not None:
            raise ValueError(f"ray_address {self.ray_address}: is for backend: ray. Set that, or leave ray_address out")
        if self.backend == "ray":
            self.ray_options.check()
        elif self.gpus == [] and self.worker_listen is None:
            raise ValueError("gpus: []: this server has no GPUs of its own, and workers of other hosts come to worker_listen. Set it too")
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> ServerConfig:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together; give both, or neither")
        if not self.is_local and not self.tls_certificate and not self.trusted_proxies:
            raise ValueError(
                f"host {self.host!r} can be reached from other machines, and keys would go over the network in the clear. Give "
                "tls_certificate and tls_key, or listen on 127.0.0.1, or name the proxy that ends TLS in trusted_proxies"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in _LOOPBACK

    @property
    def hosts_may_come(self) -> bool:
        """Whether there may be more GPUs than this machine's: what they lack is no reason to refuse a job."""
        return self.ray_address is not None or self.worker_listen is not None

    @property
    def ray_options(self) -> RayOptions:
        from tlora.cluster.host_keeper import HostLimits  # only a server with an engine waits for these
        from tlora.cluster.ray_keeper import RayOptions

        limits = HostLimits(self.min_hosts, self.max_hosts, self.host_idle_seconds)
        return RayOptions(self.ray_address or "", self.worker_listen, limits)

    @property
    def directory(self) -> Path:
        """Where everything of the server lies, absolute."""
        return Path(self.data_dir).expanduser().absolute() if self.data_dir else default_directory()

    @property
    def hosts(self) -> frozenset[str]:
        """Names that a Host header may give, without ports."""
        own = _LOOPBACK if self.is_local else (self.host,)
        return frozenset(name.strip("[]").lower() for name in (*own, *self.allowed_hosts))


def read_config(path: Path | None, options: Mapping[str, object]) -> ServerConfig:
    """The file `path`, if there is one, with `options` over it. Raises ConfigError with every problem, in words."""
    content = _read(path) if path is not None else {}
    where = f"{path}: " if path is not None else ""
    try:
        return ServerConfig.model_validate({**content, **options})
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(where + _told(item) for item in error.errors(include_url=False)))) from None


def _told(error: Any) -> str:
    keys = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        model = (
            {"limits": Limits, "connections": ConnectionLimits, "retention": Retention}.get(keys[0], ServerConfig)
            if len(keys) > 1
            else ServerConfig
        )
        return f"{'.'.join(keys)}: unknown key; {suggest(keys[-1], model.model_fields)}"
    text = str(error["msg"]).removeprefix("Value error, ")
    return text if not keys or error["type"] == "value_error" else f"{'.'.join(keys)}: {error['input']!r} is refused: {text}"


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_CONFIG_BYTES + 1)
        if len(content) > _MOST_CONFIG_BYTES:
            raise ConfigError(f"{path}: longer than {_MOST_CONFIG_BYTES} bytes; a server's settings take a page")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give a YAML file with the server's settings") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    problems: list[Problem] = []
    root = read_yaml(text, lambda line: f"{path}:{line}", problems)
    if problems:
        raise ConfigError(join_problems(sorted(problems)))
    if root is not None and not isinstance(root.value, dict):
        raise ConfigError(f"{path}: is not a mapping; write `port: 8321` lines")
    return {key: plain(value) for key, value in root.fields.items()} if root is not None else {}
