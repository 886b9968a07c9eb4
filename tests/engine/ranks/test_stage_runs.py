"""A base in stages, each on a rank of its own: the bytes of one process, also when a rank is lost."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM

import tlora
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.conftest import save_base
from tests.engine.ranks.worlds import fork_children, hold_until_ranks_stop, record_ranks
from tests.engine.tiny_runs import TWO_LINEARS, job, run_spec, same_bytes, sentence, train, write_rows
from tests.process_hooks import hold
from tlora.engine.messages import Stop
from tlora.engine.ranks import rank_group
from tlora.engine.ranks.rank_group import RankGroup
from tlora.engine.results import Results
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import ConfigError, ModelError
from tlora.link.supervisor import SupervisedProcess

NAMES = ("dropout", "evaluates", "long", "dpo", "kto", "replicas")


@dataclass
class World:
    base: Path
    orders: list[dict[str, Any]]
    whole: Path
    processes: list[SupervisedProcess] = field(default_factory=list[SupervisedProcess])

    def train(self, out: Path, gpus: int, **options: Any) -> Results:
        self.processes.clear()
        settings = {"deterministic": True, "token_budget": 64, "layout": "stages", **options.pop("settings", {})}
        return tlora.train(run_spec(self.base, out, self.orders, **settings), device="cpu", gpus=gpus, **options)

    def same_bytes(self, out: Path) -> None:
        same_bytes(out, self.whole, NAMES)


def write_preferences(directory: Path, count: int) -> tuple[str, str]:
    """Files of pairs, and of answers one by one."""
    rng = random.Random(5)
    pairs = [{"prompt": sentence(rng, 1, 3), "chosen": sentence(rng, 1, 3), "rejected": sentence(rng, 2, 5)} for _ in range(count)]
    answers = [{"prompt": p["prompt"], "completion": p[kind], "label": kind == "chosen"} for p in pairs for kind in ("chosen", "rejected")]
    files = directory / "pairs.jsonl", directory / "answers.jsonl"
    for file, rows in zip(files, (pairs, answers), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(files[0]), str(files[1])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_servers: object) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("stage-runs")
    base = save_base(directory / "base", num_hidden_layers=4)
    data = str(write_rows(directory / "a.jsonl", 24, high=6))
    pairs, answers = write_preferences(directory, 12)
    brief = {"max_steps": 4, "target_modules": TWO_LINEARS}
    orders = [
        job("dropout", data, lora_dropout=0.1, max_steps=6, batch_size=2, save_steps=1, target_modules=TWO_LINEARS),
        job("evaluates", data, max_steps=5, batch_size=2, eval_size=2, eval_steps=2, seed=3, target_modules=["down_proj"]),
        job("long", data, max_steps=10, save_steps=3, seed=4, layers_to_transform=[0, 3]),
        job("dpo", {"path": pairs, "eval_size": 3}, objective="dpo", lora_dropout=0.1, eval_steps=2, batch_size=2, **brief),
        job("kto", {"path": answers, "eval_size": 4}, objective="kto", batch_size=3, **brief),
        job("replicas", data, batch_size=4, gpus=2, seed=5, **brief),
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        fork_children(monkeypatch, directory)
        train(base, directory / "whole", orders, deterministic=True)
        world = World(base, orders, directory / "whole")
        record_ranks(monkeypatch, world.processes)
        monkeypatch.setattr(rank_group, "LOOK_SECONDS", 0.1)  # a stopped rank is lost after five looks
        yield world


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_give_the_bytes_of_one_process(world: World, tmp_path: Path, stages: int) -> None:
    lines: list[str] = []
    results = world.train(tmp_path / "out", stages, watcher=Watcher(note=lines.append))
    assert results.status == "done", ({result.name: result.reason for result in results.values()}, lines)
    world.same_bytes(tmp_path / "out")
    assert any(line.startswith("layout: stages: CPU process 0: layers 0 to ") for line in lines)


def test_more_stages_than_layers_are_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a decoder layer for each CPU process, and the base has 4 for 5. Take --gpus 4"):
        world.train(tmp_path / "out", 5)


def test_a_base_that_cannot_be_cut_is_refused(world: World, tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_tokenizer(CHATML).save_pretrained(base)
    config = OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32, vocab_size=400)
    OPTForCausalLM(config).save_pretrained(base)
    with pytest.raises(ModelError, match="OPTForCausalLM cannot be cut into stages"):
        tlora.train(run_spec(base, tmp_path / "out", world.orders[:1], layout="stages"), device="cpu", gpus=2)


def test_stages_on_one_gpu_are_said(world: World, tmp_path: Path) -> None:
    lines: list[str] = []
    orders = [{**world.orders[0], "max_steps": 1}]
    results = tlora.train(run_spec(world.base, tmp_path / "out", orders, layout="stages"), device="cpu", watcher=Watcher(note=lines.append))
    assert results.status == "done" and any("layout: stages is of several GPUs, and here is one" in line for line in lines)


@pytest.mark.parametrize(("first", "then"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_a_run_goes_on_in_another_layout(world: World, tmp_path: Path, first: int, then: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage ends first: of what it saves, the others have parts."""
    told, send = list[int](), RankGroup.send
    stops: list[tuple[int, list[int]]] = []

    def see(group: RankGroup, rank: int, command: Any) -> None:
        if isinstance(command, Stop):
            stops.append((rank, group.living))
        send(group, rank, command)

    monkeypatch.setattr(RankGroup, "send", see)

    def stop(progress: RunProgress) -> None:
        if not told and sum(job.step for job in progress.jobs) >= 6:
            told.append(progress.jobs[0].step)
            os.kill(os.getpid(), signal.SIGINT)

    with hold_until_ranks_stop(8):
        stopped = world.train(tmp_path / "out", first, watcher=Watcher(stop))
    assert stopped.signal_number == signal.SIGINT
    assert [rank for rank, _ in stops] == ([1, 0] if first == 2 else []) and all(1 not in living for rank, living in stops if rank == 0)
    assert world.train(tmp_path / "out", then, resume=True).status == "done"
    world.same_bytes(tmp_path / "out")


def train_with_a_lost_rank(world: World, out: Path, stages: int, rank: int, number: signal.Signals, at_steps: int) -> None:
    """The rank gets the signal when all jobs together have taken so many steps; the run ends with the bytes of one process."""
    lines: list[str] = []
    lost: list[int] = []

    def lose(progress: RunProgress) -> None:
        if not lost and sum(job.step for job in progress.jobs) >= at_steps:
            lost.append(world.processes[rank].pid)
            os.kill(lost[0], number)
            release()

    with hold(at_steps + 2) as release:
        results = world.train(out, stages, watcher=Watcher(lose, lines.append))
    assert lost and results.status == "done", lines
    assert any("starting again from the last checkpoints" in line for line in lines), lines
    world.same_bytes(out)


@pytest.mark.parametrize(
    ("stages", "rank", "number"),
    [
        pytest.param(2, 0, signal.SIGKILL, marks=pytest.mark.slow),
        (2, 1, signal.SIGKILL),
        pytest.param(3, 1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_lost_stage_ends_the_run_and_it_begins_again_on_what_is_left(
    world: World, tmp_path: Path, stages: int, rank: int, number: signal.Signals
) -> None:
    train_with_a_lost_rank(world, tmp_path / "out", stages, rank, number, 5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_stages_lost_at_any_time(world: World, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randint(2, 4)
    number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    train_with_a_lost_rank(world, tmp_path / "out", stages, rng.randrange(stages), number, rng.randint(1, 24))
