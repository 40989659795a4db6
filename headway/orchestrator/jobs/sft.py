"""`headway sft`: the supervised cold start."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from headway.config.schema import Experiment
from headway.orchestrator.jobs.evaluate import Scorer
from headway.orchestrator.jobs.model_card import write_sft_card
from headway.orchestrator.nodes.machines import open_machines
from headway.records.errors import ConfigurationError, HeadwayError, NoProgress, RemoteError
from headway.records.generation import PublishedWeights
from headway.records.ledger import EvaluationRecord
from headway.runtime.clock import RealClock
from headway.runtime.file_lock import FileLock
from headway.tasks.sft_data import read_sft_tokens
from headway.trainer.checkpoints import recover_folder, require_replaceable
from headway.trainer.rank_workers import RankWorkers
from headway.weights.slots import reap

_SERVICE = "headway.trainer.supervised:SupervisedService"
# of the last steps, as progress: the complete report is in the result
_PROGRESS_KEYS = (
    "step",
    "steps",
    "loss_mean",
    "learning_rate",
    "skipped",
    "held_out_loss",
    "tokens_per_s",
    "effective_token_share",
    "solve_rate",
    "standard_error",
    "failed",
    "kernels",
    "ended",
)
_SCORES = ("solve_rate", "standard_error", "failed", "kernels")
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.05, 1000  # demonstrations, where training ends by epochs

Progress = Callable[[dict[str, Any]], None]


def run_sft(experiment: Experiment, *, on_progress: Progress | None = None) -> dict[str, Any]:
    """`headway sft`: train on sft.data, write the model to sft.output.

    Every ``sft.evaluate_every_steps`` the sampled solve rate on tasks.validation is measured (training pauses
    meanwhile); training ends at ``sft.epochs`` or ``sft.steps``, ``run.time_limit_s`` or ``sft.stop_at_solve_rate``.
    Where it ends by epochs, some demonstrations are held out: once their loss is higher after an epoch than it was
    before, training ends, and the model of the lowest loss is what is written. Returns what was dropped, the last
    step's statistics, the scores last measured up to the model that is written, ``evaluations`` with the loss and
    scores at each step that was evaluated (the written model's are in its ``state.json`` too), and under ``ended`` why
    it ended early. Raises ConfigurationError before training begins, for an output that holds something else too, and
    where no kernel service answers that ``environment.name = "kernel"`` needs; RunLocked while another process trains
    the same output; NoProgress when steps are skipped without end.
    """
    _require_inputs(experiment)
    output = Path(experiment.sft.output).resolve()
    identity = "sft-" + hashlib.blake2b(str(output).encode(), digest_size=6).hexdigest()  # names its shared memory
    lock = FileLock(output.with_name(f".{output.name}.lock"), "sft.output", experiment.sft.output)
    lock.acquire()
    try:
        reap(identity)  # of a killed process, as is the folder that it was writing
        recover_folder(output)
        return asyncio.run(_sft(experiment, identity, on_progress or (lambda _: None)))
    except RemoteError as error:
        if isinstance(error.__cause__, HeadwayError):  # a bad data file, a full disk: found by the worker
            raise error.__cause__ from None
        raise
    finally:
        reap(identity)
        lock.release()


def _require_inputs(experiment: Experiment) -> None:
    settings = experiment.sft
    for key in ("data", "output"):
        if not getattr(settings, key):
            raise ConfigurationError(f"missing key 'sft.{key}'")
    require_replaceable(settings.output, "sft.output")
    if Path(settings.output).resolve() == Path(experiment.model.path).resolve():
        raise ConfigurationError(
            f"sft.output: {settings.output} is model.path too and would be overwritten; --model.path=… begins from "
            "another model"
        )
    if settings.evaluate_every_steps and experiment.tasks.validation is None:
        raise ConfigurationError(
            f"sft.evaluate_every_steps = {settings.evaluate_every_steps} needs tasks.validation; valid without it: 0"
        )


async def _sft(experiment: Experiment, identity: str, on_progress: Progress) -> dict[str, Any]:
    settings = experiment.sft
    clock = RealClock()
    sft_tokens = read_sft_tokens(experiment)
    on_progress(sft_tokens.counts)
    async with AsyncExitStack() as stack:
        machines = await stack.enter_async_context(
            open_machines(experiment, clock, run_id=identity, origin=settings.devices[0])
        )
        trainer = RankWorkers(
            machines.launcher, experiment, identity, settings.devices, _SERVICE, name="sft", host_of=machines.host_of
        )
        await trainer.start()
        stack.push_async_callback(trainer.stop)
        rows = len(sft_tokens.lengths_s)
        held = 0 if settings.steps else min(_MOST_HELD_OUT, round(_HELD_OUT_SHARE * rows))
        await trainer.call_all("prepare", sft_tokens.token_ids_n, sft_tokens.learned_n, sft_tokens.lengths_s, held)
        scorer: Scorer | None = None
        if settings.evaluate_every_steps:
            scorer = Scorer(machines.experiment, "validation", machines)
            await scorer.start(stack)
        started_s, result = clock.now(), dict[str, Any](sft_tokens.counts) | {"held_out": held}
        total_steps, epoch = settings.total_steps(rows - held), (rows - held) / settings.batch_sequences
        step, lowest_loss, lowest_step, solve_rate = 0, math.inf, 0, 0.0
        scores, kept_scores = dict[str, Any](), dict[str, Any]()  # of the last evaluation; of the model that is written
        evaluations: list[dict[str, Any]] = []
        while step < total_steps:
            report_every = min(25, math.ceil(epoch)) if held else 25
            chunk_steps = min(settings.evaluate_every_steps or report_every, total_steps - step)
            report: dict[str, Any] = (await trainer.call_all("steps", chunk_steps))[0]
            step += chunk_steps
            report |= {"step": step, "steps": total_steps, "time_s": clock.now() - started_s}
            if scorer is not None:
                weights: PublishedWeights = (await trainer.call_all("publish", step))[0]
                await scorer.generator.update_weights(weights)
                record = await scorer.score("during", step)
                new_scores = _scores(record)
                scores = new_scores if record.samples else scores
                report |= new_scores
                solve_rate = 0.0 if record.mostly_failed else record.solve_rate
                evaluations.append({"step": step, "loss_mean": report["loss_mean"], **new_scores})
            if held and report["version"] and (step == total_steps or step // epoch > (step - chunk_steps) // epoch):
                report["held_out_loss"] = loss = (await trainer.call_all("held_out_loss"))[0]
                if loss <= lowest_loss:
                    lowest_loss, lowest_step, kept_scores = loss, step, scores
                    await trainer.call_all("save", settings.output, _metrics(report))
                else:
                    rise_text = f"from {lowest_loss:.4g} to {loss:.4g}"
                    report["ended"] = f"the held-out loss rose {rise_text}: the model of step {lowest_step} is kept"
            result |= report
            on_progress({key: report[key] for key in _PROGRESS_KEYS if key in report})
            if "ended" in report:
                break
            target_rate = settings.stop_at_solve_rate
            if target_rate is not None and solve_rate >= target_rate:
                result["ended"] = f"the solve rate has reached sft.stop_at_solve_rate = {target_rate:g}"
                break
            limit_s = experiment.run.time_limit_s
            if limit_s is not None and clock.now() - started_s >= limit_s:
                result["ended"] = f"run.time_limit_s = {limit_s:g} have passed"
                break
        if not result["version"]:
            raise NoProgress(f"all {step} steps were skipped: no loss or gradient was finite; nothing was saved")
        if lowest_step < step and "ended" not in report:
            kept_scores = scores
            await trainer.call_all("save", settings.output, _metrics(report))
        final_fields = {key: figure for key, figure in result.items() if key not in _SCORES}
        card_fields = final_fields | kept_scores
        with suppress(HeadwayError):  # the model is written, and matters more than its card
            data_name = "" if settings.data is None else settings.data.display_name
            write_sft_card(settings.output, experiment.model.path, data_name, card_fields)
        return card_fields | {"evaluations": evaluations, "output": settings.output}


def _scores(record: EvaluationRecord) -> dict[str, Any]:
    """Scores of the model by an evaluation, none where every attempt failed; ``failed``: how many did, and why."""
    failure_fields = {"failed": record.failures_text} if record.failed else {}
    if not record.samples:
        return failure_fields
    scores = {"solve_rate": record.solve_rate, "standard_error": record.standard_error}
    return scores | failure_fields | ({"kernels": record.kernels} if record.kernels else {})


def _metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a step as numbers by name, for the state file of the model that is written after it."""
    figures = {key: report[key] for key in ("loss_mean", "held_out_loss", "solve_rate") if key in report}
    for metric, kernel_share in report.get("kernels", {}).items():
        low, high = kernel_share.interval
        count_fields = {f"{metric}_count": kernel_share.count, f"{metric}_rollouts": kernel_share.rollouts}
        figures |= {metric: kernel_share.value, f"{metric}_low": low, f"{metric}_high": high, **count_fields}
    return {key: float(number) for key, number in figures.items()}
