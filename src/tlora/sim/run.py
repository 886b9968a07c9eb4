"""From a scenario to what came of it: the scene, the simulation, its bounds, and its numbers for a sweep. Writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from tlora.report.rows import JsonObject
from tlora.report.simulation_view import SimulationView
from tlora.scheduler.policies import POLICIES
from tlora.shape.cost import BaseConstants
from tlora.sim.bounds import Bounds, ThroughputBound, lower_bounds, throughput_bound, work_of
from tlora.sim.machines import ClusterShape
from tlora.sim.metrics import STEADY, compare, metrics_by_base
from tlora.sim.outputs import REFERENCE, MetricRow, constant_rows, metric_rows, move_rows, policy_name, simulation_view
from tlora.sim.records import SimulationResult
from tlora.sim.scenario import KERNELS, Scenario, cost_of, scene_of
from tlora.sim.simulate import Labels, simulate
from tlora.sim.sweep import SweepRow, TaskProgress, map_in_processes
from tlora.wording.metrics import factors

WALL_TIMES = ("decision_milliseconds", "wall_seconds")  # the only metrics that differ between equal runs


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulation and what it is held against."""

    scenario: Scenario
    result: SimulationResult
    bounds: Bounds
    rate: ThroughputBound


def run_scenario(scenario: Scenario) -> Outcome:
    """Read the trace and simulate it. Useful work is counted in our kernels' saturated tokens/s, whichever kernels the policy has."""
    scene, cost = scene_of(scenario), cost_of(scenario, scenario.kernels)
    saturated = {base: constants.tokens_per_second for base, constants in cost_of(scenario, "tlora").constants.items()}
    moves = scenario.conditions.moves if scenario.kernels == "tlora" else scenario.conditions.moves.of_processes_of_one_job
    conditions = replace(scenario.conditions, seed=scenario.seed, saturated=saturated, moves=moves)
    labels = Labels(scenario.policy, scenario.kernels, scene.trace, scenario.seed, scene.load)
    shape = ClusterShape(scenario.nodes, scenario.gpus_per_node)
    result = simulate(scene.jobs, shape, POLICIES[scenario.policy](), cost, conditions, labels)
    result.settings = {**scene.notes, **_settings(scenario), **result.settings}
    believed = cost_of(scenario, scenario.kernels)  # `cost` may have been corrected
    result.warnings = scene.warnings
    bounds = lower_bounds(work_of(result.jobs, believed, shape.num_gpus, shape.gpus_per_node), shape.num_gpus)
    rate = throughput_bound(result.jobs, believed, shape.num_gpus, shape.gpus_per_node, STEADY[1] - STEADY[0])
    return Outcome(scenario, result, bounds, rate)


def sweep_numbers(scenario: Scenario) -> dict[str, float]:
    """The metrics and bounds of a scenario, without any wall time. `offered_load` is the load that it came to."""
    outcome = run_scenario(scenario)
    (row,) = metric_rows([outcome.result], [outcome.bounds], [outcome.rate])
    numbers = {key: value for key, value in row.items() if isinstance(value, float) and key not in (*WALL_TIMES, "load")}
    return {"offered_load": outcome.result.load, **numbers}


def run_scenarios(scenarios: Sequence[Scenario], watch: Callable[[TaskProgress], None]) -> list[Outcome]:
    """All of them, on all cores, in their order."""
    with closing(map_in_processes(run_scenario, scenarios, watch)) as results:
        result_by_number = dict(results)
    return [result_by_number[number] for number in range(len(scenarios))]


