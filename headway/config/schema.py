"""The experiment file: every key with its unit, its default and its valid values.

One TOML file holds a whole experiment. Unknown keys are errors (``load.py`` names the nearest valid one).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from headway.config.alerts import AlertsConfig
from headway.config.auto import without_auto
from headway.config.buffer import BufferConfig
from headway.config.cluster import ClusterConfig
from headway.config.control import ControlConfig
from headway.config.curriculum import REPEAT_STEPS, CurriculumSection
from headway.config.endpoint import EndpointSection, EnvironmentConfig
from headway.config.external_models import TeacherConfig
from headway.config.hooks import HooksConfig
from headway.config.model import ModelConfig, apply_dtype
from headway.config.objective.critic import GAE, CriticConfig
from headway.config.objective.parameters import CheckedParameters, ObjectiveParameters
from headway.config.objective.rules import Rules, make_rules
from headway.config.presets import Preset, apply_preset
from headway.config.pruning import PruningConfig
from headway.config.router import RouterSection
from headway.config.sandbox import SandboxConfig
from headway.config.section import (
    NonNegative,
    Positive,
    RankDevices,
    ReplicaDevices,
    Seconds,
    Section,
    Switch,
    distinct_names,
    host_port,
    require_named,
)
from headway.config.sources import DemonstrationsConfig, SftConfig, TaskSources, VerifierSettings

Decay = Annotated[float, Field(ge=0, lt=1)]
Bounds = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]  # lowest and highest value that pass

# Names that need no import; a user's own is module:function.
GROUP_ADVANTAGES = ("group_mean", "group_mean_std", "leave_one_out", "length_weighted", "pass_at_k")
ADVANTAGES = (*GROUP_ADVANTAGES, "batch_mean_std", "group_mean_batch_std", GAE)
LOSSES = ("ppo_clip", "decoupled_ppo", "gspo", "gmpo", "sapo", "cispo", "dppo", "dro", "reinforce")

Trackers = Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], distinct_names("tracker")]
Overlong = Literal["score", "mask", "penalty", "filter", "bootstrap"]
Aggregation = Literal["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"]
Address = Annotated[str, host_port("127.0.0.1:9464", optional=True)]


class RunConfig(Section):
    directory: str  # folder of all that the run writes; one run at a time may hold it
    seed: int = 0  # seed of task order and sampling; rollouts are keyed (seed, group, member, position)
    # Tune: raise it while the validation solve rate still rises at the end; `--resume` continues with more
    steps: Positive = 100  # completed training steps at which the run ends
    # Tune: set it on a machine that is rented by the hour, or where seconds are compared instead of steps
    time_limit_s: Seconds | None = None  # training stops after this many seconds and the run ends in order
    # Tune: true where the sides share devices and `headway check` finds too little memory; devices = "auto" sets it
    offload: bool = False  # generator or trainer frees the memory of a shared device while the other computes
    # Tune: true where two runs must be equal bit by bit, say to find a fault; it wants budget 0 and costs speed
    deterministic: bool = False  # fixed batch shapes: on CPU and with budget 0, a run is bit-reproducible
    stop_grace_s: Seconds = 120.0  # from Ctrl-C, SIGTERM or SIGUSR1 to the run's end, resumable
    # Tune: "restart" or "end" for unattended runs
    on_stall: Literal["warn", "restart", "end"] = "warn"  # on a stall: warn, restart the worker, or end resumable


class TasksConfig(Section):
    train: TaskSources
    validation: TaskSources | None = None  # evaluated during the run; the best checkpoint is chosen by it
    test: TaskSources | None = None  # evaluated with held weights before and after training


class VerifierConfig(VerifierSettings):
    """The default verifier: it scores the responses to every task that chooses no other one."""

    workers: Positive = 1  # processes; each can score with every verifier
    reasoning: bool = False  # give all verifiers the text that the chat template marks as reasoning, too
    nodes: tuple[str, ...] = ()  # names of cluster.nodes, assigned in turn; "": this machine; (): all here


class RolloutConfig(Section):
    # Tune: raise it while most groups are filtered for equal rewards (zero variance); lower it for more tasks a step
    group_size: Positive = 8  # attempts at one task; advantages compare them: 1 only with batch_mean_std and gae
    # Tune: raise it where `headway check` names longer prompts; the KV cache grows with it
    max_prompt_tokens: Positive = 512  # `check` refuses longer prompts, and in a run they fail their group
    # Tune: raise it while many responses are truncated; lower it where the longest ones hold up the trainer
    max_response_tokens: Positive = 256  # a longer response is cut, and counted as truncated
    # Tune: leave it at 1 unless the model was made for another; lower means less exploration
    temperature: Annotated[float, Field(gt=0)] = 1.0  # sampling temperature; the trainer divides logits by it, too
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # nucleus mass; below 1 see algorithm.allow_truncated_sampling
    top_k: NonNegative = 0  # number of most likely tokens kept; 0: all; else see algorithm.allow_truncated_sampling
    stop: tuple[str, ...] = ()  # any of these strings ends a response
    # Tune: raise it for environments and tools that need minutes; a rollout that hangs holds its slot for this time
    timeout_s: Seconds = 600.0  # a rollout open for longer ends as failed
    retries: NonNegative = 2  # retries after infrastructure failures, those of the engine and those of the verifier

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0


class GeneratorConfig(Section):
    # Tune: "vllm" for models of a billion weights and more, or several GPUs a replica: docs/vllm.md
    engine: Literal["torch", "vllm", "vllm-server"] = "torch"  # own; vLLM 0.32 in a replica, or served
    engine_arguments: dict[str, Any] = {}  # keys of vLLM's EngineArgs, passed on as they are: docs/vllm.md
    probe_every_updates: NonNegative = 1  # vLLM proves every n-th update; 0: no proof, and no agreement check
    # Tune: more of them while the trainer waits (generation-bound), fewer while the generator waits; auto: docs/gpus.md
    devices: ReplicaDevices = ("cpu:0",)  # a replica for each: [NODE/]cuda:N, cpu:N, cpu:N-M; 4*cuda; http://HOST:PORT
    # Tune: "bfloat16" for an engine alone, where the trainer must be float32
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and KV; auto: model.dtype, or docs/gpus.md
    prefill_tokens_per_step: Positive = 8192  # prompt tokens per step, beside running requests; longer: several steps
    # Tune: raise it while tokens/s still rise and KV is left; lower it when KV is full and requests are prefilled again
    slots: Positive = 64  # concurrent requests of one replica
    # Tune: lower it where responses are mostly far shorter than the limit: less memory; raise it at many reprefills
    kv_capacity_tokens: Positive | None = None  # KV memory of a replica; default: a whole context for every slot
    # Tune: raise it while slots are empty though groups may open; lower it for younger samples
    prefetch_groups: NonNegative = 2  # groups waiting inside the engines, so that no slot is idle
    # Tune: "recompute" or "abort" if mismatch_k3 grows under "keep"; "finish" for adapters: docs/async.md
    update_mode: Literal["keep", "recompute", "abort", "finish", "drain"] = "keep"  # for open requests: docs/async.md


class QueueConfig(Section):
    """Admission, staleness, and the selection of groups for a batch."""

    # Tune: raise it for steadier gradients and fewer updates; lower it for more updates from the same samples
    groups_per_step: Positive = 8  # groups of one batch
    # Tune: set it at a budget of 0 or 1, where the trainer waits for the slowest group of each batch
    groups_per_part: Positive | None = None  # the trainer computes on parts of this many as they finish; default: all
    # Tune: raise it while a side waits for admission or stragglers; lower it when mismatch_k3 passes 0.03
    budget: NonNegative = 4  # eta: largest trajectory staleness, in versions, that is trained on; 0 is synchronous
    # Tune: "drop" if the longest responses are junk, not thought: it biases lengths; "mask" for very long rollouts
    overdue: Literal["wait", "drop", "mask"] = "wait"  # treatment of groups at the budget's limit: docs/async.md
    # Tune: raise it when environments keep slots idle; lower it when the machine's memory is short
    max_concurrent_rollouts: Positive | None = None  # rollouts at once; default: slots + prefetch_groups x group_size
    # Tune: 2 or so with surplus = "discard" for on-policy runs that can't wait for the tail; else younger samples
    oversampling: Annotated[float, Field(ge=1)] | None = None  # open groups / those of a batch; default: all admitted
    # Tune: "discard" for budget 0 with a long tail; "park" if the engine must be empty while the trainer works
    surplus: Literal["continue", "park", "discard"] = "continue"  # for groups that are unfinished when a batch is full
    max_token_staleness: NonNegative | None = None  # tokens staler than this carry no loss; default: no limit
    max_optimizer_step_staleness: NonNegative | None = None  # in optimiser steps: a limit on the budget; default: none
    max_environment_staleness: NonNegative | None = None  # a parked rollout restarts beyond it; default: no limit
    # Tune: false to train on every group that is generated, at the price of gradients that are 0
    filter_zero_variance: bool = True  # groups whose rewards are all equal are filtered: they have no gradient
    min_advantage: Annotated[float, Field(ge=0)] = 0.0  # a group without an advantage of this size is filtered
    min_valid_group_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5  # a group with fewer members without failure fails
    min_valid_item_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0  # a group with a smaller share left is filtered
    group_timeout_s: Seconds | None = None  # a group generating (or parked) for longer ends with finished members ...
    min_timeout_group_ratio: Annotated[float, Field(gt=0, le=1)] = 0.7  # ... if they are this share of it, or it fails


class AlgorithmConfig(Section):
    # Tune: set it to begin from a published method; your own keys override it
    preset: Preset | None = None  # a published method: fills in the missing keys (config/presets.py)
    # Tune: "leave_one_out" or "group_mean" if dividing by the deviation favours too easy and too hard tasks
    advantage: str = "group_mean_std"  # per group or batch: algorithms/advantages.py, or your own module:function
    # Tune: "ppo_clip" to begin with; "decoupled_ppo" beyond budget 2, with half the learning rate: docs/learning.md
    loss: str = "decoupled_ppo"  # trainer/losses.py, or your own module:function
    parameters: CheckedParameters = ObjectiveParameters()
    # Tune: narrower where the policy jumps (KL, entropy); wider where many tokens are clipped under staleness
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2  # the ratio is clipped to 1 - clip_low ...
    # Tune: above clip_low, so that rare tokens may grow; lower it when entropy explodes
    clip_high: Annotated[float, Field(gt=0)] = 0.28  # ... 1 + clip_high
    # Tune: lower it when ratio_p99 is large and steps are noisy: less variance, more bias
    behaviour_weight_cap: Annotated[float, Field(gt=0)] = 2.0  # truncated importance weight (TIS); 1e9: never truncated
    turn_discount: Annotated[float, Field(ge=0, le=1)] | None = None  # of rewards by turn, to go; unset: outcome alone
    # Tune: to follow a method: "seq_mean_token_mean" is GRPO's, which spares long wrong answers, "fixed" Dr. GRPO's
    aggregation: Aggregation = "token_mean"  # how token losses are reduced to one number: docs/objectives.md
    proximal: Literal["auto", "recompute", "current"] = "auto"  # auto: current when one optimiser step per batch
    # Tune: set it where engine and trainer disagree (mismatch_max), as with mixtures of experts or quantised engines
    token_mask: Bounds | None = None  # tokens whose weight pi_prox / pi_behav is outside carry no loss (IcePop: 0.5, 5)
    sequence_mask: Bounds | None = None  # samples whose weight, by the next key, is outside carry no loss
    sequence_mask_by: Literal["mean", "sum", "max"] = "mean"  # of log weights: geometric mean, product, any token's
    second_moment_limit: Annotated[float, Field(gt=0)] | None = None  # M2PO: mean squared log weight kept (paper: 0.04)
    # Tune: true for a mixture that vLLM samples on GPUs: auto leaves it off there
    routing_replay: Switch = "auto"  # the trainer takes the experts chosen at sampling; auto: with the torch engine
    early_stop_ratio: Annotated[float, Field(gt=0)] | None = None  # mean |ratio - 1| that ends a batch's updates ...
    early_stop_kl: Annotated[float, Field(gt=0)] | None = None  # ... and k3 of that ratio, in nats per token
    # Tune: 0.001 to 0.05 when the policy drifts from language or games its reward; costs a reference pass
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0  # coefficient of the KL penalty to model.reference; 0: none
    kl_target: Annotated[float, Field(gt=0)] | None = None  # nats per token to which the coefficient adapts
    # Tune: 0.99 or so where a fixed reference holds a long run back; 0 compares with the step before
    reference_decay: Decay | None = None  # the reference is a moving average of the weights; unset: model.reference
    kl_estimator: Literal["k1", "k2", "k3", "k1_unbiased", "k3_unbiased"] = "k3"  # from samples: trainer/kl.py
    kl_in: Literal["loss", "reward"] = "loss"  # the penalty's place; in the reward: k1 of each token, to go
    # Tune: 0 to learn from a teacher alone: rewards are then only measured
    policy_coefficient: Annotated[float, Field(ge=0)] = 1.0  # of the loss by reward, with KL penalty and entropy bonus
    teacher: str = ""  # NAME of [teachers.NAME], whose distribution is learned too: docs/objectives.md
    teacher_coefficient: Annotated[float, Field(gt=0)] = 1.0  # of the loss by the teacher
    # Tune: 0.01 to 0.1 where answers of tools show how the environment works, and rewards are rare
    environment_coefficient: Annotated[float, Field(ge=0)] = 0.0  # of the cross-entropy on what tools answered
    # Tune: 0.001 to 0.01 while entropy falls towards 0 and the solve rate with it; lower it when entropy explodes
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0  # bonus: weight of each token's entropy in that loss
    # Tune: where many tokens are certain: at the entropy that a fifth of them exceeds (low_entropy_share: 0.8)
    entropy_threshold: Annotated[float, Field(gt=0)] | None = None  # nats; tokens below it have no gradient of the loss
    # Tune: "mask" or "penalty" while many responses are cut: a cut answer is no evidence that it was wrong
    overlong: Overlong = "score"  # cut responses: as is, no loss, penalty, dropped; a critic's value stands behind
    # Tune: true for rollout.top_p or top_k, and where agents ask for JSON or a named tool: docs/objectives.md
    allow_truncated_sampling: bool = False  # train on samples from a part of the vocabulary, which is then replayed
    # Tune: raise it where it makes rollouts fail, at a high temperature or top_p near 1: 2 or 4 bytes an id
    truncation_support_tokens: Positive = 1024  # most ids stored for one token; a rollout that needs more fails

    @field_validator("advantage", "loss")
    @classmethod
    def _require_known_name(cls, value: str, info: ValidationInfo) -> str:
        return require_named(value, ADVANTAGES if info.field_name == "advantage" else LOSSES)

    @field_validator("token_mask", "sequence_mask")
    @classmethod
    def _require_ordered(cls, value: Bounds | None) -> Bounds | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("the range is empty; valid: [lowest, highest], the first below the second")
        return value

    @model_validator(mode="after")
    def _require_known_parameters(self) -> AlgorithmConfig:
        self.parameters.taken_by(self.loss, self.advantage)
        return self

    @property
    def trains_equal_rewards(self) -> bool:
        """Whether a group of equal rewards is of use: a critic compares them with its values, a teacher with its
        distribution."""
        return self.advantage == GAE or bool(self.teacher)

    @field_serializer("parameters")
    def _serialize_parameters(self, parameters: ObjectiveParameters) -> dict[str, Any]:
        return parameters.taken_by(self.loss, self.advantage)


RateSteps = tuple[NonNegative, Positive]  # between which the learning rate rises, or falls: warm-up, stable, decay
Checkpointing = Literal["none", "selective", "full"]
HostMemory = Literal["none", "optimiser", "all"]


class TrainerConfig(Section):
    # Tune: more of them while the generator waits (training-bound)
    devices: RankDevices = ("cpu:1",)  # a rank for each; 2*cuda: on one of the cluster's nodes; auto: docs/gpus.md
    # Tune: "float32" for a trainer alone, where bfloat16 makes ratios too coarse (mismatch_k3)
    dtype: Literal["float32", "bfloat16"] = "float32"  # auto: as generator.dtype; float32 masters and sums
    # Tune: halve it when mismatch_k3 passes 0.03 or the solve rate falls; adapters need ten times a full run's
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5  # peak; 0 changes no weights (a control run)
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up; linear and cosine decay ...
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0  # ... to this
    # Tune: with a critic [20, 20] or so: values are learned first, where a policy can do something already
    warmup_steps: NonNegative | RateSteps = 0  # of a rising learning rate, or [first, last]: 0 before the first
    schedule_steps: Positive | RateSteps | None = None  # end of the decay, or [first, last] step; default: run.steps
    # Tune: "muon" for fewer steps of `headway sft`, and where half of AdamW's moments should do
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: of the layers' matrices; of all else AdamW: docs/learning.md
    # Tune: the second to 0.99 or 0.999 for long runs of small batches
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # decay of the means of gradients (Muon's: 0.95) and of their squares
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # of all weights: times the learning rate, each step
    # Tune: lower it when single steps spoil the run; see grad_norm in the report
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0  # gradients with a larger norm are scaled down to it
    # Tune: as large as memory allows (`headway check`): fewer, fuller passes; lower it when memory runs out
    micro_batch_tokens: Positive = 16384  # most tokens in one forward pass (or a single longer sample)
    packing: Literal["balanced", "areal", "fixed"] = "balanced"  # how samples are spread over micro-batches and ranks
    micro_batch_samples: Positive | None = None  # fixed: samples of a forward pass (branches count), of any length
    shared_prefix: bool = True  # a group's common prefix is computed once in a micro-batch, with the same gradient
    # Tune: more where a copy doesn't fit (`headway check`); its ranks gather each layer when they compute it
    shards: Positive | Literal["all"] = 1  # ranks that divide a copy of the model; auto: the fewest that can hold it
    # Tune: more where one sample's activations don't fit; each layer then exchanges its tokens twice
    context_parallel: Positive = 1  # ranks that divide the tokens of a micro-batch; a copy has so many times shards
    # Tune: more where gathered experts don't fit or take too long; each layer then exchanges tokens in their place
    expert_parallel: Positive = 1  # ranks of a copy that divide the experts of a mixture, which they never gather
    # Tune: "optimiser" on GPUs where a copy nearly fits, then "all": less of the GPU's memory for slower steps
    host_memory: HostMemory = "none"  # in the machine's: AdamW's moments, or weights as well
    # Tune: "selective" where activations don't fit, then "full": a third more work for a fraction of their memory
    gradient_checkpointing: Checkpointing = "none"  # recomputed: norms and gates, or layers
    # Tune: 2 to 4 on policy or at budgets of 1 or 2, where samples are expensive: docs/learning.md
    optimizer_steps_per_batch: Positive = 1  # number of updates into which a batch is split, by group
    # Tune: 2 to 4 where samples are expensive, with a limit (early_stop_kl): later passes are off policy
    passes: Positive = 1  # over a batch; from the second one on its groups are shuffled

    @model_validator(mode="after")
    def _require_decay(self) -> TrainerConfig:
        if isinstance(steps := self.schedule_steps, tuple) and not self.warmup[1] <= steps[0] < steps[1]:
            raise ValueError(
                f"trainer.schedule_steps = {list(steps)}; valid: [first, last] with trainer.warmup_steps = "
                f"{self.warmup[1]} <= first < last"
            )
        if self.warmup[0] > self.warmup[1]:
            raise ValueError(f"trainer.warmup_steps = {list(self.warmup)}; valid: [first, last] with first <= last")
        if self.min_learning_rate and (self.schedule == "constant" or self.min_learning_rate > self.learning_rate):
            raise ValueError(
                f"trainer.min_learning_rate = {self.min_learning_rate:g} with learning_rate = {self.learning_rate:g} "
                f"and schedule = {self.schedule!r}; valid: at most learning_rate, and a schedule that decays"
            )
        return self

    @property
    def updates_per_batch(self) -> int:
        """The most optimiser steps on a batch."""
        return self.passes * self.optimizer_steps_per_batch

    @property
    def warmup(self) -> RateSteps:
        """The first step with a learning rate above 0, and the first at its peak."""
        return steps if isinstance(steps := self.warmup_steps, tuple) else (0, steps)

    def decay_steps(self, run_steps: int) -> RateSteps:
        """The steps between which the learning rate falls, in a run of ``run_steps``."""
        steps = self.schedule_steps or run_steps
        return steps if isinstance(steps, tuple) else (self.warmup[1], steps)

    def layout_of(self, ranks: int) -> tuple[int, int, int]:
        """The numbers of ranks, of so many, that divide the weights of a copy, a micro-batch's tokens, and a mixture's
        experts: those of the keys, or fewer where these don't divide ``ranks``."""
        context, experts = math.gcd(self.context_parallel, ranks), math.gcd(self.expert_parallel, ranks)
        fewest = ranks if self.shards == "all" else min(self.shards * context, ranks)
        of_copy = range(fewest, ranks + 1)
        return next(n for n in of_copy if not (ranks % n or n % context or n % experts)), context, experts

    def shards_of(self, ranks: int) -> int:
        """The number of ranks, of so many, that divide the weights of a copy (see `layout_of`)."""
        return self.layout_of(ranks)[0]


