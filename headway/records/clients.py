"""Protocols between the orchestrator and the actors: real clients and fakes both satisfy them.

The orchestrator knows only these, so the planner can simulate it with fakes under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headway.records.environment import PartialRollout
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    Probe,
    ProbeScores,
    PublishedWeights,
    RouterStatistics,
)
from headway.records.ledger import TeacherStatistics
from headway.records.rollout import Failure, Group, Pruned, Rollout, Verdict
from headway.records.task import Task
from headway.records.training import CheckpointInfo, OptimiserSettings, PartReport, StepReport, TrainBatch

Stop = Pruned | Failure | Literal["park", "leave"]  # why a member is stopped


@dataclass(frozen=True)
class Watch:
    """A callback for a request's tokens while it runs, in the caller's event loop. ``on_tokens`` must not take long; it
    may cancel the request."""

    every_tokens: int  # new response tokens between two calls, about: they come in the deltas that engines stream
    on_tokens: Callable[[PartialResponse], None]  # all tokens so far


class Generator(Protocol):
    """A pool of generator replicas behind one handle."""

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
        """Sample one response; ``watch`` is called with its tokens meanwhile. If a replica dies, another continues the
        request from the tokens streamed so far. A request parked by an ``abort`` update returns with finish_reason
        "abort"; the caller resumes it with ``partial``. A failed one raises nothing: "error"."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request: its ``generate`` returns with finish_reason "abort" and its tokens. Unknown ids: no-op."""
        ...

    def tokens_so_far(self, request_id: str) -> int:
        """Response tokens of an open request that have been streamed, plus those it was resumed with; 0 for an unknown
        id."""
        ...

    async def update_weights(self, weights: PublishedWeights, leave_slow: bool = False) -> list[AppliedWeights]:
        """Apply a version on every live replica, in flight; returns when all have applied it, with ``leave_slow`` all
        but those that take much longer than others."""
        ...

    def take_voided(self) -> list[str]:
        """Ids of ended requests that a replica may have sampled from weights that had changed in its memory, found
        since the last call. Those that were open then end with an error."""
        ...

    async def score(self, probe: Probe) -> list[ProbeScores]:
        """Scores of ``probe`` by every live replica that has applied the newest weights; open requests don't change."""
        ...

    async def applied_version(self) -> int:
        """Lowest version applied by any live replica that takes requests."""
        ...

    async def pause_replicas(self, indices: Collection[int]) -> None:
        """Stop decoding on these replicas between two steps: their devices are *yielded* to another worker. Requests
        stay in flight, weights can still be updated. All others keep decoding."""
        ...

    async def resume_replicas(self, indices: Collection[int]) -> None:
        """Resume decoding on replicas that were paused."""
        ...

    async def idle_replicas(self, idle: Collection[int]) -> None:
        """Send no requests to the replicas with these indices and move theirs elsewhere; all others take requests.
        Idle replicas still apply updates, and serve when no other is live."""
        ...

    async def statistics(self) -> list[EngineStatistics]: ...

    def routing(self) -> RouterStatistics:
        """The router's statistics: open requests and where they were routed."""
        ...

    async def stop(self) -> None: ...


