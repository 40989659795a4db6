"""Typed errors and the exit code each ends the command with."""

from __future__ import annotations

from typing import Literal

FoundBy = Literal["exit", "health", "call", "node"]
"""How a worker's death was noticed: its process ended by itself; it missed its health checks, or a call to it failed,
and it was killed; or its node was lost."""


class HeadwayError(Exception):
    """Base of the errors a command reports as one clear message. ``exit_code`` ends the process; ``page`` of the
    documentation says more, "" where none does."""

    exit_code = 1
    page = ""


class ConfigurationError(HeadwayError):
    """Bad input: names the key or field, the value, and what would be valid."""

    exit_code = 2


class RunLocked(ConfigurationError):
    """Another process has locked the run directory."""

    page = "docs/map.md#a-runs-folder"


class EpochLost(HeadwayError):
    """The run's epoch was taken by another orchestrator, or couldn't be renewed: this one commits nothing more."""

    exit_code = 3
    page = "docs/several_machines.md#the-accounting-its-copy-and-resuming-elsewhere"


class CheckpointCorrupt(ConfigurationError):
    """A checkpoint fails its checksums; names the file."""

    page = "docs/map.md#a-runs-folder"


class StepRefused(HeadwayError, ValueError):
    """The trainer refuses a call that contradicts its version, earlier calls or the algorithm; nothing was changed."""


class RanksDiffer(HeadwayError):
    """The trainer's ranks were given calls that contradict one another; names what differs on which ranks."""


class LayoutsDisagree(ConfigurationError):
    """Ranks that divide a model compute other gradients than one rank; names the layer where they part."""

    page = "docs/sharding.md#the-comparison-with-one-rank"


class MicroBatchesHalved(HeadwayError):
    """Micro-batches were halved within a step of several parts, whose gradients are lost: compute all parts again."""


class OutOfDeviceMemory(HeadwayError):
    """A training step doesn't fit in the memory of a trainer's device, even with smaller micro-batches."""

    page = "docs/troubleshooting.md#out-of-memory-in-a-training-step"


class ExpertsMismatch(HeadwayError):
    """Recorded experts can't be those of the model in training: they are of other layers, or more than it has."""

    page = "docs/models.md#mixtures-of-experts-under-reinforcement-learning"


class KeptSetMismatch(HeadwayError):
    """A token can't have been sampled by its recorded kept set or grammar, so it has no log-probability."""

    page = "docs/objectives.md#samples-of-a-part-of-the-vocabulary"


class HookFailed(HeadwayError):
    """A user's function raised, or returned what its contract doesn't allow. ``key`` of the experiment file names it,
    and the message names the function and what it raised or returned."""

    page = "docs/hooks.md"

    def __init__(self, key: str, name: str, problem: str) -> None:
        super().__init__(f"{key} = {name!r} {problem}")
        self.key = key

    @property
    def short(self) -> str:
        """The key without its section."""
        return self.key.rpartition(".")[2]


class InfrastructureError(HeadwayError):
    """Raised by a user's code, or ours that it calls, where a machine or a service failed: it says nothing of the
    policy, so it is retried and never rewarded."""

    page = "docs/hooks.md#the-policys-failures-and-the-machines"


class SimulatorFailed(HeadwayError):
    """A simulator raised, or returned what its spaces don't allow. ``lane``: of its block, None where unknown. The
    message of a block's names block, lane, fragment and step."""

    page = "docs/embodied.md"

    def __init__(self, problem: str, lane: int | None = None) -> None:
        super().__init__(problem)
        self.lane = lane


class WorkerDied(HeadwayError):
    """A worker process ended. ``cause``: exit code or signal and its last traceback; ``silent_s``: seconds without a
    sign of life when its end was noticed."""

    exit_code = 3
    page = "docs/troubleshooting.md#a-worker-died"

    def __init__(self, worker: str, cause: str, found_by: FoundBy = "exit", silent_s: float = 0.0) -> None:
        super().__init__(f"worker {worker} died: {cause}")
        self.worker = worker
        self.cause = cause
        self.found_by: FoundBy = found_by
        self.silent_s = silent_s


class RemoteError(HeadwayError):
    """A worker's method raised; carries the remote traceback. The worker keeps running."""

    exit_code = 3
    page = "docs/troubleshooting.md#a-worker-died"

    def __init__(self, worker: str, method: str, error: str, traceback: str) -> None:
        super().__init__(f"{worker}.{method}: {error}")
        self.worker = worker
        self.method = method
        self.error = error
        self.traceback = traceback


class Overloaded(HeadwayError):
    """The requests exceed the capacity; the caller may try again after ``retry_after_s``."""

    def __init__(self, why: str, retry_after_s: int) -> None:
        super().__init__(f"{why}: try again after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class WeightsCorrupt(HeadwayError):
    """Published weights whose checksum or version is not the announced one."""

    exit_code = 3


class WeightsMismatch(HeadwayError):
    """An engine's output isn't that of the published weights; names the first module whose output differs."""

    exit_code = 3
    page = "docs/vllm.md#the-probes"


class EnginesDisagree(ConfigurationError):
    """Trainer and engine compute different log-probabilities of the same tokens; names the layer at
    which their hidden states diverge, where that can be determined."""

    page = "docs/troubleshooting.md#trainer-and-engine-disagree"


class AccountingError(HeadwayError):
    """A rollout is missing or ended twice."""

    exit_code = 4
    page = "docs/troubleshooting.md#rollouts-not-accounted-for"


class Interrupted(HeadwayError):
    """Stopped by the user before the end; resumable."""

    exit_code = 130


class BudgetExceeded(HeadwayError):
    """A batch would contain a group staler than the budget, which an invariant of admission rules out."""

    exit_code = 4
    page = "docs/troubleshooting.md#budget-broken"


class NoProgress(HeadwayError):
    """The run makes no progress: every step is skipped, or every group ends untrained."""

    page = "docs/troubleshooting.md#no-progress"


class DeviceBusy(HeadwayError):
    """A participant didn't get its devices in time; the message names their holder, its stage, and for how long."""

    page = "docs/async.md#where-the-two-sides-compute"


class StorageFailed(HeadwayError):
    """The disk is full or unreadable: the last transition was undone, nothing is half-written."""

    page = "docs/troubleshooting.md#a-disk-that-is-full"


class BufferFull(HeadwayError):
    """A group was admitted although the buffer has no free place."""


class BufferCorrupt(ConfigurationError):
    """The buffer's database is damaged, of another schema, or contradicts a transition."""

    page = "docs/several_machines.md#the-accounting-its-copy-and-resuming-elsewhere"
