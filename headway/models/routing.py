"""Whether a run records the experts of what is sampled and replays them in the trainer; torch-free."""

from __future__ import annotations

from pathlib import Path

from headway.config.schema import Experiment
from headway.models.configuration import DecoderConfig
from headway.models.hub.configuration import implementation_of
from headway.records.errors import ConfigurationError
from headway.records.tokens import ExpertRouting


def without_replay(experiment: Experiment) -> Experiment:
    """The experiment for engines whose samples nothing trains on."""
    return experiment.model_copy(
        update={"algorithm": experiment.algorithm.model_copy(update={"routing_replay": "off"})}
    )


def replayed_routing(experiment: Experiment) -> ExpertRouting | None:
    """The shape of the experts that engines return and the trainer replays, as ``algorithm.routing_replay`` says; None:
    none are. Raises ConfigurationError where it is on and the model has no experts."""
    wanted = experiment.algorithm.routing_replay
    if wanted == "off" or (wanted == "auto" and experiment.generator.engine != "torch"):
        return None
    path = experiment.model.path
    try:
        if implementation_of(path, experiment.model.implementation) == "transformers":
            if wanted == "on":
                raise ConfigurationError(
                    "algorithm.routing_replay = 'on': a model that runs in transformers can't; valid: 'auto', 'off'"
                )
            return None
        routing = DecoderConfig.from_pretrained(Path(path)).routing
    except ConfigurationError:
        if wanted == "on":
            raise
        return None  # what is wrong with the model is said where it is loaded
    if routing is None and wanted == "on":
        raise ConfigurationError(f"algorithm.routing_replay = 'on': {path} has no experts; valid: 'auto', 'off'")
    return routing
