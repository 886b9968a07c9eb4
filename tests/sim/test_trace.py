"""Reading traces: the formats by their columns, the shipped files, and every rule that a row can break."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.errors import DataError
from tlora.sim.trace import NEVER_RAN, NO_GPU, NO_SECOND, SHIPPED, TRACES, TraceJob, end_of, is_unfinished, read_trace

OWN = "job_id,submit_s,gpus,duration_s,user,vc,type,state"
SEREN = "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time"
# The first two rows are those of ACMETrace's own README.
SEREN_ROWS = (
    "5778432,u5907,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,936.0",
    "5778469,u5907,1,8,128,Other,COMPLETED,2023-03-01 00:23:58+08:00,2023-03-01 00:24:11+08:00,2023-03-01 01:09:04+08:00,2693,13,21544.0",
    "5778470,u11,1,0,16,Debug,COMPLETED,2023-03-01 00:24:00+08:00,2023-03-01 00:24:00+08:00,2023-03-01 00:24:01+08:00,1,0,0.0",
    "5778471,u11,1,2.0,16,SFT,CANCELLED,2023-03-01 00:25:00+08:00,,,,,",
    "5778472,u11,1,2,16,SFT,FAILED,2023-03-01 00:26:00+08:00,2023-03-01 00:26:01+08:00,2023-03-01 00:26:01+08:00,0,1,0.0",
    "5778473,u11,1,2.0,16,SFT,CANCELLED,2023-03-01 00:26:00+08:00,2023-03-01 00:26:01+08:00,2023-03-01 00:26:03+08:00,2,1,4.0",
)
KALOS = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,fail_time,stop_time,"
    "duration,queue,gpu_time"
)
KALOS_ROW = (
    "dlctk696s0jbvitv,uf794,8,64,960,1000,100.0,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,2023-05-17 11:01:16+00:00,"
    "2023-05-17 11:01:16+00:00,,18,10.0,1152.0"
)
HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
# The first two rows are those of HeliosData's own README.
HELIOS_ROWS = (
    "1425511,uXBbc,vcJkd,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0",
    "1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0",
    "1425513,uzqls,vcpDC,0,1,1,CANCELLED,2020-06-09 18:41:28,2020-06-09 18:41:28,2020-06-17 14:15:21,675233,0",
)


def written(directory: Path, *lines: str, name: str = "jobs.csv") -> Path:
    path = directory / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def own_row(job_id: str = "a", submit: str = "0", gpus: str = "1", duration: str = "10") -> str:
    return f"{job_id},{submit},{gpus},{duration},u,v,SFT,COMPLETED"


# -- formats -----------------------------------------------------------------------------------------------------------


def test_own_format_with_comments_empty_lines_and_a_start_that_is_not_0(tmp_path: Path) -> None:
    path = written(tmp_path, '# from "somewhere', OWN, "", "b,100,2,3.5,,v,,", '# "', '"a,1",160.5,8,1e3,u,,SFT,FAILED')
    trace = read_trace(path)
    assert trace.name == "jobs" and not trace.skipped and trace.compression == 1 and not trace.filters
    assert trace.jobs == (TraceJob("b", 0, 2, 3.5, "", "v", "", ""), TraceJob("a,1", 60.5, 8, 1000, "u", "", "SFT", "FAILED"))


def test_a_file_may_be_packed_have_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "my.jobs.csv.gz"
    path.write_bytes(gzip.compress(f"\ufeff{OWN}\r\n{own_row()}\r\n".encode()))
    assert read_trace(str(path)).name == "my.jobs"
    assert read_trace(path).jobs == (TraceJob("a", 0, 1, 10, "u", "v", "SFT", "COMPLETED"),)


def test_acme_seren_skips_what_is_no_gpu_job_and_counts_it(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, SEREN, *SEREN_ROWS))
    assert trace.jobs == (
        TraceJob("5778432", 0, 8, 117, "u5907", "", "Other", "FAILED"),
        TraceJob("5778469", 336, 8, 2693, "u5907", "", "Other", "COMPLETED"),
        TraceJob("5778473", 458, 2, 2, "u11", "", "SFT", "CANCELLED"),
    )
    assert trace.skipped == {NO_GPU: 1, NEVER_RAN: 1, NO_SECOND: 1}


def test_acme_kalos_runs_from_start_to_end_and_not_for_its_column_duration(tmp_path: Path) -> None:
    job = read_trace(written(tmp_path, KALOS, KALOS_ROW)).jobs[0]
    assert (job.gpus, job.duration_seconds) == (64, 8)  # the column says 18: 10 seconds of waiting are in it


def test_helios_has_no_time_zone_and_no_type(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HELIOS, *HELIOS_ROWS))
    assert trace.jobs == (
        TraceJob("1425511", 0, 1, 36848, "uXBbc", "vcJkd", "", "COMPLETED"),
        TraceJob("1425512", 26, 4, 249, "uVMrF", "vchbv", "", "FAILED"),
    )
    assert trace.skipped == {NO_GPU: 1}


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED", "Waiting"])
def test_a_logged_job_that_had_not_ended_is_left_out_though_its_row_has_an_end(tmp_path: Path, state: str) -> None:
    trace = read_trace(written(tmp_path, HELIOS, HELIOS_ROWS[0], HELIOS_ROWS[1].replace("FAILED", state)))
    assert [job.job_id for job in trace.jobs] == ["1425511"] and trace.skipped == {NEVER_RAN: 1}


def test_phases_of_kubernetes_pods_are_known(tmp_path: Path) -> None:
    assert [end_of(phase) for phase in ("Succeeded", "Failed", "Unknown")] == ["done", "failed", "done"]
    assert [is_unfinished(phase) for phase in ("Running", "Pending", "Succeeded", "Failed")] == [True, True, False, False]
    rows = [own_row(phase).replace("COMPLETED", phase) for phase in ("Succeeded", "Running", "Pending", "Failed")]
    trace = read_trace(written(tmp_path, OWN, *rows))
    assert [job.state for job in trace.jobs] == ["Succeeded", "Failed"] and trace.skipped == {NEVER_RAN: 2}


def test_a_trace_of_jobs_that_had_not_ended_is_refused_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no job in it \(rows skipped: \{'never started, or not ended when the log was taken': 1\}\)"):
        read_trace(written(tmp_path, OWN, own_row().replace("COMPLETED", "Running")))


# -- what is shipped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "of_gpus"),
    [
        ("ee9e8c", 1511, {1: 597, 2: 109, 4: 266, 8: 420, 16: 96, 24: 1, 32: 13, 64: 6, 128: 3}),
        ("6c71a0+b436b2", 17_376, {1: 16_291, 2: 40, 4: 468, 8: 506, 16: 69, 24: 2}),
        ("window_15k", 15_000, {1: 14_432, 2: 185, 4: 258, 8: 120, 16: 5}),
        ("synth_sft", 6000, {1: 1158, 2: 977, 4: 164, 8: 3480, 16: 191, 32: 30}),
    ],
)
def test_shipped_traces_are_found_by_name(name: str, rows: int, of_gpus: dict[int, int]) -> None:
    trace = read_trace(name)
    assert trace.name == name and len(trace.jobs) == rows and not trace.skipped
    assert Counter(job.gpus for job in trace.jobs) == of_gpus
    assert trace.jobs[0].submit_seconds == 0


def test_every_shipped_file_is_named_in_the_notice_and_no_other_lies_there() -> None:
    notice = (TRACES / "NOTICE.md").read_text(encoding="utf-8")
    assert {path.name for path in TRACES.iterdir()} == {"NOTICE.md", *SHIPPED.values()}
    assert all(f"`{file}`" in notice for file in SHIPPED.values())
    assert "CC-BY-4.0" in notice and "ACME-marginal synthetic" in notice


# -- what can be wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "line", "says"),
    [
        ((own_row(duration="-3"),), 3, "duration_s is '-3', and must be more than 0 seconds. Correct the row or take it out"),
        ((own_row(duration="0"),), 3, "duration_s is '0'"),
        ((own_row(gpus="0"),), 3, "gpus is '0', and a job needs at least one GPU"),
        ((own_row(gpus="-1"),), 3, "gpus is '-1', and must be a whole number"),
        ((own_row(gpus="1.5"),), 3, "gpus is '1.5', and must be a whole number"),
        ((own_row(gpus="eight"),), 3, "gpus is 'eight', and must be a number"),
        ((own_row(duration="inf"),), 3, "duration_s is 'inf', and must be a finite number"),
        ((own_row(), own_row("b", submit="1e300")), 4, "submit_s is '1e300', and must be no larger than 100,000,000,000"),
        ((own_row(submit="-1e12"),), 3, "submit_s is '-1e12', and must be no larger"),
        ((own_row(gpus="1e300"),), 3, "gpus is '1e300', and must be no larger"),
        ((own_row(submit=""),), 3, "submit_s is '', and must be a number"),
        ((own_row(), own_row("")), 4, "job_id is '', and every job needs one"),
        ((own_row(submit="5"), own_row("b", submit="4")), 4, "submit_s is '4', and lies before that of the job above"),
        ((own_row(), own_row("b"), own_row()), 5, "job_id is 'a', and {path}, line 3 has the same"),
        ((own_row() + ",more",), 3, "there are 9 cells, and the header names 8 columns"),
        ((own_row(), "b,1,1"), 4, "there are 3 cells, and the header names 8 columns"),
        ((own_row("a" * 200_000),), 3, "this is no row of a CSV file"),
    ],
)
def test_a_broken_row_of_our_own_is_named(
    tmp_path: Path, request: pytest.FixtureRequest, rows: tuple[str, ...], line: int, says: str
) -> None:
    limit = csv.field_size_limit(131_072)  # csv's own; who reads data in this process raises it
    request.addfinalizer(lambda: csv.field_size_limit(limit))
    path = written(tmp_path, "# comment", OWN, *rows)
    with pytest.raises(DataError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}, line {line}: ")
    assert says.format(path=path) in str(error.value)


@pytest.mark.parametrize(
    ("header", "rows", "line", "says"),
    [
        (
            SEREN,
            [SEREN_ROWS[0].replace("+08:00", "")],
            2,
            "carries no time zone; ACMETrace's times do. Write +08:00 behind",
        ),
        (SEREN, [SEREN_ROWS[0], SEREN_ROWS[1].replace("+08:00", "+00:00")], 3, "the first row has the time zone UTC+08:00"),
        (SEREN, [SEREN_ROWS[0].replace("51+08:00", "51+00:00")], 2, "end_time is '2023-03-01 00:20:51+00:00', and the first row has"),
        (SEREN, [SEREN_ROWS[0], SEREN_ROWS[1].replace("58+08:00", "58+0800h")], 3, "must be a time such as 2023-03-01 00:18:22+08:00"),
        (SEREN, [SEREN_ROWS[0].replace("00:20:51", "00:18:53")], 2, "it started at 2023-03-01 00:18:54+08:00; a job ends after its start"),
        (SEREN, [SEREN_ROWS[0].replace(",8,128", ",-8,128")], 2, "gpu_num is '-8'"),
        (SEREN, [SEREN_ROWS[1], SEREN_ROWS[0]], 3, "rows stand in order of submission. Sort them by submit_time"),
        (SEREN, [SEREN_ROWS[0], SEREN_ROWS[0]], 3, "every job is there once"),
        (HELIOS, [HELIOS_ROWS[0], HELIOS_ROWS[1].replace("18:41:27", "18:41:27+08:00")], 3, "the first row has no time zone"),
        (HELIOS, [HELIOS_ROWS[0].replace("2020-06-09 18:41:01", "yesterday", 1)], 2, "submit_time is 'yesterday'"),
    ],
)
def test_a_broken_row_of_a_log_is_named(tmp_path: Path, header: str, rows: list[str], line: int, says: str) -> None:
    path = written(tmp_path, header, *rows)
    with pytest.raises(DataError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}, line {line}: ") and says in str(error.value)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (OWN.replace("gpus", "gpu"), "column 'gpus' is missing for the nearest format (tlora: job_id,submit_s,"),
        (SEREN.replace("end_time,", ""), "column 'end_time' is missing for the nearest format (ACMETrace"),
        (HELIOS.replace("submit_time", "submit"), "column 'submit_time' is missing for the nearest format (Helios"),
        ("", "is missing for the nearest format"),
    ],
)
def test_a_missing_column_is_named_with_the_nearest_format(tmp_path: Path, header: str, says: str) -> None:
    with pytest.raises(DataError, match=r"line 1: the header is .*Add it") as error:
        read_trace(written(tmp_path, header))
    assert says in str(error.value)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_cells_that_no_comma_separates_are_told_so(tmp_path: Path, mark: str) -> None:
    path = written(tmp_path, OWN.replace(",", mark))
    with pytest.raises(DataError) as error:
        read_trace(path)
    assert str(error.value) == f"{path}, line 1: the cells are separated by {mark!r}, and a trace's by commas. Write it with commas"


@pytest.mark.parametrize("header", [OWN, SEREN, HELIOS])
def test_a_column_that_is_there_twice_is_named(tmp_path: Path, header: str) -> None:
    path = written(tmp_path, header + ", user,,", own_row() + ",w,,")
    with pytest.raises(DataError) as error:
        read_trace(path)
    assert str(error.value) == f"{path}, line 1: the header names column 'user' 2 times; which one counts is unclear. Take the others out"


def test_a_trace_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no job in it \\(rows skipped: none"):
        read_trace(written(tmp_path, OWN))
    with pytest.raises(DataError, match="'no GPU asked for': 1.*at least one GPU job"):
        read_trace(written(tmp_path, HELIOS, HELIOS_ROWS[2]))


def test_a_trace_that_is_not_there_is_told_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'ee9e8d'.*ee9e8c, 6c71a0\+b436b2"):
        read_trace("ee9e8d")
    for name in (tmp_path, "x" * 300, "~nobody-of-this-name/x"):
        with pytest.raises(DataError, match="it is no file"):
            read_trace(name)


@pytest.mark.parametrize(
    ("name", "data"),
    [("t.csv", b"\xff\xfe\x00"), ("t.csv.gz", b"job_id"), ("t.csv.gz", gzip.compress(OWN.encode() * 9, mtime=0)[:-12])],
    ids=["no UTF-8", "not compressed", "torn"],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match="cannot be read.*UTF-8.*gzip"):
        read_trace(path)


ODD_CELLS = ("", "0", "-1", "1e999", "nan", '"', "9" * 400, "2023-03-01", "2023-03-01 00:18:22+25:00", "0001-01-01", "#", "\x00")
CHANGES = st.dictionaries(st.integers(0, 12), st.sampled_from(ODD_CELLS), max_size=3)


@given(header=st.sampled_from([OWN, SEREN, HELIOS]), row=st.integers(0, 1), changes=CHANGES)
def test_odd_cells_are_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, header: str, row: int, changes: dict[int, str]
) -> None:
    lines = {OWN: (own_row(), own_row("b")), SEREN: SEREN_ROWS[:2], HELIOS: HELIOS_ROWS[:2]}[header]
    rows = [line.split(",") for line in lines]
    for at, cell in changes.items():
        rows[row][min(at, len(rows[row]) - 1)] = cell
    path = written(tmp_path_factory.getbasetemp(), header, *(",".join(cells) for cells in rows), name="odd.csv")
    try:
        jobs = read_trace(path).jobs
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert all(job.gpus > 0 and job.duration_seconds > 0 for job in jobs)
