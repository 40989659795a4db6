"""The workers behind the service: the trainer's process, and the adapters of samplers in the generator's engines."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.generator.client import GeneratorPool
from headway.records.errors import ConfigurationError, InfrastructureError, RemoteError
from headway.records.generation import BASE_MODEL, GenerationRequest, GenerationResult, PromptLogprobs
from headway.records.tenants.protocols import (
    AdapterNotLoaded,
    AppliedState,
    CheckpointKind,
    PassOutcome,
    TenantAdapter,
    TenantRefused,
    TenantSample,
    TenantSampleOutcome,
    TenantSampleRequest,
    TenantsUnavailable,
    TopTokens,
    TrainingPass,
)
from headway.records.tokens import TokenIds
from headway.records.training import OptimiserSettings
from headway.runtime.clock import Clock
from headway.runtime.worker_slots import WorkerSlot, typed_cause
from headway.trainer.tenants.shared_passes import SharedPasses

_SEED_STRIDE = 0x9E3779B97F4A7C15  # between the samples of a request
_SEEDS = 1 << 62
_STOP_S = 5.0
_WATCH_S = 2.0


class TrainerWorker:
    """The trainer's process as a `TenantTrainer`, started again whenever it dies: the next calls restore adapters."""

    def __init__(self, slot: WorkerSlot, *, co_batch: bool = False) -> None:
        """``slot``: of the worker, whose methods have the names and arguments of `TenantTrainer`'s. ``co_batch``:
        passes that wait at the same time are computed together."""
        self._slot = slot
        self._busy = asyncio.Lock()
        self._shared = SharedPasses(lambda passes: self._worker_call("forward_backward_together", passes), self._busy)
        self._co_batch = co_batch

    async def start(self) -> None:
        """Start the process. Raises ConfigurationError and what its start raises."""
        try:
            await self._slot.start()
        except RemoteError as error:
            raise typed_cause(error) from None

    async def run(self) -> None:
        """Consumes the worker's events; waits for its death, and starts a successor, until cancelled."""
        while True:
            if (worker := self._slot.live) is not None:
                async for _ in worker.events:
                    pass
                await self._slot.dead()
            await self._slot.restart()

    async def stop(self) -> None:
        """End the process."""
        await self._slot.stop(_STOP_S)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        async with self._busy:
            return await self._worker_call(method, *arguments, **named)

    async def _worker_call(self, method: str, *arguments: Any, **named: Any) -> Any:
        worker = self._slot.live
        if worker is None or self._slot.restarting:
            raise TenantsUnavailable("the trainer is starting")
        try:
            return await worker.call(method, *arguments, **named)
        except RemoteError as error:
            raise typed_cause(error) from None

    async def create(self, model_id: str, sequence: int, adapter: TenantAdapter) -> None:
        """See `TenantTrainer`."""
        await self._call("create", model_id, sequence, adapter)

    async def restore(self, model_id: str) -> AppliedState | None:
        """See `TenantTrainer`."""
        return await self._call("restore", model_id)

    async def forward_backward(self, model_id: str, training_pass: TrainingPass) -> PassOutcome:
        """See `TenantTrainer`."""
        if self._co_batch:
            return await self._shared.forward_backward(model_id, training_pass)
        return await self._call("forward_backward", model_id, training_pass)

    async def optim_step(self, model_id: str, sequence: int, optimiser: OptimiserSettings) -> dict[str, float]:
        """See `TenantTrainer`."""
        return await self._call("optim_step", model_id, sequence, optimiser)

    async def load(self, model_id: str, sequence: int, path: str, adapter: TenantAdapter, *, optimiser: bool) -> None:
        """See `TenantTrainer`."""
        await self._call("load", model_id, sequence, path, adapter, optimiser=optimiser)

    async def save(self, model_id: str, path: str, kind: CheckpointKind) -> int:
        """See `TenantTrainer`."""
        return await self._call("save", model_id, path, kind)

    async def evict(self, model_id: str) -> None:
        """See `TenantTrainer`."""
        await self._call("evict", model_id)

    async def delete(self, path: str) -> None:
        """See `TenantTrainer`."""
        await self._call("delete", path)


