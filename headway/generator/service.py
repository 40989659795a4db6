"""The process of one generator replica: it runs one engine step in each tick and streams token deltas as events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.generator.activity import Activity, ActivitySpan, StepLog
from headway.generator.engines.engine import Prompt
from headway.generator.engines.prompt_pass import PromptPass
from headway.generator.engines.select import EngineSettings, build_engine
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.adapter_files import load_adapter
from headway.models.configuration import DecoderConfig
from headway.models.lora import Lora
from headway.records.errors import ConfigurationError
from headway.records.execution import MemoryMove
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    Probe,
    ProbeScores,
    PromptLogprobs,
    PublishedWeights,
    TokenDelta,
    UpdateMode,
)
from headway.records.tokens import TokenIds, decoder, encoder
from headway.records.trace import EngineStep
from headway.runtime.child import WorkerContext

STREAM_INTERVAL_S = 0.08  # between deltas of running requests: a dead engine costs no more than the last interval
FINISH_DELAY_S = 0.02  # a finished request's delta waits this long to share an event; an idle engine sends at once


@dataclass(frozen=True)
class _Update:
    """An update of the weights whose fetch is under way."""

    published: PublishedWeights
    mode: UpdateMode
    fetched: Future[None]
    applied: Future[AppliedWeights] = field(default_factory=Future[AppliedWeights])


class GeneratorService:
    """Serves an engine as a worker.

    Every ``tick`` is one engine step. Events are MessagePack of ``list[TokenDelta]``: one small buffer for
    many requests, because each event costs time in the orchestrator.
    """

    def __init__(self, context: WorkerContext, **settings: Any) -> None:
        """``settings``: the fields of EngineSettings."""
        self._context = context
        self._model_path: str = settings["model_path"]
        self._engine = build_engine(EngineSettings(**settings), context)
        self._activity = Activity()
        self._steps = StepLog(self._engine.statistics)
        self._encoder = encoder()
        self._requests = decoder(list[GenerationRequest])
        self._moved: list[MemoryMove] = []  # not yet reported
        self._yielded_since_s: float | None = None
        self._yielded_s = self._yielded_idle_s = self._idle_before_s = 0.0
        self._streamed_s = time.monotonic()
        self._ready_since_s: float | None = None
        self._fetcher = ThreadPoolExecutor(1, "fetch")
        self._update: _Update | None = None
        self._prompts: list[tuple[Prompt, Future[PromptLogprobs]]] = []  # oldest first
        self._adapters: list[tuple[str, Future[Lora], Future[None]]] = []  # that are being read, oldest first

    def submit(self, requests: bytes) -> None:
        """Queue requests (MessagePack of ``list[GenerationRequest]``)."""
        self._engine.submit(self._requests.decode(requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their last deltas follow as an event."""
        self._engine.abort(request_ids)

    def update_weights(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights | Future[AppliedWeights]:
        """Fetch and verify a version beside the decode steps, where the engine can, and apply it between two. Raises
        WeightsCorrupt, with nothing changed, or WeightsMismatch, after which the engine samples no more."""
        self._finish_update()  # an earlier one, whose caller has given up
        if self._engine.prefetches and self._engine.open_requests:
            fetch_future = self._fetcher.submit(self._engine.prefetch, published)
            self._update = _Update(published, mode, fetch_future)
            return self._update.applied
        self._load()
        with self._activity.during("update"):
            return self._engine.apply(published, mode)

    def _finish_update(self) -> None:
        """Apply the version that is being fetched, once it is."""
        pending_update, self._update = self._update, None
        if pending_update is None:
            return
        try:
            pending_update.fetched.result()
            self._load()
            with self._activity.during("update"):
                pending_update.applied.set_result(self._engine.apply(pending_update.published, pending_update.mode))
        except Exception as error:  # the boundary of a remote call: its failure belongs to the caller
            pending_update.applied.set_exception(error)

    def score(self, probe: Probe) -> ProbeScores:
        """Score a probe between two decode steps: see `Engine.score`."""
        self._load()
        return self._engine.score(probe)

    def prompt_logprobs(
        self, ids: TokenIds, top: int, adapter: str, targets: np.ndarray | None = None
    ) -> Future[PromptLogprobs]:
        """Compute log-probabilities of given tokens, in chunks between the decode steps: see `Engine.prompt_pass`.
        ``targets`` [L, T]: of these ids in each one's place, too; torch engine alone."""
        prompt, logprobs_future = self._engine.prompt_pass(ids, top, adapter), Future[PromptLogprobs]()
        if targets is not None:
            assert isinstance(prompt, PromptPass)
            prompt.targets_lt = targets
        self._prompts.append((prompt, logprobs_future))
        return logprobs_future

    def add_adapter(self, name: str, folder: str) -> Future[None]:
        """Read an adapter's folder beside the decode steps, and register it, or its next revision, between two. Raises
        ConfigurationError, with nothing changed, for a folder that isn't an adapter of the model."""
        added = Future[None]()
        self._adapters.append((name, self._fetcher.submit(self._read_adapter, folder), added))
        return added

    def remove_adapter(self, name: str) -> None:
        """Free an adapter that no open request names."""
        self._add_adapters(len(self._adapters))
        self._torch_engine.remove_adapter(name)

    @property
    def _torch_engine(self) -> TorchEngine:
        if not isinstance(self._engine, TorchEngine):
            raise ConfigurationError(f"{type(self._engine).__name__} takes no adapters at run time: valid: TorchEngine")
        return self._engine

    def _read_adapter(self, folder: str) -> Lora:
        return load_adapter(folder, self._model_path, DecoderConfig.from_pretrained(Path(self._model_path)))

    def _add_adapters(self, waited: int = 0) -> None:
        """Register the adapters that are read, and ``waited`` more of those whose reading has begun."""
        while self._adapters and (waited or self._adapters[0][1].done() or not self._engine.open_requests):
            (name, read, added), waited = self._adapters.pop(0), max(0, waited - 1)
            try:
                lora = read.result()
                self._load()
                self._torch_engine.add_adapter(name, lora)
            except Exception as error:  # the boundary of a remote call: its failure belongs to the caller
                added.set_exception(error)
            else:
                added.set_result(None)

    def _advance_prompt(self) -> bool:
        """Compute a chunk of the oldest prompt; False if there is none."""
        if not self._prompts:
            return False
        self._load()
        prompt_pass, logprobs_future = self._prompts[0]
        try:
            logprobs = prompt_pass.advance()
        except Exception as error:  # the boundary of a remote call: its failure belongs to the caller
            logprobs_future.set_exception(error)
        else:
            if logprobs is None:
                return True
            logprobs_future.set_result(logprobs)
        del self._prompts[0]
        return True

    def yield_device(self, yielded: bool) -> None:
        """Yield the device to the trainer, or (``yielded`` False) reclaim it; requests keep their KV meanwhile."""
        now_s = time.monotonic()
        if yielded and self._yielded_since_s is None:
            self._yielded_since_s, self._idle_before_s = now_s, self._engine.statistics().idle_s
        elif not yielded and self._yielded_since_s is not None:
            self._yielded_s += now_s - self._yielded_since_s
            self._yielded_idle_s += self._engine.statistics().idle_s - self._idle_before_s
            self._yielded_since_s = None

    def offload(self) -> list[MemoryMove]:
        """Free weights and KV while the device is yielded; requests stay. Returns the moves since the last `offload` or
        `onload`. Raises StorageFailed, with nothing changed, and ConfigurationError for an engine that can't do it."""
        if (memory := self._engine.memory) is None:
            raise ConfigurationError(f"{type(self._engine).__name__} can't leave its device: run.offload = false")
        with self._activity.during("offload"):
            self._moved.append(memory.offload())
        return self._take_moved()

    def onload(self) -> list[MemoryMove]:
        """Undo `offload` when there is something to compute: at once, or as soon as requests or weights come."""
        if self._engine.open_requests:
            self._load()
        return self._take_moved()

    def _load(self) -> None:
        memory = self._engine.memory
        if memory is not None and memory.offloaded:
            with self._activity.during("onload"):
                self._moved.append(memory.onload())

    def _take_moved(self) -> list[MemoryMove]:
        moved_memory, self._moved = self._moved, []
        return moved_memory

    def statistics(self) -> EngineStatistics:
        """Return the engine's counters; time in which the device is yielded counts as ``yielded_s``, not as idle."""
        statistics = self._engine.statistics()
        yielded_s, yielded_idle_s = self._yielded_s, self._yielded_idle_s
        if self._yielded_since_s is not None:
            yielded_s += time.monotonic() - self._yielded_since_s
            yielded_idle_s += statistics.idle_s - self._idle_before_s
        return msgspec.structs.replace(statistics, idle_s=statistics.idle_s - yielded_idle_s, yielded_s=yielded_s)

    def activity(self) -> tuple[list[ActivitySpan], list[EngineStep]]:
        """Return the spans of this replica's states and its engine's steps since the last call."""
        return self._activity.take(), self._steps.take()

    def tick(self) -> bool:
        """Run one engine step, and emit an event when due. Returns False when idle until the next call."""
        is_yielded = self._yielded_since_s is not None
        if self._update is not None and (is_yielded or self._update.fetched.done() or not self._engine.open_requests):
            self._finish_update()
        self._add_adapters()
        if self._engine.open_requests and not is_yielded:
            self._load()
            self._activity.enter("busy")
        worked = not is_yielded and self._engine.step()
        if not is_yielded and self._advance_prompt():
            self._activity.enter("busy")
            worked = True
        if not worked:
            self._activity.enter("yielded" if is_yielded else "idle")
        now_s = time.monotonic()
        self._steps.note(worked, now_s)
        if self._engine.ready_deltas and self._ready_since_s is None:
            self._ready_since_s = now_s
        if now_s - self._streamed_s >= STREAM_INTERVAL_S:
            self._emit(self._engine.take_deltas())
            self._streamed_s = now_s
        elif self._ready_since_s is not None and (not worked or now_s - self._ready_since_s >= FINISH_DELAY_S):
            self._emit(self._engine.take_deltas(running=False))
        return worked

    def _emit(self, deltas: list[TokenDelta]) -> None:
        self._ready_since_s = None
        if deltas:
            self._context.emit(self._encoder.encode(deltas))
