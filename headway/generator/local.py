"""`LocalGenerator`: an engine in the caller's own process and event loop, for workers of workflows."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from headway.config.services.policy_sections import PolicySections
from headway.generator.engines.select import EngineSettings, build_engine
from headway.generator.routing.open_request import OpenRequest
from headway.generator.routing.replica import replica_spec
from headway.records.clients import Watch
from headway.records.errors import HeadwayError
from headway.records.generation import AppliedWeights, GenerationRequest, GenerationResult, PublishedWeights
from headway.runtime.child import WorkerContext


class LocalGenerator:
    """Samples responses by the engine that an experiment's ``[generator]`` names, as one replica of it would.

    Decodes while there are requests, with one engine step in each pass of the event loop, so that other tasks run in
    between. `TurnSampler` takes ``generate`` as its sampler.
    """

    def __init__(self, experiment: PolicySections, context: WorkerContext) -> None:
        """``context``: the worker's. Raises ConfigurationError when the engine can't be built."""
        engine_arguments: dict[str, Any] = replica_spec(0, str(context.device), experiment, None).arguments
        self.engine = build_engine(EngineSettings(**engine_arguments), context)
        self._newest: PublishedWeights | None = None  # received while the engine was offloaded
        self._open: dict[str, OpenRequest] = {}
        self._numbers = itertools.count()
        self._decoding: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
        """Sample one response: see `headway.records.clients.Generator.generate`."""
        open_request = OpenRequest(request, asyncio.get_running_loop().create_future(), watch)
        open_request.ticket = f"{request.request_id}#{next(self._numbers)}"
        self._open[open_request.ticket] = open_request
        try:
            self.engine.submit([open_request.resubmission()])
            if self._decoding is None or self._decoding.done():
                self._decoding = asyncio.create_task(self._decode(), name="decoding")
            return await open_request.future
        finally:
            if self._open.pop(open_request.ticket, None) is not None:
                self.engine.abort([open_request.ticket])

    def cancel(self, request_id: str) -> None:
        """End a request with its tokens so far. Unknown ids: no-op."""
        self.engine.abort([ticket for ticket, call in self._open.items() if call.request.request_id == request_id])

    def tokens_so_far(self, request_id: str) -> int:
        """Response tokens of an open request; 0 for an unknown id."""
        return next((call.tokens for call in self._open.values() if call.request.request_id == request_id), 0)

    def update_weights(self, published: PublishedWeights) -> AppliedWeights | None:
        """Sample with other weights from now on; returns None while offloaded: then `onload` applies them. Raises
        WeightsCorrupt, with nothing changed."""
        if self.engine.memory is not None and self.engine.memory.offloaded:
            self._newest = published
            return None
        return self.engine.apply(published, "keep")

    def offload(self) -> None:
        """Free weights and KV while no request is open; no-op for a vLLM server. Raises StorageFailed, with nothing
        changed."""
        if self.engine.memory is not None:
            self.engine.memory.offload()

    def onload(self) -> None:
        """Undo `offload`, and apply the newest weights received meanwhile."""
        if self.engine.memory is not None:
            self.engine.memory.onload()
        newest_weights, self._newest = self._newest, None
        if newest_weights is not None:
            self.engine.apply(newest_weights, "keep")

    async def _decode(self) -> None:
        """Decode until no request is open. An error of the engine fails all of them."""
        try:
            while self._open:
                self.engine.step()
                for delta in self.engine.take_deltas():
                    open_request = self._open.get(delta.request_id)
                    if open_request is None:
                        continue
                    open_request.absorb(delta, time.monotonic())
                    open_request.notify_watch()
                    if delta.finish_reason is not None:
                        del self._open[delta.request_id]
                        open_request.finish(delta.finish_reason, delta.error, refused=delta.refused)
                await asyncio.sleep(0)
        except Exception as error:  # the boundary of the engine: every waiting caller gets the error
            for open_request in self._open.values():
                open_request.fail(HeadwayError(f"the engine failed: {type(error).__name__}: {error}"))
            self._open.clear()
