"""``headway kernels``: task files, scores of a model's answers, conversations for supervised training."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headway.cli.printing import print_json
from headway.records.errors import ConfigurationError, HeadwayError

if TYPE_CHECKING:
    from headway.kernels.jobs.judging import JudgeAll, OnJudged
    from headway.kernels.jobs.sft_data import SftCounts
    from headway.kernels.scores import JudgedTask
    from headway.records.kernels import KernelTask

TASKS = typer.Option(..., "--tasks", metavar="FILE", help="Task file that `kernels tasks` wrote.")
ADDRESSES = typer.Option(
    [], "--addresses", metavar="URL", help="A kernel service, http://HOST:PORT; may be repeated.", show_default=False
)
LOCAL = typer.Option(False, "--local", help="Evaluate on this machine, without a service.")
KEY_FILE = typer.Option("", "--key-file", metavar="FILE", help="File with the services' API key.")
CONCURRENCY = typer.Option(
    None, "--concurrency", min=1, metavar="N", help="Evaluations at once. Default: 8 a service; with --local, by cores."
)
TRIALS = typer.Option(5, "--trials", min=1, metavar="N", help="Trials of a candidate, for each seed.")
JSON = typer.Option(False, "--json", help="Print the numbers as one JSON object.")
TIMEOUT_S = typer.Option(600.0, "--timeout-s", min=1.0, metavar="S", help="Longest time of an evaluation.")


def add_commands(app: typer.Typer) -> None:
    kernels_app = typer.Typer(help="Models that write kernels: tasks, scores, data.", no_args_is_help=True)
    for function, example in (
        (tasks, "headway kernels tasks tasks.jsonl --held-out 0.25"),
        (evaluate, "headway kernels eval --tasks tasks.jsonl --answers answers.jsonl --out report --local"),
        (sft_data, "headway kernels sft-data --conversations rows.jsonl --tasks tasks.jsonl --out sft.jsonl --local"),
    ):
        name = "eval" if function is evaluate else function.__name__.replace("_", "-")
        kernels_app.command(name, epilog=f"Example: {example}")(function)
    app.add_typer(kernels_app, name="kernels", rich_help_panel="Kernels")


def tasks(
    out: Path = typer.Argument(..., metavar="OUT.jsonl", help="File to write; must not exist."),
    kernelbench: Path | None = typer.Option(
        None, "--kernelbench", metavar="FOLDER", help="A checkout of KernelBench, scaled to fit a CPU."
    ),
    full_size: bool = typer.Option(False, "--full-size", help="Keep KernelBench's sizes."),
    jsonl: Path | None = typer.Option(
        None, "--jsonl", metavar="FILE", help="Tasks, one JSON object a line: name, source and more."
    ),
    backend: str = typer.Option(
        "", metavar="NAME", help="torch, cpp, triton or cuda. Default: cpp, or the one in --jsonl."
    ),
    level: list[int] = typer.Option([], "--level", metavar="N", help="May be repeated. Default: all."),
    held_out: float = typer.Option(
        0.0, "--held-out", min=0.0, metavar="SHARE", help="Share of each level that goes to OUT.held-out.jsonl."
    ),
    seed: int = typer.Option(0, metavar="N", help="Seed of the held-out split."),
    as_json: bool = JSON,
) -> None:
    """Write kernel tasks with their prompts, for tasks.train.path and the like: the built-in ones, or a source's."""
    from headway.kernels.jobs.task_files import distinct_tasks, require_new, split_tasks, task_row, write_rows

    file_by_part = {"": out, "held out": out.with_suffix(f".held-out{out.suffix}")} if held_out else {"": out}
    for file in file_by_part.values():
        require_new(file, "OUT")
    if held_out >= 1.0:
        raise ConfigurationError(f"--held-out {held_out:g}: valid: from 0 to below 1")
    read_tasks = _read_kernel_tasks(kernelbench, jsonl, backend, level, full_size=full_size)
    distinct = distinct_tasks(read_tasks)
    if len(distinct) < len(read_tasks):
        typer.echo(f"{len(read_tasks) - len(distinct)} tasks left out: an earlier one has the same prompt", err=as_json)
    task_parts = split_tasks(distinct, held_out, seed)
    if held_out and not all(task_parts):
        raise ConfigurationError(f"--held-out {held_out:g} of {len(distinct)} tasks leaves one file without tasks")
    written_files = []
    for part_tasks, (part_name, file) in zip(task_parts, file_by_part.items(), strict=False):
        write_rows(file, map(task_row, part_tasks))
        count_by_level = dict(sorted(Counter(task.level for task in part_tasks).items()))
        written_files.append({"file": str(file), "tasks": len(part_tasks), "levels": count_by_level})
        levels_text = ", ".join(f"level {key}: {count}" for key, count in count_by_level.items())
        if not as_json:
            typer.echo(f"{file}: {len(part_tasks)} tasks{' ' + part_name if part_name else ''} ({levels_text})")
    if as_json:
        print_json({"written": written_files, "left_out": len(read_tasks) - len(distinct)})


