"""The agreement check: trainer and engines compute the same log-probabilities, or a run is refused."""

from __future__ import annotations

from headway.config.schema import Experiment
from headway.control.agreement import LIMITS, coarser, disagreement, precision_of
from headway.models.hub.prompts import Pictures
from headway.records.clients import Generator, Trainer
from headway.records.errors import EnginesDisagree
from headway.records.generation import ProbeScores
from headway.runtime.workers import EventCallback

ShownPrompt = tuple[tuple[int, ...], str]
EVENT_AGREEMENT = "agreement"  # data: version, agrees 0/1, replicas, and for each pair of ways the largest difference


async def pictured_prompt(experiment: Experiment, pictures: Pictures | None) -> ShownPrompt:
    """Token ids and content hash of the pixel arrays of the prompt that is compared; empty: no task's pictures can be
    shown. Raises as `Pictures.prompt`."""
    if pictures is None or not experiment.generator.probe_every_updates:
        return (), ""
    for task in pictures.compared:
        made, ids, _ = await pictures.prompt(task, hold=True)
        if 0 < len(ids) <= experiment.rollout.max_prompt_tokens:
            return tuple(ids), made.pixels
    return (), ""


async def trainer_scores(experiment: Experiment, trainer: Trainer, shown: ShownPrompt = ((), "")) -> list[ProbeScores]:
    """The trainer's scores of the next check, of random tokens alone and behind the prompt with pictures that is
    ``shown``; empty with ``generator.probe_every_updates = 0``."""
    if not experiment.generator.probe_every_updates:
        return []
    found = [await trainer.score(), await trainer.score(*shown) if shown[1] else None]
    return [one for one in found if one is not None]


async def require_agreement(
    experiment: Experiment, generator: Generator, scores: list[ProbeScores], version: int, on_event: EventCallback
) -> bool:
    """Compare the trainer's ``scores`` of ``version`` with those of every replica, which have applied it, and record
    the event ``agreement``. Returns whether there is nothing left to compare: no replica may have answered. Raises
    EnginesDisagree beyond the limits."""
    if not scores:
        return True
    dtype = experiment.generator.dtype
    both = [(own, engine) for own in scores for engine in await generator.score(own.probe)]
    found = [disagreement(own, engine, dtype) for own, engine in both]
    if not found:  # each replica died; its successor is given the weights anew
        on_event(EVENT_AGREEMENT, f"version {version}: no replica answered", version=version, agrees=0, replicas=0)
        return False
    largest = {name: max(one.largest[name] for one in found) for name in found[0].largest}
    precision = precision_of(
        coarser(scores[0].precision, dtype, *(engine.precision for _, engine in both)), mixture=scores[0].mixture
    )
    figures = ", ".join(f"{name} {value:.2g}" for name, value in largest.items())
    wrong = next((one.wrong for one in found if one.wrong), "")
    on_event(
        EVENT_AGREEMENT,
        wrong or f"version {version}: {figures} nats at most; allowed in {precision} are {LIMITS[precision].largest:g}",
        version=version,
        agrees=int(not wrong),
        replicas=len(found) // len(scores),
        **largest,
    )
    if wrong:
        raise EnginesDisagree(f"trainer and engine disagree at version {version}: {wrong}")
    return True
