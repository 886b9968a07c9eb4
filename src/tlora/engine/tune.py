"""`tlora tune`: times the candidate tiles at the shapes of one base on this GPU, and writes those that win into a table.

A candidate and the rule's tile are timed in turns, because clocks vary. It must win by a margin and give right results, or the rule stays.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tlora import durable
from tlora.cache_directory import gpu_file_name
from tlora.errors import ConfigError
from tlora.kernels.device import own_stream, tuned_as, why_plain
from tlora.planning.plan import pick_device
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import Base, outline
from tlora.supermodel.structure import find_groups
from tlora.version import __version__

if TYPE_CHECKING:
    from tlora.kernels.tile_trials import Problem  # brings triton, which not every CPU install has
    from tlora.kernels.tiles import AnyTile, Key

TOKENS, JOBS, RANK = 8192, 8, 16
MARGIN = 0.02  # of the rule's time: less may be noise, and a table changes bits
_ROUNDS = 12
_CALLS = {"forward": 3, "input_gradient": 3, "shrink": 20, "sum": 20}  # in one CUDA graph: the kernels' time, independent of the host's


@dataclass(frozen=True)
class Choice:
    """The tile chosen for one key. Seconds are of one launch; `faults` are the reasons against other candidates."""

    key: Key
    tile: AnyTile
    rule: AnyTile
    seconds: float
    rule_seconds: float
    faults: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """Part of the rule's time that is saved."""
        return 1 - self.seconds / self.rule_seconds


@dataclass(frozen=True)
class Tuned:
    gpu: str
    path: Path
    choices: tuple[Choice, ...]
    seconds: float


def tune(
    base_model: str, dtype: str = "auto", device: str | None = None, out: Path | None = None, note: Callable[[str], None] = print
) -> Tuned:
    """Time all launches of `base_model`'s linears and write the table: to `out`, or where training looks for it.

    `base_model` is a directory, of which config.json is enough, or a hub id. `note` gets a line per launch. What the file holds of other
    shapes stays. Raises ConfigError without a GPU, for a dtype without candidates and for a damaged table; ModelError.
    """
    place = pick_device(device)
    if place.type != "cuda":
        raise ConfigError(f"tune times kernels on a GPU, and the device here is {place}. Run it on the machine that trains")
    if (why := why_plain(place)) is not None:
        raise ConfigError(f"tune times the fused kernels, which do not run here: {why}. Train without it")
    from tlora.kernels.tile_files import user_directory
    from tlora.kernels.tile_trials import DTYPES

    base = outline(base_model, dtype)
    found = base.head.weight_VH.dtype
    if found not in DTYPES:
        raise ConfigError(f"tune knows candidates for bfloat16 and float16, and this base is {str(found)[6:]}. Give --dtype bfloat16")
    begun, gpu = time.perf_counter(), tuned_as(torch.cuda.get_device_name(place))
    path = out or user_directory() / gpu_file_name(gpu)
    write_choices(path, gpu, [])  # fails before the work if the file cannot be written or read
    launches = launches_of(base)
    choices: list[Choice] = []
    for number, (key, widths) in enumerate(launches.items(), 1):
        choices.append(choose(key, widths, place))
        write_choices(path, gpu, choices[-1:])  # an interruption costs one
        note(f"[{number}/{len(launches)}] {choice_text(choices[-1])}")
    return Tuned(gpu, path, tuple(choices), time.perf_counter() - begun)


def launches_of(base: Base) -> dict[Key, tuple[int, ...]]:
    """Every key that training `base` can ask for, and the widths of the linears of an input gradient."""
    from tlora.kernels.tiles import keys_of

    dtype = base.head.weight_VH.dtype
    linears: dict[str, nn.Linear] = {n: m for n, m in find_linears(base.model).items() if isinstance(m, nn.Linear)}
    found: dict[Key, tuple[int, ...]] = {}
    for names in find_groups(base, linears):
        in_features, widths = linears[names[0]].in_features, tuple(linears[name].out_features for name in names)
        if all(size % 16 == 0 for size in (in_features, *widths)):  # others take the plain path
            for key in keys_of(in_features, widths, dtype, dtype):
                found.setdefault(key, widths)
    return dict(sorted(found.items(), key=lambda item: (item[0].kernel, *item[0][2:])))


