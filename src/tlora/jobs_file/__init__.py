"""The jobs file: YAML with defaults and sweeps, read into a `RunSpec`. Every problem is reported with its file and line.

Not here: what the keys mean (`job.py`), and whether the data and the base model exist (engine).
"""

from tlora.jobs_file.read import at_home, read_jobs_file, read_settings, read_sweeps
from tlora.jobs_file.rules import explain
from tlora.jobs_file.spelling import suggest

__all__ = ["at_home", "explain", "read_jobs_file", "read_settings", "read_sweeps", "suggest"]
