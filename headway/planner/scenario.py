"""The scenario file of `headway simulate`: an experiment whose hardware, workload and environment are described."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from headway.config import endpoint
from headway.config.load import load_file
from headway.config.model import ModelConfig
from headway.config.schema import CheckpointConfig, EvaluationConfig, Experiment, LedgerConfig, RunConfig, TasksConfig
from headway.config.section import NonNegative, Positive, Section
from headway.planner.quantities import Quantity, constant

Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
Duration = Annotated[float, Field(ge=0)]
Slowdown = Annotated[float, Field(ge=1)]

# What [[drift]] may change: quantities and costs by a factor, shares to a value.
SHARES = ("workload.trivial_share", "workload.impossible_share")
DRIFTING = (
    "workload.prompt_tokens",
    "workload.response_tokens",
    "workload.turns",
    "workload.turn_tokens",
    "workload.reply_tokens",
    "workload.tool_s",
    "workload.verify_s",
    *SHARES,
    "environment.start_s",
    "hardware.trainer.step_s",
    "hardware.generator.decode_s",
)


class GeneratorHardware(Section):
    """The generator's replicas. Slots, KV capacity and update mode are keys of [generator]."""

    replicas: Positive = 1  # generator.devices names them: it can't be set in a scenario, nor can trainer.devices
    devices_per_replica: Positive = 1  # counted in device-hours
    decode_fixed_s: Duration = 0.02  # fixed cost of a decode step, which gives every running request a token
    decode_request_s: Duration = 0.0  # ... more for each running request
    decode_kv_token_s: Duration = 0.0  # ... more for each token in their KV
    prefill_tokens_per_s: Rate | None = None  # of a replica, which doesn't decode meanwhile; default: no time at all
    prefill_elsewhere: bool = False  # on devices of their own: a prefill delays its request alone
    update_s: Duration = 0.0  # pause of decoding for a weight update
    shares_devices: bool = False  # on the trainer's devices: decoding is paused during training steps
    beside: Slowdown = 1.0  # factor on a decode step while the trainer computes (shared memory bandwidth and cores)


class TrainerHardware(Section):
    devices: Positive = 1  # counted in device-hours
    step_fixed_s: Duration = 0.0  # fixed cost of a training step
    token_s: Duration = 0.0  # ... more for each token of the batch, prompts included
    step_s: Quantity = constant(0.0)  # ... more, as a quantity, say values by step
    beside: Slowdown = 1.0  # factor on a training step while the generator computes
    publish_s: Duration = 0.0  # time to publish a version
    version_bytes: Duration = 0.0  # of a version's weights, which go to the generator over a link, beside the next step
    link_bytes_per_s: Rate | None = None  # default: no time at all
    changed_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of values that a step changes: deltas; 1: whole versions
    checkpoint_s: Duration = 0.0  # time to write a checkpoint
    flops_per_token: Duration = 0.0  # of forward and backward; 6 x active parameters; for MFU
    peak_flops_per_s: Duration = 0.0  # of all its devices together; for MFU


class TeacherHardware(Section):
    """Teachers outside of the trainer. Without a time none scores rollouts."""

    at_once: Positive = 1  # rollouts that are scored at once: one a replica, or a server's requests
    rollout_s: Duration = 0.0  # time to score a rollout, one of them
    token_s: Duration = 0.0  # ... more for each token of the rollout, its prompt included


class Hardware(Section):
    generator: GeneratorHardware = GeneratorHardware()
    trainer: TrainerHardware = TrainerHardware()
    teachers: TeacherHardware = TeacherHardware()
    verifiers: Positive = 1  # verifier processes: each scores a group's responses one after another
    dollars_per_device_hour: Duration = 0.0  # price of a device, the generator's or the trainer's


