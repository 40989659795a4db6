"""`headway runs`, `report`, `doctor`, `show`, `export`, `trace`, `explain-task`: commands that read a run's folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from headway.cli.printing import USD_PER_DEVICE_HOUR, price_from, print_json, print_result, print_rows
from headway.records.curriculum import CurriculumExplanation
from headway.records.errors import ConfigurationError

RUN = typer.Argument(..., metavar="RUN", help="The run's folder.", show_default=False)


def add_commands(app: typer.Typer) -> None:
    app.command("runs", epilog="Example: headway runs runs --usd-per-device-hour 2.5")(runs)
    app.command("report", epilog="Example: headway report runs/arithmetic/rl")(report)
    app.command("doctor", epilog="Example: headway doctor runs/arithmetic/rl --usd-per-device-hour 2.5")(doctor)
    app.command("trace", epilog="Example: headway trace runs/arithmetic/rl --from-step 40 --to-step 45")(trace)
    app.command("show", epilog="Example: headway show runs/arithmetic/rl --step 40 --unsolved")(show)
    app.command("export", epilog="Example: headway export runs/arithmetic/rl --to hf")(export)
    app.command("explain-task", epilog="Example: headway explain-task runs/arithmetic/rl 3f2a")(explain_task)


def runs(
    folders: list[str] = typer.Argument(
        None, metavar="[FOLDER]...", help="Runs, or folders that hold some. Default: runs.", show_default=False
    ),
    usd_per_device_hour: str = USD_PER_DEVICE_HOUR,
    as_json: bool = typer.Option(False, "--json", help="Print the list as one JSON object."),
) -> None:
    """List runs: state, steps, solve rate, reward, device-hours or cost, disk, start, and problems.

    Active runs come first, then the newest.
    """
    from headway.report.progress_bars import ProgressBar
    from headway.report.several.run_list import find_runs, list_runs, print_runs

    run_folders = find_runs(folders or ["runs"])
    with ProgressBar("runs", silent=as_json) as bar:
        listed_runs = list_runs(run_folders, price_from(usd_per_device_hour), progress=bar)
    if as_json:
        print_json({"runs": listed_runs})
    elif listed_runs:
        print_runs(listed_runs)
    else:
        typer.echo(f"no runs in {', '.join(folders or ['runs'])}")


def report(
    run: list[str] = typer.Argument(..., metavar="RUN...", help="The run's folder.", show_default=False),
    compare: bool = typer.Option(False, "--compare", help="Overlay several runs on one page."),
    usd_per_device_hour: str = USD_PER_DEVICE_HOUR,
    as_json: bool = typer.Option(False, "--json", help="Print summary and verdict as one JSON object; write no page."),
    html: str = typer.Option(
        "",
        "--html",
        metavar="FILE",
        help="Write the page of headway watch as one file; of --compare: compare.html here.",
    ),
) -> None:
    """Judge a run in words: who waits for whom, how stale, is it learning, what failed. With --html: on the page of
    headway watch as one file, without a server or a network. Of a workflow (headway.flow) print what its stages did.
    With --compare: several runs over each other, on steps, samples, tokens, hours or dollars, with what differs in
    their configurations."""
    from headway.report.plans.workflow import is_workflow, print_workflow, read_workflow, workflow_rows

    price = price_from(usd_per_device_hour)
    if compare:
        _compare(run, price, html or "compare.html", as_json)
        return
    if len(run) > 1:
        raise ConfigurationError(f"{len(run)} runs: valid: one, or --compare")
    if is_workflow(run[0]):
        if as_json:
            print_json(workflow_rows(read_workflow(run[0])))
        else:
            print_workflow(run[0])
        return
    from headway.report.run_cost import with_cost
    from headway.report.run_view import as_json as to_json
    from headway.report.run_view import view_run

    view_with_cost = with_cost(view_run(run[0]), price)
    if as_json:
        print_json(to_json(view_with_cost))
        return

    print_rows(view_with_cost.verdict.sentences, gap=2)
    if view_with_cost.verdict.pages:
        typer.echo(f"what to do: {' '.join(view_with_cost.verdict.pages)}")
    if html:
        from headway.services.watch.page_file import write_run_page

        write_run_page(run[0], html, price)
    page_path = html or str(Path(run[0]) / "report.html")
    if Path(page_path).is_file():
        typer.echo(f"report: {page_path}")


def _compare(run_dirs: list[str], price: float | None, html: str, as_json: bool) -> None:
    if len(run_dirs) < 2:
        raise ConfigurationError("--compare: valid: with two runs or more")
    if as_json:
        from headway.report.several.compare import compare_json

        print_json(compare_json(run_dirs))
        return
    from headway.services.watch.page_file import write_compared_page

    left_out = write_compared_page(run_dirs, html, price)
    for path, reason in left_out.items():
        typer.echo(f"left out: {path}: {reason}", err=True)
    typer.echo(f"report: {html}")


def doctor(
    run: str = RUN,
    usd_per_device_hour: str = USD_PER_DEVICE_HOUR,
    as_json: bool = typer.Option(False, "--json", help="Print everything as one JSON object."),
    live: bool = typer.Option(False, "--live", help="Print who waits for whom now, in an active run."),
) -> None:
    """Say what bounds a run, where its device-hours go, and the three changes with the largest predicted gain."""
    if live:
        from headway.report.live_waits import live_waits_text, read_live_waits

        live_waits = read_live_waits(run)
        return print_result(live_waits, as_json, lambda: typer.echo(live_waits_text(live_waits)))
    from headway.report.doctor import diagnose_run, print_report

    price = price_from(usd_per_device_hour)
    report = diagnose_run(run, price)
    print_result(report, as_json, lambda: print_report(report, price))


def show(
    run: str = RUN,
    step: int | None = typer.Option(None, "--step", help="Only rollouts trained in this step; the first is 0."),
    group: int | None = typer.Option(None, "--group", help="Only rollouts of this group."),
    solved: bool | None = typer.Option(None, "--solved/--unsolved", help="Only rollouts that did or didn't solve it."),
    ending: str | None = typer.Option(
        None, "--ending", help="Only rollouts with this ending: trained, filtered, ..., or open."
    ),
    limit: int = typer.Option(100, "--limit", "-n", min=1, help="At most this many, the newest."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object a line."),
) -> None:
    """Page through prompts, responses, rewards and versions of rollouts."""
    from headway.report.recorded_samples import SampleSelection, show_samples
    from headway.services.run_tokenizer import run_decoder

    selection = SampleSelection(step=step, group=group, solved=solved, ending=ending, limit=limit)
    show_samples(run, selection, decode=run_decoder(run), as_json=as_json)


def export(
    run: str = RUN,
    to: str = typer.Option(..., "--to", help="jsonl, parquet (one file), or hf (a folder that `datasets` loads)."),
    output: str = typer.Option("", "--output", "-o", metavar="PATH", help="The file or folder; default RUN/export*."),
    ending: str = typer.Option("", "--ending", help="Only rollouts with this ending: trained, filtered, ..., or open."),
    as_json: bool = typer.Option(False, "--json", help="Print the outcome as one JSON object."),
) -> None:
    """Write a run's rollouts with their texts and token columns: what the engine sampled, what the trainer saw."""
    from headway.report.progress_bars import ProgressBar
    from headway.services.run_tokenizer import run_decoder
    from headway.telemetry.rollouts.export import export as write

    with ProgressBar("rollouts") as bar:
        outcome = write(run, to, output or None, decode=run_decoder(run), ending=ending, on_progress=bar)
    if as_json:
        print_json(outcome)
        return
    for problem in outcome.problems:
        typer.echo(f"left out: {problem}", err=True)
    typer.echo(f"{outcome.rollouts:,} rollouts, {outcome.size_bytes / 1e6:,.1f} MB: {outcome.path}")


