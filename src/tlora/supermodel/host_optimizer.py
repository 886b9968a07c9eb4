"""The optimizer steps of a bank in the host's memory: each is done when the call that takes it returns."""

from __future__ import annotations

from tlora.adapters.adamw import adamw_step, measure
from tlora.adapters.bank import AdapterBank
from tlora.supermodel.job_by_job import JobByJobOptimizer


def make_host_optimizer(bank: AdapterBank) -> JobByJobOptimizer:
    return JobByJobOptimizer(bank, measure, adamw_step)