class WeightsConfig(Section):
    # Tune: a bucket where nodes have no fast links to the trainer's machine, or are behind firewalls
    exchange: str | None = None  # vllm-server: folder that it reads weights from; else: s3:// or http:// of a store
    # Tune: raise it when applying weights costs the generator much (report: apply, pause) and the budget has room
    steps_per_publish: Positive = 1  # every n-th version is published; queue.budget must be >= n - 1
    # Tune: 1 where nodes have links as fast as memory: finding what has changed takes longer than it saves
    whole_every: Positive = 256  # every n-th published version goes whole to other nodes, of others what has changed


class CheckpointConfig(Section):
    # Tune: lower it where machines are preempted: steps after the last checkpoint are trained again
    every_steps: Positive = 50  # steps from one checkpoint to the next; the run's end writes one, too
    keep_last: Positive = 2  # older ones are removed
    # Tune: set it to rebuild versions between two checkpoints: headway weights RUN --version V --output DIR
    delta_bytes: NonNegative = 0  # size of what has changed in published versions, kept with the checkpoints; 0: none


class EvaluationConfig(Section):
    # Tune: set it (or every_s) to have the best checkpoint chosen; less often if evaluations hold up the generator
    every_steps: NonNegative = 0  # steps between validations during the run; 0: never
    every_s: Seconds | None = None  # time between validations during the run
    # Tune: "after" or "never" where the test set takes longer than the training that it is to judge
    test: Literal["both", "before", "after", "never"] = "both"  # when tasks.test is evaluated, with held weights
    # Tune: raise it when the standard error is larger than the change that you want to see
    samples_per_task: Positive = 1  # attempts at each task
    # Tune: 0 to compare with published greedy scores; 1 to see the policy that is trained
    temperature: Annotated[float, Field(ge=0)] = 1.0  # sampling temperature; 0 takes the most likely token
    stop_at_solve_rate: Annotated[float, Field(gt=0, le=1)] | None = None  # end early once validation reaches it

    @property
    def before(self) -> bool:
        """Whether held tasks are evaluated before training."""
        return self.test in ("both", "before")

    @property
    def after(self) -> bool:
        """Whether held tasks are evaluated after training, with the best checkpoint's weights, when there is one."""
        return self.test in ("both", "after")


