"""Replica of the fake generator: continuous batching as a sequence of events, without a clock of its own."""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.records.clients import Watch
from headway.records.counted import CountedTokens, Repeated, joined, tokens_from
from headway.records.generation import FinishReason, GenerationRequest, PartialResponse, UpdateMode, VersionSpan

LOGPROB = -0.5  # of every token
_ROUNDING = 1e-6  # tokens: rounding of summed times
_ROUNDING_S = 1e-9
_FREE_SHARE = 0.01  # of the KV capacity that a new request must leave free, or it would be preempted at once


@dataclass(frozen=True, kw_only=True)
class ReplicaCosts:
    """Durations and capacities of a replica. A decode step gives every running request one token."""

    token_s: float | Callable[[int], float]  # a decode step: a number, or a function of how many requests run
    kv_token_s: float = 0.0  # added to it for every KV token of the running requests
    prefill_token_s: float = 0.0  # of each token to prefill; decoding stands still meanwhile
    prefill_s: Callable[[GenerationRequest], float] | None = None  # delay before decoding, beside everything else
    beside: float = 1.0  # factor on a decode step's duration while the trainer computes
    slots: int = 64
    kv_capacity_tokens: int | None = None
    counted: bool = False  # responses are counted, not stored

    def step_s(self, running: int) -> float:
        return self.token_s(running) if callable(self.token_s) else self.token_s


class FakeRequest:
    """A request: *waiting* -> *prefilling* (or delayed) -> *decoding* -> finished; preempted, it waits again.

    A *stretch* is the time between two preemptions. While the request decodes, ``base`` is the replica's work at the
    beginning of its present stretch; ``done`` counts the tokens of earlier stretches.
    """

    def __init__(
        self, request: GenerationRequest, serial: int, length: int, reason: FinishReason, watch: Watch | None
    ) -> None:
        self.request = request
        self.watch = watch
        self.notified_tokens = len(request.partial.ids)  # response tokens when its watch was last notified
        self.serial = serial
        self.length = length  # response tokens at its end
        self.reason: FinishReason = reason
        self.session = request.session
        self.begun = False  # holds a slot
        self.decoding = False
        self.base = 0.0
        self.change = 0  # index of the version its stretch began under
        self.done = 0
        self.stretch = 0  # preemptions so far: events of earlier stretches are void
        self.spans: list[list[int]] = [[span.version, span.tokens] for span in request.partial.versions]
        self.prompt_key: tuple[Sequence[int], int] = ((), 0)  # with the version it began under
        self.first_token_s = 0.0
        self.reprefills = 0

    @property
    def resumed_tokens(self) -> int:
        return len(self.request.partial.ids)

    @property
    def context_tokens(self) -> int:
        """KV tokens that the request needs before the first token of its stretch."""
        return len(self.request.prompt_ids) + self.resumed_tokens + self.done

    @property
    def allowed_tokens(self) -> int:
        """Prompt tokens plus response tokens still allowed: the load that the request may put on a replica."""
        return len(self.request.prompt_ids) + max(0, self.request.sampling.max_tokens - self.resumed_tokens - self.done)


