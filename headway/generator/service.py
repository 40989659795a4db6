"""The process of one generator replica: decodes in its ticks, streams what it sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.generator.activity import Activity, ActivitySpan
from headway.generator.engine import TorchEngine
from headway.models.loading import load_for_generation
from headway.models.native import why_none
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    PublishedWeights,
    TokenDelta,
    UpdateMode,
)
from headway.runtime.child import WorkerContext
from headway.tokens.tokenizer import Tokenizer
from headway.weights.shared_memory import Subscriber

STREAM_INTERVAL_S = 0.08  # running requests' tokens: an engine that dies costs no more than this
FINISH_DELAY_S = 0.02  # a finished request waits this long for others to share its event; not once the engine is idle


class GeneratorService:
    """A TorchEngine behind a worker's interface.

    Every ``tick`` is one engine step. Events are MessagePack of ``list[TokenDelta]``: one small buffer for
    many requests, because what an event costs is paid in the orchestrator.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        dtype: str,
        slots: int,
        max_context_tokens: int,
        kv_capacity_tokens: int | None = None,
        version: int = 0,
        deterministic: bool = False,
        native_kernels: bool = True,
        prefill_tokens_per_step: int = 8192,
    ) -> None:
        self._context = context
        model = load_for_generation(model_path, dtype, context.device.torch_device())
        has_tokenizer = (Path(model_path) / "tokenizer.json").is_file()
        self._engine = TorchEngine(
            model,
            slots=slots,
            max_context_tokens=min(max_context_tokens, model.config.max_positions),
            kv_capacity_tokens=kv_capacity_tokens,
            version=version,
            tokenizer=Tokenizer.load(model_path) if has_tokenizer else None,
            deterministic=deterministic,
            prefill_tokens_per_step=prefill_tokens_per_step,
            native_kernels=native_kernels,
        )
        if native_kernels and (reason := why_none(model.dtype, model.device)):
            context.log.warning("decoding without the native kernels, which costs speed: %s", reason)
        self._activity = Activity()
        self._subscriber = Subscriber()
        self._encoder = msgspec.msgpack.Encoder()
        self._requests = msgspec.msgpack.Decoder(list[GenerationRequest])
        self._lent_since_s: float | None = None
        self._lent_s = self._lent_idle_s = self._idle_before_s = 0.0
        self._streamed_s = time.monotonic()
        self._ready_since_s: float | None = None

    def submit(self, requests: bytes) -> None:
        """Queue requests (MessagePack of ``list[GenerationRequest]``)."""
        self._engine.submit(self._requests.decode(requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their last deltas follow as an event."""
        self._engine.abort(request_ids)

    def update_weights(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """Fetch, verify and apply a version between two decode steps. Raises WeightsCorrupt, with nothing changed."""
        started = time.monotonic()
        with self._activity.during("update"):
            with self._engine.paused():  # ticks and calls share one thread: fetching pauses decoding as well
                tensors = self._subscriber.fetch(published)
            fetch_s = time.monotonic() - started
            applied = self._engine.update_weights(tensors, published.version, mode)
        return msgspec.structs.replace(applied, fetch_s=fetch_s, pause_s=applied.pause_s + fetch_s)

    def lend(self, lent: bool) -> None:
        """Leave the device to the trainer, or take it back; requests keep their KV meanwhile."""
        now = time.monotonic()
        if lent and self._lent_since_s is None:
            self._lent_since_s, self._idle_before_s = now, self._engine.statistics().idle_s
        elif not lent and self._lent_since_s is not None:
            self._lent_s += now - self._lent_since_s
            self._lent_idle_s += self._engine.statistics().idle_s - self._idle_before_s
            self._lent_since_s = None

    def statistics(self) -> EngineStatistics:
        """The engine's counters; while the device is lent, the engine is not idle."""
        engine = self._engine.statistics()
        lent_s, lent_idle_s = self._lent_s, self._lent_idle_s
        if self._lent_since_s is not None:
            lent_s += time.monotonic() - self._lent_since_s
            lent_idle_s += engine.idle_s - self._idle_before_s
        return msgspec.structs.replace(engine, idle_s=engine.idle_s - lent_idle_s, lent_s=lent_s)

    def activity(self) -> list[ActivitySpan]:
        """What it has been doing since this was last asked."""
        return self._activity.take()

    def tick(self) -> bool:
        """One engine step, and an event when one is due. False: nothing to do until the next call."""
        lent = self._lent_since_s is not None
        if self._engine.open_requests and not lent:
            self._activity.be("busy")
        worked = not lent and self._engine.step()
        if not worked:
            self._activity.be("lent" if lent else "idle")
        now = time.monotonic()
        if self._engine.ready_deltas and self._ready_since_s is None:
            self._ready_since_s = now
        if now - self._streamed_s >= STREAM_INTERVAL_S:
            self._emit(self._engine.take_deltas())
            self._streamed_s = now
        elif self._ready_since_s is not None and (not worked or now - self._ready_since_s >= FINISH_DELAY_S):
            self._emit(self._engine.take_deltas(running=False))
        return worked

    def _emit(self, deltas: list[TokenDelta]) -> None:
        self._ready_since_s = None
        if deltas:
            self._context.emit(self._encoder.encode(deltas))