def _read_kernel_tasks(
    kernelbench: Path | None, jsonl: Path | None, backend: str, levels: Sequence[int], *, full_size: bool
) -> list[KernelTask]:
    """Read the tasks of the source that the options name. Raises ConfigurationError for invalid options."""
    import msgspec

    from headway.kernels.backends import BACKENDS
    from headway.kernels.tasks import LEVELS, ScaleLimits, builtin_tasks, load_jsonl, load_kernelbench

    if kernelbench is not None and jsonl is not None:
        raise ConfigurationError("--kernelbench and --jsonl: valid: one of them, or none for the built-in tasks")
    if full_size and kernelbench is None:
        raise ConfigurationError("--full-size: valid: with --kernelbench")
    if backend and backend not in BACKENDS:
        raise ConfigurationError(f"--backend {backend}: valid: {', '.join(BACKENDS)}")
    if kernelbench is not None:
        limits, requested_levels = None if full_size else ScaleLimits(), sorted(set(levels)) or LEVELS
        kernel_tasks, unscaled = load_kernelbench(kernelbench, levels=requested_levels, limits=limits)
        for name, notes in unscaled.items():
            typer.echo(f"{name} is kept, but doesn't fit a CPU: {'; '.join(notes)}", err=True)
    else:
        kernel_tasks = builtin_tasks() if jsonl is None else load_jsonl(jsonl)
    if backend:
        kernel_tasks = [msgspec.structs.replace(task, backend=backend) for task in kernel_tasks]
    available_levels = sorted({task.level for task in kernel_tasks})
    for level in levels:
        if level not in available_levels:
            raise ConfigurationError(f"--level {level}: valid: {', '.join(map(str, available_levels))}")
    return [task for task in kernel_tasks if not levels or task.level in levels]


