"""The agreement check: trainer and engines compute the same log-probabilities, or a run is refused."""

from __future__ import annotations

from headway.config.schema import Experiment
from headway.control.agreement import LIMITS, coarser, disagreement, precision_of
from headway.records.clients import Generator, Trainer
from headway.records.errors import EnginesDisagree
from headway.records.generation import ProbeScores
from headway.runtime.workers import EventCallback

EVENT_AGREEMENT = "agreement"  # data: version, agrees 0/1, replicas, and for each pair of ways the largest difference


async def trainer_scores(experiment: Experiment, trainer: Trainer) -> ProbeScores | None:
    """The trainer's scores of the next check; None with ``generator.probe_every_updates = 0``."""
    return await trainer.score() if experiment.generator.probe_every_updates else None


async def require_agreement(
    experiment: Experiment, generator: Generator, scores: ProbeScores | None, version: int, on_event: EventCallback
) -> bool:
    """Compare the trainer's ``scores`` of ``version`` with those of every replica, which have applied it, and record
    the event ``agreement``. Returns whether there is nothing left to compare: no replica may have answered. Raises
    EnginesDisagree beyond the limits."""
    if scores is None:
        return True
    engines, dtype = await generator.score(scores.ids), experiment.generator.dtype
    found = [disagreement(scores, engine, dtype) for engine in engines]
    if not found:  # each replica died; its successor is given the weights anew
        on_event(EVENT_AGREEMENT, f"version {version}: no replica answered", version=version, agrees=0, replicas=0)
        return False
    largest = {name: max(one.largest[name] for one in found) for name in found[0].largest}
    precision = precision_of(
        coarser(scores.precision, dtype, *(engine.precision for engine in engines)), mixture=scores.mixture
    )
    figures = ", ".join(f"{name} {value:.2g}" for name, value in largest.items())
    wrong = next((one.wrong for one in found if one.wrong), "")
    on_event(
        EVENT_AGREEMENT,
        wrong or f"version {version}: {figures} nats at most; allowed in {precision} are {LIMITS[precision].largest:g}",
        version=version,
        agrees=int(not wrong),
        replicas=len(found),
        **largest,
    )
    if wrong:
        raise EnginesDisagree(f"trainer and engine disagree at version {version}: {wrong}")
    return True
