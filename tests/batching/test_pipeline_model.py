"""The pipeline in predicted seconds, against what is known by hand."""

from __future__ import annotations

from itertools import repeat

import pytest

from tlora.batching.flow import Item
from tlora.batching.pipeline_model import NO_OVERHEAD, OfferedJob, Pipeline, StageOverhead, Stream, Through


def send(batches: list[int], budget: int, stages: int, micro_batches: int, overhead: StageOverhead = NO_OVERHEAD) -> Through:
    """Of jobs whose global batches have so many samples of 100 tokens each, of which one takes three seconds."""
    jobs = {f"job{n}": OfferedJob(f"job{n}", repeat([Item(i, 100) for i in range(size)])) for n, size in enumerate(batches)}
    pipeline = Pipeline(Stream(jobs, budget, stages), lambda entry: entry.tokens * 0.03, stages, overhead)
    return pipeline.run(micro_batches, micro_batches // 5)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_lone_job_waits_as_long_as_a_pipeline_that_is_flushed(stages: int, batch_size: int) -> None:
    """(S - 1) / (m + S - 1) of the time, with m micro-batches a global batch."""
    through = send([batch_size], 100, stages, 40 * batch_size)
    assert through.waited_seconds / through.seconds == pytest.approx((stages - 1) / (batch_size + stages - 1), abs=0.01)
    assert through.stalls == pytest.approx(through.micro_batches / batch_size, abs=1)


def test_equal_jobs_that_offer_enough_leave_no_wait() -> None:
    through = send([4] * 6, 100, 2, 400)
    assert through.waited_seconds == 0 and through.seconds == pytest.approx(320 * 3 / 2)


def test_many_small_batches_that_fill_few_micro_batches_wait() -> None:
    """All jobs together offer two full micro-batches for two stages; batches of unequal size leave them unequal, and one waits."""
    through = send([1, 2, 2, 5, 6, 7, 8, 9], 2000, 2, 200)
    assert through.waited_seconds / through.seconds > 0.2
    assert send([1, 2, 2, 5, 6, 7, 8, 9], 500, 2, 200).waited_seconds == pytest.approx(0, abs=1e-6)


def test_a_lone_micro_batch_waits_for_the_way_there_and_back_and_others_hide_it() -> None:
    """With three in flight over two stages, which take 1.5 s each. A lone one goes there and back, and the last stage hears that it has
    left.
    """
    full = send([4] * 6, 100, 2, 400, StageOverhead(latency=0.25))
    assert full.seconds == pytest.approx(320 * 3 / 2) and full.waited_seconds == 0
    assert send([1], 100, 2, 40, StageOverhead(latency=0.5)).seconds == pytest.approx(32 * (3 + 3 * 0.5))


@pytest.mark.parametrize(("stages", "copies"), [(2, 2), (4, 4)])
def test_copies_take_a_stages_time_at_each_of_its_boundaries(stages: int, copies: int) -> None:
    """Forward and back; a stage in the middle has two."""
    through = send([4] * 6, 100, stages, 400, StageOverhead(per_token=0.001))
    assert through.seconds == pytest.approx(320 * (3 / stages + copies * 0.1))


def test_a_host_that_is_ahead_announces_before_it_knows_what_has_left() -> None:
    """Three jobs of three samples, two of which fill a micro-batch: it announces what is left of two batches, not yet three. No stage waits
    for another, so that what each micro-batch takes besides is all that this costs.
    """
    known, ahead = (send([3] * 3, 200, 2, 400, StageOverhead(host_ahead=host_ahead)) for host_ahead in (False, True))
    assert known.tokens == 320 * 200 and ahead.tokens == 320 * 180
    assert known.waited_seconds == ahead.waited_seconds == 0
