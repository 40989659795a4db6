"""Workers that run the fake engine: the real pool and its router over replicas that sample nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from headway.generator.activity import ActivitySpan
from headway.generator.fake import DrivenReplica, replica_statistics
from headway.generator.fake_replica import FakeReplica, FakeRequest, ReplicaCosts, synthetic_tokens
from headway.records.errors import RemoteError, WeightsCorrupt, WorkerDied
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    FinishReason,
    GenerationRequest,
    PublishedWeights,
    TokenDelta,
    UpdateMode,
)
from headway.records.tokens import decoder, encoder
from headway.records.trace import EngineStep
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import Clock
from headway.runtime.process_worker import Death
from headway.runtime.workers import WorkerSpec

STREAM_INTERVAL_S = 0.08  # between two deltas of a running request, as in generator/service.py
_REFUSAL = "the prompt is empty"
_EVENTS = 1 << 16  # the pool reads them at once


class FakeLauncher:
    """Starts ``FakeWorker``s, all alike; ``workers`` holds every one that was started, in order.

    Example: ``GeneratorPool(FakeLauncher(clock, ReplicaCosts(token_s=0.01)), experiment, clock)`` is a pool with one
    fake replica for each of ``generator.devices``; ``launcher.workers[0].kill()`` is a death.
    """

    def __init__(
        self,
        clock: Clock,
        costs: ReplicaCosts,
        *,
        length_of: Callable[[GenerationRequest], int],
        start_s: float = 1.0,
        update_s: float = 0.0,
        on_submit: Callable[[GenerationRequest], None] = lambda request: None,
    ) -> None:
        """``length_of(request)``: tokens its response would have; more than ``max_tokens`` end with "length".
        ``start_s``: until a worker is built; ``update_s``: how long an update stops it. ``on_submit`` is told of each
        request that reaches a replica."""
        self.clock = clock
        self.costs = costs
        self.length_of = length_of
        self.start_s = start_s
        self.update_s = update_s
        self.on_submit = on_submit
        self.workers: list[FakeWorker] = []
        self._pids = itertools.count(1)

    async def start(self, spec: WorkerSpec) -> FakeWorker:
        """See :class:`headway.runtime.workers.Launcher`."""
        await self.clock.sleep(self.start_s)
        worker = FakeWorker(spec.name, self, next(self._pids))
        self.workers.append(worker)
        return worker


class FakeWorker:
    """A replica's process as the pool sees it (`WorkerHandle`), with faults to order: ``kill``, ``hang``,
    ``slow_down``, ``refuse``, ``fail``, ``corrupt``."""

    def __init__(self, name: str, launcher: FakeLauncher, pid: int) -> None:
        self._name = name
        self._pid = pid
        self._made_by = launcher
        self._clock = launcher.clock
        self._events: BoundedQueue[Any] = BoundedQueue(_EVENTS, f"{name}.events", launcher.clock)
        self._died = Death()
        self.engine = DrivenReplica(launcher.costs, 0, launcher.clock, self._end_due)
        self._open: dict[str, _Streamed] = {}
        self._serials = itertools.count()
        self._busy: asyncio.Future[None] | None = None  # an update is under way, or it hangs: calls run one at a time
        self._ready: list[TokenDelta] = []
        self._emitting: asyncio.Handle | None = None
        self._streaming: asyncio.TimerHandle | None = None
        self._encoder = encoder()
        self._requests = decoder(list[GenerationRequest])
        self.refuse = 0  # so many submissions raise
        self.fail = ""  # requests end with this error
        self.corrupt = False  # updates find damaged weights

    # --- a WorkerHandle -------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def alive(self) -> bool:
        return not self._died.done()

    @property
    def events(self) -> BoundedQueue[Any]:
        return self._events

    @property
    def died(self) -> Death:
        return self._died

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> Any:
        """See :class:`headway.runtime.workers.WorkerHandle`."""
        self._require_alive()
        async with asyncio.timeout(timeout_s):
            while self._busy is not None:
                await asyncio.shield(self._busy)
                self._require_alive()
            result = getattr(self, f"_{method}")(*args, **named)
            return await self._while_alive(result) if asyncio.iscoroutine(result) else result

    async def _while_alive(self, working: Coroutine[Any, Any, Any]) -> Any:
        job = asyncio.ensure_future(working)

        def end(_: object) -> None:
            job.cancel()

        self._died.add_done_callback(end)
        try:
            return await job
        except asyncio.CancelledError:
            self._require_alive()
            raise
        finally:
            self._died.remove_done_callback(end)

    async def stop(self, grace_s: float = 5.0) -> None:
        self.kill("stopped")

    def kill(self, reason: str = "killed by SIGKILL (-9)") -> None:
        """It dies at once: what it hadn't streamed is gone."""
        if not self.alive:
            return
        self.engine.stop()
        for timer in (self._emitting, self._streaming):
            if timer is not None:
                timer.cancel()
        self._died.set(WorkerDied(self._name, reason))
        self._free(self._busy)
        self._events.close()

    # --- faults ---------------------------------------------------------------------------------------------

    def hang(self) -> Callable[[], None]:
        """It answers no call, though it goes on decoding, until the function that comes back is called."""
        hanging = self._busy = asyncio.get_running_loop().create_future()

        return lambda: self._free(hanging)

    def slow_down(self, times: float) -> None:
        """A decode step takes so many times as long from now on."""
        self.engine.advance()
        costs = self.engine.core.costs
        self.engine.core.costs = dataclasses.replace(costs, token_s=lambda running: times * costs.step_s(running))
        self.engine.settle()

    # --- methods of the process -----------------------------------------------------------------------------

    def _submit(self, data: bytes) -> None:
        if self.refuse > 0:
            self.refuse -= 1
            raise RemoteError(self._name, "submit", "RuntimeError: it was told to refuse", "")
        engine = self.engine
        engine.advance()
        for request in self._requests.decode(data):
            self._made_by.on_submit(request)
            if not request.prompt_ids:
                refusal = TokenDelta(request_id=request.request_id, finish_reason="error", error=_REFUSAL, refused=True)
                self._say(refusal)
                continue
            wanted, most = max(1, self._made_by.length_of(request)), request.sampling.max_tokens
            reason: FinishReason = "error" if self.fail else "stop" if wanted <= most else "length"
            entry = FakeRequest(request, next(self._serials), min(wanted, most), reason, None)
            self._open[request.request_id] = _Streamed(entry)
            engine.core.enter(entry)
            if entry.length <= entry.resumed_tokens:
                self._end(entry, reason)
        engine.settle()
        if self._streaming is None and self._open:
            self._streaming = asyncio.get_running_loop().call_later(STREAM_INTERVAL_S, self._stream)

    def _abort(self, request_ids: Sequence[str]) -> None:
        self.engine.advance()
        for request_id in request_ids:
            if request_id in self._open:
                self._end(self._open[request_id].entry, "abort")
        self.engine.settle()

    async def _update_weights(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        engine, core, pause_s = self.engine, self.engine.core, self._made_by.update_s
        busy = self._busy = asyncio.get_running_loop().create_future()
        try:
            engine.advance()
            crossing, reprefilled = core.begin_update(mode)
            engine.settle()
            if pause_s > 0:
                await self._clock.sleep(pause_s)
            engine.advance()
            if self.corrupt:
                core.end_update(core.version, 0)
                engine.settle()
                error = WeightsCorrupt(f"version {published.version}: it was told to find them damaged")
                raise RemoteError(self._name, "update_weights", str(error), "") from error
            if mode == "abort":
                for entry in crossing:
                    if entry.request.interruptible and entry.begun:
                        self._end(entry, "abort")
            core.end_update(published.version, reprefilled)
            engine.settle()
        finally:
            self._free(busy)
        return AppliedWeights(
            version=published.version, pause_s=pause_s, in_flight=len(crossing), reprefilled_tokens=reprefilled
        )

    def _yield_device(self, yielded: bool) -> None:
        self.engine.advance()
        self.engine.core.yielded = yielded
        self.engine.settle()

    def _statistics(self) -> EngineStatistics:
        self.engine.advance()
        return replica_statistics(self.engine.core, idle=False)

    def _activity(self) -> tuple[list[ActivitySpan], list[EngineStep]]:
        return [], []

    # --- inside ---------------------------------------------------------------------------------------------

    def _free(self, busy: asyncio.Future[None] | None) -> None:
        """Calls that wait may go on."""
        if self._busy is busy:
            self._busy = None
        if busy is not None and not busy.done():
            busy.set_result(None)

    def _require_alive(self) -> None:
        if not self.alive:
            raise WorkerDied(self._name, self._died.result().cause)

    def _end_due(self, entry: FakeRequest) -> None:
        self._end(entry, entry.reason)

    def _end(self, entry: FakeRequest, reason: FinishReason) -> None:
        streamed, core = self._open.pop(entry.request.request_id), self.engine.core
        deltas = streamed.take(core, reason)
        core.generated += core.produced(entry)
        context = entry.context_tokens + core.produced(entry)
        core.withdraw(entry)
        if entry.session and reason != "error":
            core.keep_session(entry.session, context)
        core.finished += 1
        last = deltas.pop() if deltas else TokenDelta(request_id=entry.request.request_id)
        error = self.fail if reason == "error" else ""
        self._say(*deltas, msgspec.structs.replace(last, finish_reason=reason, error=error))

    def _say(self, *deltas: TokenDelta) -> None:
        self._ready += deltas
        if self._emitting is None:
            self._emitting = asyncio.get_running_loop().call_soon(self._emit)  # with those that end at the same time

    def _stream(self) -> None:
        """Hand out what the running requests have gained."""
        self._streaming = None
        core = self.engine.core
        self.engine.advance()
        for streamed in self._open.values():
            if core.produced(streamed.entry) or streamed.entry.done:
                self._ready += streamed.take(core)
        self._emit()
        if self._open:
            self._streaming = asyncio.get_running_loop().call_later(STREAM_INTERVAL_S, self._stream)

    def _emit(self) -> None:
        if self._emitting is not None:
            self._emitting.cancel()
            self._emitting = None
        if self._ready and self.alive:
            self._events.put_nowait(self._encoder.encode(self._ready))
            self._ready = []


class _Streamed:
    """A request and how much of it was handed out."""

    __slots__ = ("entry", "reprefills", "sent")

    def __init__(self, entry: FakeRequest) -> None:
        self.entry = entry
        self.sent = entry.resumed_tokens
        self.reprefills = -1 if entry.resumed_tokens else 0  # a resumed one is prefilled with its tokens

    def take(self, core: FakeReplica, ended: FinishReason | None = None) -> list[TokenDelta]:
        """What is new, a delta for each version. ``ended``: how, when it is over."""
        found: list[TokenDelta] = []
        entry, spans, end = self.entry, core.spans(self.entry), 0
        for number, (version, tokens) in enumerate(spans, 1):
            first, end = max(end, self.sent), end + tokens
            if end > first:
                ids, logprobs = synthetic_tokens(entry, first, end, ended if number == len(spans) else None)
                found.append(
                    TokenDelta.of(
                        entry.request.request_id,
                        ids,
                        logprobs,
                        version=version,
                        reprefilled=entry.reprefills > self.reprefills,
                    )
                )
                self.reprefills = entry.reprefills
        self.sent = max(self.sent, end)
        return found
