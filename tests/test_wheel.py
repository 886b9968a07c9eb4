"""The sdist builds, a wheel is built from it, and the demo's jobs train from that wheel where there is no source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD_SDIST = "import setuptools.build_meta as backend; backend.build_sdist('dist')"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "COLUMNS")}
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the tracked files, unpacked: what is not tracked cannot help."""
    directory = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in tracked:
        if name and not name.startswith("bench/results/") and (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    run(sys.executable, "-c", BUILD_SDIST, cwd=directory)
    (archive,) = (directory / "dist").glob("tlora-*.tar.gz")
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    return next(unpacked.iterdir())


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", "dist", ".", cwd=sdist)
    (found,) = (sdist / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. Its libraries are those of this environment; a .pth file does not bring an editable install."""
    directory = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory).strip())
    (site / "libraries.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
    run(*pip, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel), cwd=directory)
    return python


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "src/tlora"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    package = {name.removeprefix("src/") for name in tracked if (ROOT / name).is_file()}
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if name.startswith("tlora/")}
    assert names == package


def test_the_demo_trains_from_the_wheel(clean_python: Path, sdist: Path, tmp_path: Path) -> None:
    """The demo's four jobs, ten steps each; a page, an answer and a simulation need the files that are no code."""
    shutil.copytree(sdist / "demo", tmp_path / "demo")
    where = run(clean_python, "-c", "import tlora; print(tlora.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(clean_python.parents[1]), "the source tree must not be imported"
    tlora = clean_python.parent / "tlora"
    printed = run(tlora, "train", "demo/jobs.yaml", "--device", "cpu", "--set", "defaults.max_steps=10", cwd=tmp_path)
    assert printed.count("done, step 10/10") == 4 and "report: demo/out/report.html" in printed
    adapter = tmp_path / "demo" / "out" / "sql"
    assert (adapter / "adapter_model.safetensors").is_file() and (tmp_path / "demo" / "out" / "report.html").is_file()
    assert run(tlora, "generate", "--adapter", adapter, "--prompt", "Show all books.", "--device", "cpu", cwd=tmp_path).strip()
    assert "residual_capacity" in run(tlora, "simulate", "--jobs", "20", "--policy", "fifo,residual_capacity", cwd=tmp_path)
