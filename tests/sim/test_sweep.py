"""A sweep's table: whole at every moment, gone on from, the same bytes again, and refused where it is something else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.sim.small_traces import write_trace
from tlora.errors import ConfigError, DataError
from tlora.sim import sweep
from tlora.sim.conditions import Conditions
from tlora.sim.outputs import held
from tlora.sim.scenario import Scenario
from tlora.sim.sweep import TaskProgress, read_grid, read_table, run_sweep, scenarios_of, setting_cells, write_table

FORMATS = pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
COLUMNS = tuple(setting_cells(Scenario(), ""))


def measured(scenario: Scenario) -> dict[str, float]:
    """Stands where `sweep_numbers` would: numbers that tell scenarios apart, and one that there is not."""
    load = scenario.load or 0.9
    return {"offered_load": load, "mean_jct_seconds": 100.0 / load + scenario.seed, "fairness_mean": math.nan}


def never(scenario: Scenario) -> dict[str, float]:
    raise AssertionError(f"{scenario} was simulated again")


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.setattr(sweep, "num_cores", lambda: 1)
    return Scenario(trace=str(write_trace(tmp_path)))


def points(plain: Scenario, text: str) -> list[Scenario]:
    return scenarios_of(read_grid(text), plain, [0], ["fifo/peft", "sjf"])


def silent(_: TaskProgress) -> None:
    return


@FORMATS
def test_rows_stand_in_the_order_of_the_grid_and_are_read_as_they_were(plain: Scenario, tmp_path: Path, name: str) -> None:
    path, scenarios = tmp_path / name, points(plain, "load=0.1:0.7,delta=2:inf")
    rows = run_sweep(scenarios, path, measured, silent)
    assert read_table(path, COLUMNS) == rows
    assert [(row["load"], row["delta"], row["policy"], row["kernels"]) for row in rows] == [
        (load, delta, *policy) for load in (0.1, 0.7) for delta in (2.0, math.inf) for policy in (("fifo", "peft"), ("sjf", "tlora"))
    ]
    assert all(row["mean_jct_seconds"] == 100.0 / float(row["load"] or 0) and row["fairness_mean"] is None for row in rows)
    assert {row["jobs"] for row in rows} == {None} and {row["gpus"] for row in rows} == {128}


@FORMATS
def test_what_is_there_is_not_simulated_again(plain: Scenario, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    run_sweep(points(plain, "load=0.5:0.7"), path, measured, silent)
    before = path.read_bytes()
    heard: list[TaskProgress] = []
    run_sweep(points(plain, "load=0.5:0.7"), path, never, heard.append)
    assert path.read_bytes() == before and heard == [TaskProgress(4, 4, ())]
    rows = run_sweep(points(plain, "load=0.6:0.7"), path, measured, heard.append)
    assert heard[1] == TaskProgress(4, 2, (0,)) and heard[-1] == TaskProgress(4, 4, ())
    assert [row["load"] for row in rows] == [0.6, 0.6, 0.7, 0.7]
    assert [row["load"] for row in read_table(path, COLUMNS)] == [0.5, 0.5, 0.6, 0.6, 0.7, 0.7]  # those of other points stay, first


@FORMATS
def test_a_sweep_that_was_stopped_ends_with_the_same_bytes(plain: Scenario, tmp_path: Path, name: str) -> None:
    scenarios = points(plain, "load=0.5..0.9/5")
    run_sweep(scenarios, tmp_path / name, measured, silent)
    path = tmp_path / f"stopped-{name}"

    def stop(standing: TaskProgress) -> None:
        if standing.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(scenarios, path, measured, stop)
    assert len(read_table(path, COLUMNS)) == 3  # whole rows, and nothing beside the file
    assert not [found for found in tmp_path.iterdir() if found.name not in (name, path.name, "small.csv")]
    run_sweep(scenarios, path, measured, silent)
    assert path.read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(plain: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = points(plain, "load=0.5..0.9/3")
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    run_sweep(scenarios, one, measured, silent)
    monkeypatch.setattr(sweep, "num_cores", lambda: 2)
    run_sweep(scenarios, two, measured, silent)
    assert one.read_bytes() == two.read_bytes()


def test_each_setting_makes_another_point(plain: Scenario, tmp_path: Path) -> None:
    others = [
        replace(plain, **change)
        for change in (
            *({"policy": "sjf"}, {"kernels": "peft"}, {"nodes": 8}, {"gpus_per_node": 4}, {"load": 0.5}, {"jobs": 3}, {"seed": 1}),
            *(
                {"delta": 2.0},
                {"kappa": 1.0},
                {"scale": (("launch_seconds", 1.3),)},
                {"paper": True},
                {"conditions": Conditions(drift=0.1)},
            ),
            *(
                {"conditions": Conditions(speed_error=0.1)},
                {"conditions": Conditions(length_error=0.1)},
                {"conditions": Conditions(delay=1.0)},
            ),
            *({"layout": "stages"}, {"memory_limit": 2**36}),
            {"conditions": Conditions(mtbf_hours=10.0)},
            {"conditions": Conditions(usage_half_life_seconds=3600.0)},
        )
    ]
    rows = run_sweep([plain, *others], tmp_path / "rows.csv", measured, silent)
    assert len(read_table(tmp_path / "rows.csv", COLUMNS)) == len(rows) == 1 + len(others)
    Path(plain.trace).write_text(Path(plain.trace).read_text().replace("5000", "6000"))  # another trace under the same name
    run_sweep([plain], tmp_path / "rows.csv", measured, silent)
    assert len(read_table(tmp_path / "rows.csv", COLUMNS)) == 2 + len(others)


def test_numbers_keep_all_digits(tmp_path: Path) -> None:
    path, row = tmp_path / "t.csv", {"policy": "fifo", "a": 0.1 + 0.2, "b": 3.0, "c": math.inf, "d": None, "e": 1e300, "f": -0.5}
    write_table(path, [row])
    assert path.read_text().splitlines()[1].startswith("fifo,0.30000000000000004,3,inf,,1") and read_table(path, ("policy",)) == [row]
    write_table(path.with_suffix(".parquet"), [row])
    assert read_table(path.with_suffix(".parquet"), ("policy",)) == [row]
    assert str(parquet.read_schema(path.with_suffix(".parquet")).field("b").type) == "double"


def test_other_files_are_refused_and_left_as_they_are(plain: Scenario, tmp_path: Path) -> None:
    scenarios = points(plain, "load=0.5")
    with pytest.raises(ConfigError, match=r"a sweep is written as .csv or .parquet"):
        run_sweep(scenarios, tmp_path / "rows.json", measured, silent)
    for name, content, told in (
        ("other.csv", "a,b\n1,2\n", "has no column 'trace'"),
        ("heads.csv", "a,b\n", "has no column 'trace'"),
        ("torn.csv", ",".join(COLUMNS) + "\n1,2\n", "cannot be read as the table of a sweep"),
        ("words.csv", ",".join(COLUMNS) + "\n" + ",".join("x" for _ in COLUMNS) + "\n", "cannot be read as the table"),
        ("broken.parquet", "no parquet", "cannot be read as the table of a sweep"),
    ):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(DataError, match=told):
            run_sweep(scenarios, path, never, silent)
        assert path.read_text() == content
    (tmp_path / "empty.csv").touch()
    assert len(run_sweep(scenarios, tmp_path / "empty.csv", measured, silent)) == 2


@FORMATS
def test_two_sweeps_never_write_one_table(plain: Scenario, tmp_path: Path, name: str) -> None:
    path, link = tmp_path / name, tmp_path / f"link-{name}"
    link.symlink_to(path)
    refused: list[Path] = []

    def run_another(_: TaskProgress) -> None:
        for other in (path, link):
            with pytest.raises(ConfigError, match=f"{other} .*another sweep.*another file"):
                run_sweep(points(plain, "load=0.7"), other, never, silent)
            refused.append(other)

    run_sweep(points(plain, "load=0.5"), path, measured, run_another)
    assert refused and [row["load"] for row in read_table(path, COLUMNS)] == [0.5, 0.5]
    run_sweep(points(plain, "load=0.7"), link, measured, silent)
    assert link.is_symlink() and [row["load"] for row in read_table(path, COLUMNS)] == [0.5, 0.5, 0.7, 0.7]
    assert {found.name for found in tmp_path.iterdir()} == {"small.csv", path.name, link.name}


def test_a_lock_that_was_just_taken_away_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", lambda *_: (tmp_path / ".rows.csv.lock").unlink())  # its holder ends before it is ours
        with pytest.raises(ConfigError, match="is being written by another sweep"), held(path):
            pytest.fail("another could hold it too")
    with held(path):
        assert (tmp_path / ".rows.csv.lock").exists()
