"""The decision whether a run records the experts of sampled tokens and replays them in the trainer; torch-free."""

from __future__ import annotations

from pathlib import Path

from headway.config.schema import Experiment
from headway.config.services.policy_sections import PolicySections
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import implementation_of
from headway.records.errors import ConfigurationError
from headway.records.tokens import ExpertRouting


def without_replay(experiment: Experiment) -> Experiment:
    """The experiment without routing replay, for engines whose samples aren't trained on."""
    return experiment.model_copy(
        update={"algorithm": experiment.algorithm.model_copy(update={"routing_replay": "off"})}
    )


def replayed_routing(experiment: PolicySections) -> ExpertRouting | None:
    """The shape of the experts that engines return and the trainer replays by ``algorithm.routing_replay``; None: they
    are not replayed. Raises ConfigurationError if the key is "on" and the model has no experts."""
    setting = experiment.algorithm.routing_replay
    if setting == "off" or (setting == "auto" and experiment.generator.engine != "torch"):
        return None
    path = experiment.model.path
    try:
        if implementation_of(path, experiment.model.implementation) == "transformers":
            if setting == "on":
                raise ConfigurationError(
                    "algorithm.routing_replay = 'on': models of transformers don't support it; valid: 'auto', 'off'"
                )
            return None
        routing = DecoderConfig.from_pretrained(Path(path)).routing
    except ConfigurationError:
        if setting == "on":
            raise
        return None  # loading the model reports its error
    if routing is None and setting == "on":
        raise ConfigurationError(f"algorithm.routing_replay = 'on': {path} has no experts; valid: 'auto', 'off'")
    return routing