class Workload(Section):
    """Tasks, response lengths, turns and rewards. An environment's reply tokens count as response tokens."""

    tasks: Positive = 1000  # distinct tasks
    prompt_tokens: Quantity = constant(128)  # prompt length of a task
    response_tokens: Quantity = constant(512)  # sampled tokens of a rollout with a single turn
    group_correlation: Share = 0.0  # correlation of the lengths inside a group
    turns: Quantity = constant(1)  # model calls of a rollout; all but the last are followed by a reply
    turn_tokens: Quantity = constant(256)  # sampled tokens of a turn, when there are several
    reply_tokens: Quantity = constant(256)  # tokens of an environment's reply
    tool_s: Quantity = constant(1.0)  # latency of an environment's reply
    solve_rate: Quantity = constant(0.5)  # solve rate of a task under the first weights
    trivial_share: Share = 0.0  # share of tasks that are always solved
    impossible_share: Share = 0.0  # share of tasks that are never solved
    learning: float = 0.0  # growth per training step of a task's log-odds of being solved
    verify_s: Quantity = constant(0.0)  # time to verify a response

    @model_validator(mode="after")
    def _shares(self) -> Workload:
        if self.trivial_share + self.impossible_share > 1:
            raise ValueError(
                f"trivial_share = {self.trivial_share:g} and impossible_share = {self.impossible_share:g} are more "
                "than all tasks together"
            )
        return self

    @property
    def multi_turn(self) -> bool:
        """Whether a rollout may have several turns."""
        return not self.turns.fixed or self.turns.at_normal(0.0) > 1


class ScenarioEnvironment(endpoint.EnvironmentConfig):
    """Sandboxes of rollouts with several turns. Their failures are retried rollout.retries times."""

    start_s: Quantity = constant(0.0)  # time to start a sandbox
    start: Literal["first_tool", "rollout"] = "first_tool"  # when the sandbox is started
    starting_at_once: Positive | None = None  # most sandboxes that start at the same time; the others wait
    live_at_once: Positive | None = None  # account limit on sandboxes: beyond it a start fails
    start_failure: Share = 0.0  # share of starts that fail
    tool_failure: Share = 0.0  # share of tool calls that lose the sandbox: the rollout restarts from its beginning
    keep_kv: bool = True  # KV is kept between turns, while there is room; else each turn prefills its whole prompt


class Drift(Section):
    """A change during the run: of a quantity by ``factor``, or of a share of the tasks to ``value``."""

    key: str  # one of: workload.response_tokens, workload.tool_s, environment.start_s, hardware.trainer.step_s, ...
    factor: Annotated[float, Field(gt=0)] | None = None  # final factor on the quantity
    value: Share | None = None  # final value of the share
    from_step: NonNegative = 0  # training step at which the change begins
    over_steps: NonNegative = 0  # steps over which it happens; 0: at once
    until_step: NonNegative | None = None  # training step at which it is undone; default: the change stays

    @field_validator("key")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in DRIFTING:
            raise ValueError(f"valid: {', '.join(DRIFTING)}")
        return value

    @model_validator(mode="after")
    def _check_keys(self) -> Drift:
        required, excluded = ("value", "factor") if self.key in SHARES else ("factor", "value")
        if getattr(self, required) is None or getattr(self, excluded) is not None:
            raise ValueError(f"key = {self.key!r} takes {required}, not {excluded}")
        if self.until_step is not None and self.until_step <= self.from_step:
            raise ValueError(f"until_step = {self.until_step} must be after from_step = {self.from_step}")
        return self

    def at(self, step: int, initial: float) -> float:
        """The value of ``initial``, a share or a factor, under this drift at a training step."""
        if step < self.from_step or (self.until_step is not None and step >= self.until_step):
            return initial
        done_share = 1.0 if not self.over_steps else min(1.0, (step - self.from_step) / self.over_steps)
        final_value = self.value if self.value is not None else initial * (self.factor or 1.0)
        return initial + (final_value - initial) * done_share


_NOT_SIMULATED = {
    "model": "no model is loaded",
    "tasks": "tasks are described by [workload]",
    "verifier": "verdicts are described by [workload]",
    "verifiers": "verdicts are described by [workload]",
    "evaluation": "evaluations are not simulated",
    "sft": "a cold start is not simulated",
    "endpoint": "nothing calls it",
}


_DEFAULTS: dict[str, dict[str, Any]] = {  # others than an experiment's, also where the file has such a section
    "run": {"directory": "runs/simulated"},
    "ledger": {"trackers": (), "trace": False, "rollouts": 0.0625},
    "checkpoint": {"every_steps": 1_000_000},
}


