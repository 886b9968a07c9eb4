"""The commands of the tutorial and the how-to pages run, in the order of the page, over the demo's base on a CPU.

A block of ```bash is run; one of ```yaml whose first line is `# NAME.yaml` becomes that file first. Commands that need GPUs, a network or
another terminal stand in ```sh blocks: of these only names and options are compared with the program.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tlora.cli.commands import app
from tlora.jobs_file import read_jobs_file

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SERVE = 'if [ "$1" = serve ]; then shift; set -- serve --port 0 "$@"; fi'  # pages are run side by side


def blocks(page: Path, *languages: str) -> list[str]:
    return [textwrap.dedent(text) for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def script_of(page: Path) -> str:
    """The page's commands as one script that ends at the first that fails; `! command` must fail."""
    lines = "\n".join(blocks(page, "bash"))
    return "set -euo pipefail\n" + re.sub(r"^! (.+)$", r"if \1; then exit 99; fi", lines, flags=re.MULTILINE)


def write_files(page: Path, directory: Path) -> None:
    for text in blocks(page, "yaml"):
        name = text.partition("\n")[0].removeprefix("# ")
        if name.endswith(".yaml"):
            assert not (directory / name).exists(), f"{page.name} writes {name} twice"
            (directory / name).write_text(text, encoding="utf-8")


def environment_of(directory: Path) -> dict[str, str]:
    programs = directory / "programs"
    programs.mkdir()
    for name, command in {"tlora": f"{SERVE}\nexec {sys.executable} -m tlora", "python": f"exec {sys.executable}"}.items():
        (programs / name).write_text(f'#!/bin/sh\n{command} "$@"\n')
        (programs / name).chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TLORA_", "XDG_"))}
    path = f"{programs}{os.pathsep}{own['PATH']}"
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), own.get("PYTHONPATH")]))
    return own | {"PATH": path, "HOME": str(directory / "home"), "PYTHONPATH": source, "TLORA_CACHE": str(directory / "cache")}


def keys_written(directory: Path) -> set[str]:
    """The keys of all rows of metrics and of all results below."""
    rows = [line for name in ("metrics.jsonl", "run.jsonl") for file in directory.rglob(name) for line in file.read_text().splitlines()]
    return {key for text in (*rows, *(file.read_text() for file in directory.rglob("result.json"))) for key in json.loads(text)}


@pytest.mark.slow  # that commands and options exist is looked at in every run, and the example of an own loop runs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for name in ("demo", "examples"):
        (work / name).symlink_to(ROOT / name)
    write_files(page, work)
    environment, log = environment_of(tmp_path), tmp_path / "log"
    with log.open("w") as output:
        command = ("bash", "-c", script_of(page))
        started = subprocess.Popen(command, cwd=work, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status = started.wait(timeout=1500)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
    assert status == 0, log.read_text()[-6000:]
    metrics = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert not [key for key in keys_written(work) if f"`{key.removeprefix('eval_')}`" not in metrics and f"`{key}`" not in metrics]


@pytest.mark.slow  # that its files are there and its keys are known is looked at in every run
def test_the_example_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """But for what `make demo` does, which `.ci/run` runs: it is said to have set up the environment."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "demo").symlink_to(ROOT / "demo")
    write_files(ROOT / "README.md", work)
    environment = environment_of(tmp_path)
    (tmp_path / "programs" / "make").write_text("#!/bin/sh\nmkdir -p .venv/bin && touch .venv/bin/activate\n")
    (tmp_path / "programs" / "make").chmod(0o755)
    script = "set -euo pipefail\n" + blocks(ROOT / "README.md", "sh")[0]
    ran = subprocess.run(("bash", "-c", script), cwd=work, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    assert "SELECT COUNT(*) FROM players WHERE age < 30" in ran.stdout
    assert {path.parent.name for path in work.glob("out/*/adapter_model.safetensors")} == {"polite", "sql", "sweep-r8", "sweep-r32"}


def test_the_example_of_the_readme_names_files_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    write_files(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    run = read_jobs_file("jobs.yaml")
    assert Path(run.base_model, "config.json").is_file()
    assert len(run.jobs) == 4 and all(Path(source.path).is_file() for job in run.jobs for source in job.data.sources)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 120 and len(page.encode()) <= 9 * 1024


def commands_in(text: str) -> list[list[str]]:
    """The words of each `tlora …` of a shell block."""
    lines = text.replace("\\\n", " ").splitlines()
    calls = [call for line in lines for call in re.findall(r"(?:^|[\s(])(tlora\s[^|;&>)#]*)", line)]
    return [shlex.split(call)[1:] for call in calls]


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md"), ROOT / "README.md"], ids=lambda page: page.name)
def test_commands_and_options_of_shell_blocks_exist(page: Path) -> None:
    unknown: list[str] = []
    for words in (words for text in blocks(page, "bash", "sh", "console") for words in commands_in(text)):
        command: Any = get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
        unknown += [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
        unknown += words[:1] if hasattr(command, "commands") and words and not words[0].startswith("-") else []
    assert not unknown
