"""Groups that were planned by constants of another base, once their own base has been measured: other budgets, and fewer members where
bounds do not hold any more. The jobs that leave are placed like all that wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from tlora.scheduler.decision import Decision
from tlora.scheduler.job import Job


def replan(decision: Decision, bases: Iterable[str]) -> list[Job]:
    """Each group of those bases gets the plan that suits the new predictions, on the GPUs that it has. As long as a member's bound cannot
    hold, the last to come leaves; a job alone leaves GPUs that are other in number than it asks for. Returns the jobs that left.
    """
    left: list[Job] = []
    for name in [name for base in bases for name in decision.state.groups_of_base[base]]:
        group = decision.state.groups[name].group
        if not group.job_ids:
            continue
        view = decision.view(name)
        jobs = list(view.jobs)
        while (prediction := decision.predict_on(jobs, view.gpus)) is None and len(jobs) > 1:
            left.append(jobs.pop())
        if prediction is None:
            left += jobs
            decision.stop(name)
        elif prediction.plan != group.plan or len(view.jobs) > 1:  # the weights of several are other needs now
            decision.change(name, jobs, view.gpus, prediction)
    return left
