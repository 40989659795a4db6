"""`headway sft`: the supervised cold start."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from headway.config.schema import Experiment
from headway.orchestrator.jobs.evaluate import Scorer
from headway.orchestrator.jobs.sft_data import read_sft_tokens
from headway.records.errors import ConfigurationError, HeadwayError, NoProgress, RemoteError
from headway.records.generation import PublishedWeights
from headway.runtime.clock import RealClock
from headway.runtime.file_lock import FileLock
from headway.runtime.workers import LocalLauncher, WorkerSpec
from headway.trainer.checkpoints import recover_folder, require_replaceable
from headway.weights.leftovers import reap

_SERVICE = "headway.trainer.supervised:SupervisedService"
# of the last steps, as progress: the whole report is in the result
_SHOWN = (
    "step",
    "loss_mean",
    "learning_rate",
    "skipped",
    "tokens_per_s",
    "effective_token_share",
    "solve_rate",
    "standard_error",
)

Progress = Callable[[dict[str, Any]], None]


def run_sft(experiment: Experiment, *, on_progress: Progress | None = None) -> dict[str, Any]:
    """`headway sft`: train on sft.data, write the model to sft.output.

    Every ``sft.evaluate_every_steps`` the sampled solve rate on tasks.validation is measured (training pauses
    meanwhile); training ends at ``sft.steps``, ``sft.time_limit_s`` or ``sft.stop_at_solve_rate``. Returns
    what was dropped, the last step's statistics and the last solve rate. Raises ConfigurationError before anything
    is started, for an output that holds something else too; RunLocked while another process trains the same output;
    NoProgress when steps are skipped without end.
    """
    _require_inputs(experiment)
    folder = Path(experiment.sft.output).resolve()
    identity = "sft-" + hashlib.blake2b(str(folder).encode(), digest_size=6).hexdigest()  # names its shared memory
    lock = FileLock(folder.with_name(f".{folder.name}.lock"), "sft.output", experiment.sft.output)
    lock.acquire()
    try:
        reap(identity)  # of one that was killed, as is what it was writing
        recover_folder(folder)
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
    if settings.evaluate_every_steps and experiment.tasks.validation is None:
        raise ConfigurationError(
            f"sft.evaluate_every_steps = {settings.evaluate_every_steps} needs tasks.validation; valid without it: 0"
        )


async def _sft(experiment: Experiment, identity: str, on_progress: Progress) -> dict[str, Any]:
    settings = experiment.sft
    clock = RealClock()
    data = read_sft_tokens(experiment)
    on_progress(data.counts)
    async with AsyncExitStack() as stack:
        arguments = {"experiment": json.loads(experiment.model_dump_json()), "run_id": identity}
        spec = WorkerSpec(name="sft", factory=_SERVICE, arguments=arguments, device=settings.device)
        launcher = LocalLauncher(clock, start_timeout_s=experiment.run.worker_start_timeout_s)
        trainer = await launcher.start(spec)
        stack.push_async_callback(trainer.stop)
        await trainer.call("prepare", data.token_ids_n, data.learned_n, data.lengths_s)
        scorer: Scorer | None = None
        if settings.evaluate_every_steps:
            scorer = Scorer(experiment, "validation")
            await scorer.start(stack)
        started, result = clock.now(), dict[str, Any](data.counts)
        step = 0
        while step < settings.steps:
            chunk = min(settings.evaluate_every_steps or 25, settings.steps - step)
            report: dict[str, Any] = await trainer.call("steps", chunk)
            step += chunk
            report |= {"step": step, "time_s": clock.now() - started}
            if scorer is not None:
                weights: PublishedWeights = await trainer.call("publish", step)
                await scorer.generator.update_weights(weights)
                record = await scorer.score("during", step)
                if record.samples:  # else every attempt failed, and nothing was measured
                    report |= {"solve_rate": record.solve_rate, "standard_error": record.standard_error}
            result |= report
            on_progress({key: report[key] for key in _SHOWN if key in report})
            target = settings.stop_at_solve_rate
            if target is not None and report.get("solve_rate", 0.0) >= target:
                break
            if settings.time_limit_s is not None and clock.now() - started >= settings.time_limit_s:
                break
        if not result["version"]:
            raise NoProgress(f"all {step} steps were skipped: no loss or gradient was finite; nothing was saved")
        await trainer.call("save", settings.output)
        return result | {"output": settings.output}