RecordedShare = Literal["all", "none"] | Annotated[float, Field(gt=0, le=1)]


class LedgerConfig(Section):
    """Reports of a run in addition to RUN/ledger.jsonl: docs/monitoring.md."""

    trackers: Trackers = ()  # each needs its extra, say headway[wandb]
    project: str = "headway"  # trackers: the project (MLflow: the experiment) the run is filed under
    name: str = ""  # trackers: the run's name; default: the last part of run.directory
    tags: tuple[str, ...] = ()  # trackers: labels to find the run by
    table_every_steps: NonNegative = 10  # trackers: kept rollouts with their texts, as a table; 0: texts stay here
    prometheus: Address = ""  # HOST:PORT that serves /metrics during the run; port 0: any free one; "": none
    trace: bool = True  # RUN/trace.jsonl: when each process worked, for `headway trace` (at most 128 MB)
    pass_at: Annotated[tuple[Positive, ...], distinct_names("k")] = ()  # k of pass@k; (): 1, 2, 4, ... up to a group
    # Tune: a share, or "none", when disks are small: a token takes 17 bytes
    rollouts: RecordedShare = "all"  # with all tokens in RUN/rollouts, for `headway show` and `export`; number: a share
    rollouts_max_bytes: Positive | None = 100 * 10**9  # size of RUN/rollouts at which recording ends; None: no limit


