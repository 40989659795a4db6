"""Teachers outside of the trainer as stages of a plan, which leaves them where the experiment has them."""

from __future__ import annotations

from functools import lru_cache

from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.memory import teacher_uses
from headway.orchestrator.task_sets import training_weights
from headway.planner.model_figures import model_figures
from headway.planner.stage_curves import StageCurves
from headway.records.generation import PROBE_TOKENS
from headway.records.plan import PlannedStage
from headway.runtime.devices import parse_device


@lru_cache(1)  # for all candidates of a plan
def teacher_stages(curves: StageCurves) -> tuple[PlannedStage, ...]:
    """Return a stage for each teacher that scores rollouts. Its rate, in samples of the run, is by the workload's
    ``teacher_s``, or of replicas by the tokens that they read: rollouts, and a probe for each group."""
    experiment, rules, stages = curves.experiment, curves.experiment.rules, list[PlannedStage]()
    uses, weights = list(teacher_uses(experiment)), training_weights(experiment)
    tokens = curves.prompt_tokens + curves.lengths.mean_tokens
    for name, teacher in experiment.used_teachers.items():
        if not teacher.scores:
            continue
        seconds, device = curves.workload.teacher_s, "server"
        if teacher.devices:
            is_cpu, kinds = parse_device(teacher.devices[0]).kind == "cpu", curves.pool.classes
            kind = next((kind for kind in kinds if (kind.device.name == "cpu") == is_cpu), kinds[0])
            read_tokens, device = tokens + PROBE_TOKENS / experiment.rollout.group_size, kind.device.name
            figures = model_figures(sizes_of(teacher.path))
            seconds = seconds or read_tokens / curves.prompt_tokens_per_s(kind, figures, tokens)
        taught_weight = sum(w for source, w in weights.items() if rules.of(source).teacher == name)
        nbytes = [float(use.total_bytes) for use in uses if use.name == f"teacher-{name}-0"]
        stages.append(
            PlannedStage(
                name=f"teacher {name}",
                device=device,
                names=teacher.devices or (teacher.address["url"],),
                copies=teacher.at_once,
                spread="1 device" if teacher.devices else "request",
                samples_per_s=teacher.at_once / seconds * sum(weights.values()) / taught_weight if seconds else 0.0,
                bytes_per_device=max(nbytes, default=None),
            )
        )
    return tuple(stages)
