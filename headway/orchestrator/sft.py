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
from headway.orchestrator.scoring import Scorer
from headway.records.errors import ConfigurationError, HeadwayError, RemoteError
from headway.records.generation import PublishedWeights
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher, WorkerSpec
from headway.weights.leftovers import reap

_SERVICE = "headway.trainer.supervised:SupervisedService"
# of the last steps, as progress: the whole report is in the result
_SHOWN = ("step", "loss_mean", "learning_rate", "tokens_per_s", "effective_token_share", "solve_rate", "standard_error")

Progress = Callable[[dict[str, Any]], None]


def run_sft(experiment: Experiment, *, on_progress: Progress | None = None) -> dict[str, Any]:
    """`headway sft`: train on sft.data, write the model to sft.output.

    Every ``sft.evaluate_every_steps`` the sampled solve rate on tasks.validation is measured (training pauses
    meanwhile); training ends at ``sft.steps``, ``sft.time_limit_s`` or ``sft.stop_at_solve_rate``. Returns
    what was dropped, the last step's statistics and the last solve rate.
    """
    for key in ("data", "output"):
        if not getattr(experiment.sft, key):
            raise ConfigurationError(f"missing key 'sft.{key}'")
    folder = str(Path(experiment.sft.output).resolve())
    identity = "sft-" + hashlib.blake2b(folder.encode(), digest_size=6).hexdigest()  # names its shared memory
    reap(identity)  # of one that was killed
    try:
        return asyncio.run(_sft(experiment, identity, on_progress or (lambda _: None)))
    except RemoteError as error:
        if isinstance(error.__cause__, HeadwayError):  # a bad data file, found by the worker
            raise error.__cause__ from None
        raise
    finally:
        reap(identity)


async def _sft(experiment: Experiment, identity: str, on_progress: Progress) -> dict[str, Any]:
    settings = experiment.sft
    clock = RealClock()
    async with AsyncExitStack() as stack:
        arguments = {"experiment": json.loads(experiment.model_dump_json()), "run_id": identity}
        spec = WorkerSpec(name="sft", factory=_SERVICE, arguments=arguments, device=settings.device)
        trainer = await LocalLauncher(clock).start(spec)
        stack.push_async_callback(trainer.stop)
        counts: dict[str, Any] = await trainer.call("prepare")
        on_progress(counts)
        scorer: Scorer | None = None
        if settings.evaluate_every_steps:
            scorer = Scorer(experiment, "validation")
            await scorer.start(stack)
        started, result = clock.now(), dict(counts)
        step = 0
        while step < settings.steps:
            chunk = min(settings.evaluate_every_steps or 25, settings.steps - step)
            report: dict[str, Any] = await trainer.call("steps", chunk)
            step += chunk
            result |= report | {"step": step, "time_s": clock.now() - started}
            if scorer is not None:
                weights: PublishedWeights = await trainer.call("publish", step)
                await scorer.generator.update_weights(weights)
                record = await scorer.score("during", step)
                result |= {"solve_rate": record.solve_rate, "standard_error": record.standard_error}
            on_progress({key: result[key] for key in _SHOWN if key in result})
            target = settings.stop_at_solve_rate
            if target is not None and result.get("solve_rate", 0.0) >= target:
                break
            if settings.time_limit_s is not None and clock.now() - started >= settings.time_limit_s:
                break
        await trainer.call("save", settings.output)
        return result | {"output": settings.output}