class Trainer(Protocol):
    """The trainer, with all its ranks, behind one handle."""

    async def start(self) -> None: ...

    @property
    def accumulated_parts(self) -> int:
        """Parts since the last step whose gradients the trainer holds; 0 after a restart."""
        ...

    async def train_step(self, batch: TrainBatch) -> StepReport:
        """Train on a whole batch: one version, or a skipped step."""
        ...

    async def forward_backward(self, part: TrainBatch) -> PartReport:
        """Accumulate loss, gradients and statistics of a part of the next step, which `optim_step` divides by the
        denominator of all parts together. Raises StepRefused, with nothing changed, for what needs the whole batch,
        and for a part of another step."""
        ...

    async def optim_step(self, settings: OptimiserSettings | None = None) -> StepReport:
        """Clip, step and make a version of the gradients accumulated since the last step. A part that isn't finite
        skips the step, and is named in its reason. Raises StepRefused without parts."""
        ...

    async def begin_publish(self, version: int) -> None:
        """Take a snapshot of the present weights for `publish`; returns when they may change."""
        ...

    async def publish(self, version: int) -> PublishedWeights:
        """Publish the weights of `begin_publish` under ``version``, beside the trainer's other calls; the present ones,
        if it wasn't called with ``version``."""
        ...

    async def score(self, prompt: tuple[int, ...] = (), pixels: str = "") -> ProbeScores | None:
        """Scores of random tokens, behind a prompt with these pictures if there is one, by the present weights, which
        don't change, nor do gradients. None: there is no model."""
        ...

    async def begin_checkpoint(self, path: str, consumed: dict[int, list[int]]) -> None:
        """Take a copy of the present state for `save_checkpoint`; returns when it may change. ``consumed``: step ->
        group indices, all steps so far."""
        ...

    async def save_checkpoint(
        self, path: str, consumed: dict[int, list[int]], before_commit: Callable[[], None] = lambda: None
    ) -> CheckpointInfo:
        """Write the checkpoint of `begin_checkpoint` atomically, beside the trainer's other calls; the present state,
        if it wasn't called with ``path``. ``before_commit`` is called when all but the last step is on disk; its error
        keeps the checkpoint from being one. Raises StorageFailed; the older checkpoints are then kept."""
        ...

    async def load_checkpoint(self, path: str) -> int:
        """Load model, optimiser, schedule and RNG; returns the version. Raises CheckpointCorrupt."""
        ...

    async def save_weights(self, path: str) -> CheckpointInfo:
        """Write only the model (a Hugging Face folder), atomically, replacing what is there."""
        ...

    async def restart(self) -> None:
        """Restart after a death, at the initial model and version 0 (the caller loads and replays)."""
        ...

    async def load_weights(self, path: str) -> None:
        """Load only the model's weights (a checkpoint's ``model`` folder): for held weights in evaluation."""
        ...

    async def stop(self) -> None: ...


class TeacherScores(Protocol):
    """The teachers of a run, which score rollouts outside of the trainer."""

    async def score(self, group: Group, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Return a group's verified rollouts with their scores, failed where their teacher has."""
        ...

    def take_statistics(self) -> TeacherStatistics | None:
        """The statistics since the last call; None if no teacher is outside of the trainer."""
        ...


class Verifier(Protocol):
    """A pool that scores responses outside the orchestrator."""

    async def start(self) -> None: ...

    @property
    def start_s(self) -> float:
        """Seconds that the last worker took to start; 0.0 before the first."""
        ...

    def max_workers(self) -> int:
        """The number of workers that cores and memory allow now, running ones included."""
        ...

    def set_workers(self, count: int) -> None:
        """Have ``count`` workers. Returns at once: a further one takes groups when it has started, and one that is too
        many ends when it has scored the group it has."""
        ...

    async def verify(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Score the responses to one task. A raise, a hang (hard timeout kills the job) or a non-finite
        reward becomes a Verdict with ``failure``; siblings are not affected. Infrastructure failures are
        retried before they are returned."""
        ...

    async def stop(self) -> None: ...


class RolloutMaker(Protocol):
    """Makes rollouts, one member of a group at a time; any number may be in the making."""

    async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
        """Generate member ``member`` of ``group``: finished or failed but not verified; raises nothing but
        cancellation. ``parked``: the state in which a former process parked it; generation resumes there."""
        ...

    def stop(self, group: int, member: int, why: Stop) -> None:
        """Stop a member of the group with this admission index, as soon as the generator returns its tokens.

        Pruned: it ends with them, to be verified as it stands. Failure: it ends failed. "park": it waits at the resume
        gate and continues from them, unless it has reached the limit of parkings. "leave": parked regardless of the
        limit, because the run ends. No-op for a member that isn't being made, has nothing to park or was stopped.
        """
        ...

    def reached(self, group: int, member: int) -> int:
        """Response tokens, as far as known here, of a member that is generating or parked; else 0."""
        ...

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> RolloutMaker:
        """Return a maker of the same rollouts at ``temperature`` (None: the run's), neither accounted for nor
        pruned. ``request_prefix`` keeps its requests and random numbers separate from this maker's."""
        ...


class TextCodec(Protocol):
    """The part of a tokenizer that rollouts need: stop ids and decoding."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a response."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """Text of token ids, special tokens left out."""
        ...


class PromptCodec(TextCodec, Protocol):
    """The part of a tokenizer that the loops need: that of rollouts, and rendering of prompts."""

    def render(self, prompt: str | Sequence[Mapping[str, Any]], template: Literal["raw", "chat"], /) -> Sequence[int]:
        """Prompt ids of a task: its text, or a conversation."""
        ...