def evaluate(
    tasks: Path = TASKS,
    answers: Path = typer.Option(
        ...,
        "--answers",
        metavar="FILE",
        help="JSONL: a task's name or task_id (or its prompt) with a source, or an answer's text or response.",
    ),
    out: Path = typer.Option(..., "--out", metavar="NAME", help="Writes NAME.json and NAME.md."),
    model: str = typer.Option("model", "--model", metavar="NAME", help="Name in the report."),
    n: int | None = typer.Option(
        None, "-n", min=1, metavar="N", help="Answers of a task, the first ones. Default: all."
    ),
    k: list[int] = typer.Option([1], "-k", min=1, metavar="K", help="k of pass@k; may be repeated."),
    addresses: list[str] = ADDRESSES,
    local: bool = LOCAL,
    key_file: str = KEY_FILE,
    concurrency: int | None = CONCURRENCY,
    trials: int = TRIALS,
    untimed: bool = typer.Option(False, "--untimed", help="Check correctness only: no fast_p."),
    timeout_s: float = TIMEOUT_S,
    as_json: bool = JSON,
) -> None:
    """Score answers to kernel tasks: pass@k of compiling and of being correct, fast_p, by level, with intervals.

    The answers come from a file, which a run's may be that `headway export --to jsonl` writes (single turns); nothing
    is sampled here.
    """
    import msgspec

    from headway.kernels.jobs.evaluate import JudgeSettings, evaluate_answers, kernel_report, read_answers
    from headway.kernels.jobs.markdown import caveats, leaderboard, markdown_report
    from headway.kernels.jobs.task_files import KernelTaskFile, require_new
    from headway.runtime.run_directory import write_atomically

    report_files = [Path(f"{out}{ending}") for ending in (".json", ".md")]
    for file in report_files:
        require_new(file, "--out")
    task_file = KernelTaskFile(tasks)
    sources_by_task, surplus = read_answers(answers, task_file, n)
    limit = max(map(len, sources_by_task.values()))
    for requested_k in k:
        if requested_k > limit:
            raise ConfigurationError(f"-k {requested_k}: no task has more than {limit} answers; valid: 1 to {limit}")
    settings = JudgeSettings(correct_trials=trials, timed=not untimed, timeout_s=timeout_s)

    async def score() -> list[JudgedTask]:
        async with _open_judge(addresses, key_file, concurrency, local=local) as judge:
            return await evaluate_answers(judge, task_file, sources_by_task, settings)

    report = kernel_report(asyncio.run(score()), sorted(set(k)), settings, model, (str(tasks), str(answers)), surplus)
    report_json = msgspec.json.encode({"row": report.row, **msgspec.to_builtins(report)})
    write_atomically(report_files[0], msgspec.json.format(report_json, indent=2) + b"\n")
    write_atomically(report_files[1], markdown_report(report).encode())
    if as_json:
        return typer.echo(report_json.decode())
    for line in [*leaderboard(report), *caveats(report.scores), f"{report_files[0]}, {report_files[1]}"]:
        typer.echo(line)


def sft_data(
    context: typer.Context,
    conversations: Path = typer.Option(
        ...,
        "--conversations",
        metavar="FILE",
        help='JSONL: a task with a source or text; or "messages" of several turns.',
    ),
    tasks: Path = TASKS,
    out: Path = typer.Option(..., "--out", metavar="FILE", help="File for sft.data to write."),
    need: str = typer.Option(
        "correct", metavar="WHAT", help="What the last answer must be: compiled, correct, faster."
    ),
    least_speedup: float = typer.Option(1.0, min=0.0, metavar="X", help="With --need faster: above it."),
    turns: int = typer.Option(3, min=1, max=3, metavar="N", help="Most answers of a conversation."),
    seeds: int = typer.Option(3, min=1, metavar="N", help="Seeds of the unit check, each with --trials."),
    trials: int = TRIALS,
    shortest_tokens: int = typer.Option(100, "--shortest", min=0, metavar="N", help="Fewest tokens of a conversation."),
    longest_tokens: int = typer.Option(8192, "--longest", min=1, metavar="N", help="Most tokens of a conversation."),
    model: str = typer.Option("", "--model", metavar="FOLDER", help="It counts the tokens. Default: characters / 4."),
    addresses: list[str] = ADDRESSES,
    local: bool = LOCAL,
    key_file: str = KEY_FILE,
    concurrency: int | None = CONCURRENCY,
    timeout_s: float = TIMEOUT_S,
    as_json: bool = JSON,
) -> None:
    """Write conversations for `headway sft` from candidates that compile, are correct, or are faster.

    Wrong answers before a right one for the same task become turns, with the evaluator's feedback between them. The
    counts by reason go to OUT.counts.json as well.
    """
    import msgspec

    from headway.kernels.jobs.sft_data import NEEDS, SftData, SftSettings
    from headway.kernels.jobs.task_files import KernelTaskFile, require_new, write_rows
    from headway.runtime.run_directory import write_atomically
    from headway.tokens.tokenizer import Tokenizer

    if need not in NEEDS:
        raise ConfigurationError(f"--need {need}: valid: {', '.join(NEEDS)}")
    if shortest_tokens > longest_tokens:
        raise ConfigurationError(f"--shortest {shortest_tokens}: valid: at most --longest, {longest_tokens}")
    counts_file = out.with_suffix(".counts.json")
    for file in (out, counts_file):
        require_new(file, "--out")
    # The options are named as the settings are.
    settings = msgspec.convert({**context.params, "counted_by": model or "characters / 4"}, SftSettings)
    encode = Tokenizer.load(model).encode if model else None
    builder = SftData(
        KernelTaskFile(tasks), settings, lambda text: len(encode(text)) if encode else math.ceil(len(text) / 4)
    )

    async def make() -> tuple[list[dict[str, Any]], SftCounts]:
        async with _open_judge(addresses, key_file, concurrency, local=local) as judge:
            return await builder.make(conversations, judge)

    conversation_rows, counts = asyncio.run(make())
    write_atomically(counts_file, msgspec.json.format(msgspec.json.encode(counts), indent=2) + b"\n")
    if as_json:
        print_json({**msgspec.to_builtins(counts), "missing": builder.missing})
    else:
        _print_counts(counts)
    for task, reason in builder.missing:
        typer.echo(f"{task} not evaluated: {reason}", err=True)
    if not conversation_rows:
        raise HeadwayError(f"no conversation passed, so {out} isn't written; counts: {counts_file}")
    write_rows(out, conversation_rows)
    typer.echo(f"{out}, {counts_file}; tokens: {settings.counted_by}", err=as_json)