def reference_of(contenders: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The policy and kernels that gains are held against: exclusive FIFO without our kernels' gain if it is there, else the first."""
    return REFERENCE if REFERENCE in contenders else contenders[0]


def summary(outcomes: Sequence[Outcome]) -> list[MetricRow]:
    """A row for each policy and its kernels: the mean over the seeds of each metric, and what it gains over the reference.

    `gain` is the mean over the seeds of (mean JCT of the reference / its own), over the jobs that are done under both; `least_gain` and
    `most_gain` are the extremes of the seeds.
    """
    by_seed: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        by_seed.setdefault(outcome.scenario.seed, []).append(outcome)
    columns: list[list[MetricRow]] = []
    for outcomes_of_seed in by_seed.values():
        results = [outcome.result for outcome in outcomes_of_seed]
        names = [(result.policy, result.kernels) for result in results]
        gains = compare(results, results[names.index(reference_of(names))])
        rows = metric_rows(results, [outcome.bounds for outcome in outcomes_of_seed], [outcome.rate for outcome in outcomes_of_seed])
        columns.append([row | {"gain": gain["mean_jct_seconds"]} for row, gain in zip(rows, gains, strict=True)])
    return [_mean_row(rows) for rows in zip(*columns, strict=True)]


def document(outcomes: Sequence[Outcome]) -> JsonObject:
    """What a command found, as one JSON object: what was simulated, the rows of `summary`, and the factors of the gain."""
    first = outcomes[0].result
    rows = summary(outcomes)
    decomposition = factors({str(row["name"]): float(row["gain"]) for row in rows})
    return {
        "trace": first.trace,
        "jobs": len(first.jobs),
        "gpus": first.num_gpus,
        "load": _finite(first.load),
        "seeds": list(dict.fromkeys(outcome.scenario.seed for outcome in outcomes)),
        "settings": {key: _finite(value) for key, value in first.settings.items()},
        "warnings": first.warnings,
        "reference": policy_name(*reference_of([(outcome.result.policy, outcome.result.kernels) for outcome in outcomes])),
        "rows": [{key: _finite(value) for key, value in row.items() if key not in (*WALL_TIMES, "seed")} for row in rows],
        "decomposition": [{"means": means, "factor": factor} for means, factor in decomposition],
        "by_base": [
            {"name": policy_name(outcome.result.policy, outcome.result.kernels)} | {key: _finite(value) for key, value in row.items()}
            for outcome in outcomes
            if outcome.scenario.seed == outcomes[0].scenario.seed
            for row in metrics_by_base(outcome.result)
        ],
    }


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def constants_in(outcomes: Sequence[Outcome]) -> dict[str, dict[str, BaseConstants]]:
    """By set of kernels, the constants of the bases that jobs have."""
    bases = {job.base_model for outcome in outcomes for job in outcome.result.jobs}
    scenarios = {outcome.scenario.kernels: outcome.scenario for outcome in outcomes}
    return {
        kernels: {base: constants for base, constants in cost_of(scenarios[kernels], kernels).constants.items() if base in bases}
        for kernels in KERNELS
        if kernels in scenarios
    }


def page_view(outcomes: Sequence[Outcome], swept: Sequence[JsonObject]) -> SimulationView:
    """The page of the first seed's simulations. Its gains over load are those of a sweep, or else of all seeds."""
    scenario = outcomes[0].scenario
    shown = [outcome for outcome in outcomes if outcome.scenario.seed == scenario.seed]
    results = [outcome.result for outcome in shown]
    rows = metric_rows(results, [outcome.bounds for outcome in shown], [outcome.rate for outcome in shown])
    all_rows = metric_rows([outcome.result for outcome in outcomes], [outcome.bounds for outcome in outcomes])
    constants = constant_rows(constants_in(outcomes)) + move_rows(scenario.conditions.moves)
    view = simulation_view(results, rows, constants, all_rows)
    return replace(view, sweep=swept) if swept else view


def gain_rows(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[JsonObject]:
    """As the page's curves of gain over load have them: a curve for each policy and point on `axes`, which `load` is not among.

    Each is held against the reference at the same point.
    """
    contenders = [(str(row["policy"]), str(row["kernels"])) for row in rows]
    reference = policy_name(*reference_of(contenders))
    where = ["".join(f", {axis} {row[axis]:g}" for axis in axes) for row in rows]
    return [
        {
            "name": policy_name(*contender) + point,
            "reference": reference + point,
            "load": row["offered_load"],
            "seed": row["seed"],
            "mean_jct_seconds": row["mean_jct_seconds"],
            "policy": policy_name(*contender),
            "delta": row.get("delta"),
            "steady_tokens_per_second": row.get("steady_tokens_per_second"),
            "tokens_bound_per_second": row.get("tokens_bound_per_second"),
        }
        for row, contender, point in zip(rows, contenders, where, strict=True)
    ]


def _mean_row(rows: Sequence[MetricRow]) -> MetricRow:
    mean: MetricRow = {
        key: math.fsum(float(row[key]) for row in rows) / len(rows) if isinstance(value, float) else value for key, value in rows[0].items()
    }
    gains = [float(row["gain"]) for row in rows]
    return mean | {"least_gain": min(gains), "most_gain": max(gains)}


def _settings(scenario: Scenario) -> dict[str, object]:
    """What the command set, where it is not as usual."""
    draws = "as the reference" if scenario.paper else "mixed" if scenario.mixed else "default"
    settings: dict[str, object] = {"GPU": scenario.gpu, "draws": draws}
    if scenario.layout != "auto":
        settings["layout"] = scenario.layout
    if scenario.memory_limit is not None:
        settings["memory limit"] = scenario.memory_limit
    if scenario.delta is not None:
        settings["delta"] = scenario.delta
    if scenario.kappa is not None:
        settings["kappa"] = scenario.kappa
    return settings | {f"scale.{name}": factor for name, factor in scenario.scale}
