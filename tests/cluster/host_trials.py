"""`python -m tests.cluster.host_trials FIRST LAST`: trials with these seeds. In each a controller of its own and workers on two other hosts
train three jobs, faults chosen by the seed strike meanwhile, and at the end each job has the files of one undisturbed process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.engine.tiny_runs import job, same_bytes, save_base, write_rows
from tests.hosts import Network, kill_host, network, start_worker
from tests.process_hooks import let_hold, slow_down

LEASE_SECONDS, LONGEST_SECONDS, TRIAL_SECONDS = 6.0, 12.0, 600.0
HOSTS = {"b": [], "c": ["--gpus", "0,1"]}  # the second with an agent, whose processes can have any of its GPUs
FAULTS_OF_A_TRIAL = 3
STEPS = 100
_CONTROLLER = f"""
import sys
from tlora.cluster.limits import Limits
Limits.__init__.__defaults__ = (*Limits.__init__.__defaults__[:-1], {LEASE_SECONDS})
from tlora.cli import main
sys.argv[0] = "tlora"
main()
"""


class Material:
    """Base, data and what one process makes of the jobs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        base, data = save_base(directory / "base"), write_rows(directory / "rows.jsonl", 60)
        often = {"logging_steps": 1, "save_steps": 25, "max_steps": STEPS, "lora_dropout": 0.1}
        jobs = [job(f"job{index}", str(data), seed=index, r=2 + 2 * index, **often) for index in range(3)]
        self.names = [fields["name"] for fields in jobs]
        self.file = directory / "jobs.yaml"
        self.file.write_text(yaml.safe_dump({"base_model": str(base), "output_dir": "out", "deterministic": True, "jobs": jobs}))
        self._own = {"TLORA_CACHE": str(directory / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        self.whole = directory / "whole"
        command = ["train", str(self.file), "--output-dir", str(self.whole), "--device", "cpu", "--quiet"]
        subprocess.run([sys.executable, "-m", "tlora", *command], env=self.environment, check=True)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | self._own


class Trial:
    """One cluster on a network of its own, and what befalls it."""

    def __init__(self, material: Material, directory: Path, apart: Network, seed: int, go_on: Callable[[], None]) -> None:
        """`go_on` lets the jobs come to their ends."""
        self.material, self.directory, self.apart, self._go_on = material, directory, apart, go_on
        self.out, self.log = directory / "out", directory / "log"
        self.random, self.said = random.Random(seed), list[str]()
        with socket.create_server((apart.here, 0)) as free:
            self._address = f"tcp://{apart.here}:{free.getsockname()[1]}"
        self._over = threading.Event()
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._keepers: list[threading.Thread] = []
        self._controller = self._start_controller()

    # -- what strikes, each for some seconds ------------------------------------------------------------------------------

    def kill_host(self) -> None:
        kill_host(self._workers[self._any_host()])

    def end_host(self) -> None:
        self._workers[self._any_host()].terminate()

    def suspend_host(self) -> None:
        """As a virtual machine that is paused: its clock goes on."""
        there = self._processes(self._any_host())
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in there:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if number == signal.SIGSTOP:
                self._wait(LONGEST_SECONDS)

    def kill_process(self) -> None:
        """One of an agent's, which starts it again."""
        there = [process for process in self._processes("c") if "tlora.cli.tethered_worker" in _command(process)]
        if there:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.random.choice(there).kill()

    def cut_out(self) -> None:
        self._hinder(self.apart.cut, "out")

    def cut_in(self) -> None:
        self._hinder(self.apart.cut, "in")

    def cut_both(self) -> None:
        self._hinder(self.apart.cut, "out", "in")

    def delay_out(self) -> None:
        self._hinder(self.apart.delay, "out")

    def delay_in(self) -> None:
        self._hinder(self.apart.delay, "in")

    def delay_both(self) -> None:
        self._hinder(self.apart.delay, "out", "in")

    def kill_controller(self) -> None:
        self._controller.kill()
        self._controller.wait()
        self._wait(3.0)
        self._controller = self._start_controller()

    def kill_worker(self) -> None:
        """The controller's own."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(json.loads((self.out / "workers" / "gpu0.json").read_text())["pid"], signal.SIGKILL)

    # ---------------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until all jobs have ended. Raises AssertionError for what must not be."""
        self._options, self._token = self._way_in()
        for host in range(len(HOSTS)):
            self._keepers.append(threading.Thread(target=self._keep, args=(host,)))
            self._keepers[-1].start()
        self._until(self._trains, "no job trains")
        lines = [self.cut_out, self.cut_in, self.cut_both]
        if self.apart.can_delay:
            lines += [self.delay_out, self.delay_in, self.delay_both]
        kills = (self.kill_host, self.end_host, self.suspend_host, self.kill_controller, self.kill_worker, self.kill_process)
        for strike in self.random.sample([*lines, *kills], FAULTS_OF_A_TRIAL):
            self._wait(4.0)
            self.said.append(strike.__name__)
            assert self._controller.poll() is None, self._report("the jobs have ended before it struck")
            strike()
        self._go_on()
        self._until(lambda: self._controller.poll() is not None, "the jobs do not end")
        assert self._controller.returncode == 0, self._report("the controller failed")
        results = {name: json.loads((self.out / "jobs" / name / "result.json").read_text()) for name in self.material.names}
        assert all(result["status"] == "done" for result in results.values()), self._report(str(results))
        same_bytes(self.out / "jobs", self.material.whole, self.material.names)

    def close(self) -> None:
        self._over.set()
        for keeper in self._keepers:
            keeper.join()
        for process in self._workers.values():
            kill_host(process)
        self._controller.kill()
        self._controller.wait()
        for path in (self.out / "workers").glob("gpu*.json"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)

    def _start_controller(self) -> subprocess.Popen[bytes]:
        at = ["--output-dir", str(self.out), "--device", "cpu", "--policy", "fifo", "--worker-listen", self._address]
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", _CONTROLLER, "cluster", str(self.material.file), *at]
            return subprocess.Popen(command, env=self.material.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _way_in(self) -> tuple[list[str], str]:
        self._until((self.out / "workers" / "tcp-address").exists, "no worker can come")
        command = [sys.executable, "-m", "tlora", "worker-token", str(self.out), "--json"]
        made = subprocess.run(command, env=self.material.environment, capture_output=True, check=True)
        facts = json.loads(made.stdout)
        return ["--connect", self._address, "--fingerprint", facts["fingerprint"]], facts["token"]

    def _keep(self, host: int) -> None:
        """Start the host's worker, again when it has ended, as systemd does."""
        while True:
            name, hidden = list(HOSTS)[host], [self.material.directory, self.directory / "out"]
            home = self.directory / f"home-{name}"
            process = start_worker(
                [*self._options, *HOSTS[name]], self._token, home, hidden, name=name, namespace=self.apart.namespace(host)
            )
            self._workers[name] = process
            while process.poll() is None:
                if self._over.wait(0.2):
                    return
            if self._over.wait(5.0):
                return

    def _any_host(self) -> str:
        return self.random.choice(list(HOSTS))

    def _processes(self, host: str) -> list[psutil.Process]:
        """All of the host."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._workers[host].pid)
            return [first, *first.children(recursive=True)]
        return []

    def _hinder(self, how: Callable[..., None], *directions: str) -> None:
        host = self.random.randrange(len(HOSTS))
        for yes in (True, False):
            for direction in directions:
                how(host, direction, yes=yes)
            if yes:
                self._wait(LONGEST_SECONDS)

    def _wait(self, most: float) -> None:
        seconds = self.random.uniform(0.0, most)
        self.said.append(f"{seconds:.1f} s")
        time.sleep(seconds)

    def _trains(self) -> bool:
        assert self._controller.poll() is None, self._report("the controller has ended")
        return any(path.stat().st_size for path in self.out.glob("jobs/*/metrics.jsonl"))

    def _until(self, look: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + TRIAL_SECONDS
        while not look():
            assert time.monotonic() < deadline, self._report(otherwise)
            time.sleep(0.1)

    def _report(self, what: str) -> str:
        return f"{what}: {self.said}\n{self.log.read_text()[-6000:]}"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextlib.contextmanager
def open_trial(material: Material, directory: Path, seed: int) -> Iterator[Trial]:
    """One whose jobs do not end before all has struck."""
    directory.mkdir(parents=True)
    with network(len(HOSTS)) as apart, pytest.MonkeyPatch.context() as monkeypatch:
        let_hold(monkeypatch, directory, "")
        with slow_down(STEPS) as go_on:
            trial = Trial(material, directory, apart, seed, go_on)
            try:
                yield trial
            finally:
                trial.close()


def main() -> None:
    first, last = map(int, sys.argv[1:])
    root = Path(tempfile.mkdtemp(prefix="tlora-trials-"))
    (root / "material").mkdir()
    material, failed = Material(root / "material"), list[int]()
    for seed in range(first, last + 1):
        began = time.monotonic()
        with open_trial(material, root / f"{seed}", seed) as trial:
            try:
                trial.run()
            except AssertionError as error:
                failed.append(seed)
                print(error, flush=True)
        print(f"{seed}: {'FAILED' if seed in failed else 'ok'} in {time.monotonic() - began:.0f} s: {trial.said}", flush=True)
    print(f"{last - first + 1} trials, {len(failed)} failed: {failed} ({root})")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
