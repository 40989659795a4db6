"""Runs committed requests: a model's in order, each once, on a trainer that may die; samples beside them; sessions."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import msgspec

from headway.config.services.tinker import TinkerConfig
from headway.control.tenant_shares import DeficitRoundRobin
from headway.records.errors import HeadwayError, InfrastructureError, StorageFailed, WorkerDied
from headway.records.tenants.protocols import (
    AdapterNotLoaded,
    BaseDescription,
    TenantRefused,
    TenantSampler,
    TenantsUnavailable,
    TenantTrainer,
)
from headway.runtime.clock import Clock
from headway.services.tinker.log import LoggedModel, LoggedRequest, LoggedSampler, LoggedSession, TinkerLog
from headway.services.tinker.operations import Operations, RequestAnswer
from headway.services.tinker.ordering import ModelOrder, RequestAdmission, SequenceGap
from headway.services.tinker.tenants import REQUEST_TOKENS, SampleAdmissions, TenantAccounts, TooManyRequests

_log = logging.getLogger("headway.tinker")
_RETRY_S = 0.5  # between attempts while a worker restarts
_ATTEMPTS = 3  # of a request in whose course the worker died
_SWEEP_S = 1.0
_OPEN_REQUESTS = 4096  # of a model or a sampler, without a reply; more are refused
_SHARING_MODELS = 16  # whose requests are carried out at once, if tenants share passes


class _LiveModel:
    """A model with open requests, or whose state is in the trainer."""

    def __init__(self, model: LoggedModel, order: ModelOrder) -> None:
        self.session, self.tenant = model.session, model.tenant
        self.order = order
        self.restored = False


class TinkerDispatch:
    """Runs the log's open requests until they have replies.

    Lifecycle of a request: *committed* (`submit`) -> *running* in its turn -> *replied* (committed with its effects) ->
    *fetched* -> *released*. Invariant: between two durable states of a model the trainer has computed exactly the
    forward_backwards that the log lists, in order; after any failure the state is restored and they are repeated.
    Tenants take turns by tokens, at the trainer and at the engines; the models of one, request by request.
    """

    def __init__(
        self,
        log: TinkerLog,
        trainer: TenantTrainer,
        sampler: TenantSampler,
        base: BaseDescription,
        settings: TinkerConfig,
        clock: Clock,
        wall: Callable[[], float],
        admitted_samples: int = 128,
    ) -> None:
        """``clock``: monotonic, for waits and sessions; ``wall``: for stamps that people read, and retention.
        ``admitted_samples``: at the engines at once. Raises ConfigurationError for unknown prices."""
        self.counts: Counter[str] = Counter()
        self._log = log
        self._trainer = trainer
        self._sampler = sampler
        self._base = base
        self._settings = settings
        self._clock = clock
        self._wall = wall
        self.accounts = TenantAccounts(log, settings, clock.now)
        self.accounts.open_models = self._open_models
        admissions = SampleAdmissions(admitted_samples)
        self.operations = Operations(log, trainer, sampler, base, settings, self.accounts, admissions, wall)
        self._models: dict[str, _LiveModel] = {}
        self._turns = DeficitRoundRobin[str](REQUEST_TOKENS)  # models that are ready
        self._ready: set[str] = set()  # these, and those that have their turn
        self._work = asyncio.Event()
        self._replied: dict[tuple[str, int], asyncio.Event] = {}  # of requests that somebody waits for
        self._attempts: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        self._alive: dict[str, float] = {}  # session -> when it last gave a sign
        self._samples: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Run until cancelled: first what the log has open, then what is submitted. Raises StorageFailed and
        BufferCorrupt for a log that can't be read."""
        now_s = self._clock.now()
        for session in self._log.all("sessions", "finished IS NULL"):
            self._alive[session.id] = now_s
        async with asyncio.TaskGroup() as self._group:
            for request in self._log.all("requests", "replied_s IS NULL"):
                self._enqueue(request)
            self._group.create_task(self._train())
            self._group.create_task(self._sweep())

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self, request: LoggedRequest, session: LoggedSession, model: LoggedModel | None = None, tokens: int = 0
    ) -> RequestAdmission:
        """Commit a session's request of so many ``tokens``, and a new ``model`` with its first; run it if it is new.
        Raises TooManyRequests, StorageFailed: nothing is committed then."""
        live = self._models.get(request.scope)
        open_count = len(live.order) if live else sum(scope == request.scope for scope, _ in self._samples)
        turn = live.order.next_sequence if live else -1  # the one that others wait for is never refused
        if open_count >= _OPEN_REQUESTS and request.sequence > turn:
            raise TooManyRequests(f"{request.scope} has {open_count} requests without a reply: valid: again, later")
        if self._log.request(*(key := (request.scope, request.sequence))) is None:
            self.accounts.arrive(session.tenant, key, tokens, refusable=request.sequence > turn)
        try:
            admission = self._log.submit(request, self.operations.arrival(request, model))
        except BaseException:
            self.accounts.depart(session.tenant, key)
            raise
        if admission is RequestAdmission.RELEASED:
            self.accounts.depart(session.tenant, key)
        self.counts[admission.value] += 1
        if admission is RequestAdmission.NEW:
            self.keep_alive(session.id)
            self._enqueue(request)
        return admission

    async def reply(self, scope: str, sequence: int, wait_s: float) -> LoggedRequest | None:
        """Return a request once it has its reply, or as it is after ``wait_s``; None: it is unknown or released."""
        request = self._log.request(scope, sequence)
        if request is None or request.replied_s is not None:
            return request
        event = self._replied.setdefault((scope, sequence), asyncio.Event())
        timer = asyncio.ensure_future(self._clock.sleep(wait_s))
        waiter = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({timer, waiter}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            waiter.cancel()
        return self._log.request(scope, sequence)

    def gap(self, model_id: str) -> SequenceGap | None:
        """Return the sequence that a model's requests wait for, with its age."""
        live = self._models.get(model_id)
        return live and live.order.gap(self._clock.now())

    def gaps(self, tenants: Collection[str]) -> dict[str, SequenceGap]:
        """Return the gaps of all models of these tenants."""
        model_ids = [model_id for model_id, live in self._models.items() if live.tenant in tenants]
        return {model_id: gap for model_id in model_ids if (gap := self.gap(model_id)) is not None}

    def note_fetched(self, request: LoggedRequest) -> None:
        """Note that a client has the reply."""
        if request.fetched_s is None and not request.released:
            self._log.note_fetched(request.scope, request.sequence, self._wall())

    async def cancel(self, request: LoggedRequest) -> None:
        """End an open sample request with an error."""
        if request.replied_s is None:
            if (task := self._samples.get((request.scope, request.sequence))) is not None:
                task.cancel()
            tenant = self._log.get("samplers", request.scope).tenant
            await self._conclude(request, RequestAnswer.failure("the client cancelled the request", "user"), tenant)
            await self._quietly(self._sampler.cancel(f"{request.scope}:{request.sequence}"))

    def _enqueue(self, request: LoggedRequest) -> None:
        if self._group is None:
            return  # `run` begins with all that the log has open
        if request.kind == "asample":
            if (key := (request.scope, request.sequence)) in self._samples:
                return
            self._samples[key] = task = self._group.create_task(self._sample(request))
            task.add_done_callback(lambda done: self._samples.get(key) is done and self._samples.pop(key))
            return
        live = self._live(request.scope)
        live.order.add(request.sequence, self._clock.now())
        self._note_ready(request.scope, live)

    def _live(self, model_id: str) -> _LiveModel:
        if model_id not in self._models:
            order = ModelOrder(self._log.released_below(model_id, 0))
            for sequence in self._log.replied(model_id):
                order.resolve(sequence)
            self._models[model_id] = _LiveModel(self._log.get("models", model_id), order)
        return self._models[model_id]

    def _note_ready(self, model_id: str, live: _LiveModel) -> None:
        if live.order.ready() is not None and model_id not in self._ready:
            self._ready.add(model_id)
            self._turns.add(live.tenant, model_id)
            self._work.set()

    # --- training -----------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Consumes the models' requests, in turn, of several models at once where these share passes; waits for the
        trainer; is unblocked by `submit`."""
        turns = asyncio.Semaphore(_SHARING_MODELS if self._settings.co_batch else 1)
        assert self._group is not None
        while True:
            await turns.acquire()
            while (turn := self._turns.take()) is None:
                self._work.clear()
                await self._work.wait()
            task = self._group.create_task(self._run_turn(*turn))
            task.add_done_callback(lambda _: turns.release())

    async def _run_turn(self, tenant: str, model_id: str) -> None:
        live = self._live(model_id)
        if (sequence := live.order.ready()) is not None:
            self.accounts.begin(tenant, (model_id, sequence))
            tokens = await self._run_next(model_id, live, sequence)
            self._turns.charge(tenant, max(tokens, REQUEST_TOKENS))
            if live.session not in self._alive:
                await self._free_model(model_id, live)
        self._ready.discard(model_id)  # until now it had its turn
        if model_id in self._models:
            self._note_ready(model_id, self._models[model_id])

    async def _run_next(self, model_id: str, live: _LiveModel, sequence: int) -> int:
        """Run the request whose turn it is, or fail it; after a failure of the trainer it keeps its turn. Returns the
        tokens that it trained on."""
        request = self._log.request(model_id, sequence)
        if request is None or request.replied_s is not None:
            live.order.resolve(sequence)
            return 0
        started_s = self._clock.now()
        try:
            if not live.restored:
                await self._restore(model_id, live)
                if live.order.ready() != sequence:
                    return 0
            answer = self._exhausted(request, _ATTEMPTS) or await self.operations.train(request)
        except TenantRefused as error:
            answer = RequestAnswer.failure(str(error), "user")
        except StorageFailed as error:
            answer = RequestAnswer.failure(str(error), "server")
        except Exception as error:  # the boundary of a tenant's request: others go on
            answer = await self._after_failure(request, live, error)
            if answer is None:
                return 0
        used = msgspec.structs.replace(answer.usage, device_s=self._clock.now() - started_s)
        await self._conclude(request, msgspec.structs.replace(answer, usage=used), live.tenant)
        live.order.resolve(sequence)
        return used.tokens

    async def _after_failure(self, request: LoggedRequest, live: _LiveModel, error: Exception) -> RequestAnswer | None:
        """Have the state restored before the next call, which comes at once if the adapter was merely evicted; returns
        the failure of a request whose state can't be restored."""
        self.counts["trainer_failures"] += 1
        evicted = isinstance(error, AdapterNotLoaded) and live.restored
        live.restored = False
        if isinstance(error, (InfrastructureError, WorkerDied)):
            for model in self._models.values():
                model.restored = False
        self._note_attempt(request, error)
        if (answer := self._exhausted(request, 2 * _ATTEMPTS)) is None and not evicted:
            await self._clock.sleep(_RETRY_S)
        return answer

    def _note_attempt(self, request: LoggedRequest, error: Exception) -> None:
        if not isinstance(error, (AdapterNotLoaded, TenantsUnavailable)):
            _log.warning("%s %s:%d: %s", request.kind, request.scope, request.sequence, error, exc_info=error)
            self._attempts[request.scope, request.sequence].append(f"{type(error).__name__}: {error}")

    def _exhausted(self, request: LoggedRequest, limit: int) -> RequestAnswer | None:
        """Return the failure of a request in whose course the worker failed too often. A model's state has been
        restored without it by then, so it wasn't applied."""
        causes = self._attempts.get((request.scope, request.sequence), [])
        if len(causes) < limit:
            return None
        return RequestAnswer.failure(f"the worker failed in each of {len(causes)} attempts: {causes[-1]}", "server")

    async def _restore(self, model_id: str, live: _LiveModel) -> None:
        """Load a model's durable state, answer the request that made it if that has no reply, and repeat the
        forward_backwards since. Raises StorageFailed if the state is missing."""
        state = await self._trainer.restore(model_id)
        logged: LoggedModel = self._log.get("models", model_id)
        if logged.applied > (-1 if state is None else state.sequence):
            raise StorageFailed(f"the state of {model_id} after request {logged.applied} is missing from the store")
        if state is not None:
            made_by = self._log.request(model_id, state.sequence)
            if made_by is not None and made_by.replied_s is None:
                answer = self.operations.durable_answer(made_by, state.adapter, state.metrics)
                await self._conclude(made_by, answer, live.tenant)
                live.order.resolve(state.sequence)
            condition = "scope = ? AND sequence > ? AND kind = 'forward_backward' AND failed = 0 AND replied_s NOT NULL"
            key = (model_id, state.sequence)
            for request in self._log.all("requests", f"{condition} AND body NOT NULL ORDER BY sequence", key):
                await self.operations.train(request)
                self.counts["repeated_passes"] += 1
        live.restored = True

    async def _conclude(self, request: LoggedRequest, answer: RequestAnswer, tenant: str) -> None:
        """Commit the reply with what it used, however long the disk is full, and wake those that wait for it."""
        effects = (*answer.effects, self.accounts.charge(tenant, answer.usage))
        replied = msgspec.structs.replace(
            request,
            reply=answer.reply,
            protobuf=int(answer.protobuf),
            failed=int(answer.failed),
            replied_s=self._wall(),
        )
        while True:
            try:
                self._log.reply(replied, effects, keeps_body=answer.keeps_body, applied=answer.applied)
                break
            except StorageFailed:
                self.counts["storage_failures"] += 1
                await self._clock.sleep(_RETRY_S)
        key = (request.scope, request.sequence)
        self._attempts.pop(key, None)
        self.accounts.depart(tenant, key)
        if (event := self._replied.pop(key, None)) is not None:
            event.set()

    # --- samples ------------------------------------------------------------------------------------------------------

    async def _sample(self, request: LoggedRequest) -> None:
        """Consumes a sample request; waits for its turn at the engines and for the sampler; is unblocked by its
        outcome, or `cancel`."""
        answer: RequestAnswer | None = None
        sampler: LoggedSampler = self._log.get("samplers", request.scope)
        while answer is None:
            try:
                answer = await self.operations.sample(request, sampler)
            except TenantRefused as error:
                answer = RequestAnswer.failure(str(error), "user")
            except Exception as error:  # the boundary of a tenant's request: others go on
                self.operations.registered.discard(request.scope)
                self._note_attempt(request, error)
                if (answer := self._exhausted(request, _ATTEMPTS)) is None:
                    await self._clock.sleep(_RETRY_S)
        await self._conclude(request, answer, sampler.tenant)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def keep_alive(self, session: str) -> None:
        """Note a sign of life of a session; what a dead one had asked for is sampled now."""
        returned = session not in self._alive
        self._alive[session] = self._clock.now()
        if returned:
            opened = "replied_s IS NULL AND kind = 'asample' AND substr(scope, 1, length(?1)) = ?1"
            for request in self._log.all("requests", opened, (f"{session}:",)):
                self._enqueue(request)

    def note_poll(self, session: str) -> None:
        """Note that a client asks for a reply: it is back, if its session was dead."""
        if session not in self._alive and self._log.get("sessions", session).finished is None:
            self.keep_alive(session)

    def _open_models(self, tenant: str) -> int:
        """Count a tenant's models in living sessions."""
        models: list[LoggedModel] = self._log.all("models", "tenant = ? AND adapter NOT NULL", (tenant,))
        return sum(model.session in self._alive for model in models)

    async def end_session(self, session: str) -> None:
        """End what waits behind a gap; free the slots of samples, which wait for the session's return, and memory of
        models and samplers, whose next requests load them again."""
        self._alive.pop(session, None)
        logged: LoggedSession | None = self._log.get("sessions", session)
        for key in [key for key in self._samples if key[0].startswith(f"{session}:")]:
            self._samples.pop(key).cancel()
            request = self._log.request(*key)
            if logged is not None and logged.finished is not None and request is not None:
                reason = "the session was finished while this request was sampled"
                await self._conclude(request, RequestAnswer.failure(reason, "user"), logged.tenant)
        for model_id, live in [entry for entry in self._models.items() if entry[1].session == session]:
            gap = live.order.gap(self._clock.now())
            for sequence in live.order.behind_gap():
                request = self._log.request(model_id, sequence)
                if gap is not None and request is not None:
                    reason = f"the session ended while this request waited for request {gap.sequence}, which never came"
                    await self._conclude(request, RequestAnswer.failure(reason, "user"), live.tenant)
                    live.order.resolve(sequence)
            await self._free_model(model_id, live)
        registered = self.operations.registered
        for sampler_id in [name for name in registered if name.startswith(f"{session}:")]:
            registered.discard(sampler_id)
            await self._quietly(self._sampler.release(sampler_id))

    async def _free_model(self, model_id: str, live: _LiveModel) -> None:
        """Free the memory of a model without open requests."""
        if len(live.order) == 0 and self._models.pop(model_id, None) is not None:
            await self._quietly(self._trainer.evict(model_id))

    async def _sweep(self) -> None:
        """Consumes deadlines (of sessions, replies, checkpoints); waits for the clock."""
        while True:
            await self._clock.sleep(_SWEEP_S)
            oldest_s = self._clock.now() - self._settings.session_timeout_s
            for session in [session for session, seen_s in self._alive.items() if seen_s < oldest_s]:
                self.counts["dead_sessions"] += 1
                await self.end_session(session)
            try:
                self.counts["released"] += self._log.release_replies(self._wall())
                expired = self._log.all("checkpoints", "expires_s <= ?", (self._wall(),))
            except StorageFailed:
                continue
            for checkpoint in expired:
                await self._quietly(self.operations.delete_checkpoint(checkpoint.path))

    async def _quietly(self, call: Coroutine[Any, Any, None]) -> None:
        """Await a call whose failure changes nothing: a worker that died holds nothing to free."""
        try:
            await call
        except HeadwayError:
            self.counts["failed_releases"] += 1