class Scenario(Experiment):
    """The whole scenario file."""

    run: RunConfig = RunConfig.model_validate(_DEFAULTS["run"])
    model: ModelConfig = ModelConfig(path="simulated")
    tasks: TasksConfig = TasksConfig.model_validate({"train": {"path": "simulated"}})
    evaluation: EvaluationConfig = EvaluationConfig(test="never")
    checkpoint: CheckpointConfig = CheckpointConfig.model_validate(_DEFAULTS["checkpoint"])
    ledger: LedgerConfig = LedgerConfig.model_validate(_DEFAULTS["ledger"])
    hardware: Hardware = Hardware()
    workload: Workload = Workload()
    environment: ScenarioEnvironment = ScenarioEnvironment()
    drift: tuple[Drift, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        settings: dict[str, Any] = dict(cast("dict[str, Any]", raw))  # of a TOML file
        for section, reason in _NOT_SIMULATED.items():
            if section in settings:
                raise ValueError(f"[{section}] isn't valid in a scenario: {reason}")
        section_table = settings.get("environment", {})
        for key in endpoint.EnvironmentConfig.model_fields:
            if isinstance(section_table, dict) and key in section_table:
                raise ValueError(f"environment.{key} has no place in a scenario: turns are described by [workload]")
        for section, default_keys in _DEFAULTS.items():
            section_table = settings.get(section, {})
            if isinstance(section_table, dict):
                settings[section] = default_keys | section_table
        return _with_devices(settings)

    def experiment(self) -> Experiment:
        """The experiment that is simulated: the scenario without hardware, workload, drift and environment; the
        hardware's verifiers become ``verifier.workers``."""
        experiment_fields = self.model_dump(mode="json", include=set(Experiment.model_fields) - {"environment"})
        return Experiment.model_validate(experiment_fields | {"verifier": {"workers": self.hardware.verifiers}})

    def drifted(self, key: str, step: int, current: float = 1.0) -> float:
        """The value of a share, or the factor of a quantity (initially 1), under all drifts at a training step."""
        for drift in self.drift:
            if drift.key == key:
                current = drift.at(step, current)
        return current

    @property
    def devices(self) -> int:
        generator = self.hardware.generator
        trainer_devices = 0 if generator.shares_devices else self.hardware.trainer.devices
        return generator.replicas * generator.devices_per_replica + trainer_devices


def _with_devices(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with a device name for each replica and rank: the run counts these, and derives from them which devices
    generator and trainer share."""
    hardware: Any = raw.get("hardware", {})
    tables = [hardware.get(section, {}) if isinstance(hardware, dict) else {} for section in ("generator", "trainer")]
    if not all(isinstance(section, dict) for section in (raw.get("generator", {}), raw.get("trainer", {}), *tables)):
        return raw  # validation reports this error
    replicas, ranks = tables[0].get("replicas", 1), tables[1].get("devices", 1)
    if not isinstance(replicas, int) or not isinstance(ranks, int):
        return raw
    for section, key in (("generator", "replicas"), ("trainer", "devices")):
        if "devices" in raw.get(section, {}):
            raise ValueError(f"{section}.devices has no place in a scenario: set hardware.{section}.{key}")
    generator_devices = [f"cuda:{index}" for index in range(max(1, replicas))]
    trainer_only = [f"cuda:{index}" for index in range(len(generator_devices), len(generator_devices) + max(1, ranks))]
    trainer_devices = generator_devices if tables[0].get("shares_devices") is True else trainer_only
    return raw | {
        "generator": raw.get("generator", {}) | {"devices": generator_devices},
        "trainer": raw.get("trainer", {}) | {"devices": trainer_devices},
    }


def load_scenario(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read and validate a scenario, as ``config.load.load_experiment`` does an experiment. The run's default folder is
    runs/simulated/NAME, after the file's name. Raises ConfigurationError."""
    scenario = load_file(path, overrides, Scenario)
    if scenario.run.directory == _DEFAULTS["run"]["directory"]:
        run_config = scenario.run.model_copy(update={"directory": f"runs/simulated/{Path(path).stem}"})
        scenario = scenario.model_copy(update={"run": run_config})
    return scenario
