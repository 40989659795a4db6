"""`headway simulate`, `headway plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import experiment_options as experiments
from headway.cli.printing import print_json, print_result, print_rows

if TYPE_CHECKING:
    from headway.config.schema import Experiment
    from headway.planner.from_run import RunScenario
    from headway.planner.outcome import SimulationOutcome
    from headway.planner.scenario import Scenario
    from headway.records.plan import Objective, PlacementReport


def add_commands(app: typer.Typer) -> None:
    scenario_example = "headway simulate examples/scenarios/long_tail.toml --queue.budget=8 --run.seed=3"
    run_example = "headway simulate runs/mine --hardware.generator.replicas=2"
    experiments.add_command(app, simulate, scenario_example, run_example)
    plan_example = "headway plan experiment.toml --pool pool.toml --output plan.json"
    experiments.add_command(app, plan, plan_example, "headway plan --graph examples/placement/hybrid.json")


def simulate(
    context: typer.Context,
    scenario: str = typer.Argument(
        ..., metavar="SCENARIO|RUN", help="A scenario file (TOML), or the folder of a run.", show_default=False
    ),
    steps: str = typer.Option("", "--steps", metavar="A:B", help="For a run: steps A to B-1. Default: the last half."),
    beside: str = typer.Option(
        "",
        "--beside",
        metavar="RUN2",
        help="For a run: another of the same load and machine whose generation and training overlap differently "
        "(say, a synchronous one); used to estimate what the two sides cost each other.",
    ),
    write: str = typer.Option("", "--write", metavar="FILE", help="For a run: save the scenario found, as TOML."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as one JSON object."),
) -> None:
    """Run the real orchestrator in virtual time over described hardware, workload and sandboxes.

    They are described by a scenario file, or by the ledger of a run: the answer to what that run would do with other
    settings. Writes the ledger, summary and buffer that a live run would. Any key of the scenario can be given as
    --section.key=value.
    """
    from headway.planner.scenario import load_scenario

    overrides = experiments.given_overrides(context)
    if Path(scenario).is_dir():
        _simulate_run(context, scenario, overrides, steps, beside, write, as_json)
        return
    for option, option_text in (("--steps", steps), ("--beside", beside), ("--write", write)):
        if option_text:
            context.fail(f"{option} needs a run's folder, and {scenario} isn't one")
    loaded_scenario = load_scenario(scenario, overrides)
    outcome = _simulate_with_progress(loaded_scenario, Path(scenario).stem, quiet=as_json)
    print_result(outcome, as_json, lambda: _print_outcome(outcome, loaded_scenario.run.directory))


def _simulate_run(
    context: typer.Context, path: str, overrides: list[str], steps: str, beside: str, write: str, as_json: bool
) -> None:
    from headway.planner.from_run import read_run, scenario_from, window
    from headway.planner.live_comparison import agreement, print_agreement
    from headway.telemetry.ledger import read_ledger

    recorded = read_run(path)
    step_window = window(recorded, _parse_steps(context, steps))
    other = read_run(beside) if beside else None
    fitted = scenario_from(recorded, step_window, overrides, beside=None if other is None else (other, window(other)))
    if write:
        _write(fitted, write)
    run_folder = fitted.scenario.run.directory
    simulation_name = f"{path}, steps {fitted.first_step} to {fitted.last_step}"
    outcome = _simulate_with_progress(fitted.scenario, simulation_name, quiet=as_json)
    comparison = agreement(fitted, read_ledger(run_folder), overrides)
    if as_json:
        print_json({"outcome": outcome, "agreement": comparison})
        return
    _print_outcome(outcome, run_folder)
    print_agreement(comparison)
    if comparison.unidentified:
        print_rows(comparison.unidentified, "Not in the ledger")


def _print_outcome(outcome: SimulationOutcome, run_dir: str) -> None:
    from headway.planner.table import outcome_rows
    from headway.report.tables import summary_rows

    print_rows(summary_rows(outcome.summary) | outcome_rows(outcome))
    typer.echo(f"simulated: headway report {run_dir}   judges the run")


def _simulate_with_progress(scenario: Scenario, name: str, quiet: bool) -> SimulationOutcome:
    """Run a simulation with a progress bar, which is shown on a terminal only, and disappears at the end."""
    from headway.planner.simulate import simulate as run
    from headway.records.ledger import LedgerLine, StepRecord
    from headway.report.progress_bars import ProgressBar

    with ProgressBar("simulated steps", silent=quiet) as bar:

        def show(line: LedgerLine) -> None:
            if isinstance(line, StepRecord):
                bar(line.step + 1, scenario.run.steps)

        return run(scenario, name=name, on_line=show)


def _parse_steps(context: typer.Context, steps: str) -> tuple[int | None, int | None] | None:
    """Parse ``--steps A:B``, where either number may be missing; None when the option is absent."""
    if not steps:
        return None
    first, colon, end = steps.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, end)):
        context.fail(f"--steps {steps}: valid: A:B, the first step and the one after the last, say 40:80 or 40:")
    return int(first) if first else None, int(end) if end else None


def _write(run_scenario: RunScenario, path: str) -> None:
    from headway.planner.scenario_text import toml_text
    from headway.records.errors import ConfigurationError

    steps_text = f"steps {run_scenario.first_step} to {run_scenario.last_step}"
    comments = [
        f"What the ledger of {run_scenario.run} says, {steps_text}: headway simulate {path}",
        *(f"{name}: {reason}" for name, reason in run_scenario.unidentified.items()),
    ]
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(toml_text(run_scenario.raw, comments))
    except FileExistsError:
        raise ConfigurationError(f"--write {path}: the file already exists") from None
    except OSError as error:
        raise ConfigurationError(f"--write {path}: {error.strerror}") from None


def plan(
    context: typer.Context,
    config: str = typer.Argument("", metavar="[CONFIG]", help="The experiment file (TOML).", show_default=False),
    pool: str = typer.Option("", "--pool", metavar="FILE", help="Devices to plan for, and the workload, as TOML."),
    profile: bool = typer.Option(
        False, "--profile", help="Measure CONFIG's two sides on this machine, for a pool file's key profile; ~1 min."
    ),
    calibrate_s: float = typer.Option(
        10.0, "--calibrate-s", metavar="SECONDS", min=1.0, help="With --profile: how long to measure a placement."
    ),
    graph: str = typer.Option(
        "", "--graph", metavar="FILE", help="Place a workflow graph instead: it and a pool of devices, as JSON."
    ),
    objective: str = typer.Option("time", "--objective", help="What the plan minimises: time or cost."),
    output: str = typer.Option("", "--output", metavar="FILE", help="Write the plan, for headway train --plan FILE."),
    write: str = typer.Option("", "--write", metavar="FILE", help="Write the whole experiment that runs the plan."),
    picture: str = typer.Option("", "--picture", metavar="FILE", help="Draw a steady step, device by device, as SVG."),
    compare: tuple[str, str] = typer.Option(
        ("", ""), "--compare", metavar="A B", help="Compare two plans that --output wrote."
    ),
    catalogue: list[str] = typer.Option([], "--catalogue", metavar="FILE", help="TOML on top of the package's."),
    simulated: bool = typer.Option(
        True, "--simulate/--no-simulate", help="Run the plan with the real orchestrator in virtual time."
    ),
    tolerance: float = typer.Option(
        0.0, "--tolerance", help="With --graph: end the search at a plan within this share of the best."
    ),
    expansions: int = typer.Option(
        2_000_000, "--expansions", help="With --graph: budget of the search; the remaining gap is printed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the plan and its reasons as one JSON object."),
) -> None:
    """Find which devices should generate and which should train, how many of them, and the expected samples/s, waits
    and dollars. Nothing is started.

    With --graph: place the stages of any workflow on devices. docs/planning.md describes the files.

    Any key of the experiment file can be given as --section.key=value.
    """
    from headway.records.errors import ConfigurationError

    if objective not in ("time", "cost"):
        raise ConfigurationError(f"--objective {objective}: valid: time, cost")
    if not 0 <= tolerance < 1:
        raise ConfigurationError(f"--tolerance {tolerance}: valid: 0 to less than 1")
    experiments.given_overrides(context)  # refuses unknown options
    requested = {"CONFIG with --pool or --profile": bool(config), "--graph": bool(graph), "--compare": bool(compare[0])}
    if sum(requested.values()) != 1 or bool(config) != (bool(pool) != profile):
        context.fail(f"give one of {', '.join(requested)}")
    validated_objective: Objective = "time" if objective == "time" else "cost"
    if profile:
        _profile(experiments.load(context, config), calibrate_s, output, as_json)
    elif graph:
        _plan_graph(graph, validated_objective, tolerance, expansions, as_json)
    elif compare[0]:
        _compare(compare, as_json)
    else:
        from headway.cli.cost import read_catalogue
        from headway.planner.plan_files import PlanOutputs, plan_for, require_writable, write_outputs
        from headway.report.plans.run_plan import draw_plan, plan_rows
        from headway.report.progress_bars import ProgressBar
        from headway.runtime.run_directory import write_atomically

        experiment, outputs = experiments.load(context, config), PlanOutputs(output, write, picture)
        require_writable(outputs)  # a plan takes seconds
        full_catalogue = read_catalogue(catalogue)
        with ProgressBar("simulated steps", silent=as_json) as bar:
            run_plan = plan_for(experiment, pool, full_catalogue, validated_objective, simulated=simulated, on_step=bar)
        write_outputs(experiment, run_plan, outputs)
        if picture:
            write_atomically(Path(picture), draw_plan(run_plan).encode())
        if as_json:
            print_json(run_plan)
        else:
            print_rows(plan_rows(run_plan))
            if output and not run_plan.refused:
                typer.echo(f"\nheadway train {config} --plan {output}   runs it")


def _profile(experiment: Experiment, seconds: float, output: str, as_json: bool) -> None:
    import msgspec

    from headway.planner.profile import measure_profile
    from headway.records.errors import ConfigurationError
    from headway.report.plans.run_plan import profile_rows
    from headway.report.progress_bars import CalibrationProgress
    from headway.runtime.run_directory import write_atomically

    path = Path(output or "profile.json")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--output {path}: valid: a file in a folder that exists")
    with CalibrationProgress(seconds, silent=as_json) as progress:
        profile = measure_profile(experiment, seconds, progress)
    write_atomically(path, msgspec.json.encode(profile))
    if as_json:
        print_json(profile)
    else:
        point_rows = [(point.generators, point.trainers, point.measured) for point in profile.points]
        print_rows(profile_rows(point_rows, profile.missed))
        typer.echo(f'\n{path} written; in a pool file: profile = "{path}"')


def _compare(paths: tuple[str, str], as_json: bool) -> None:
    from headway.planner.plan_files import read_plan
    from headway.report.plans.run_plan import plan_rows

    plan_a, plan_b = map(read_plan, paths)
    if as_json:
        print_json({"plans": [plan_a, plan_b], "samples_per_s_ratio": plan_b.samples_per_s / plan_a.samples_per_s})
        return
    rows_a, rows_b = plan_rows(plan_a), plan_rows(plan_b)
    row_pairs = {key: (rows_a.get(key, "–"), rows_b.get(key, "–")) for key in dict.fromkeys((*rows_a, *rows_b))}
    print_rows({key: f"A: {a}\nB: {b}" for key, (a, b) in row_pairs.items() if a != b})
    typer.echo(f"B makes {plan_b.samples_per_s / plan_a.samples_per_s:.3f} times the samples/s of A")


def _plan_graph(graph: str, objective: Objective, tolerance: float, expansions: int, as_json: bool) -> None:
    from headway.control.placement.explanation import explain
    from headway.control.placement.options import SearchSettings
    from headway.planner.graph_file import read_problem
    from headway.records.errors import ConfigurationError

    problem = read_problem(graph)
    try:
        placement = explain(problem.workflow, problem.pool, objective, SearchSettings(tolerance, expansions))
    except ConfigurationError as error:
        raise ConfigurationError(f"{graph}: {error}") from None
    print_result(placement, as_json, lambda: print_rows(_plan_rows(placement)))


def _plan_rows(placement: PlacementReport) -> dict[str, str]:
    """Return the rows of a plan: its figures, a row per part, then its reasons."""
    from headway.control.placement.plan_records import pipelines_of

    plan = placement.plan
    unit = "s" if plan.objective == "time" else "$"
    cost_text = "" if plan.cost_usd is None else f", ${plan.cost_usd:.4g}"
    proof_text = "proven best" if plan.gap == 0 else f"at most {plan.gap:.1%} above the best"
    rows = {"plan": f"{plan.mode}, {plan.seconds:.4g} s a step{cost_text}; {proof_text}"}
    for number, phase in enumerate(pipelines_of(plan.phases)):
        rounds = f", {phase.rounds} rounds" if phase.rounds > 1 else ""
        rows[f"{number + 1}. {phase.name}"] = f"{phase.seconds:.4g} s, chunks of {phase.items_per_chunk}{rounds}"
        for level, parallel_parts in enumerate(phase.levels):
            for part in parallel_parts:
                devices_text = ", ".join(f"{name} {first}-{first + n - 1}" for name, (first, n) in part.devices.items())
                turns_text = ", ".join(turn.name for turn in part.turns)
                rows[f"   {number + 1}.{level + 1} {turns_text}"] = f"{devices_text}: {part.seconds:.4g} s a chunk"
    if placement.second_best is not None:
        rows["second best"] = f"{placement.second_best.value:.4g} {unit}: {placement.second_best.name}"
    rows["binds"] = "; ".join(placement.binds)
    for alternative in (*placement.relaxations, *placement.one_more):
        rows[alternative.name] = "no plan" if alternative.value is None else f"{alternative.value:.4g} {unit}"
    return rows
