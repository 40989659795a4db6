"""Commands that read a run's folder, during the run or later: report, doctor, show, export, trace, explain-task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from headway.cli.printing import USD_PER_DEVICE_HOUR, price_from, print_json
from headway.records.curriculum import CurriculumExplanation

RUN = typer.Argument(..., metavar="RUN", help="The run's folder.", show_default=False)


def add_commands(app: typer.Typer) -> None:
    app.command("report", epilog="Example: headway report runs/arithmetic/rl")(report)
    app.command("doctor", epilog="Example: headway doctor runs/arithmetic/rl --usd-per-device-hour 2.5")(doctor)
    app.command("trace", epilog="Example: headway trace runs/arithmetic/rl --from-step 40 --to-step 45")(trace)
    app.command("show", epilog="Example: headway show runs/arithmetic/rl --step 40 --unsolved")(show)
    app.command("export", epilog="Example: headway export runs/arithmetic/rl --to hf")(export)
    app.command("explain-task", epilog="Example: headway explain-task runs/arithmetic/rl 3f2a")(explain_task)


def report(
    run: str = RUN,
    usd_per_device_hour: str = USD_PER_DEVICE_HOUR,
    as_json: bool = typer.Option(False, "--json", help="Print summary and verdict as one JSON object; write no page."),
    output: str = typer.Option("", "--output", "-o", metavar="FILE", help="The page; default RUN/report.html."),
) -> None:
    """Write one self-contained HTML page about a run: verdict in words, plots, evaluations, events. Of a workflow
    (headway.flow) print what its stages did."""
    from headway.report.plans.workflow import is_workflow, print_workflow

    if is_workflow(run):
        print_workflow(run)
        return
    from headway.report.run_cost import with_cost
    from headway.report.run_view import as_json as to_json
    from headway.report.run_view import view_run

    price = price_from(usd_per_device_hour)
    view = with_cost(view_run(run), price)
    if as_json:
        import json

        typer.echo(json.dumps(to_json(view), ensure_ascii=False))
        return
    from headway.report.page import report as write_page
    from headway.report.printing import print_rows

    page = write_page(run, output or None, price)
    print_rows(view.verdict.sentences, gap=2)
    typer.echo(f"report: {page}")


def doctor(
    run: str = RUN,
    usd_per_device_hour: str = USD_PER_DEVICE_HOUR,
    as_json: bool = typer.Option(False, "--json", help="Print everything as one JSON object."),
    live: bool = typer.Option(False, "--live", help="Print who waits for whom now, in an active run."),
) -> None:
    """Say what bounds a run, where its device-hours go, and the three changes with the largest predicted gain."""
    if live:
        from headway.report.live_waits import live_waits_text, read_live_waits

        waits = read_live_waits(run)
        if as_json:
            print_json(waits)
        else:
            typer.echo(live_waits_text(waits))
        return
    from headway.report.doctor import examine, print_report

    price = price_from(usd_per_device_hour)
    report = examine(run, price)
    if as_json:
        print_json(report)
    else:
        print_report(report, price)


def show(
    run: str = RUN,
    step: int | None = typer.Option(None, "--step", help="Only rollouts trained in this step."),
    group: int | None = typer.Option(None, "--group", help="Only rollouts of this group."),
    solved: bool | None = typer.Option(None, "--solved/--unsolved", help="Only those that did, or didn't, solve it."),
    ending: str | None = typer.Option(
        None, "--ending", help="Only those that ended so: trained, filtered, ..., or open."
    ),
    limit: int = typer.Option(100, "--limit", "-n", min=1, help="At most this many, the newest."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object a line."),
) -> None:
    """Page through prompts, responses, rewards and versions of rollouts."""
    from headway.report.show import SampleSelection, show_samples

    selection = SampleSelection(step=step, group=group, solved=solved, ending=ending, limit=limit)
    show_samples(run, selection, decode=_decoder(run), as_json=as_json)


def export(
    run: str = RUN,
    to: str = typer.Option(..., "--to", help="jsonl, parquet (one file), or hf (a folder that `datasets` loads)."),
    output: str = typer.Option("", "--output", "-o", metavar="PATH", help="The file or folder; default RUN/export*."),
    ending: str = typer.Option("", "--ending", help="Only rollouts that ended so: trained, filtered, ..., or open."),
    as_json: bool = typer.Option(False, "--json", help="Print the outcome as one JSON object."),
) -> None:
    """Write a run's rollouts with their texts and token columns: what the engine sampled, what the trainer saw."""
    from headway.telemetry.rollouts.export import export as write

    outcome = write(run, to, output or None, decode=_decoder(run), ending=ending)
    if as_json:
        print_json(outcome)
        return
    for problem in outcome.problems:
        typer.echo(f"left out: {problem}", err=True)
    typer.echo(f"{outcome.rollouts:,} rollouts, {outcome.size_bytes / 1e6:,.1f} MB: {outcome.path}")


def _decoder(run: str) -> Callable[[Sequence[int]], str] | None:
    """The decoder of a run's tokenizer, out of its model's folder or else a checkpoint's; None: none can be read."""
    from headway.records.errors import HeadwayError
    from headway.runtime.run_directory import RunDirectory
    from headway.tokens.tokenizer import Tokenizer

    directory = RunDirectory(run)
    with contextlib.suppress(HeadwayError):
        folders = [directory.read_experiment().model.path, directory.best, *directory.checkpoints.glob("step_*/model")]
        for folder in folders:
            with contextlib.suppress(HeadwayError):
                return Tokenizer.load(folder).decode
    return None


def explain_task(
    run: str = RUN,
    task: str = typer.Argument("", metavar="[TASK]", help="A task's id, the start of it, or text of its prompt."),
    whole: bool = typer.Option(False, "--all", help="Every draw of the task, not only the newest."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Why a task was drawn, what came of it, and what would be drawn next; without TASK, the whole curriculum."""
    from headway.orchestrator.jobs.explain_task import RunHistory
    from headway.planner.simulate import simulated_tasks
    from headway.report.explain import overview_text, task_text

    history = RunHistory(run, simulated_tasks(Path(run)))
    found = history.explain(history.find(task)) if task else history.overview()
    if as_json:
        print_json(found)
    else:
        typer.echo(overview_text(found) if isinstance(found, CurriculumExplanation) else task_text(found, whole=whole))


def trace(
    run: str = RUN,
    out: str = typer.Option("", "--output", "--out", "-o", metavar="FILE", help="The trace; default RUN/trace.json."),
    from_step: int | None = typer.Option(None, "--from-step", min=0, metavar="N", help="First step to show."),
    to_step: int | None = typer.Option(None, "--to-step", min=0, metavar="N", help="Last step to show."),
) -> None:
    """Write a timeline of workers and rollouts for https://ui.perfetto.dev. Default: the newest 30 steps."""
    from headway.report.trace import describe, write_trace

    typer.echo(describe(write_trace(run, out or None, from_step, to_step)))
