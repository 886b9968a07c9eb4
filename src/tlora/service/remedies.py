"""Failures of training in words of use to a tenant: remedies of `tlora train`'s command line and of the server's machine are not theirs."""

from __future__ import annotations

import re

ANEW = "Clone the job to train it anew; if that fails too, ask the server's operator"
_PART = re.compile(r"(?<=[.;]) +")
_NOT_THEIRS = re.compile(
    r"(?<!\w)--[a-z]|\boutput_dir\b|\b(TLORA|OMP)_[A-Z]|\btaskset\b|\brun\.json\b|\bjobs file\b"
    r"|\b[Rr]esume (the run|with)\b|\bwith resume\b|\b[Pp]ut (it|that|the [a-z ]+) back\b|\bRemove this checkpoint\b"
)


def in_service_words(reason: str) -> str:
    """What is wrong stays, and remedies that a tenant can follow; `ANEW` takes the place of the others."""
    first, *rest = _PART.split(reason)
    kept = [part for part in rest if not _NOT_THEIRS.search(part)]
    if len(kept) == len(rest):
        return reason
    return f"{' '.join([first, *kept]).rstrip(' .;')}. {ANEW}"
