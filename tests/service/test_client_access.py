"""Which server and which key: where they come from, whose rights they need, and that no other server gets the key."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tlora.cli import worker_commands
from tlora.client.access import check_key, find_access, find_url, key_file, origin_of, save_key
from tlora.errors import ConfigError
from tlora.service.store_id import check_store

KEY = "tml-" + "k" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TLORA_HOME", str(tmp_path / "server"))
    for name in ("TLORA_URL", "TLORA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_environment_wins_over_what_is_saved() -> None:
    save_key("https://saved.example", KEY)
    found = find_access({"TLORA_URL": "https://given.example:99/x/", "TLORA_API_KEY": "tml-environment"})
    assert (found.url, found.key, found.key_from) == ("https://given.example:99/x", "tml-environment", "$TLORA_API_KEY")


def test_a_key_goes_to_the_origin_that_it_was_saved_for_alone() -> None:
    path = save_key("https://one.example/prefix", KEY)
    assert path.stat().st_mode & 0o777 == 0o600
    assert find_access({}).key == KEY and find_access({}).url == "https://one.example/prefix"
    assert find_access({"TLORA_URL": "https://one.example:443"}).key == KEY  # the same origin
    for other in ("https://two.example", "https://one.example:444", "http://127.0.0.1:443", "https://one.example.evil.example"):
        with pytest.raises(ConfigError, match="there is no key for"):
            find_access({"TLORA_URL": other})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_key_file_that_others_may_read_is_refused(mode: int) -> None:
    save_key("https://one.example", KEY).chmod(mode)
    with pytest.raises(ConfigError, match=r"others may read it .* chmod 600"):
        find_access({})


def test_a_key_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    save_key("https://one.example", KEY)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        find_access({})


@pytest.mark.parametrize("content", ["{", "[]", '{"keys": []}', '{"keys": {}, "url": 3}'])
def test_a_damaged_key_file_is_one_error(content: str) -> None:
    save_key("https://one.example", KEY).write_text(content)
    with pytest.raises(ConfigError, match="save the key again"):
        find_access({})


def test_a_saved_key_that_no_header_can_carry_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="is no key") as caught:
        check_key("tml-two words\n", "$TLORA_API_KEY")
    assert "two words" not in str(caught.value)


def test_the_users_own_server_on_this_machine_is_found(home: Path) -> None:
    with pytest.raises(ConfigError, match="no server is known"):
        find_url({})
    (home / "server").mkdir()
    (home / "server" / "address").write_text("http://127.0.0.1:8321\n")
    with pytest.raises(ConfigError, match="there is no key for"):
        find_access({})
    first = home / "server" / "first-key"
    first.write_text(KEY + "\n")
    first.chmod(0o600)
    assert find_access({}).key == KEY
    with pytest.raises(ConfigError, match="there is no key for"):
        find_access({"TLORA_URL": "http://127.0.0.1:8322"})  # the first key is of the other server
    first.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        find_access({})


@pytest.mark.parametrize(
    "url", ["", "host", "ftp://host", "https://", "https://user@host", "https://host?x=1", "https://host:99999", "https://host#x"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is not (a URL|the URL of a server); write"):
        origin_of(url)


def test_no_key_goes_over_a_network_in_the_clear() -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        origin_of("http://host.example:8321")
    assert origin_of("http://[::1]:8321") == "http://[::1]:8321"


def test_saving_a_key_keeps_the_others() -> None:
    save_key("https://one.example", KEY)
    save_key("https://two.example", "tml-" + "2" * 40)
    assert find_access({}).url == "https://two.example"
    assert find_access({"TLORA_URL": "https://one.example"}).key == KEY
    assert key_file().stat().st_mode & 0o777 == 0o600


def put_server(directory: Path, url: str) -> None:
    """What a server writes into its directory for clients of its user."""
    directory.mkdir()
    (directory / "address").write_text(url + "\n")
    key = directory / "first-key"
    key.write_text(KEY + "\n")
    key.chmod(0o600)


def test_a_server_with_a_directory_of_its_own_is_found_with_what_the_message_says(home: Path) -> None:
    """`tlora serve --data-dir`: no server is known, no key, or the key of the one in the default directory."""
    put_server(home / "own", "http://127.0.0.1:8401")
    remedy = r"; a server with a --data-dir of its own is found with TLORA_HOME=DIRECTORY"
    for environment in ({}, {"TLORA_URL": "http://127.0.0.1:8401"}):
        with pytest.raises(ConfigError, match=remedy):
            find_access(environment)
    with pytest.raises(ConfigError) as caught:  # of a server on another machine there is no directory here
        find_access({"TLORA_URL": "https://one.example"})
    assert "TLORA_HOME" not in str(caught.value)


def test_a_directory_of_a_server_is_found_by_what_the_message_says(home: Path) -> None:
    put_server(home / "server", "http://127.0.0.1:8321")
    assert find_access({}).of_directory == home / "server"
    save_key("http://127.0.0.1:8321", KEY)
    assert find_access({}).of_directory is None


def test_a_first_key_of_another_user_is_left_where_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, over the directory of a service's user: to remove its file would lose the only copy."""
    put_server(home / "server", "http://127.0.0.1:8321")
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"first-key: belongs to another user.*Run this as that user .*or set TLORA_API_KEY") as caught:
        find_access({})
    assert "Remove" not in str(caught.value)


def test_a_directory_that_another_user_keeps_to_itself_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a client and for what works in a store: each ended with a traceback."""
    find_tokens = worker_commands._store  # what `tlora worker-token` begins with
    with tempfile.TemporaryDirectory() as found, kept_out(closed := Path(found) / "closed"):
        monkeypatch.setenv("TLORA_HOME", str(closed / "server"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(Path(found) / "config"))
        for look in (find_access, find_url, lambda: check_store(closed / "server"), lambda: find_tokens(closed / "server")):
            with pytest.raises(ConfigError, match=r"closed/server: this user may not look into it\. Run this as the user of its server"):
                look()
        monkeypatch.setenv("XDG_CONFIG_HOME", str(closed))
        with pytest.raises(ConfigError, match=r"keys\.json: .*[Pp]ermission denied.*XDG_CONFIG_HOME"):
            find_access({})


@contextmanager
def kept_out(directory: Path) -> Iterator[None]:
    """This process may not look into the directory, which is made."""
    directory.mkdir()
    directory.parent.chmod(0o755)
    directory.chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())
        directory.chmod(0o700)
