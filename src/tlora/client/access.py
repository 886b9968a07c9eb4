"""Which server is meant, and which key it gets. A key goes to the origin that it was saved for, and to no other."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tlora import durable
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.server_directory import ADDRESS, FIRST_KEY, HOME, check_rights, default_directory

URL, KEY = "TLORA_URL", "TLORA_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_OWN_DIRECTORY = f"a server with a --data-dir of its own is found with {HOME}=DIRECTORY"


@dataclass(frozen=True, slots=True)
class Access:
    """A server's URL without a final slash, the key for it, and where the two come from, for messages. `of_directory`: whose first key
    it is, if it is one.
    """

    url: str
    key: str
    url_from: str
    key_from: str
    of_directory: Path | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is reached without TLS, which is on this machine only."""
        return self.url.startswith("http:")


def key_file() -> Path:
    """Where `tlora login` saves keys."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return (Path(home) / "tlora" / "keys.json").expanduser().absolute()


def origin_of(url: str) -> str:
    """`https://host:port`, with the port that the scheme implies. Raises ConfigError for what is no URL of a server."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        raise ConfigError(f"{url}: is not a URL; write https://host:port") from None
    if not port or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ConfigError(f"{url}: is not the URL of a server; write http://127.0.0.1:8321 or https://host:port")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ConfigError(f"{url}: a key would go to {parts.hostname} in the clear. Use https://, or a tunnel to 127.0.0.1")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def find_access(environment: Mapping[str, str] = os.environ) -> Access:
    """$TLORA_URL with $TLORA_API_KEY, else what `tlora login` saved, else this user's own server on this machine. Raises ConfigError."""
    url, url_from = find_url(environment)
    if environment.get(KEY):
        return Access(url, check_key(environment[KEY].strip(), f"${KEY}"), url_from, f"${KEY}")
    origin, saved = origin_of(url), _saved()
    if origin in saved.keys:
        return Access(url, check_key(saved.keys[origin], str(key_file())), url_from, str(key_file()))
    local, path = _local_url(), default_directory() / FIRST_KEY
    if local is not None and origin == origin_of(local) and path.is_file():
        return Access(url, check_key(_private_text(path).strip(), str(path)), url_from, str(path), path.parent)
    own = f"; {_OWN_DIRECTORY}" if urlsplit(url).hostname in _LOOPBACK else ""
    raise ConfigError(
        f"there is no key for {origin}. Set {KEY}, or save one with `tlora login {url}`; keys of other servers are not sent there{own}"
    )


def check_key(key: str, where: str) -> str:
    """`key`, if a header can carry it. Raises ConfigError; the key is not shown."""
    if not re.fullmatch(r"[!-~]{8,256}", key):
        raise ConfigError(f"{where}: what stands there is no key; one looks like tml-…, without spaces")
    return key


def find_url(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The server's URL, and where it comes from. Raises ConfigError."""
    if given := environment.get(URL):
        url, where = given, f"${URL}"
    elif saved := _saved().url:
        url, where = saved, str(key_file())
    elif (local := _local_url()) is not None:
        url, where = local, str(default_directory() / ADDRESS)
    else:
        raise ConfigError(
            f"no server is known: set {URL}, or `tlora login URL`. `tlora serve` starts one on this machine; {_OWN_DIRECTORY}"
        )
    origin_of(url)
    return url.rstrip("/"), where


def save_key(url: str, key: str) -> Path:
    """For the URL's origin, which becomes the server that is meant. Raises ConfigError."""
    path, saved = key_file(), _saved()
    content = {"url": url.rstrip("/"), "keys": {**saved.keys, origin_of(url): key}}
    durable.make_directory(path.parent)
    previous = os.umask(0o077)  # the file is private from its first byte on
    try:
        durable.write_file(path, json.dumps(content, indent=2) + "\n")
    finally:
        os.umask(previous)
    return path


@dataclass(frozen=True, slots=True)
class _Saved:
    url: str
    keys: Mapping[str, str]


def _saved() -> _Saved:
    path = key_file()
    try:
        if not path.exists():
            return _Saved("", {})
    except PermissionError as error:
        raise ConfigError(f"{path}: {error.strerror}. Set XDG_CONFIG_HOME to a directory of this user's") from None
    _refuse_rights(path)
    try:
        found = read_object(path)
        keys, url = found.get("keys", {}), found.get("url", "")
        if not isinstance(keys, dict) or not isinstance(url, str):
            raise ValueError("has no mapping `keys` and text `url`")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}. Remove it, and save the key again with `tlora login`") from None
    return _Saved(url, {str(origin): str(key) for origin, key in keys.items()})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _local_url() -> str | None:
    """Of this user's server; it may have ended."""
    path = default_directory() / ADDRESS
    check_rights(path.parent)
    try:
        return _private_text(path).strip() if path.is_file() else None
    except UnicodeDecodeError:
        return None


def _private_text(path: Path) -> str:
    if path.name != ADDRESS:
        _refuse_rights(path)
    return path.read_text(encoding="utf-8")[:10_000]


def _refuse_rights(path: Path) -> None:
    """Raises ConfigError for a file with a key in it that others may read, or have made."""
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path}: others may read it (mode {mode:04o}), and it holds keys. chmod 600 {path}")
    if status.st_uid != os.getuid():
        remedy = "Remove it, and save the key again"
        if path.name == FIRST_KEY:  # which exists once
            remedy = f"Run this as that user (sudo -u), or set {KEY}"
        raise ConfigError(f"{path}: belongs to another user, and it holds keys. {remedy}")