def explain_task(
    run: str = RUN,
    task: str = typer.Argument("", metavar="[TASK]", help="A task's id, the start of it, or text of its prompt."),
    full: bool = typer.Option(False, "--all", help="Every draw of the task, not only the newest."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Explain why a task was drawn, its outcomes, and what would be drawn next; without TASK, the whole curriculum."""
    from headway.orchestrator.jobs.explain_task import RunHistory
    from headway.planner.simulate import simulated_tasks
    from headway.report.curriculum_text import overview_text, task_text

    history = RunHistory(run, simulated_tasks(Path(run)))
    answer = history.explain(history.find(task)) if task else history.overview()
    if as_json:
        print_json(answer)
    else:
        typer.echo(overview_text(answer) if isinstance(answer, CurriculumExplanation) else task_text(answer, full=full))


def trace(
    run: str = RUN,
    out: str = typer.Option("", "--output", "--out", "-o", metavar="FILE", help="The trace; default RUN/trace.json."),
    from_step: int | None = typer.Option(None, "--from-step", min=0, metavar="N", help="First step to show, from 0."),
    to_step: int | None = typer.Option(None, "--to-step", min=0, metavar="N", help="Last step to show."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as one JSON object."),
) -> None:
    """Write a timeline of workers and rollouts for https://ui.perfetto.dev. Default: the newest 30 steps."""
    from headway.report.trace import describe, write_trace

    trace_summary = write_trace(run, out or None, from_step, to_step)
    if as_json:
        print_json(dataclasses.asdict(trace_summary) | {"path": str(trace_summary.path)})
    else:
        typer.echo(describe(trace_summary))
