"""`TokenPolicy`: a language model that acts in all lanes of a block by one batch of an engine in this process.

Shapes: b lanes, d numbers of a chunk of actions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from headway.config.simulation import SimulatorExperiment
from headway.embodied.records import Array, PolicyWeights, Spaces, TokenSteps, to_host
from headway.embodied.tokens.codes import ActionCode, ObservationCode
from headway.embodied.tokens.sections import token_sections
from headway.generator.local import LocalGenerator
from headway.records.errors import HeadwayError
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.records.tokens import TokenIds
from headway.tokens.tokenizer import Tokenizer

_PROMPTS = 65_536  # that are kept encoded


class TokenPolicy:
    """The policy as it acts in the lanes of a block.

    Lifecycle: built, with the model's weights -> ``load`` of others -> ``act`` any number of times, until the next
    ``load``. Every `act` is one batch of the engine: a response of each lane, of letters that its grammar allows.
    Equal observations, noise and number of lanes give equal bits."""

    def __init__(self, spaces: Spaces, experiment: SimulatorExperiment, actions: ActionCode, context: Any) -> None:
        """``spaces``: those of `ChunkedLanes`. ``actions``: the code of its chunks. ``context``: the worker's. Raises
        ConfigurationError for observations without a code, and where the engine can't be built."""
        assert experiment.model is not None, "a token policy has a model"
        self._observations, self._actions = ObservationCode(experiment.policy, spaces.observations), actions
        sections, model = token_sections(experiment, actions.letters), experiment.model
        self._tokenizer = Tokenizer.load(
            model.path, chat=sections.uses_chat, arguments=model.chat_template_kwargs, started=None
        )
        self._engine = LocalGenerator(sections, context).engine
        self._sampling = SamplingParameters(
            max_tokens=sections.rollout.max_response_tokens,
            stop_token_ids=self._tokenizer.stop_ids,
            grammar=actions.grammar,
            kept_sets=sections.kept_sets,
        )
        self._evaluation_temperature = experiment.evaluation.temperature
        self._prompt_ids = lru_cache(_PROMPTS)(lambda text: self._tokenizer.render(text, model.template))
        self._version = -1
        self._steps: list[TokenSteps] = []

    def load(self, weights: PolicyWeights) -> None:
        """Act by these weights from now on. Raises WeightsCorrupt."""
        if weights.version != self._version and weights.published is not None:
            self._engine.apply(weights.published, "keep")
            self._version = weights.version

    def act(self, observations_b: Any, noise_b: Array) -> tuple[Array, Array, Array]:
        """Return the numbers of chunks [b, d], their log-probabilities [b], and zeros. The noise of a lane is the seed
        of its response."""
        actions_b, steps = self._respond(observations_b, noise_b, self._sampling)
        self._steps.append(steps)
        starts_b = np.cumsum(steps.responses_k) - steps.responses_k
        return actions_b, np.add.reduceat(steps.logprobs_r, starts_b), np.zeros(len(actions_b), np.float32)

    def act_in_evaluation(self, observations_b: Any, noise_b: Array) -> Array:
        """Return the numbers of chunks [b, d] that are sampled at the evaluation's temperature."""
        sampling = msgspec.structs.replace(self._sampling, temperature=self._evaluation_temperature)
        return self._respond(observations_b, noise_b, sampling)[0]

    def take_tokens(self) -> TokenSteps | None:
        """Return the tokens of the `act` calls since the last one; None: there were none."""
        steps, self._steps = self._steps, []
        if not steps:
            return None
        (grammar, *_), *arrays = zip(*steps, strict=True)
        return TokenSteps(grammar, *map(np.concatenate, arrays))

    def _respond(self, observations_b: Any, noise_b: Array, sampling: SamplingParameters) -> tuple[Array, TokenSteps]:
        """Sample a response of every lane. Raises HeadwayError with the engine's error."""
        seeds = [int.from_bytes(noise.tobytes()[:8], "little") >> 1 for noise in noise_b]
        sampling_b = [msgspec.structs.replace(sampling, seed=seed) for seed in seeds]
        prompts = [self._prompt_ids(text) for text in self._observations.texts(to_host(observations_b))]
        pairs = enumerate(zip(prompts, sampling_b, strict=True))
        self._engine.submit(
            [GenerationRequest(request_id=str(lane), prompt_ids=ids, sampling=how) for lane, (ids, how) in pairs]
        )
        ids_b, logprobs_b = [[TokenIds()] for _ in prompts], [[np.empty(0, np.float32)] for _ in prompts]
        while self._engine.open_requests:
            self._engine.step()
            for delta in self._engine.take_deltas(running=False):
                if delta.error:
                    raise HeadwayError(f"the engine failed: {delta.error}")
                ids_b[int(delta.request_id)].append(delta.ids)
                logprobs_b[int(delta.request_id)].append(np.asarray(delta.logprobs, np.float32))
        responses = [np.concatenate([np.asarray(part, np.int32) for part in parts]) for parts in ids_b]
        actions_b = np.stack([self._actions.actions(self._tokenizer.decode(ids.tolist())) for ids in responses])
        all_ids = [np.asarray(ids, np.int32) for pair in zip(prompts, responses, strict=True) for ids in pair]
        lengths_b2 = np.array([len(ids) for ids in all_ids]).reshape(-1, 2)
        logprobs_r = np.concatenate([part for parts in logprobs_b for part in parts])
        prompts_k, responses_k = lengths_b2.T
        return actions_b, TokenSteps(
            self._sampling.grammar, np.concatenate(all_ids), prompts_k, responses_k, logprobs_r
        )
