"""`--backend ray`: what is refused, with Ray and without. What trains through it: test_ray_faults.py."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.cluster.ray_cluster import ROOT, ray_cluster
from tlora.cluster import ray_engine
from tlora.cluster.host_keeper import HostLimits
from tlora.cluster.ray_engine import check_address, check_installed
from tlora.cluster.ray_keeper import RayOptions
from tlora.errors import ConfigError


def has_ray() -> bool:
    try:
        check_installed()
    except ConfigError:
        return False
    return True


with_ray = pytest.mark.skipif(not has_ray(), reason="ray is not installed: pip install 'tlora[ray]'")


def test_without_the_package_there_is_one_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(ray_engine, "version", no_version)
    with pytest.raises(ConfigError, match=r"needs the package 'ray': pip install 'tlora\[ray\]'"):
        check_installed()
    monkeypatch.setattr(ray_engine, "version", lambda _: "2.9.3")
    with pytest.raises(ConfigError, match=r"needs ray 2\.56 or newer, and this is 2\.9\.3"):
        check_installed()
    monkeypatch.setattr(ray_engine, "version", lambda _: "2.60.0")
    check_installed()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1", ":6379", "head:port"])
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be host:port of the cluster's head"):
        check_address(address, tmp_path / "log")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RayOptions("head:6379"), "Give --worker-listen"),
        (RayOptions("head:6379", "tcp://0.0.0.0:8322"), "an address that they can dial"),
        (RayOptions(limits=HostLimits(3, 2)), r"max_hosts 2: must be at least 1 and min_hosts \(3\)"),
    ],
)
def test_options_that_cannot_work_are_refused(options: RayOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.check()


def test_only_one_file_imports_ray() -> None:
    files = [path for path in (ROOT / "src").rglob("*.py") if "import ray" in path.read_text() or "from ray" in path.read_text()]
    assert [path.name for path in files] == ["ray_driver.py"]


@with_ray
@pytest.mark.slow
def test_a_cluster_that_lets_in_anybody_is_refused(tmp_path: Path) -> None:
    with ray_cluster(token=False) as cluster, pytest.raises(ConfigError, match="asks for no token.*RAY_AUTH_MODE=token"):
        check_address(cluster.address, tmp_path / "log")
    with pytest.raises(ConfigError, match="no Ray answers there"):
        check_address(cluster.address, tmp_path / "log")