class AdapterSampler:
    """Samples of a pool's engines, as a `TenantSampler`.

    A snapshot is an adapter of the engines by the name of its path; the inflight samplers of a model share one, whose
    revisions replace each other under running requests. An adapter is in the engines while it is among the
    ``resident`` most recently used ones or has open requests; the next request of another loads it again. Samples of
    a request share their prompt's KV.
    """

    def __init__(self, pool: GeneratorPool, store: Path, end_ids: tuple[int, ...], resident: int) -> None:
        """``store``: its folder checkpoints has the paths. ``end_ids``: of the tokenizer, end a response."""
        self._pool, self._folder, self._end_ids, self._resident_limit = pool, store / "checkpoints", end_ids, resident
        self._names: dict[str, str] = {}  # of the adapters of samplers
        self._paths: dict[str, str] = {}  # of the newest revisions of adapters
        self._resident: OrderedDict[str, str] = OrderedDict()  # adapter in the engines -> its path; oldest use first
        self._open: Counter[str] = Counter()  # requests by adapter
        self._samples: dict[str, int] = {}  # of open requests: how many
        self._changing = asyncio.Lock()
        self._paged_out = 0
        self._device_s_per_token = 0.0

    async def register(self, sampler_id: str, path: str | None, *, inflight: bool) -> None:
        """See `TenantSampler`."""
        if path is None:
            self._names[sampler_id] = BASE_MODEL
            return
        name = f"{path.partition('/')[0]}/inflight" if inflight else path
        self._paths[name], self._names[sampler_id] = path, name
        try:
            await self._load(name)
        except TenantRefused:
            del self._names[sampler_id]
            raise

    async def _load(self, name: str) -> None:
        """Have an adapter's newest revision in the engines, and page out others beyond the limit."""
        if name in self._resident and self._resident[name] == self._paths[name]:
            return self._resident.move_to_end(name)
        async with self._changing:
            if self._resident.get(name) != (path := self._paths[name]):
                try:
                    await self._pool.adapters.add(name, str(self._folder / path))
                except ConfigurationError as error:
                    raise TenantRefused(f"tinker://{path} can't be sampled from any longer: {error}") from None
                self._resident[name] = path
            self._resident.move_to_end(name)
            unused = [other for other in self._resident if other != name and not self._open[other]]
            for other in unused[: max(0, len(self._resident) - self._resident_limit)]:
                self._paged_out += 1
                await self._unload(other)

    async def _unload(self, name: str) -> None:
        del self._resident[name]
        await self._pool.adapters.remove(name)

    async def sample(self, request: TenantSampleRequest) -> TenantSampleOutcome:
        """See `TenantSampler`."""
        if (name := self._names.get(request.sampler_id)) is None:
            raise AdapterNotLoaded(f"sampler {request.sampler_id} isn't registered")
        self._open[name] += 1
        self._samples[request.request_id] = request.samples
        try:
            if name != BASE_MODEL:
                await self._load(name)
            async with asyncio.TaskGroup() as group:
                samples = [group.create_task(self._sample(request, name, index)) for index in range(request.samples)]
                prompt = group.create_task(self._prompt(request, name))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._open[name] -= 1
            del self._samples[request.request_id]
            if request.sampler_id not in self._names:
                await self._drop_unused(name)
        scored = prompt.result()
        outcome = TenantSampleOutcome(samples=tuple(task.result() for task in samples))
        if scored is None:
            return outcome
        prompt_logprobs = scored.logprobs.copy()
        if request.prompt_logprobs_last_n is not None:
            prompt_logprobs[: -request.prompt_logprobs_last_n] = np.nan
        return msgspec.structs.replace(
            outcome,
            prompt_logprobs=prompt_logprobs if request.prompt_logprobs else None,
            prompt_top=_top(scored, 0) if request.topk_prompt_logprobs else None,
            target_prompt_logprobs=None if scored.target_logprobs is None else scored.target_logprobs[1:],
        )

    async def _sample(self, request: TenantSampleRequest, name: str, index: int) -> TenantSample:
        sampling = request.sampling
        ends = () if request.ignores_end else self._end_ids
        result = await self._pool.generate(
            GenerationRequest(
                request_id=f"{request.request_id}/{index}",
                prompt_ids=request.prompt_ids,
                adapter=name,
                sampling=msgspec.structs.replace(
                    sampling,
                    seed=(sampling.seed + index * _SEED_STRIDE) % _SEEDS,
                    stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))),
                    untempered=True,
                ),
            )
        )
        if result.finish_reason == "error":
            if result.error.startswith("there is no adapter"):  # its folder was gone when an engine restarted
                self._resident.pop(name, None)
                raise AdapterNotLoaded(result.error)
            raise TenantRefused(result.error) if result.refused else InfrastructureError(f"the engine: {result.error}")
        if result.finish_reason == "abort":
            raise TenantRefused("the request was cancelled")
        top = None
        if request.topk_sample_logprobs:
            top = await self._top_of(request, name, result)
        return TenantSample(
            token_ids=np.asarray(result.response.ids, np.int32),
            logprobs=np.asarray(result.response.logprobs, np.float32),
            stopped=result.finish_reason == "stop",
            top=top,
        )

    async def _top_of(self, request: TenantSampleRequest, name: str, result: GenerationResult) -> TopTokens:
        """Return the likeliest tokens in each sampled one's place, by a pass over all of them."""
        ids = TokenIds(request.prompt_ids) + TokenIds(result.response.ids)
        return _top(await self._pool.prompts.logprobs(ids, request.topk_sample_logprobs, name), len(request.prompt_ids))

    async def _prompt(self, request: TenantSampleRequest, name: str) -> PromptLogprobs | None:
        """Return the prompt's log-probabilities, if any are asked for."""
        targets, top = request.target_prompt_ids, request.topk_prompt_logprobs
        if not (request.prompt_logprobs or top or targets is not None):
            return None
        if targets is not None:  # those of the first token's place are none
            targets = np.concatenate([np.full((1, targets.shape[1]), -1), targets])
        return await self._pool.prompts.logprobs(TokenIds(request.prompt_ids), top, name, targets)

    async def cancel(self, request_id: str) -> None:
        """See `TenantSampler`."""
        for index in range(self._samples.get(request_id, 0)):
            self._pool.cancel(f"{request_id}/{index}")

    async def release(self, sampler_id: str) -> None:
        """See `TenantSampler`."""
        if (name := self._names.pop(sampler_id, None)) is not None:
            await self._drop_unused(name)

    async def _drop_unused(self, name: str) -> None:
        """Free an adapter that no sampler has and no request uses."""
        if self._open[name]:
            return
        del self._open[name]
        if name != BASE_MODEL and name not in self._names.values():
            self._paths.pop(name, None)
            async with self._changing:
                if name in self._resident and not self._open[name] and name not in self._paths:
                    with suppress(InfrastructureError):
                        await self._unload(name)

    async def watch(self, clock: Clock) -> None:
        """Note the engines' time for a token, now and then, until cancelled."""
        while True:
            engines = await self._pool.statistics()
            tokens = sum(engine.prefilled_tokens + engine.generated_tokens for engine in engines)
            self._device_s_per_token = sum(engine.busy_s for engine in engines) / max(1, tokens)
            await clock.sleep(_WATCH_S)

    def statistics(self) -> Mapping[str, float]:
        """See `TenantSampler`."""
        return {
            "device_s_per_token": self._device_s_per_token,
            "open_samples": sum(self._open.values()),
            "samplers": len(self._names),
            "resident_samplers": len(self._resident),
            "paged_out_samplers": self._paged_out,
        }


def _top(scored: PromptLogprobs, start: int) -> TopTokens:
    return TopTokens(token_ids=scored.top_ids[start:], logprobs=scored.top_logprobs[start:])