class FakeReplica:
    """Requests in slots, their KV, and the time that decoding and prefills take.

    ``work`` counts the tokens that a request decoding since the start would have gained. Prefills have a queue of
    their own, and decoding waits for all of them. With n requests that decode and K tokens in their KV, the next d
    tokens of each take the sum of d steps: d x step_s(n) + kv_token_s x (d K + n d (d - 1) / 2) seconds.

    Usage: ``advance(now)``, a change, ``settle()``; then call both again at ``next_event_s()``.
    """

    def __init__(self, costs: ReplicaCosts, version: int, now: float, on_end: Callable[[FakeRequest], None]) -> None:
        self.costs = costs
        self._on_end = on_end
        self._now = now
        self.changes: list[tuple[float, int]] = [(0.0, version)]  # work at which each version was applied
        self.work = 0.0
        self.running: dict[int, FakeRequest] = {}  # by serial, in the order they began
        self.waiting: list[tuple[int, int, int, FakeRequest]] = []  # (priority, serial, stretch, request)
        self.open = 0
        self._held: list[tuple[int, int, int, FakeRequest]] | None = None  # those that wait while others finish
        self.paused = self.yielded = False
        self._finishing = False  # requests end on the version they began with
        self.beside = False  # the trainer computes, on devices of its own
        self._due: list[tuple[float, int, int, FakeRequest]] = []  # (work at its end, serial, stretch, request)
        self._watched: list[tuple[float, int, int, FakeRequest]] = []  # (work at its watch's next notification, ...)
        self._delayed: list[tuple[float, int, int, FakeRequest]] = []  # (time its delay ends, ...)
        self._prefills: deque[tuple[FakeRequest | None, int]] = deque()  # (request, its stretch)
        self._prefill_left_s: deque[float] = deque()
        self._decoding = 0
        self._context = 0  # KV tokens of running requests at the beginning of their stretches
        self._bases = 0.0  # sum of ``base`` over the decoding requests
        self._allowed = 0  # sum of ``allowed_tokens`` over the open requests
        self._sessions: OrderedDict[str, int] = OrderedDict()  # KV tokens kept of finished turns, oldest first
        self._session_tokens = 0
        self._prompts: Counter[tuple[Sequence[int], int]] = Counter()  # running requests by prompt
        self.generated = self.prefilled = self.finished = self.preemptions = 0
        self.busy_s = self.idle_s = self.paused_s = self.yielded_s = self.decode_steps = 0.0

    # --- present state --------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.changes[-1][1]

    @property
    def kv_tokens(self) -> float:
        """KV tokens of the running requests, fractions of a token included."""
        return self._context + self._decoding * self.work - self._bases

    @property
    def outstanding_tokens(self) -> int:
        return int(self._allowed - (self._decoding * self.work - self._bases))

    @property
    def generated_tokens(self) -> int:
        return self.generated + sum(self.produced(request) for request in self.running.values())

    @property
    def held_tokens(self) -> int:
        return sum(request.context_tokens + self.produced(request) for request in self.running.values())

    def holds(self, session: str) -> bool:
        return session in self._sessions

    def produced(self, entry: FakeRequest) -> int:
        """Count the tokens that a request has gained in its present stretch."""
        if not entry.decoding or entry.reason == "error":
            return 0
        remaining_tokens = entry.length - entry.resumed_tokens - entry.done
        return max(0, min(remaining_tokens, math.floor(self.work - entry.base + _ROUNDING)))

    # --- time -----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Advance time and work to ``now``, which must not be after the next event."""
        elapsed_s, self._now = now - self._now, now
        if self.yielded:
            self.yielded_s += elapsed_s
        elif self.paused:
            self.paused_s += elapsed_s
        elif self._prefills:
            self._prefill_left_s[0] -= elapsed_s
            self.busy_s += elapsed_s
        elif self.running:
            if self._decoding:
                gained_tokens = self._tokens_in(elapsed_s)
                self.work += gained_tokens
                self.decode_steps += gained_tokens
            self.busy_s += elapsed_s
        else:
            self.idle_s += elapsed_s

    def next_event_s(self) -> float:
        """Time of the next event: an end, a beginning, a notification or full KV; inf when none is due."""
        due_s = self._delayed[0][0] if self._delayed else math.inf
        if self.paused or self.yielded:
            return due_s
        if self._prefills:
            return min(due_s, self._now + max(0.0, self._prefill_left_s[0]))
        if not self._decoding:
            return due_s
        due_work = self._due[0][0]
        event_tokens = (min(due_work, self._watched[0][0]) if self._watched else due_work) - self.work
        capacity_tokens = self.costs.kv_capacity_tokens
        if capacity_tokens is not None and self._decoding > 1:
            event_tokens = min(event_tokens, (capacity_tokens - self.kv_tokens) / self._decoding)
        return min(due_s, self._now + self._seconds_of(max(0.0, event_tokens)))

    def _step_and_growth_s(self) -> tuple[float, float]:
        """Return (a, b): d more tokens of each request take a d + b d² seconds."""
        n_running = self._decoding
        slowdown = self.costs.beside if self.beside else 1.0
        kv_s = self.costs.kv_token_s * slowdown
        step_s = self.costs.step_s(n_running) * slowdown
        return (step_s + kv_s * (self.kv_tokens - n_running / 2), kv_s * n_running / 2) if kv_s else (step_s, 0.0)

    def _seconds_of(self, tokens: float) -> float:
        step_s, growth_s = self._step_and_growth_s()
        return tokens * (step_s + growth_s * tokens)

    def _tokens_in(self, seconds: float) -> float:
        step_s, growth_s = self._step_and_growth_s()
        if not growth_s:
            return seconds / step_s
        return 2.0 * seconds / (step_s + math.sqrt(step_s * step_s + 4.0 * growth_s * seconds))

    # --- events ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Process due events: notifications, ends of prefills and delays, finished requests, preemptions, new requests.

        Call `advance` before."""
        self._evict_sessions()  # first, since KV only grows between two events
        self._notify_watches()
        while self._delayed and self._delayed[0][0] <= self._now + _ROUNDING_S:
            _, _, stretch_index, request = heapq.heappop(self._delayed)
            if request.begun and request.stretch == stretch_index:
                self._start_decoding(request)
        self._end_prefills()
        while self._due:
            due_work, _, stretch_index, request = self._due[0]
            is_current = request.decoding and request.stretch == stretch_index
            if is_current and due_work > self.work + _ROUNDING:
                break
            heapq.heappop(self._due)
            if is_current:
                self._on_end(request)
        if self.costs.kv_capacity_tokens is not None:
            self._preempt_to_fit(self.costs.kv_capacity_tokens)
        self._fill()

    def _notify_watches(self) -> None:
        """Notify due watches. A watch may cancel requests, which calls `settle` again."""
        while self._watched and self._watched[0][0] <= self.work + _ROUNDING:
            _, _, stretch_index, request = heapq.heappop(self._watched)
            if request.decoding and request.stretch == stretch_index and request.watch is not None:
                request.notified_tokens += request.watch.every_tokens
                self._watch(request)
                request.watch.on_tokens(self.response(request)[0])

    def _watch(self, entry: FakeRequest) -> None:
        """Schedule the next notification of a request's watch, if one is due before its end."""
        if entry.watch is not None and entry.notified_tokens + entry.watch.every_tokens < entry.length:
            due_work = entry.base + entry.notified_tokens + entry.watch.every_tokens - entry.resumed_tokens - entry.done
            heapq.heappush(self._watched, (due_work, entry.serial, entry.stretch, entry))

    def _evict_sessions(self) -> None:
        """Evict the KV of finished turns, oldest first, until the running requests' KV fits."""
        capacity = self.costs.kv_capacity_tokens
        while capacity is not None and self._sessions and self.kv_tokens + self._session_tokens > capacity:
            self._session_tokens -= self._sessions.popitem(last=False)[1]

    def _preempt_to_fit(self, capacity: int) -> None:
        """Preempt the youngest requests until the KV of the others fits."""
        while len(self.running) > 1 and self.kv_tokens >= capacity - _ROUNDING:
            youngest = max(self.running.values(), key=lambda candidate: (candidate.request.priority, candidate.serial))
            self.interrupt(youngest)
            self.preemptions += 1
            self.enter(youngest)

    def _fill(self) -> None:
        costs = self.costs
        while self.waiting and len(self.running) < costs.slots and not self.paused and not self.yielded:
            _, _, stretch_index, request = self.waiting[0]
            if request.stretch != stretch_index or request.length < 0:  # moved elsewhere or cancelled
                heapq.heappop(self.waiting)
                continue
            if costs.kv_capacity_tokens is not None and self.running:
                free_tokens = costs.kv_capacity_tokens * (1 - _FREE_SHARE) - self.kv_tokens
                if request.context_tokens > free_tokens:
                    return
            heapq.heappop(self.waiting)
            self._begin(request)
        self._end_prefills()  # of zero duration

    def _end_prefills(self) -> None:
        """Start decoding of requests whose prefill is done; skip prefills of requests that are gone."""
        while self._prefills:
            request, stretch_index = self._prefills[0]
            is_gone = request is not None and not (request.begun and request.stretch == stretch_index)
            if not is_gone and self._prefill_left_s[0] > _ROUNDING_S:
                return
            self._prefills.popleft()
            self._prefill_left_s.popleft()
            if request is not None and not is_gone:
                self._start_decoding(request)

    def _begin(self, entry: FakeRequest) -> None:
        costs = self.costs
        entry.begun = True
        self.running[entry.serial] = entry
        context_tokens = entry.context_tokens
        self._context += context_tokens
        cached_tokens = 0
        if entry.session:
            cached_tokens = self._sessions.pop(entry.session, 0)
            self._session_tokens -= cached_tokens
        if costs.prefill_token_s:
            prompt_key = entry.prompt_key = (entry.request.prompt_ids, self.version)
            if not cached_tokens and self._prompts[prompt_key]:
                cached_tokens = len(entry.request.prompt_ids)  # a running sibling's KV has the prompt
            self._prompts[prompt_key] += 1
            new_tokens = max(0, context_tokens - cached_tokens)
            self.prefilled += new_tokens
            self._prefills.append((entry, entry.stretch))
            self._prefill_left_s.append(new_tokens * costs.prefill_token_s)
            return
        self.prefilled += max(0, context_tokens - cached_tokens)
        delay_s = costs.prefill_s(entry.request) if costs.prefill_s is not None else 0.0
        if delay_s > 0:
            heapq.heappush(self._delayed, (self._now + delay_s, entry.serial, entry.stretch, entry))
        else:
            self._start_decoding(entry)

    def _start_decoding(self, entry: FakeRequest) -> None:
        entry.decoding = True
        entry.base = self.work
        entry.change = len(self.changes) - 1
        self._decoding += 1
        self._bases += entry.base
        remaining_tokens = 0 if entry.reason == "error" else entry.length - entry.resumed_tokens - entry.done
        if entry.first_token_s == 0.0 and remaining_tokens:
            entry.first_token_s = self._now + self._seconds_of(1.0)
        heapq.heappush(self._due, (entry.base + remaining_tokens, entry.serial, entry.stretch, entry))
        self._watch(entry)

    # --- requests and versions ------------------------------------------------------------------------------

    def enter(self, entry: FakeRequest) -> None:
        """Queue a request for a slot; lower priorities first."""
        self.open += 1
        self._allowed += entry.allowed_tokens
        queue = self.waiting if self._held is None or entry.reprefills else self._held
        heapq.heappush(queue, (entry.request.priority, entry.serial, entry.stretch, entry))

    def leave(self, entry: FakeRequest) -> None:
        """Remove a request, freeing its slot and KV."""
        self.open -= 1
        self._allowed -= entry.allowed_tokens
        if not entry.begun:
            return
        entry.begun = False
        del self.running[entry.serial]
        self._context -= entry.context_tokens
        if self.costs.prefill_token_s:
            self._prompts[entry.prompt_key] -= 1
            if not self._prompts[entry.prompt_key]:
                del self._prompts[entry.prompt_key]
        if entry.decoding:
            entry.decoding = False
            self._decoding -= 1
            self._bases -= entry.base

    def withdraw(self, entry: FakeRequest) -> None:
        """Remove a request for good, also from the waiting queue."""
        self.leave(entry)
        entry.length = -1

    def interrupt(self, entry: FakeRequest) -> None:
        """Preempt a request: remove it with its tokens so far, which the replica it enters next prefills."""
        produced_tokens, has_begun = self.produced(entry), entry.begun
        entry.spans = self.spans(entry)
        self.leave(entry)
        self.generated += produced_tokens
        entry.done += produced_tokens
        entry.stretch += 1
        entry.reprefills += has_begun

    def keep_session(self, session: str, tokens: int) -> None:
        """Keep the KV of a finished turn until its capacity is needed."""
        self._sessions[session] = tokens
        self._session_tokens += tokens

    def forget_session(self, session: str) -> None:
        self._session_tokens -= self._sessions.pop(session, 0)

    def begin_drain(self) -> None:
        """Continue only requests that have begun, preempted ones too, until the next update is applied."""
        self._held = [queued for queued in self.waiting if not queued[-1].reprefills]
        self.waiting = [queued for queued in self.waiting if queued[-1].reprefills]
        heapq.heapify(self.waiting)

    def begin_update(self, mode: UpdateMode) -> tuple[list[FakeRequest], int]:
        """Pause decoding. Returns (requests that cross the update, tokens to prefill again)."""
        self._sessions.clear()
        self._session_tokens = 0
        self._finishing = mode == "finish"
        crossing_requests = [] if self._finishing else list(self.running.values())
        reprefilled_tokens = 0
        if mode == "recompute":
            for request in crossing_requests:
                request.reprefills += 1
                reprefilled_tokens += request.context_tokens + self.produced(request)
        self.paused = True
        return crossing_requests, reprefilled_tokens

    def end_update(self, version: int, reprefilled: int) -> None:
        self.paused = False
        self.waiting += self._held or ()
        heapq.heapify(self.waiting)
        self._held = None
        self.changes.append((self.work, version))
        if reprefilled and self.costs.prefill_token_s:
            self._prefills.append((None, 0))
            self._prefill_left_s.append(reprefilled * self.costs.prefill_token_s)
            self.prefilled += reprefilled

    # --- results --------------------------------------------------------------------------------------------

    def spans(self, entry: FakeRequest) -> list[list[int]]:
        """Return the version spans of a request's response, [version, tokens] each, present stretch included."""
        produced_tokens, spans, counted_tokens = self.produced(entry), [[*span] for span in entry.spans], 0
        if not produced_tokens:
            return spans
        for change_index in range(entry.change, len(self.changes)):
            version = self.changes[change_index][1]
            end_token = produced_tokens
            if change_index + 1 < len(self.changes) and not self._finishing:
                change_work = self.changes[change_index + 1][0]
                end_token = max(counted_tokens, min(produced_tokens, math.floor(change_work - entry.base + _ROUNDING)))
            if end_token > counted_tokens and spans and spans[-1][0] == version:
                spans[-1][1] += end_token - counted_tokens
            elif end_token > counted_tokens:
                spans.append([version, end_token - counted_tokens])
            counted_tokens = end_token
        return spans

    def response(self, entry: FakeRequest, ended: FinishReason | None = None) -> tuple[PartialResponse, int]:
        """Return (response so far, count of tokens gained here). ``ended``: the finish reason, if it has ended."""
        gained, resumed = entry.done + self.produced(entry), entry.request.partial
        version_spans = tuple(VersionSpan(version=version, tokens=tokens) for version, tokens in self.spans(entry))
        if not gained:
            return PartialResponse(ids=resumed.ids, logprobs=resumed.logprobs, versions=version_spans), 0
        new_ids: Sequence[int]
        logprobs: Sequence[float]
        if self.costs.counted:
            new_ids = CountedTokens.of(gained, entry.request.sampling.seed, last=_last_id(entry, ended))
            logprobs = Repeated.of(LOGPROB, gained)
        else:
            new_ids, logprobs = synthetic_tokens(entry, entry.resumed_tokens, entry.resumed_tokens + gained, ended)
        ids, logprobs = joined(resumed.ids, new_ids), joined(resumed.logprobs, logprobs)
        return PartialResponse(ids=ids, logprobs=logprobs, versions=version_spans), gained


def synthetic_tokens(
    entry: FakeRequest, first: int, end: int, ended: FinishReason | None = None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Make response tokens ``first`` to ``end``, and log-probabilities. ``ended``: the finish reason, at the end."""
    ids, last_id = tokens_from(entry.request.sampling.seed, first, end - first), _last_id(entry, ended)
    return ids if last_id < 0 else (*ids[:-1], last_id), (LOGPROB,) * (end - first)


def _last_id(entry: FakeRequest, ended: FinishReason | None) -> int:
    """Return the id of a response's last token: a stop token after "stop", else -1 for an ordinary token."""
    stop_ids = entry.request.sampling.stop_token_ids
    return stop_ids[0] if ended == "stop" and stop_ids else -1
