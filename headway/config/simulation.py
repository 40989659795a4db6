"""The experiment file with ``[simulator]``: a policy that acts in vectorised simulators, in the place of a language
model with tasks and an environment. With ``[model]`` the policy is a language model whose tokens are actions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from headway.config.cluster import ClusterConfig
from headway.config.control import ControlConfig
from headway.config.model import ModelConfig
from headway.config.objective.critic import CriticConfig
from headway.config.schema import CheckpointConfig, Experiment, LedgerConfig, RunConfig
from headway.config.section import NonNegative, Positive, Seconds, Section

Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
Bins = Annotated[int, Field(ge=2, le=62)]  # a letter or digit for each
Devices = Annotated[tuple[str, ...], Field(min_length=1)]


class SimulatorConfig(Section):
    """The simulators in which the policy acts, in blocks of lanes that are stepped together: docs/embodied.md."""

    environment: str  # a gymnasium id, EnvPool's, or your own module:Class
    backend: Literal["gymnasium", "envpool"] = "gymnasium"  # whose id it is; envpool: C++, needs headway[envpool]
    arguments: dict[str, Any] = {}  # of its constructor, passed on as they are
    # Tune: raise it for steadier gradients; memory and the time of a step grow with it
    lanes: Positive = 16  # environments that are stepped side by side, a multiple of block_lanes
    # Tune: lower it until there are as many blocks as simulator.devices; larger blocks are faster
    block_lanes: Positive = 8  # lanes of a block, the unit that workers share: it changes the result, devices don't
    # Tune: raise it while most groups are filtered for equal success; 1 with [critic], which compares with values
    group_lanes: Positive = 1  # with [model]: lanes of a group, which begin alike and whose successes are compared
    # Tune: lower it for more updates from the same samples; a fragment should hold a good part of an episode
    steps_per_fragment: Annotated[int, Field(ge=2)] = 128  # steps of each lane between two updates; a reset is one
    step_timeout_s: Seconds = 60.0  # a step of a block that takes longer ends its worker, which is started again
    devices: Devices = ("cpu:0",)  # a worker for each; the policy acts there too

    @property
    def blocks(self) -> int:
        """The number of blocks, which is that of the fragments of a training step."""
        return self.lanes // self.block_lanes

    @model_validator(mode="after")
    def _require_whole_blocks(self) -> SimulatorConfig:
        if self.lanes % self.block_lanes:
            raise ValueError(
                f"simulator.lanes = {self.lanes}; valid: a multiple of simulator.block_lanes = {self.block_lanes}"
            )
        if self.block_lanes % self.group_lanes:
            raise ValueError(
                f"simulator.block_lanes = {self.block_lanes}; valid: a multiple of simulator.group_lanes = "
                f"{self.group_lanes}"
            )
        if self.blocks < len(self.devices):
            raise ValueError(
                f"simulator.devices has {len(self.devices)} for {self.blocks} blocks of lanes; valid: a block for each "
                "at least (fewer devices, more simulator.lanes, or smaller simulator.block_lanes)"
            )
        return self


class PolicyConfig(Section):
    """The actor and critic: a perceptron, or a small convolutional network where observations are pictures. With
    [model] how its tokens stand for observations and actions: docs/embodied.md."""

    hidden: tuple[Positive, ...] = (64, 64)  # units of each hidden layer, of actor and critic each
    squash: bool = False  # actions through tanh into their bounds, in the place of clipping to them
    normalize: bool = True  # observations and rewards by running statistics, which are part of the policy
    template: str = "{inputs}"  # with [model]: the prompt, with a letter for each input
    inputs: tuple[str, ...] = ()  # numbers of an observation, "36 in 0..1", or differences, "36-0 in -1..1"; (): all
    observation_bins: Bins = 21  # letters of an input
    # Tune: fewer bins are learned sooner, more of them act finer
    action_bins: Bins = 9  # letters of a dimension of an action, from its lower to its upper bound
    # Tune: raise it for fewer decisions an episode, where the simulator changes little in a step
    chunk: Positive = 1  # actions of a response
    repeat: Positive = 1  # steps of the simulator for which each lasts


class FragmentQueueConfig(Section):
    """How far the simulators may be ahead of the learner."""

    # Tune: 1 or 2 where simulators and learner have devices of their own, with a correction
    budget: NonNegative = 0  # eta: largest staleness of a fragment, in versions; 0 is synchronous


class EmbodiedAlgorithmConfig(Section):
    """PPO with values, and its correction for fragments of an older policy."""

    # Tune: "vtrace" at a budget of 1 or more
    correction: Literal["none", "recompute", "vtrace"] = "none"  # of stale fragments, by the policy of the step's start
    discount: Share = 0.99  # of rewards, a step
    decay: Share = 0.95  # lambda of the advantages
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2  # the ratio is clipped to 1 - clip ... 1 + clip
    value_coefficient: NotNegative = 0.5  # of the value loss, the mean squared error
    value_clip: AboveZero | None = None  # values gain nothing by moving further in a step, in units of reward
    entropy_coefficient: NotNegative = 0.0  # bonus: weight of the policy's entropy
    behaviour_weight_cap: AboveZero = 2.0  # truncated importance weight of stale fragments
    early_stop_kl: AboveZero | None = None  # k3, in nats an action, that ends a step's updates ...
    early_stop_ratio: AboveZero | None = None  # ... and mean |ratio - 1|


class EmbodiedTrainerConfig(Section):
    """The learner and its optimiser, Adam."""

    devices: Annotated[tuple[str, ...], Field(min_length=1, max_length=1)] = ("cpu:1",)  # the learner's one
    learning_rate: NotNegative = 3e-4  # peak
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # behind the warm-up; else to 0 at run.steps
    warmup_steps: NonNegative = 0  # of a rising learning rate
    max_grad_norm: AboveZero = 0.5  # gradients with a larger norm are scaled down to it
    # Tune: 4 where the learner is what the run waits for
    passes: Positive = 10  # over the fragments of a step, shuffled
    minibatch: Positive = 256  # transitions of an optimiser step


class EpisodeEvaluationConfig(Section):
    """Evaluation: episodes with fixed seeds, by the likeliest actions or sampled tokens, in simulators of their own."""

    every_steps: NonNegative = 0  # steps between two of them; 0: never
    episodes: Positive = 16  # of an evaluation
    # Tune: 0 to see what the likeliest tokens do; 1 to see the policy that is trained
    temperature: Annotated[float, Field(ge=0)] = 1.0  # with [model]: of its tokens; 0 takes the likeliest ones
    video: bool = True  # the first episode of each as RUN/videos/step_N.gif, where the simulator draws


# Keys that only one kind of policy has.
_OF_TOKENS = {
    "simulator": "group_lanes",
    "policy": "template inputs observation_bins action_bins chunk repeat",
    "critic": "path learning_rate gae",
    "evaluation": "temperature",
}
_OF_NETWORKS = {
    "policy": "hidden squash normalize",
    "algorithm": "discount decay value_coefficient value_clip",
    "model": "reference",
}
# Keys of sections that simulators share with language models, and that have no effect here.
_UNUSED = {
    "run": "offload deterministic on_stall",
    "ledger": "table_every_steps trace pass_at rollouts rollouts_max_bytes",
    "cluster": "accounting_directory replicate_to",
}


class SimulatorExperiment(Section):
    """The whole experiment file of a policy in simulators."""

    run: RunConfig
    simulator: SimulatorConfig
    model: ModelConfig | None = None
    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    queue: FragmentQueueConfig = FragmentQueueConfig()
    algorithm: EmbodiedAlgorithmConfig = EmbodiedAlgorithmConfig()
    trainer: EmbodiedTrainerConfig = EmbodiedTrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EpisodeEvaluationConfig = EpisodeEvaluationConfig()
    ledger: LedgerConfig = LedgerConfig()
    control: ControlConfig = ControlConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def plans_itself(self) -> bool:
        """Whether the run measures its stages and places them on its devices by itself (`--plan auto`)."""
        return self.control.devices == "move"

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices of the run, each once, the simulators' first."""
        return tuple(dict.fromkeys((*self.simulator.devices, *self.trainer.devices)))

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_sections(cls, raw: Any) -> Any:
        tables: dict[str, Any] = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        foreign_names = [name for name in tables if name in Experiment.model_fields and name not in cls.model_fields]
        if foreign_names:
            raise ValueError(
                f"[{foreign_names[0]}] belongs to language models; beside [simulator] valid sections are: "
                f"{', '.join(cls.model_fields)}"
            )
        return cast("Any", raw)

    @model_validator(mode="after")
    def _require_consistent(self) -> SimulatorExperiment:
        self._require_unset(_UNUSED, "beside [simulator]")
        if self.model is None:
            self._require_unset(_OF_TOKENS, "without [model]")
        else:
            self._require_unset(_OF_NETWORKS, "with [model]")
            self._require_tokens()
        if self.queue.budget and self.algorithm.correction == "none":
            raise ValueError(
                f'queue.budget = {self.queue.budget} with algorithm.correction = "none": a policy that learns from '
                'stale fragments without correction fails silently; valid: "vtrace", "recompute", or a budget of 0'
            )
        if self.control not in (ControlConfig(), ControlConfig(mode="act", devices="move")):
            raise ValueError(
                f"control.mode = {self.control.mode!r} with control.devices = {self.control.devices!r}: beside "
                '[simulator] valid is "act" with "move" (--plan auto) and nothing else, or no [control]'
            )
        if self.plans_itself and self.queue.budget:
            raise ValueError(
                f"queue.budget = {self.queue.budget} with --plan auto: a plan may only change between steps, when no "
                "fragment is under way; valid: a budget of 0"
            )
        return self

    def _require_unset(self, keys: dict[str, str], reason: str) -> None:
        for section_name, key_names in keys.items():
            section: Section = getattr(self, section_name)
            for key in key_names.split():
                if (value := getattr(section, key)) != type(section).model_fields[key].default:
                    raise ValueError(f"{section_name}.{key} = {value!r} has no effect {reason}: leave it out")

    def _require_tokens(self) -> None:
        if self.simulator.group_lanes > 1:
            self._require_unset({"critic": _OF_TOKENS["critic"]}, "with groups (simulator.group_lanes)")
        if self.algorithm.correction == "vtrace":
            raise ValueError(
                'algorithm.correction = "vtrace" with [model]: values are of tokens; valid: "recompute", "none"'
            )
        if "{inputs}" not in self.policy.template:
            raise ValueError(f"policy.template = {self.policy.template!r}; valid: a text with {{inputs}}")


AnyExperiment = Experiment | SimulatorExperiment
