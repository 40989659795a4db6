"""The experiment file: every key, its unit, its default and what is valid.

One TOML file holds a whole experiment. Unknown keys are errors (``load.py`` names the nearest valid one).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from headway.config.adapter import AdapterConfig, Quantization
from headway.config.alerts import AlertsConfig
from headway.config.buffer import BufferConfig
from headway.config.cluster import ClusterConfig
from headway.config.control import ControlConfig
from headway.config.curriculum import CurriculumConfig
from headway.config.endpoint import EndpointConfig, EnvironmentConfig
from headway.config.hooks import HooksConfig
from headway.config.presets import apply_preset
from headway.config.pruning import PruningConfig
from headway.config.router import RouterConfig
from headway.config.sandbox import SandboxConfig
from headway.config.section import (
    NonNegative,
    Positive,
    RankDevices,
    ReplicaDevices,
    Seconds,
    Section,
    host_port,
    named_once,
    require_named,
)
from headway.config.sources import SftData, TaskSources, VerifierSettings

Bounds = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]  # lowest and highest that pass

# Names that need no import; a user's own is module:function.
GROUP_ADVANTAGES = ("group_mean", "group_mean_std", "leave_one_out", "length_weighted", "pass_at_k")
ADVANTAGES = (*GROUP_ADVANTAGES, "batch_mean_std", "group_mean_batch_std")
LOSSES = ("ppo_clip", "decoupled_ppo", "gspo", "gmpo", "sapo", "cispo", "dppo", "dro", "reinforce")

Trackers = Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], named_once("tracker")]
Address = Annotated[str, host_port("127.0.0.1:9464", optional=True)]
Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "reinforce++",
    "reinforce++-baseline",
    "rloo",
    "gpg",
    "gspo",
    "gmpo",
    "sapo",
    "cispo",
    "areal",
]


class RunConfig(Section):
    directory: str  # everything the run writes; one run at a time may hold it
    seed: int = 0  # of task order and sampling; rollouts are keyed (seed, group, member, position)
    steps: Positive = 100  # completed training steps at which the run ends
    time_limit_s: Seconds | None = None  # training stops after this many seconds and the run ends in order
    offload: bool = False  # a side that doesn't compute on a shared device frees its memory
    deterministic: bool = False  # fixed batch shapes: on CPU and with budget 0, a run is bit-reproducible
    worker_start_timeout_s: Seconds = 600.0  # a process that is not up by then (its model loaded) is killed
    stop_grace_s: Seconds = 120.0  # from Ctrl-C, SIGTERM or SIGUSR1 to the run's end, resumable
    on_stall: Literal["warn", "restart", "end"] = "warn"  # what follows a stall: restart the worker, or end resumable


class ModelConfig(Section):
    path: str  # folder with config.json, *.safetensors and the tokenizer (Hugging Face layout)
    template: Literal["raw", "chat"] = "raw"  # how a task's prompt becomes tokens
    reference: str = ""  # folder of the model a KL penalty holds on to; default: path
    adapter: AdapterConfig | None = None  # trained beside the model's weights, which then stay as they are
    quantization: Quantization | None = None  # of the weights beside an adapter: NF4 or a dynamic 8-bit type

    @model_validator(mode="after")
    def _frozen_if_quantized(self) -> ModelConfig:
        if self.quantization is not None and self.adapter is None:
            raise ValueError(f"quantization = {self.quantization!r} without model.adapter: codes can't be trained")
        return self


class TasksConfig(Section):
    train: TaskSources
    validation: TaskSources | None = None  # evaluated during the run; the best checkpoint is chosen by it
    test: TaskSources | None = None  # evaluated with held weights before and after

    @model_validator(mode="after")
    def _own_keys(self) -> TasksConfig:
        for name, sources in (("train", self.train), ("validation", self.validation), ("test", self.test)):
            for source in sources or ():
                for key in ("seed", "size"):
                    if source.source == "reasoning-gym" and key in source.parameters:
                        given = f"tasks.{name}.parameters.{key} = {source.parameters[key]!r}"
                        raise ValueError(f"{given} has no effect: set tasks.{name}.{key}")
        return self


class VerifierConfig(VerifierSettings):
    """Scores the responses to every task that chooses no other."""

    workers: Positive = 1  # processes; each can score with every verifier
    nodes: tuple[str, ...] = ()  # of cluster.nodes, assigned in turn; "": this machine; (): all here


class RolloutConfig(Section):
    group_size: Positive = 8  # attempts at one task; advantages compare them: 1 only with batch_mean_std
    max_prompt_tokens: Positive = 512  # longer prompts are refused by `check`, and fail their group
    max_response_tokens: Positive = 256  # a longer response is cut, and counted as truncated
    temperature: Annotated[float, Field(gt=0)] = 1.0  # of sampling; the trainer divides by the same
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # nucleus mass; below 1 see algorithm.allow_truncated_sampling
    top_k: NonNegative = 0  # most likely tokens kept; 0 keeps all; else see algorithm.allow_truncated_sampling
    stop: tuple[str, ...] = ()  # any of these strings ends a response
    timeout_s: Seconds = 600.0  # a rollout open for longer ends as failed
    retries: NonNegative = 2  # of infrastructure failures, of the engine's and of the verifier's


class GeneratorConfig(Section):
    engine: Literal["torch", "vllm", "vllm-server"] = "torch"  # own; vLLM 0.32 in a replica, or served: docs/vllm.md
    engine_arguments: dict[str, Any] = {}  # of vLLM's EngineArgs, passed on as they are: docs/vllm.md
    probe_every_updates: NonNegative = 1  # vLLM: one update in so many is proved to be what is sampled from; 0: none
    exchange_directory: str | None = None  # vllm-server: new weights are written here for it to read; unset: /dev/shm
    devices: ReplicaDevices = ("cpu:0",)  # one replica each: [NODE/]cuda:N, cpu:N, cpu:N-M; 4*cuda; http://HOST:PORT
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and KV; a CPU without bfloat16 products widens both
    native_kernels: bool = True  # on one CPU core: C++ kernels built at first use; without a compiler plain torch
    prefill_tokens_per_step: Positive = 8192  # of prompts, beside the running requests; longer ones take several steps
    slots: Positive = 64  # concurrent requests of one replica
    kv_capacity_tokens: Positive | None = None  # default: slots x (max prompt + max response tokens)
    queue_ahead_groups: NonNegative = 2  # groups waiting inside the engines so that no slot runs dry
    update_mode: Literal["keep", "recompute", "abort", "finish", "drain"] = "keep"  # of those in flight: docs/async.md


class QueueConfig(Section):
    """Admission, staleness and what enters a batch."""

    groups_per_step: Positive = 8  # groups of one batch
    groups_per_part: Positive | None = None  # the trainer computes on so many while the rest finish; default: on all
    budget: NonNegative = 4  # eta: largest trajectory staleness trained on; 0 is synchronous
    overdue: Literal["wait", "drop", "mask"] = "wait"  # of groups at the budget's edge: docs/async.md
    max_concurrent_rollouts: Positive | None = None  # default: all slots, plus queue_ahead_groups x group_size
    oversampling: Annotated[float, Field(ge=1)] | None = None  # open groups / those of a batch; default: all admitted
    surplus: Literal["continue", "park", "discard"] = "continue"  # of groups unfinished when a batch is full
    max_resumes: NonNegative = 2  # a rollout parked so often runs uninterrupted from then on
    budget_s: Seconds | None = None  # groups that have been open for longer end as overdue, whatever `overdue` says
    max_token_staleness: NonNegative | None = None  # tokens staler than this are old; default: none is
    old_tokens: Literal["mask", "train"] = "mask"  # carry no loss, or train as if the present weights had sampled them
    max_optimizer_step_staleness: NonNegative | None = None  # in optimiser steps: budget must keep to it; default: any
    max_environment_staleness: NonNegative | None = None  # of a parked rollout's environment; default: any
    stale_environment: Literal["restart", "fail"] = "restart"  # a staler one: the rollout begins anew, or fails
    filter_zero_variance: bool = True  # groups whose rewards are all equal are filtered: they have no gradient
    min_advantage: Annotated[float, Field(ge=0)] = 0.0  # a group without an advantage of this size is filtered
    min_valid_group_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5  # a group with fewer members without failure fails
    min_valid_item_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0  # a group with a smaller share left is filtered
    group_timeout_s: Seconds | None = None  # a group generating (or parked) for longer ends with those finished ...
    min_timeout_group_ratio: Annotated[float, Field(gt=0, le=1)] = 0.7  # ... if they are this share of it, or fails
    give_up_after_batches: Positive = 100  # the run ends when groups of so many batches in a row end untrained


class AlgorithmConfig(Section):
    preset: Preset | None = None  # a published method: fills in keys that aren't given (config/presets.py)
    advantage: str = "group_mean_std"  # in a group or _batch: algorithms/advantages.py, or your own module:function
    advantage_k: Positive = 2  # pass_at_k: the best of so many attempts is what counts
    loss: str = "decoupled_ppo"  # trainer/losses.py, or your own module:function
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2  # the ratio is clipped to 1 - clip_low ...
    clip_high: Annotated[float, Field(gt=0)] = 0.28  # ... 1 + clip_high
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # bound of the ratio where the advantage is negative
    behaviour_weight_cap: Annotated[float, Field(gt=0)] = 2.0  # truncated importance weight (TIS); 1e9: never truncated
    turn_discount: Annotated[float, Field(ge=0, le=1)] | None = None  # of rewards by turn, to go; unset: outcome alone
    aggregation: Literal["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean"  # of losses
    fixed_denominator_tokens: Positive | None = None  # 'fixed': default samples x max_response_tokens
    proximal: Literal["auto", "recompute", "current"] = "auto"  # auto: current when one optimiser step per batch
    token_mask: Bounds | None = None  # tokens whose weight pi_prox / pi_behav is outside carry no loss (IcePop: 0.5, 5)
    sequence_mask: Bounds | None = None  # samples whose weight, by the next key, is outside carry no loss
    sequence_mask_by: Literal["mean", "sum", "max"] = "mean"  # of log weights: geometric mean, product, any one token
    second_moment_limit: Annotated[float, Field(gt=0)] | None = None  # M2PO: mean squared log weight kept (paper: 0.04)
    sapo_temperature_positive: Annotated[float, Field(gt=0)] = 1.0  # sapo: steepness of its gate if A > 0
    sapo_temperature_negative: Annotated[float, Field(gt=0)] = 1.05  # sapo: the same otherwise; higher fades sooner
    dro_beta: Annotated[float, Field(gt=0)] = 0.05  # dro: weight of half the squared log ratio
    divergence: Literal["tv", "kl"] = "tv"  # dppo: of a token, |difference in probability| or binary KL in nats
    divergence_limit: Annotated[float, Field(gt=0, lt=1)] = 0.15  # dppo: most of a token (paper: kl 0.05)
    early_stop_ratio: Annotated[float, Field(gt=0)] | None = None  # mean |ratio - 1| that ends a batch's updates
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0  # of the KL penalty against model.reference; 0: none
    kl_target: Annotated[float, Field(gt=0)] | None = None  # nats per token that the coefficient adapts to
    kl_horizon: Annotated[float, Field(gt=0)] = 10000.0  # samples; a step's error is weighed by its share of them
    kl_estimator: Literal["k1", "k2", "k3", "k1_unbiased", "k3_unbiased"] = "k3"  # trainer/kl.py
    kl_in: Literal["loss", "reward"] = "loss"  # where the penalty is put; in the reward: k1 of each token, to go
    overlong: Literal["score", "mask", "penalty", "filter"] = "score"  # if cut: as it is, unlearnt, costlier, left out
    overlong_buffer_tokens: Positive | None = None  # penalty: over these last tokens it rises; default: a fifth of all
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0  # penalty: reward taken from a response at the limit
    allow_truncated_sampling: bool = False  # train on top_p / top_k samples, whose bias is not corrected

    @field_validator("advantage", "loss")
    @classmethod
    def _named(cls, value: str, info: ValidationInfo) -> str:
        return require_named(value, ADVANTAGES if info.field_name == "advantage" else LOSSES)

    @field_validator("token_mask", "sequence_mask")
    @classmethod
    def _ordered(cls, value: Bounds | None) -> Bounds | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("nothing passes: valid: [lowest, highest], the first below the second")
        return value


class TrainerConfig(Section):
    devices: RankDevices = ("cpu:1",)  # one rank each; 2*cuda: on one of the cluster's nodes
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the forward and backward; the optimiser is float32
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5  # peak; 0 changes nothing (a control run)
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up; the others decay to 0
    warmup_steps: NonNegative = 0  # steps over which the learning rate rises linearly
    schedule_steps: Positive | None = None  # length of the decay; default: run.steps
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # AdamW
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95  # AdamW
    epsilon: Annotated[float, Field(gt=0)] = 1e-8  # AdamW
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # AdamW
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0  # gradients are scaled down to it
    micro_batch_tokens: Positive = 16384  # most tokens in one forward pass (or a single longer sample)
    packing: Literal["balanced", "areal", "fixed"] = "balanced"  # how samples are spread over micro-batches and ranks
    micro_batch_samples: Positive | None = None  # fixed: a forward pass has so many (branches count), of any length
    shared_prefix: bool = True  # a prompt is computed once for all of its group in a micro-batch: same gradient
    native_kernels: bool = True  # in float32 on one CPU core: C++ kernels, gradients equal to rounding
    gradient_checkpointing: bool = False  # layers are computed again in the backward: less memory, a third more work
    optimizer_steps_per_batch: Positive = 1  # a batch is split by group into so many updates


class WeightsConfig(Section):
    transport: Literal["shared_memory"] = "shared_memory"  # between processes of one machine
    steps_per_publish: Positive = 1  # publish one version in so many; queue.budget must be >= this - 1


class CheckpointConfig(Section):
    every_steps: Positive = 50  # and one at the end
    keep_last: Positive = 2  # older ones are removed


class EvaluationConfig(Section):
    every_steps: NonNegative = 0  # validation during the run; 0: never
    every_s: Seconds | None = None  # ... or by time
    before: bool = True  # test with held weights before training
    after: bool = True  # test with held weights after training (the best checkpoint's, when there is one)
    samples_per_task: Positive = 1  # attempts at each task
    temperature: Annotated[float, Field(ge=0)] = 1.0  # 0 takes the most likely token
    stop_at_solve_rate: Annotated[float, Field(gt=0, le=1)] | None = None  # end early once validation reaches it


Recorded = Literal["all", "none"] | Annotated[float, Field(gt=0, le=1)]


class LedgerConfig(Section):
    """Reports of a run in addition to RUN/ledger.jsonl: docs/monitoring.md."""

    trackers: Trackers = ("tensorboard",)  # the others need headway[wandb], headway[mlflow], headway[trackio]
    project: str = "headway"  # trackers: the project (MLflow: the experiment) the run is filed under
    name: str = ""  # trackers: the run's name; default: the last part of run.directory
    group: str = ""  # trackers: what runs are compared in, say the seeds of one setting
    tags: tuple[str, ...] = ()  # trackers: labels to find the run by
    table_every_steps: NonNegative = 10  # trackers: kept rollouts, text and all, as a table; 0: texts stay here
    prometheus: Address = ""  # HOST:PORT that serves /metrics while the run goes on; port 0: any free one; "": nowhere
    trace: bool = True  # RUN/trace.jsonl: who ran when, for `headway trace` (at most 128 MB)
    pass_at: Annotated[tuple[Positive, ...], named_once("k")] = ()  # k of pass@k; (): 1, 2, 4, ... up to a group
    samples_per_step: NonNegative = 2  # trackers: kept rollouts of a step
    rollouts: Recorded = "all"  # in RUN/rollouts with all tokens, for `headway show` and `export`; a number: that share
    rollouts_max_bytes: Positive | None = 100 * 10**9  # of RUN/rollouts: at that size it ends; None: without limit


class SftConfig(Section):
    """Supervised cold start (`headway sft`)."""

    data: SftData = None  # a JSONL file, or a table: rows with "prompt" and "solution", or with "messages"
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"  # whose tokens carry loss: docs/inputs.md
    output: str = ""  # folder of the trained model: a new or empty one, or one of an earlier `headway sft`
    device: str = "cpu:0-1"  # cuda:N, cpu:N, cpu:N-M
    epochs: Annotated[float, Field(gt=0)] | None = 3  # passes over the data; fewer if the held-out loss rises
    steps: Positive | None = None  # optimiser steps at which it ends, in place of sft.epochs; nothing is held out then
    batch_sequences: Positive = 32  # sequences of one step
    learning_rate: Annotated[float, Field(ge=0)] = 2e-3  # peak
    warmup_steps: NonNegative = 20  # steps over which the learning rate rises linearly
    schedule: Literal["constant", "linear", "cosine"] = "cosine"  # after the warm-up, to the last step
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # AdamW
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0  # gradients are scaled down to it
    micro_batch_tokens: Positive = 16384  # most tokens in one forward pass
    max_tokens: Positive = 512  # longer sequences (prompt and solution, or conversation) are dropped and counted
    time_limit_s: Seconds | None = None  # ends it after this many seconds
    evaluate_every_steps: NonNegative = 0  # sampled solve rate, or shares of kernels, on tasks.validation; 0: never
    stop_at_solve_rate: Annotated[float, Field(gt=0, le=1)] | None = None  # ends it: RL needs room above it

    @model_validator(mode="before")
    @classmethod
    def _ended_by_one(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        given = cast("dict[str, Any]", raw)
        epochs, steps = given.get("epochs"), given.get("steps")
        if steps is None:
            return given
        if epochs is not None:
            raise ValueError(f"sft.epochs = {epochs} and sft.steps = {steps} both say when it ends; valid: one of them")
        return given | {"epochs": None}

    def total_steps(self, sequences: int) -> int:
        """Optimiser steps of the whole training on so many sequences."""
        return self.steps or math.ceil((self.epochs or 3) * sequences / self.batch_sequences)


class Experiment(Section):
    """The whole experiment file."""

    run: RunConfig
    model: ModelConfig
    tasks: TasksConfig
    verifier: VerifierConfig = VerifierConfig()
    verifiers: dict[str, VerifierSettings] = {}
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    endpoint: EndpointConfig = EndpointConfig()
    generator: GeneratorConfig = GeneratorConfig()
    router: RouterConfig = RouterConfig()
    queue: QueueConfig = QueueConfig()
    buffer: BufferConfig = BufferConfig()
    hooks: HooksConfig = HooksConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    pruning: PruningConfig = PruningConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
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
    def _filled_by_preset(cls, raw: Any) -> Any:
        return apply_preset(raw)

    @property
    def surplus_groups(self) -> int:
        """Groups that may be open beyond what admission allows, because surplus is discarded."""
        queue = self.queue
        if queue.surplus != "discard" or queue.oversampling is None:
            return 0
        return math.ceil(queue.oversampling * queue.groups_per_step) - queue.groups_per_step

    @property
    def open_groups(self) -> int | None:
        """Most groups open at once, as queue.oversampling says; None: all that admission allows."""
        queue = self.queue
        return None if queue.oversampling is None else math.ceil(queue.oversampling * queue.groups_per_step)

    @property
    def token_budget(self) -> int | None:
        """Staleness beyond which tokens carry no loss; None: all do."""
        queue = self.queue
        limits = [queue.budget] if queue.overdue == "mask" else []
        if queue.max_token_staleness is not None and queue.old_tokens == "mask":
            limits.append(queue.max_token_staleness)
        return min(limits, default=None)

    @property
    def max_sequence_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def smallest_group(self) -> int:
        """Fewest rollouts that a group is opened with."""
        adaptive = self.curriculum.mode == "adaptive"
        return (self.curriculum.min_group_size if adaptive else None) or self.rollout.group_size

    @property
    def largest_group(self) -> int:
        """Most rollouts of a group."""
        adaptive = self.curriculum.mode == "adaptive"
        return (self.curriculum.max_group_size if adaptive else None) or self.rollout.group_size

    @property
    def task_rest_groups(self) -> tuple[int, int]:
        """Groups for which the curriculum doesn't draw a task of its band again: at least (all that may be open, so
        that a task seldom has two groups open) and where it has a choice."""
        queue = self.queue
        least = queue.groups_per_step * (queue.budget + 1)
        return least, max(least, self.curriculum.repeat_after_groups or 16 * queue.groups_per_step)

    @property
    def concurrent_rollouts(self) -> int:
        """Most rollouts that may hold a slot or wait for one at once (at least one group)."""
        if self.queue.max_concurrent_rollouts is not None:
            return max(self.queue.max_concurrent_rollouts, self.largest_group)
        slots = self.generator.slots * len(self.generator.devices)
        return max(slots, self.largest_group) + self.generator.queue_ahead_groups * self.rollout.group_size


# Keys that may differ from the run's stored configuration when it is resumed; all others must be equal. A part that is
# * stands for one name. The limit in a source's own table, tasks.*.verifier.timeout_s, is none of them: stored tasks
# know their verifier by that whole table, and a group that is open at the resume would ask for one that isn't there.
RESUMABLE_KEYS = {
    "run": "steps time_limit_s directory worker_start_timeout_s stop_grace_s on_stall",
    "generator": "devices engine_arguments engine_arguments.* probe_every_updates exchange_directory slots "
    "kv_capacity_tokens queue_ahead_groups update_mode",
    "router": "*",
    "queue": "give_up_after_batches group_timeout_s min_timeout_group_ratio max_concurrent_rollouts max_resumes",
    "buffer": "*.*",
    "hooks": "group_meta logging",
    "weights": "steps_per_publish",
    "pruning": "* *.* *.parameters.*",
    "trainer": "devices micro_batch_tokens micro_batch_samples shared_prefix gradient_checkpointing",
    "verifier": "timeout_s workers nodes",
    "verifiers": "*.timeout_s",
    "rollout": "timeout_s retries",
    "environment": "workers nodes concurrency starts_per_s timeout_s stop_grace_s models.*.address "
    "models.*.api_key_env models.*.concurrency models.*.timeout_s models.*.retries models.*.retry_s",
    "sandbox": "ttl_s exec_timeout_s live starts retries start_timeout_s hedge_share reap_every_s inject_faults "
    "allow_unbounded store store_bytes snapshot_bytes",
    "endpoint": "address max_body_bytes call_timeout_s body_timeout_s keep_alive_s stream_ping_s connections",
    "evaluation": "every_steps every_s before after samples_per_task stop_at_solve_rate",
    "control": "*",
    "checkpoint": "*",
    "ledger": "*",
    "alerts": "*",
    "cluster": "* nodes.* environment.*",
}
_RESUMABLE_PARTS = tuple((section, *key.split(".")) for section, keys in RESUMABLE_KEYS.items() for key in keys.split())


def is_resumable(key: str) -> bool:
    """Whether ``section.key`` may differ when a run is resumed."""
    parts = key.split(".")
    return any(
        len(pattern) == len(parts) and all(wanted in ("*", part) for wanted, part in zip(pattern, parts, strict=True))
        for pattern in _RESUMABLE_PARTS
    )
