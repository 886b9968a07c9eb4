"""Which GPUs a group gets, and groups in the making, while the state stays as it is."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.invariants import check
from tests.scheduler.mirror import made_spec, made_state, waiting_job
from tlora.protocol import JobGroup, ParallelPlan
from tlora.scheduler.draft import Draft, has_room
from tlora.scheduler.scheduler import reconcile
from tlora.scheduler.state import ClusterState

PLAN = ParallelPlan(1, 1024)


def with_free(*free: int, size: int = 4) -> ClusterState:
    """Nodes of `size` GPUs of which so many are free, the others under one job's groups."""
    state = made_state(*[size] * len(free))
    for index, count in enumerate(free):
        if count < size:
            name = f"filler{index}"
            job = waiting_job(state, made_spec(name))
            gpus = tuple(range(size * index, size * index + size - count))
            state.place(JobGroup(f"g{index}", "north", gpus, ParallelPlan(len(gpus), 1024 * len(gpus)), (name,), (job.weight,)))
    check(state)
    return state


@pytest.mark.parametrize(
    ("free", "count", "node"),
    [((4, 2, 3), 1, 1), ((4, 2, 3), 2, 1), ((4, 2, 3), 3, 2), ((4, 2, 3), 4, 0), ((3, 3), 4, None), ((0, 0), 1, None)],
)
def test_within_a_node_the_one_with_the_fewest_free_that_holds_it(free: tuple[int, ...], count: int, node: int | None) -> None:
    gpus = Draft(with_free(*free)).allocate(count)
    assert gpus is None if node is None else gpus is not None and {gpu // 4 for gpu in gpus} == {node} and len(gpus) == count


def test_beyond_a_node_whole_nodes_of_one_rack_and_the_rest_by_best_fit() -> None:
    state = with_free(4, 0, 4, 4, 2, 4)  # racks: n0 n1 | n2 n3 | n4 n5
    assert {gpu // 4 for gpu in Draft(state).allocate(8) or ()} == {2, 3}
    assert sorted({gpu // 4 for gpu in Draft(state).allocate(10) or ()}) == [2, 3, 4]
    assert len(Draft(state).allocate(16) or ()) == 16  # no rack has four nodes
    assert Draft(state).allocate(19) is None and Draft(state).allocate(17) is not None


def test_gpus_are_given_once_and_given_back() -> None:
    state = with_free(4, 4)
    before = copy.deepcopy(state.pool.nodes)
    draft = Draft(state)
    first, second = draft.allocate(3), draft.allocate(4)
    assert first == (0, 1, 2) and second == (4, 5, 6, 7) and draft.num_free == 1
    assert draft.allocate(2) is None and draft.allocate(1) == (3,)
    draft.give_back((5, 1, 4))
    assert draft.num_free == 3 and draft.allocate(2) == (4, 5) and draft.allocate(1) == (1,)
    draft.give_back((6,))
    draft.take((6,))
    assert draft.num_free == 0
    with pytest.raises(ValueError, match="not in list"):
        draft.take((6,))
    assert state.pool.nodes == before and state.pool.num_free == 8


@given(
    free=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    sizes=st.lists(st.sampled_from((4, 4, 3)), min_size=5, max_size=5),
    counts=st.lists(st.integers(1, 20), max_size=5),
)
def test_gpus_are_found_if_and_only_if_there_is_room(free: list[int], sizes: list[int], counts: list[int]) -> None:
    state = made_state(*sizes[: len(free)])
    draft = Draft(state)
    for (_, node), count in zip(state.pool.nodes.items(), free, strict=False):
        draft.take(node.gpus[: max(len(node.gpus) - count, 0)])
    for count in counts:
        room = {name: len(draft.free_of(name)) for name in state.pool.nodes}
        gpus = draft.allocate(count)
        assert (gpus is not None) == has_room(room.values(), count, state.pool.node_size)
        if gpus is not None:
            assert len(set(gpus)) == count and sum(len(draft.free_of(name)) for name in state.pool.nodes) == sum(room.values()) - count
            assert not set(gpus) & {gpu for name in state.pool.nodes for gpu in draft.free_of(name)}
            assert len({state.pool.node_of[gpu] for gpu in gpus}) == -(-count // state.pool.node_size)


def test_groups_open_change_and_stop_in_the_draft_alone() -> None:
    state = with_free(0, 4)
    jobs = [waiting_job(state, made_spec(name)) for name in ("a", "b")]
    draft = Draft(state)
    opened = draft.open([jobs[0]], draft.allocate(1) or (), PLAN)
    second = draft.open([jobs[1]], draft.allocate(1) or (), PLAN)
    assert (opened.group_id, second.group_id) == ("g1", "g2")
    draft.stop("g2")
    draft.change("g1", jobs, opened.gpus, ParallelPlan(1, 2048))
    assert draft.group("g1").job_ids == ("a", "b") == tuple(job.spec.job_id for job in draft.members("g1"))
    assert draft.num_free == 3
    draft.stop("g0")
    assert draft.num_free == 7 and draft.members("g0") == [] and draft.group("g0").gpus == (0, 1, 2, 3)
    assert [group.group_id for group in draft.wanted()] == ["g1", "g2", "g0"]
    assert list(state.groups) == ["g0"] and len(state.pending) == 2
    reconcile(state, draft.wanted())
    check(state)
    assert list(state.groups) == ["g1"] and list(state.pending) == ["filler0"]  # g2 never was


def test_a_flow_weighs_what_it_needs() -> None:
    state = made_state(1)
    job = waiting_job(state, made_spec("a"))
    draft = Draft(state)
    assert draft.open([job], draft.allocate(1) or (), PLAN).weights == (job.need,)


def test_where_no_gpu_is_left_there_is_no_room() -> None:
    assert not has_room([0, 0], 1, 0)