def _print_counts(counts: SftCounts) -> None:
    turns_text = ", ".join(f"{count} of {turns} turn{'s' * (turns != '1')}" for turns, count in counts.turns.items())
    typer.echo(f"{counts.written} of {counts.rows} rows written{': ' * bool(turns_text)}{turns_text}")
    for reason, count in counts.left_out.items():
        typer.echo(f"{count} left out: {reason}")


@asynccontextmanager
async def _open_judge(
    addresses: Sequence[str], key_file: str, concurrency: int | None, *, local: bool
) -> AsyncIterator[JudgeAll]:
    """Open the evaluation of submissions, by services or on this machine; it shows its progress."""
    from headway.kernels.jobs.judging import judge_all

    if local == bool(addresses):
        raise ConfigurationError("valid: either --addresses http://HOST:PORT, once or more, or --local")
    if local:
        from headway.services.serve_kernels import KernelSettings, make_evaluator

        kernel_settings = KernelSettings(concurrency=concurrency)
        evaluator, most_at_once = make_evaluator(kernel_settings), kernel_settings.limits().concurrency
    else:
        from headway.kernels.client import KernelClient
        from headway.runtime.addresses import read_keys
        from headway.runtime.clock import RealClock

        key = next(iter(read_keys(key_file, "--key-file")), "")
        evaluator = KernelClient(addresses, RealClock(), key=key)
        most_at_once = concurrency or 8 * len(addresses)
    async with evaluator as judge:
        with _progress() as show:
            yield partial(judge_all, judge, concurrent=most_at_once, on_judged=show)


@contextmanager
def _progress() -> Iterator[OnJudged]:
    """Show progress as a bar on a terminal; elsewhere as a line every two seconds, and at the end."""
    from headway.report.progress_bars import ProgressBar

    printed_s = -math.inf
    with ProgressBar("evaluations") as bar:

        def show(done: int, total: int) -> None:
            nonlocal printed_s
            bar(done, total)
            if not bar.displayed and (done == total or time.monotonic() - printed_s >= 2.0):
                printed_s = time.monotonic()
                typer.echo(f"{done} of {total} evaluated", err=True)

        yield show
