"""A run's report: reads the run directory, arranges tables and charts, writes report.html. Trains nothing, changes no other file."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from tlora import durable
from tlora.errors import CheckpointError, ConfigError
from tlora.report.charts import job_curves, learning_charts, run_charts
from tlora.report.job_looks import job_looks, keys_html
from tlora.report.page import LegendEntry, Section, render_page
from tlora.report.rows import smoothing_window
from tlora.report.run_view import RunView, read_run
from tlora.report.sweeps import sweep_sections
from tlora.report.tables import gpus_table, results_table, run_facts, run_machine


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html from the rows there are, atomically, and return its path.

    ConfigError if `run_dir` has no run or cannot be written.
    """
    page = report_page(read_run(run_dir))
    target = run_dir / "report.html"
    try:
        durable.write_file(target, page)
    except CheckpointError as error:  # its remedies are for a training run
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
        raise ConfigError(
            f"{target} cannot be written ({reason}): the report needs about 3 MB and write permission in the run's directory; "
            "free space or change its mode, then run `tlora report` again"
        ) from error
    return target


def report_page(run: RunView) -> str:
    """The page of one run: first each job's result, last how the machine was used."""
    looks = job_looks(run.jobs)
    curves = job_curves(run, looks)
    window = smoothing_window(max((len(job.train_rows) for job in run.jobs), default=0))
    learning, over_time = learning_charts(run, curves), run_charts(run, curves)
    legend = [LegendEntry(curve.job.name, looks[curve.job.name]) for curve in curves] if learning or over_time else []
    empty = "" if legend else Markup('<p class="faint">No rows yet: the charts appear once the first optimizer step is logged.</p>')
    single = [job for job in run.jobs if not job.sweep_of]
    sections = [Section("", run_facts(run)), *sweep_sections(run.jobs, looks, window)]
    if single:
        sections.append(Section("Results", results_table(single, looks, window)))
    sections += [
        Section("Curves", empty + keys_html(run.jobs), [*learning, *over_time], legend),
        Section("Run", run_machine(run) + gpus_table(run)),
    ]
    return render_page(_title(run), sections)


def _title(run: RunView) -> str:
    base = str(run.spec.get("base_model") or "an unknown base")
    if Path(base).is_absolute() or base.startswith("."):
        base = Path(base).name  # the last part names the model; the settings have the whole path
    return f"{len(run.jobs)} LoRA {'job' if len(run.jobs) == 1 else 'jobs'} over {base}"