class Experiment(Section):
    """The whole experiment file."""

    joins_groups: ClassVar[bool] = False  # the sequences of a group are one trajectory to a critic
    run: RunConfig
    model: ModelConfig
    tasks: TasksConfig
    verifier: VerifierConfig = VerifierConfig()
    verifiers: dict[str, VerifierSettings] = {}
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    endpoint: EndpointSection = EndpointSection()
    generator: GeneratorConfig = GeneratorConfig()
    router: RouterSection = RouterSection()
    queue: QueueConfig = QueueConfig()
    buffer: BufferConfig = BufferConfig()
    hooks: HooksConfig = HooksConfig()
    curriculum: CurriculumSection = CurriculumSection()
    pruning: PruningConfig = PruningConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    teachers: dict[str, TeacherConfig] = {}
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    ledger: LedgerConfig = LedgerConfig()
    alerts: AlertsConfig = AlertsConfig()
    control: ControlConfig = ControlConfig()
    cluster: ClusterConfig = ClusterConfig()
    sft: SftConfig = SftConfig()

    @model_validator(mode="before")
    @classmethod
    def _apply_presets(cls, raw: Any) -> Any:
        return apply_dtype(apply_preset(without_auto(raw)))

    @property
    def rules(self) -> Rules[AlgorithmConfig]:
        """The rules by which the training sources' samples are trained. Raises ValueError for a source's bad key."""
        sampled_teachers = [name for name, teacher in self.teachers.items() if teacher.samples]
        return make_rules(self.algorithm, self.tasks.train, sampled_teachers)

    @property
    def used_teachers(self) -> dict[str, TeacherConfig]:
        """The teachers that some source's rule names, by name."""
        names = dict.fromkeys(self.rules.algorithms[number].teacher for number in self.rules.used)
        return {name: self.teachers[name] for name in names if name}

    @property
    def surplus_groups(self) -> int:
        """Groups that may be open beyond what admission allows, because surplus is discarded."""
        queue, limit = self.queue, self.open_groups
        return limit - queue.groups_per_step if queue.surplus == "discard" and limit is not None else 0

    @property
    def open_groups(self) -> int | None:
        """Largest number of open groups by queue.oversampling; None: all that admission allows."""
        share = self.queue.oversampling
        return None if share is None else math.ceil(share * self.queue.groups_per_step)

    @property
    def token_budget(self) -> int | None:
        """Staleness beyond which tokens carry no loss; None: all tokens carry loss."""
        limits = self.queue.budget if self.queue.overdue == "mask" else None, self.queue.max_token_staleness
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def uses_chat(self) -> bool:
        """Whether responses are turns of the chat template."""
        return self.model.template == "chat" or self.environment.name != "single_turn"

    @property
    def kept_sets(self) -> int:
        """`SamplingParameters.kept_sets` of samples to train on, if top_p, top_k or grammars may truncate; else 0."""
        return self.algorithm.truncation_support_tokens if self.algorithm.allow_truncated_sampling else 0

    @property
    def constrains(self) -> bool:
        """Whether the run may train on answers that grammars constrained."""
        return self.kept_sets > 0 and self.environment.calls

    @property
    def max_sequence_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def smallest_group(self) -> int:
        """Smallest number of rollouts that a group is opened with."""
        is_adaptive = self.curriculum.mode == "adaptive"
        return (self.curriculum.min_group_size if is_adaptive else None) or self.rollout.group_size

    @property
    def largest_group(self) -> int:
        """Largest number of rollouts of a group."""
        is_adaptive = self.curriculum.mode == "adaptive"
        return (self.curriculum.max_group_size if is_adaptive else None) or self.rollout.group_size

    @property
    def task_cooldown_groups(self) -> tuple[int, int]:
        """Groups for which the curriculum doesn't draw a task of its band again: the minimum (all that may be open, so
        that a task seldom has two groups open), and the number that it keeps where it has a choice."""
        queue = self.queue
        min_groups = queue.groups_per_step * (queue.budget + 1)
        return min_groups, max(min_groups, REPEAT_STEPS * queue.groups_per_step)

    @property
    def concurrent_rollouts(self) -> int:
        """Largest number of rollouts that may hold a slot or wait for one at once (at least one group)."""
        if self.queue.max_concurrent_rollouts is not None:
            return max(self.queue.max_concurrent_rollouts, self.largest_group)
        slots = self.generator.slots * len(self.generator.devices)
        return max(slots, self.largest_group) + self.generator.prefetch_groups * self.rollout.group_size
