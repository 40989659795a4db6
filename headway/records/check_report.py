"""The report of `headway check`: findings, measurements and predictions, all that it prints and ``--json`` gives."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

import msgspec

from headway.records.errors import ConfigurationError

Level = Literal["error", "warning", "info"]
_ORDER: tuple[Level, ...] = ("error", "warning", "info")
Constraint = Literal["generator", "trainer", "verifier", "teacher", "kv", "admission", "environment", "other"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem or remark that `check` found. An error means that the run would fail, hang or mean nothing."""

    level: Level
    key: str  # the configuration key to look at
    message: str


class Findings(list[Finding]):
    """Findings in the order they were made; ``key``: the configuration key concerned.

    Example: ``with findings.refused("model.path"): Tokenizer.load(folder)`` adds an error where that raises one.
    """

    def error(self, key: str, message: str) -> None:
        self.append(Finding(level="error", key=key, message=message))

    def warning(self, key: str, message: str) -> None:
        self.append(Finding(level="warning", key=key, message=message))

    def info(self, key: str, message: str) -> None:
        self.append(Finding(level="info", key=key, message=message))

    @contextmanager
    def refused(self, key: str) -> Generator[None]:
        """End the block at a ConfigurationError, which becomes an error of ``key``."""
        try:
            yield
        except ConfigurationError as error:
            self.error(key, str(error).removeprefix(f"{key}: "))

    def by_level(self) -> list[Finding]:
        """All findings, errors first."""
        return sorted(self, key=lambda finding: _ORDER.index(finding.level))


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """The most memory or disk space that one process, or one kind of file, will need."""

    name: str  # generator-0, trainer-0, verifiers, orchestrator, published weights, checkpoints, buffer
    location: str  # "memory", a GPU, or a folder
    parts: dict[str, int]  # bytes by purpose
    offloadable_bytes: int = 0  # part of it that is free while the other side computes on a shared GPU
    measured_bytes: int | None = None  # peak resident memory of the real process while it was calibrated

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


class MemoryPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The total need of all processes and files in one place, against what is there. None: can't be determined here."""

    name: str
    needed_bytes: int
    capacity_bytes: int | None  # in all (of a container: its limit)
    available_bytes: int | None  # free now


class LengthSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Response lengths, tokens; responses that the calibration's end cut off are censored, not short."""

    finished: int  # responses that ended
    truncated: int  # ... of them at max_response_tokens
    censored: int  # responses still growing when the calibration ended
    longest_tokens: int  # the longest seen, ended or not
    mean_tokens: float  # the estimate used: Kaplan-Meier, with an exponential tail beyond the longest seen
    mean_least_tokens: float  # if every response still growing had ended where it was cut, and ...
    mean_most_tokens: float  # ... if each had grown to max_response_tokens
    p50_tokens: int
    p99_tokens: int
    p99_seen: bool  # False: p99 lies beyond the longest seen and is extrapolated
    group_correlation: float  # of the lengths inside a group, 0 (none) to 1


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the real workers over a few seconds. Rates are totals over all replicas, or over all ranks."""

    measured_s: float  # starting the workers not counted
    start_s: float  # starting them, models loaded
    at_once: bool  # trainer and generator were measured at the same time, on devices of their own
    lengths: LengthSummary
    prompt_tokens: float  # mean of the tasks used
    prefill_tokens_per_s: float  # 0: not measured
    decode_running: float  # requests that decoded together in the mean, all replicas
    decode_tokens_per_s: float  # with nothing beside it
    decode_beside_tokens_per_s: float | None  # while the trainer computed; None: not measured at once
    decode_fixed_s: float  # a decode step of one replica takes fixed + requests x request
    decode_request_s: float
    train_tokens_per_s: float  # prompt and response, of a step of ``train_samples``
    train_samples: int  # largest batch that was timed
    train_fixed_s: float  # a training step takes fixed + tokens x token
    train_token_s: float
    publish_s: float
    apply_s: float  # from the announcement of a version until every replica has applied it
    pause_s: float  # of decoding, in it
    verify_response_s: float  # one worker, the way to it and back included; 0: nothing to verify
    teach_response_s: float = 0.0  # of a rollout at teachers outside of the trainer, one of those at once; 0: none
    groups: int  # groups whose members all ended and were verified
    accepted_groups: int  # ... of them trainable: neither failed nor (where that is filtered) of zero variance
    failed_rollouts: int
    failure_cause: str = ""  # of one of them
    resident_bytes: dict[str, int] = {}  # process -> peak resident memory


class QueueOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run in steady state."""

    samples_per_s: float  # trained
    trainer_wait: float  # share of the time
    straggler_wait: float  # ... of it spent on unfinished groups at the budget's edge though a batch had finished
    generator_wait: float  # share of the time with no request at all, or paused for a trainer on the same device
    slots_filled: float  # mean share of the slots
    teaching: float = 0.0  # share of the time in which teachers outside of the trainer score
    staleness_mean: float  # of trajectories, versions
    staleness_max: int


class BudgetShare(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted throughput and staleness under one staleness budget."""

    budget: int
    share: float  # of the ideal rate
    staleness_mean: float


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the configuration and what it is predicted to gain."""

    key: str
    value: str
    constraint: Constraint  # what it relieves
    gain: float  # in samples/s, relative
    needs: str = ""  # what it takes beside the change: a device, memory


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The run's rates before it starts."""

    production_per_s: float  # samples/s that the generator makes at the configured concurrency
    acceptance: float | None  # share of groups that will be trained; None: too few groups ended to say
    effective_per_s: float  # production x acceptance (1 where that is unknown)
    consumption_per_s: float  # samples/s the trainer takes, publishing included
    verify_per_s: float | None  # samples/s all verifier workers can score
    yielded_share: float  # of the replicas: they yield their devices to the trainer, and pause meanwhile
    balance: float  # effective production / consumption
    ideal_per_s: float  # the lower of both rates; where all replicas yield 1 / (1/production + 1/consumption)
    outcome: QueueOutcome
    steps_per_h: float
    training_s: float  # until run.steps or run.time_limit_s, whichever is sooner
    evaluation_s: float  # held evaluations before and after
    total_s: float
    longest_tokens: int  # L_max of the rule for the budget ...
    longest_is: Literal["limit", "p99"]  # ... max_response_tokens, or the p99 of the calibration
    needed_budget: int  # eta >= L_max x concurrency / (samples per step x mean length)
    budgets: list[BudgetShare]
    binding: Constraint
    reason: str
    changes: list[Change]  # the largest predicted gain first


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `headway check` reports."""

    findings: list[Finding]  # errors first
    memory: list[MemoryUse] = []
    places: list[MemoryPlace] = []
    calibration: Calibration | None = None
    forecast: Forecast | None = None
