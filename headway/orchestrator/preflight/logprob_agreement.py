"""Checks that trainer and engines compute the same log-probabilities; else the run is refused."""

from __future__ import annotations

from headway.config.schema import Experiment
from headway.control.logprob_limits import LIMITS, coarser, disagreement, precision_of
from headway.models.hf.prompts import PictureClient
from headway.records.clients import Generator, Trainer
from headway.records.errors import EnginesDisagree
from headway.records.generation import ProbeScores
from headway.runtime.workers import EventCallback

ProbePrompt = tuple[tuple[int, ...], str]
EVENT_AGREEMENT = "agreement"  # data: version, agrees 0/1, replicas, and for each pair of ways the largest difference


async def pictured_prompt(experiment: Experiment, pictures: PictureClient | None) -> ProbePrompt:
    """Return token ids and the content hash of the pixel arrays of the prompt that is compared. Both are empty where no
    task's pictures can be shown. Raises as `PictureClient.prompt`."""
    if pictures is None or not experiment.generator.probe_every_updates:
        return (), ""
    for task in pictures.compared:
        rendered, prompt_ids, _ = await pictures.prompt(task, hold=True)
        if 0 < len(prompt_ids) <= experiment.rollout.max_prompt_tokens:
            return tuple(prompt_ids), rendered.pixels
    return (), ""


async def trainer_scores(experiment: Experiment, trainer: Trainer, prompt: ProbePrompt = ((), "")) -> list[ProbeScores]:
    """Compute the trainer's scores of the next check, of random tokens alone and after the pictured ``prompt``. Empty
    with ``generator.probe_every_updates = 0``."""
    if not experiment.generator.probe_every_updates:
        return []
    scores = [await trainer.score(), await trainer.score(*prompt) if prompt[1] else None]
    return [score for score in scores if score is not None]


async def require_agreement(
    experiment: Experiment, generator: Generator, scores: list[ProbeScores], version: int, on_event: EventCallback
) -> bool:
    """Compare the trainer's ``scores`` of ``version`` with those of every replica, and record the event ``agreement``.
    The replicas have applied the version. Returns False where no replica answered, so that the comparison is still to
    be made. Raises EnginesDisagree beyond the limits."""
    if not scores:
        return True
    dtype = experiment.generator.dtype
    score_pairs = [(score, engine) for score in scores for engine in await generator.score(score.probe)]
    comparisons = [disagreement(score, engine, dtype) for score, engine in score_pairs]
    if not comparisons:  # every replica died; their successors receive the weights again
        on_event(EVENT_AGREEMENT, f"version {version}: no replica answered", version=version, agrees=0, replicas=0)
        return False
    maxima = {pair: max(comparison.largest[pair] for comparison in comparisons) for pair in comparisons[0].largest}
    precision = precision_of(
        coarser(scores[0].precision, dtype, *(engine.precision for _, engine in score_pairs)), mixture=scores[0].mixture
    )
    figures_text = ", ".join(f"{pair} {difference:.2g}" for pair, difference in maxima.items())
    fault = next((comparison.wrong for comparison in comparisons if comparison.wrong), "")
    on_event(
        EVENT_AGREEMENT,
        fault or f"version {version}: {figures_text} nats at most; limit in {precision}: {LIMITS[precision].largest:g}",
        version=version,
        agrees=int(not fault),
        replicas=len(comparisons) // len(scores),
        **maxima,
    )
    if fault:
        raise EnginesDisagree(f"trainer and engine disagree at version {version}: {fault}")
    return True
