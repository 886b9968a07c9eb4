"""What an operator can set, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tlora.cluster.gpus import Gpu
from tlora.errors import ConfigError
from tlora.service import config as config_module
from tlora.service import machine
from tlora.service.config import ConnectionLimits, Limits, ServerConfig, default_directory, read_config
from tlora.service.machine import Devices, find_places
from tlora.service.server import missing_bases


def test_nothing_has_to_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TLORA_HOME", str(tmp_path / "home"))
    config = read_config(None, {})
    assert config.is_local and config.directory == tmp_path / "home" and config.database_url is None
    monkeypatch.delenv("TLORA_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "tlora" / "server"


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("port: 1\nbase_models: {a: b}\nlimits: {rank: 8}\n")
    config = read_config(path, {"port": 2})
    assert (config.port, config.base_models, config.limits.rank) == (2, {"a": "b"}, 8)
    path.write_text("")
    assert read_config(path, {}) == ServerConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("limits: {ranks: 1}", "did you mean 'rank'"),
        ("port: many", "port: 'many' is refused"),
        ("host: 0.0.0.0", "keys would go over the network in the clear"),
        ("tls_key: x", "belong together"),
        ("database_url: mysql://x", "must begin with sqlite"),
        ("- a", "is not a mapping"),
        ("a: [", "is not valid YAML"),
        ("port: 1\nhost: localhost\nport: 2", "server.yaml:3: port: given twice, first on line 1"),
        ("limits: {ranks: 1, ranks: 2}", "server.yaml:1: ranks: given twice"),
        ("port: 1\nhost: \0", r"server.yaml:2: .* U\+0000 is not allowed"),
        ("policy: magic", "policy"),
        ("trusted_proxies: [proxy.example.org]", "must be an address or a network"),
        ("connections: {per_adress: 1}", "did you mean 'per_address'"),
        ("policy: residual_capacity-growth\ndeterministic: true", "do not make it faster"),
    ],
)
def test_settings_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(path, {})


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "nothing.yaml", {})
    monkeypatch.setattr(config_module, "_MOST_CONFIG_BYTES", 3)
    (tmp_path / "long.yaml").write_text("port: 1")
    with pytest.raises(ConfigError, match="longer than"):
        read_config(tmp_path / "long.yaml", {})


def test_another_address_needs_tls_or_a_proxy() -> None:
    for more in ({"tls_certificate": "a", "tls_key": "b"}, {"trusted_proxies": ["10.0.0.1"]}):
        config = ServerConfig.model_validate({"host": "10.0.0.2", "allowed_hosts": ["Train.Example.org"]} | more)
        assert config.hosts == {"10.0.0.2", "train.example.org"}


@pytest.mark.parametrize("path", ["tlora", "/tlora/", "/a b", "/../x?", "https://host/tlora"])
def test_a_prefix_is_a_plain_path(path: str) -> None:
    assert ServerConfig(root_path="/team/tlora").root_path == "/team/tlora"
    with pytest.raises(ValueError, match="must be a prefix such as /tlora"):
        ServerConfig(root_path=path)


def test_the_settings_are_frozen_names() -> None:
    """A change here is a change of the documented file: docs/reference/server.md."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "server.md").read_text()
    for name in (*ServerConfig.model_fields, *Limits.model_fields, *ConnectionLimits.model_fields):
        assert name in text, name


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {0: Gpu(0, "GPU-a0"), 1: Gpu(16 << 30, "GPU-b1"), 2: Gpu(80 << 30, "GPU-b2")}
    monkeypatch.setattr(machine, "list_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rooms = (0, int(0.92 * (16 << 30)), int(0.92 * (80 << 30)))  # 0: the driver does not tell
    found = find_places(ServerConfig())
    assert found.speed < 1.0 and "speed is guessed" in found.told[0], "these have no names"
    nameless = {"speed": found.speed, "told": found.told}
    assert found == Devices("cuda", (0, 1, 2), 80 << 30, rooms, **nameless)
    assert find_places(ServerConfig(gpus=[2])) == Devices("cuda", (2,), 80 << 30, (int(0.92 * (80 << 30)),), **nameless)
    assert find_places(ServerConfig(gpus=[0])) == Devices("cuda", (0,), None, (0,), **nameless), "its memory is not told"
    limited = find_places(ServerConfig(device="cpu", gpus=[0, 1], memory_limit=10**9))
    assert limited == Devices("cpu", (0, 1), psutil.virtual_memory().total, (10**9, 10**9))
    assert 0 < sum(find_places(ServerConfig(device="cpu", gpus=[0, 1])).room_bytes) <= psutil.virtual_memory().total
    with pytest.raises(ConfigError, match=r"no GPU 7\. Choose among: 0, 1, 2"):
        find_places(ServerConfig(gpus=[7]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert find_places(ServerConfig()).gpus == (2, 1)
    with pytest.raises(ConfigError, match=r"no GPU 0 \(CUDA_VISIBLE_DEVICES hides it\)\. Choose among: 2, 1"):
        find_places(ServerConfig(gpus=[0]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = find_places(ServerConfig())
    assert found == Devices("cpu", (0,), psutil.virtual_memory().total, found.room_bytes)
    monkeypatch.setattr(machine, "list_gpus", dict)
    with pytest.raises(ConfigError, match="no GPU that nvidia-smi lists"):
        find_places(ServerConfig(device="cuda"))


def test_hosts_of_an_engine_and_a_server_without_gpus_of_its_own() -> None:
    for wrong, message in (
        ({"ray_address": "head:6379"}, "is for backend: ray"),
        ({"backend": "ray", "ray_address": "head:6379"}, "Give --worker-listen"),
        ({"backend": "ray", "min_hosts": 3, "max_hosts": 2}, "max_hosts 2: must be at least 1 and min_hosts"),
        ({"gpus": []}, "workers of other hosts come to worker_listen"),
        ({"backend": "slurm"}, "backend"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config(None, wrong)
    config = read_config(None, {"gpus": [], "worker_listen": "tcp://127.0.0.1:8322"})
    assert find_places(config) == Devices("cuda", ())
    ray = read_config(
        None, {"backend": "ray", "ray_address": "head:6379", "worker_listen": "tcp://10.0.0.1:8322", "device": "cpu", "max_hosts": 4}
    )
    assert find_places(ray) == Devices("cpu", ()) and ray.ray_options.limits.max_hosts == 4


def test_a_base_that_is_not_where_it_should_be_is_told_of(tmp_path: Path) -> None:
    """The server starts: it may come yet, and others are there."""
    (tmp_path / "config.json").write_text("{}")
    lines = missing_bases({"there": str(tmp_path), "hub": "org/name", "gone": f"{tmp_path}/gone"})
    assert lines == [f"base model gone: {tmp_path}/gone has no config.json, and its jobs fail until it has. Correct the path"]