def choose(key: Key, widths: tuple[int, ...], device: torch.device) -> Choice:
    """Time the candidates of one key that are right on the timed batch, and prove the winner on harder ones."""
    from tlora.kernels.tile_trials import Jobs, candidates, find_fault, make_problem

    each = TOKENS // JOBS
    problem = make_problem(key, widths, Jobs(((each // 2,) * 2,) * JOBS, RANK), device)
    tiles = candidates(key, problem.group.tiles.card)
    steps, faults = _right_ones(problem, tiles)
    seconds = dict(zip(steps, in_turn(list(steps.values())), strict=True))
    del steps, problem
    rule = tiles[0]
    tile, unfit = pick(seconds, rule, lambda tile: _fault(find_fault, key, widths, tile, device))
    return Choice(key, tile, rule, seconds[tile] / _CALLS[key.kernel], seconds[rule] / _CALLS[key.kernel], (*faults, *unfit))


def pick(seconds: Mapping[AnyTile, float], rule: AnyTile, fault: Callable[[AnyTile], str | None]) -> tuple[AnyTile, list[str]]:
    """The fastest that beats `rule` by the margin and has no fault, else `rule`; and the faults of those that were faster."""
    faults: list[str] = []
    for tile in sorted(seconds, key=lambda tile: seconds[tile]):
        if not seconds[tile] < (1 - MARGIN) * seconds[rule]:
            break
        found = fault(tile)
        if found is None:
            return tile, faults
        faults.append(f"{tile_text(tile)}: {found}")
    return rule, faults


def in_turn(steps: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each; one round after another, so that a change of clocks meets all."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(_ROUNDS + 2):  # the first two warm up
        for step, seconds in zip(steps, taken, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
    return [statistics.median(seconds[2:]) for seconds in taken]


def _right_ones(problem: Problem, tiles: Sequence[AnyTile]) -> tuple[dict[AnyTile, Callable[[], object]], list[str]]:
    """The candidates that run and agree with the first, the rule's, ready to be timed; and why the others are left out."""
    from tlora.kernels.tile_trials import MOST_DIFFERENCE, difference, prepare, results

    wanted = results(problem, tiles[0])
    steps: dict[AnyTile, Callable[[], object]] = {}
    faults: list[str] = []
    for tile in tiles:
        try:
            apart = difference(results(problem, tile), wanted)
            if apart <= MOST_DIFFERENCE[problem.key.dtype]:
                steps[tile] = _graph_of(prepare(problem, tile), _CALLS[problem.key.kernel])
            else:
                faults.append(f"{tile_text(tile)}: differs by {apart:.1e} from the rule's tile")
        except Exception as error:  # a tile that this GPU has no room for, or that its compiler refuses: triton's own errors
            if tile == tiles[0]:
                raise
            faults.append(f"{tile_text(tile)}: {_first_line(error)}")
    return steps, faults


def _fault(find: Callable[..., str | None], key: Key, widths: tuple[int, ...], tile: AnyTile, device: torch.device) -> str | None:
    try:
        return find(key, widths, tile, device)
    except Exception as error:  # as above
        return _first_line(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0][:120]}"


def _graph_of(step: Callable[[], object], calls: int) -> Callable[[], None]:
    stream = own_stream(torch.device("cuda", torch.cuda.current_device()), "tuning")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            step()

    def replay() -> None:
        assert step is not None  # a graph holds addresses: its inputs live as long as it can be replayed
        graph.replay()

    return replay


def write_choices(path: Path, gpu: str, choices: Sequence[Choice]) -> None:
    """The file's rows with those of `choices`: a tile that is not the rule's, or one where the package's table says otherwise."""
    from tlora.kernels.tile_files import SHIPPED, read_rows
    from tlora.kernels.tiles import describe

    rows, shipped = read_rows(path), read_rows(SHIPPED / gpu_file_name(gpu))
    for choice in choices:
        rows.pop(choice.key, None)
        if choice.tile != choice.rule or choice.key in shipped:
            measured = {"microseconds": round(1e6 * choice.seconds, 1), "rule_microseconds": round(1e6 * choice.rule_seconds, 1)}
            rows[choice.key] = describe(choice.key, choice.tile) | measured
    facts: dict[str, Any] = {"tlora": __version__, "torch": torch.__version__, "tokens": TOKENS, "jobs": JOBS, "rank": RANK}
    write_rows(path, gpu, rows, facts)


def write_rows(path: Path, gpu: str, rows: Mapping[Key, Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """A table as `kernels/tile_files.py` reads it, atomically; a row is `describe`'s with all that was measured.

    Raises CheckpointError where it cannot be written.
    """
    durable.make_directory(path.parent)
    head = json.dumps({"gpu": gpu, **facts}, indent=1).removesuffix("\n}")
    lines = sorted((json.dumps(dict(row)) for row in rows.values()), key=_natural)  # a line each, for eyes and diffs
    durable.write_file(path, head + ',\n "entries": [\n' + ",\n".join(f"  {line}" for line in lines) + "\n ]\n}\n")


def _natural(line: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", line)]


def choice_text(choice: Choice) -> str:
    """forward 4096 -> 14336: 1350.1 us by rule, 1310.0 us with 128x256x64 s3 w8."""
    text = f"{key_text(choice.key)}: {1e6 * choice.rule_seconds:.1f} us by rule"
    return text if choice.tile == choice.rule else f"{text}, {1e6 * choice.seconds:.1f} us with {tile_text(choice.tile)}"


def key_text(key: Key) -> str:
    what = f"{key.kernel.replace('_', ' ')} of {key.together}" if key.together > 1 else key.kernel.replace("_", " ")
    match key.kernel:
        case "shrink":
            return f"{what} {key.inner} -> ranks"
        case "sum":
            return f"{what} ranks x {key.columns}"
        case _:
            return f"{what} {key.inner} -> {key.columns}"


def tile_text(tile: AnyTile) -> str:
    """128x256x64 s3 w8 halves first: rows, columns, inner, stages, warps."""
    sides = [getattr(tile, side) for side in ("rows", "tokens", "columns", "inner") if hasattr(tile, side)]
    marks = [name for name in ("halves", "promote", "first") if getattr(tile, name, False)]
    return " ".join(["x".join(map(str, sides)), f"s{tile.stages}", f"w{tile.warps}", *marks])
