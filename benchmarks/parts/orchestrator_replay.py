"""The workers of the orchestrator's benchmark: their services replay prepared tokens, verdicts and steps.

`ReplayLauncher` starts them as real processes with the real `LocalLauncher`; only the classes differ that run inside.
A generator's process keeps the real service, with its ticks and its way of writing events, around an engine that
samples nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.algorithms.samples import FlatBatch
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    PublishedWeights,
    TokenDelta,
    UpdateMode,
)
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.records.tokens import sampled
from headway.records.training import StepReport
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher, WorkerSpec
from headway.trainer.checkpoints import CheckpointState, keep_last, write_folder

PROMPT_TOKENS, RESPONSE_TOKENS, DELTA_TOKENS = 32, 128, 16
DELTAS = RESPONSE_TOKENS // DELTA_TOKENS  # of each rollout
_FIRST_ID = 300  # behind the tokenizer's special tokens and bytes: characters
_KINDS = 20  # different tokens
_FACTORIES = {"generator": "replay_generator", "trainer": "ReplayTrainer", "verifier": "ReplayVerifier"}


class ReplayLauncher:
    """The real launcher with the services of this module in the workers' processes."""

    def __init__(self, clock: RealClock, delta_s: float) -> None:
        """``delta_s``: between two deltas of a rollout."""
        self._launcher = LocalLauncher(clock)
        self._delta_s = delta_s

    async def start(self, spec: WorkerSpec) -> Any:
        """See `headway.runtime.workers.Launcher`."""
        kind = spec.name.split("-")[0]
        arguments = {"delta_s": self._delta_s, "slots": spec.arguments["slots"]} if kind == "generator" else {}
        factory = f"{__name__}:{_FACTORIES[kind]}"
        return await self._launcher.start(dataclasses.replace(spec, factory=factory, arguments=arguments))


def prepared(tokens: int, slot: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and log-probabilities of the next tokens of a response that has ``tokens``."""
    ids = range(tokens + slot, tokens + slot + DELTA_TOKENS)
    return tuple(_FIRST_ID + one % _KINDS for one in ids), (-0.5,) * DELTA_TOKENS


class ReplayEngine:
    """Gives every running request its next DELTA_TOKENS each ``delta_s``, and the last of them its end.

    At most an eighth of the slots is filled at a time, so that responses end at every delta and not all at once.
    """

    memory = None  # nothing to offload
    prefetches = False

    def __init__(self, slots: int, delta_s: float) -> None:
        self._slots = slots
        self._delta_s = delta_s
        self._due_s = time.monotonic()
        self._waiting: dict[str, GenerationRequest] = {}
        self._running: dict[str, int] = {}  # tokens so far
        self._deltas: list[TokenDelta] = []
        self._version = self._finished = self._steps = 0

    @property
    def open_requests(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def ready_deltas(self) -> int:
        return len(self._deltas)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._waiting[request.request_id] = request

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) or self._running.pop(request_id, None) is not None:
                self._deltas.append(TokenDelta(request_id=request_id, finish_reason="abort"))

    def step(self) -> bool:
        """DELTA_TOKENS engine steps."""
        if not self.open_requests:
            return False
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._due_s = max(self._due_s, time.monotonic() - self._delta_s) + self._delta_s
        room = min(self._slots - len(self._running), max(1, self._slots // DELTAS))
        for request_id in list(self._waiting)[:room]:
            self._running[request_id] = len(self._waiting.pop(request_id).partial.ids)
        for slot, (request_id, tokens) in enumerate(list(self._running.items())):
            ids, logprobs = prepared(tokens, slot)
            ended = tokens + DELTA_TOKENS >= RESPONSE_TOKENS
            reason = "length" if ended else None
            self._deltas.append(
                TokenDelta(
                    request_id=request_id,
                    data=sampled(ids, logprobs).tobytes(),
                    version=self._version,
                    finish_reason=reason,
                )
            )
            if ended:
                del self._running[request_id]
                self._finished += 1
            else:
                self._running[request_id] = tokens + DELTA_TOKENS
        self._steps += DELTA_TOKENS
        return True

    def take_deltas(self, running: bool = True) -> list[TokenDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def apply(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        self._version = published.version
        return AppliedWeights(version=published.version, in_flight=len(self._running))

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._slots,
            generated_tokens=self._steps * self._slots,
            finished=self._finished,
            decode_steps=self._steps,
        )


def replay_generator(context: Any, *, slots: int, delta_s: float) -> Any:
    """The real generator service around a `ReplayEngine`: one event after each of its steps."""
    from headway.generator import service  # imports torch, which only this process needs

    service.build_engine = lambda settings, context: ReplayEngine(slots, delta_s)
    service.STREAM_INTERVAL_S = 0.0
    return service.GeneratorService(context, model_path="", dtype="", slots=slots, max_context_tokens=0)


class ReplayTrainer:
    """Trains nothing, at once."""

    def __init__(self, context: Any) -> None:
        self._version = 0

    def train_step(self, batch: FlatBatch) -> StepReport:
        self._version = batch.step + 1
        tokens = len(batch.token_ids_n)
        return StepReport(
            step=batch.step,
            version=self._version,
            samples=batch.samples,
            tokens=tokens,
            computed_tokens=tokens,
            loss_tokens=batch.samples * RESPONSE_TOKENS,
            compute_s=1e-3,
            metrics={"loss": 0.0, "grad_norm": 0.0, "entropy": 0.0, "learning_rate": 0.0},
        )

    def begin_publish(self, version: int) -> None: ...

    def complete_publish(self, version: int) -> PublishedWeights:
        return PublishedWeights(version=version, path="replayed", checksum="0" * 32, size_bytes=0)

    def begin_checkpoint(self, path: str, consumed: dict[int, list[int]], beside: bool) -> None:
        self._checkpoint = path, CheckpointState(version=self._version, consumed=consumed)

    def checkpoint_written(self) -> dict[str, str]:
        return {}

    def checkpoint_checksums(self) -> dict[str, str]:
        return {}

    def commit_checkpoint(self, checksums: dict[str, str]) -> int:
        path, state = self._checkpoint
        write_folder(path, lambda folder: None, state)
        keep_last(Path(path).parent.parent, 2)
        return state.version

    def score(self, prompt: tuple[int, ...], pixels: str) -> None:
        return None

    def measure_peak(self) -> float:
        return 0.0


class ReplayVerifier:
    """One verdict for each response, half of them solved, so that no group is filtered."""

    def __init__(self, context: Any) -> None:
        self._verdicts = [Verdict(reward=float(number % 2), solved=bool(number % 2)) for number in range(64)]

    def score(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        return self._verdicts[: len(responses)]
