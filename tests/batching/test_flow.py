"""A flow: one global batch at a time, and its place in the line."""

import pytest

from tlora.batching.flow import Flow, Item, enter_line


def offered(job_id: str, *lengths: int, weight: float = 1.0) -> Flow:
    flow = Flow(job_id, weight)
    flow.offer([Item(sample, tokens) for sample, tokens in enumerate(lengths)])
    return flow


def test_a_batch_goes_from_offered_to_complete() -> None:
    flow = Flow("a", 2.0)
    assert not flow.runnable and not flow.complete and list(flow.pending) == []
    flow.offer([Item(7, 30), Item(8, 10), Item(9, 20)])
    enter_line([flow], 1000)
    assert flow.runnable and not flow.complete
    assert (flow.pending_tokens, flow.longest_tokens) == (60, 30)
    assert flow.take(1) == Item(8, 10)
    assert list(flow.pending) == [Item(7, 30), Item(9, 20)]
    assert flow.virtual_time == 5.0
    assert (flow.take(0), flow.take(0)) == (Item(7, 30), Item(9, 20))
    assert flow.complete and not flow.runnable and flow.pending_tokens == 0
    assert flow.virtual_time == 30.0


def test_the_next_batch_waits_for_the_last_sample_of_this_one() -> None:
    flow = offered("a", 5, 6)
    flow.take(0)
    with pytest.raises(AssertionError, match="1 samples .*pending"):
        flow.offer([Item(2, 5)])
    flow.take(0)
    flow.offer([Item(2, 5)])
    assert flow.runnable


@pytest.mark.parametrize(("items", "match"), [([], "empty"), ([Item(0, 3), Item(1, 0)], "without tokens")])
def test_impossible_batches_are_bugs(items: list[Item], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        Flow("a").offer(items)


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_weight_is_positive(weight: float) -> None:
    with pytest.raises(AssertionError, match="must be positive"):
        Flow("a", weight)


def served(flow: Flow, virtual_time: float) -> Flow:
    """As if it had been in the line for long."""
    enter_line([flow], 10**9)
    flow.virtual_time = virtual_time
    return flow


def test_who_joins_starts_where_the_line_is() -> None:
    slow, fast = served(offered("slow", 9), 1000.0), served(offered("fast", 9), 1500.0)
    new = offered("new", 400)
    enter_line([slow, fast, new], 10**9)
    assert new.virtual_time == 1000.0  # neither 0, which would shut out the others, nor behind anyone


def test_who_comes_back_keeps_at_most_one_sample_of_credit() -> None:
    other = served(offered("other", 9), 1000.0)
    tiny = served(offered("tiny", 9), 100.0)
    tiny.take(0)
    tiny.offer([Item(1, 30), Item(2, 20)])
    enter_line([other, tiny], 10**9)
    assert tiny.virtual_time == 1000.0 - 30


def test_who_comes_back_ahead_stays_ahead() -> None:
    other = served(offered("other", 9), 1000.0)
    busy = served(offered("busy", 9), 1200.0)
    busy.take(0)
    busy.offer([Item(1, 30)])
    enter_line([other, busy], 10**9)
    assert busy.virtual_time == 1209.0


def test_when_everybody_comes_back_the_line_goes_on_from_the_most_served() -> None:
    first, second = served(offered("first", 5), 1000.0), served(offered("second", 5), 2000.0)
    for flow in (first, second):
        flow.take(0)
        flow.offer([Item(1, 10)])
    new = offered("new", 10)
    enter_line([first, second, new], 10**9)
    assert [flow.virtual_time for flow in (first, second, new)] == [1995.0, 2005.0, 2005.0]


def test_tokens_that_filled_gaps_are_not_held_against_a_flow_for_ever() -> None:
    other, filler = served(offered("other", 9), 1000.0), served(offered("filler", 9, weight=2.0), 99999.0)
    enter_line([other, filler], 500)
    assert (other.virtual_time, filler.virtual_time) == (1000.0, 1250.0)
