"""Where jobs of a worker lie, and which move when its ranks change: on numbers alone."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.batching.replicas import LEAST_REPLICA_TOKENS, ReplicaPlacement
from tlora.engine.ranks.gpu_change import JOIN_SECONDS, GpuChange, worker_device
from tlora.engine.ranks.job_spans import choose_span, moves, rank_loads
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.objectives import objective_of
from tlora.registry import OBJECTIVES
from tlora.worker_protocol import Join


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "data": "d.jsonl", **fields})


def order(name: str, gpus: int = 1, tokens: float | None = None) -> Join:
    return Join(spec(name=name, gpus=gpus, batch_size=8), tokens_per_step=tokens)


def one(rank: int) -> ReplicaPlacement:
    return ReplicaPlacement(1, (rank,))


@pytest.mark.parametrize(
    ("gpus", "count", "deterministic", "span"),
    [
        (1, 2, True, ReplicaPlacement(1, (0,))),  # bytes depend on replicas, and these on the order alone
        (1, 2, False, ReplicaPlacement(2, (0, 1))),
        (2, 2, True, ReplicaPlacement(2, (0, 1))),
        (2, 3, True, ReplicaPlacement(2, (0, 1))),
        (4, 2, True, ReplicaPlacement(4, (0, 1))),
        (4, 2, False, ReplicaPlacement(4, (0, 1))),
        (2, 4, False, ReplicaPlacement(4, (0, 1, 2, 3))),
    ],
)
def test_a_job_on_empty_ranks(gpus: int, count: int, deterministic: bool, span: ReplicaPlacement) -> None:
    assert choose_span(Join(spec(gpus=gpus, batch_size=8)), range(count), [], deterministic) == span


def test_small_batches_fill_fewer_ranks() -> None:
    assert choose_span(Join(spec(batch_size=3)), range(4), [], deterministic=False) == ReplicaPlacement(3, (0, 1, 2))


@pytest.mark.parametrize(
    ("tokens", "gpus", "deterministic", "replicas"),
    [
        (4 * LEAST_REPLICA_TOKENS, 1, False, 4),
        (4 * LEAST_REPLICA_TOKENS - 1, 1, False, 3),
        (LEAST_REPLICA_TOKENS - 1, 1, False, 1),
        (100.0, 2, False, 2),  # what is ordered is done
        (8 * LEAST_REPLICA_TOKENS, 1, True, 1),
    ],
)
def test_each_replica_has_tokens_enough(tokens: float, gpus: int, deterministic: bool, replicas: int) -> None:
    join = Join(spec(batch_size=8, gpus=gpus), tokens_per_step=tokens)
    assert choose_span(join, range(4), [], deterministic).replicas == replicas


def test_jobs_go_where_least_is_to_do_and_homes_alternate() -> None:
    spans = [ReplicaPlacement(1, (0,))]
    for _ in range(3):
        spans.append(choose_span(Join(spec()), range(3), spans, deterministic=True))
    assert [span.ranks for span in spans] == [(0,), (1,), (2,), (0,)]
    two = Join(spec(gpus=2, batch_size=4))
    first = choose_span(two, range(2), [], deterministic=True)
    second = choose_span(two, range(2), [first], deterministic=True)
    assert {first.lead_rank, second.lead_rank} == {0, 1}


def test_an_objective_with_a_statistic_of_its_batch_stays_in_one_place() -> None:
    data = {"sft": {}, "dpo": {}, "kto": {}, "orpo": {}}
    for name in OBJECTIVES:
        objective = objective_of(spec(objective=name, batch_size=4, **data[name]))
        needs_all = objective is not None and objective.statistic is not None
        assert spec(objective=name, batch_size=4).needs_whole_batch == needs_all, name
    assert choose_span(Join(spec(objective="kto", batch_size=4, gpus=2)), range(2), [], deterministic=True).ranks == (0,)


def test_jobs_of_one_rank_move_until_none_would_be_better_off() -> None:
    joins = {name: order(name) for name in "abcde"}
    assert moves(joins, dict.fromkeys(joins, one(0)), [0, 1], deterministic=True) == {"e": one(1), "d": one(1)}
    assert moves({"a": joins["a"]}, {"a": one(0)}, [0, 1], deterministic=True) == {}, "a lone job gains nothing"


def test_a_job_spans_more_ranks_when_they_come_and_fewer_when_they_go() -> None:
    joins, whole = {"a": order("a", gpus=2)}, ReplicaPlacement(2, (0,))
    spread = moves(joins, {"a": whole}, [0, 3], deterministic=True)["a"]
    assert spread.replicas == 2 and set(spread.ranks) == {0, 3}
    assert moves(joins, {"a": spread}, [0, 3], deterministic=True) == {}
    assert moves(joins, {"a": spread}, [3], deterministic=True) == {"a": ReplicaPlacement(2, (3,))}
    wide = moves({"a": order("a", tokens=4096)}, {"a": one(0)}, [0, 1], deterministic=False)["a"]
    assert (wide.replicas, set(wide.ranks)) == (2, {0, 1}), "where bytes may depend on the group, a job fills it"


def test_a_pinned_job_stays_as_long_as_its_rank_is_there() -> None:
    joins, spans = {"a": order("a", gpus=2)}, {"a": ReplicaPlacement(2, (0,))}
    assert moves(joins, spans, [0, 1], deterministic=True, pinned=["a"]) == {}
    assert moves(joins, spans, [1, 2], deterministic=True, pinned=["a"]) == {"a": ReplicaPlacement(2, (1,))}


def test_thirds_of_jobs_come_to_rest() -> None:
    """1/3 + 1 + 1 and 1/3 + (1 + 1) differ as floats: a narrow job went to and fro between two ranks for ever."""
    joins = {name: order(name, gpus=1 if name.startswith("n") else 3) for name in ("n0", "n1", "n2", "n3", "wide")}
    spans: dict[str, ReplicaPlacement] = {}
    for name, join in joins.items():
        spans[name] = choose_span(join, [0, 1], spans.values(), deterministic=True)
    spans |= moves(joins, spans, [0, 1, 2], deterministic=True)
    assert sorted(rank_loads([0, 1, 2], list(spans.values())).values()) == [1 + Fraction(1 / 3), 1 + Fraction(1 / 3), 2 + Fraction(1 / 3)]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.sets(st.integers(0, 4), min_size=1), st.sets(st.integers(0, 4), min_size=1))
def test_after_any_change_all_jobs_are_on_ranks_that_are_there_and_none_moves_twice(
    gpus: list[int], before: set[int], after: set[int]
) -> None:
    joins = {f"job-{number}": order(f"job-{number}", count) for number, count in enumerate(gpus)}
    spans: dict[str, ReplicaPlacement] = {}
    for name, join in joins.items():
        spans[name] = choose_span(join, sorted(before), spans.values(), deterministic=True)
    moved = moves(joins, spans, sorted(after), deterministic=True)
    spans |= moved
    assert all(span.replicas == join.job.gpus for span, join in zip(spans.values(), joins.values(), strict=True)), "bytes depend on it"
    assert all(set(span.ranks) <= after and len(span.ranks) == min(span.replicas, len(after)) for span in spans.values())
    assert moves(joins, spans, sorted(after), deterministic=True) == {}
    loads = rank_loads(after, list(spans.values()))
    full = max(loads, key=loads.__getitem__)
    assert max(loads.values()) - min(loads.values()) <= 1 or not any(span.ranks == (full,) for span in spans.values())


def test_gpus_come_before_others_go() -> None:
    change = GpuChange((0, 1))
    change.loaded(0), change.loaded(1)
    change.want((1, 2))
    assert change.missing == [2] and change.taking == [0, 1]
    change.begin(2, 2, now=0.0)
    assert (change.missing, change.gpus, change.target) == ([], (0, 1), (1, 2))
    assert not change.late(JOIN_SECONDS) and change.late(JOIN_SECONDS + 1) == [2]
    change.loaded(2)
    assert change.taking == [1, 2] and not change.is_done
    assert change.end_vacated({0, 1}) == [] and change.end_vacated({1}) == [0] and change.end_vacated({1}) == []
    change.ended(0)
    assert change.is_done and change.gpus == (1, 2)


def test_a_gpu_that_is_wanted_no_longer_before_it_has_come() -> None:
    change = GpuChange((0,))
    change.loaded(0)
    change.want((0, 1))
    change.begin(1, 1, now=0.0)
    change.want((0,))
    assert change.not_wanted_after_all() == [1] and change.is_done


def test_a_gpu_that_is_wanted_again_while_its_rank_ends() -> None:
    """Jobs stay where they are until another rank has come there: they were placed on what was left, which may be lent GPUs alone."""
    change = GpuChange((0, 1, 4))
    for rank in range(3):
        change.loaded(rank)
    change.want((0, 4))
    assert change.end_vacated(set()) == [1]
    change.want((1, 4))
    assert change.awaits_ranks and change.missing == [] and change.taking == [0, 2], "GPU 1 has no room for another yet"
    change.ended(1)
    assert change.missing == [1] and change.awaits_ranks
    change.begin(3, 1, now=0.0)
    assert change.taking == [0, 2]
    change.loaded(3)
    assert not change.awaits_ranks and change.taking == [2, 3]


def test_the_device_of_a_workers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts the GPUs that it is left, in their order there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3,4")
    assert [worker_device("cuda", (3, 4), gpu) for gpu in (3, 4, 5)] == ["cuda:1", "cuda:2", "cuda:0"]
    assert worker_device("cpu", (0, 1), 7) == "cpu"
    with pytest.raises(ConfigError, match=r"GPU 6: CUDA_VISIBLE_DEVICES hides it from this worker, which sees \[5, 3, 4\]. Start a"):
        worker_device("cuda", (3, 4), 6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a0,GPU-b1")
    assert worker_device("cuda", (3, 4), 4) == "cuda:1", "by UUIDs: those that it was started with"
