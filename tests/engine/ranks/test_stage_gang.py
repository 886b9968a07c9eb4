"""When ranks of a base in stages begin, and which command waits for that."""

from __future__ import annotations

from tlora.engine.messages import Leave, Listen, SetGpus, SetPlan, Stop
from tlora.engine.ranks.stage_gang import StageGang


def test_none_begins_before_all_are_there() -> None:
    gang = StageGang(4, 2)
    assert gang.ranks == (2, 3, 0, 1) and gang.last == 1 and gang.is_apart, "jobs are led at home"
    assert not any(gang.complete(rank, range(rank + 1)) for rank in range(3)) and gang.waits
    assert [gang.holds(each) for each in (SetPlan(8), Listen("a"), SetGpus((0,)), Leave("j"), Stop())] == [True, False, False, True, False]
    assert list(gang.release()) == []
    assert gang.complete(3, range(4)) == (2, 3, 0, 1) and not gang.waits
    assert list(gang.release()) == [SetPlan(8), Leave("j")] and list(gang.release()) == []
    assert not gang.holds(SetPlan(8)) and gang.leading([0, 1, 2, 3]) == [1]


def test_a_base_that_is_not_cut_waits_for_nobody() -> None:
    gang = StageGang(0, 2)
    assert gang.complete(1, [1]) == [1] and not gang.waits and not gang.holds(SetPlan(8))
    assert gang.ranks == () and gang.leading([0, 1]) == [0, 1] and not gang.is_apart
    assert StageGang(2, 2).ranks == (0, 1) and not StageGang(2, 2).is_apart
