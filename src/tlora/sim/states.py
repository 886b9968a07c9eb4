"""The words that traces and cluster schedulers have for the state of a job, and how a replayed job ends by them."""

from __future__ import annotations

from tlora.sim.records import FinalState

# The words of Slurm (ACMETrace, Helios), Philly, Kubernetes (Alibaba 2023: the phases of pods, and what kubectl shows for them), Alibaba
# 2018 and 2020 ("only Terminated tasks are successful"), Borg and LSF. An empty cell and UNKNOWN (the shipped Philly traces, a pod whose
# node does not answer) record no state: such a job is replayed as done. Any other word is unknown: the job runs, and is left out of the
# completion times.
_WORDS: tuple[tuple[FinalState, str], ...] = (
    ("done", "UNKNOWN COMPLETED COMPLETE DONE PASS SUCCEEDED SUCCESS TERMINATED FINISH FINISHED"),
    ("cancelled", "CANCELLED CANCELED KILLED KILL PREEMPTED REVOKED EVICTED EVICT INTERRUPTED"),
    ("failed", "FAILED FAIL TIMEOUT NODE_FAIL BOOT_FAIL DEADLINE OUT_OF_MEMORY ERROR OOMKILLED EXIT"),
)
_ENDS: dict[str, FinalState] = {"": "done", **{word: end for end, words in _WORDS for word in words.split()}}
_UNFINISHED = {"RUNNING", "PENDING", "WAITING", "QUEUED", "READY", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING"}
_UNFINISHED_PODS = {"CONTAINERCREATING", "TERMINATING"}


def end_of(state: str) -> FinalState:
    """How a job ends whose row has this state; "unknown" for a word that is not listed."""
    return _ENDS.get(_word(state), "unknown")


def is_unfinished(state: str) -> bool:
    """Whether the job had not ended when the trace was taken: its length is not known."""
    return _word(state) in _UNFINISHED | _UNFINISHED_PODS


def _word(state: str) -> str:
    """`sacct` adds to CANCELLED which user did it: "CANCELLED by 1004"; a cell that was cut to its column's width ends in "+"."""
    word = state.strip().upper()
    return "CANCELLED" if word.startswith("CANCELLED BY ") or word == "CANCELLED+" else word
