"""What every engine must do, whatever it is made of. Call each function with a factory of the engine under test.

``make(slots=..., max_context_tokens=..., kv_capacity_tokens=...)`` gives a fresh engine with ``model_of(0)``'s weights
and version 0. Log-probabilities are compared at ``TOLERANCE`` (float32). Where engines may differ, a condition takes
their ``Capabilities``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headway.generator.routing.open_request import OpenRequest
from headway.models.decoder import Decoder
from headway.models.loading import weights_of
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    GenerationResult,
    SamplingParameters,
    TokenDelta,
    UpdateMode,
)
from tests.conformance.reference import forced_logprobs, random_model, replayed_logprobs

TOLERANCE = 1e-4
VOCABULARY = 40
_MODELS: dict[int, Decoder] = {}


class Engine(Protocol):
    version: int

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def step(self) -> bool: ...
    def take_deltas(self) -> list[TokenDelta]: ...
    def update_weights(self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode) -> AppliedWeights: ...
    def statistics(self) -> EngineStatistics: ...


class MakeEngine(Protocol):
    def __call__(
        self, *, slots: int = 4, max_context_tokens: int = 96, kv_capacity_tokens: int | None = None
    ) -> Engine: ...


@dataclass(frozen=True)
class Capabilities:
    """In what engines may differ."""

    kv_block_tokens: int = 1  # KV is given to requests, and counted, in blocks of so many tokens

    def whole_blocks(self, tokens: int) -> int:
        """``tokens`` rounded up to blocks."""
        return -(-tokens // self.kv_block_tokens) * self.kv_block_tokens


EXACT = Capabilities()


def model_of(version: int) -> Decoder:
    """The model published as ``version``. Never handed to an engine: those copy it."""
    if version not in _MODELS:
        _MODELS[version] = random_model(100 + version, vocabulary=VOCABULARY)
    return _MODELS[version]


class _Done:
    """Takes the place of a future."""

    def __init__(self) -> None:
        self.value: GenerationResult | None = None

    def done(self) -> bool:
        return self.value is not None

    def set_result(self, value: GenerationResult) -> None:
        self.value = value


class Session:
    """An engine and everything that came out of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: dict[str, GenerationRequest] = {}
        self.results: dict[str, GenerationResult] = {}
        self.order: list[str] = []
        self._calls: dict[str, OpenRequest] = {}
        self._steps = 0

    def submit(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self._calls[request.request_id] = OpenRequest(request, _Done())  # type: ignore[arg-type]
        self.engine.submit(requests)

    def step(self, times: int = 1) -> bool:
        worked = False
        for _ in range(times):
            worked = self.engine.step()
            self._steps += 1
            if self._steps % 3 == 0 or not worked:  # deltas of one token, of several, and across updates
                self.collect()
        return worked

    def update(self, version: int, mode: UpdateMode) -> AppliedWeights:
        applied = self.engine.update_weights(weights_of(model_of(version)), version, mode)
        self.collect()
        return applied

    def collect(self) -> None:
        for delta in self.engine.take_deltas():
            call = self._calls[delta.request_id]
            call.absorb(delta, 0.0)
            if delta.finish_reason is not None:
                assert delta.request_id not in self.results, "a request ended twice"
                call.finish(delta.finish_reason, delta.error, refused=delta.refused)
                done = call.future
                self.results[delta.request_id] = done.value  # type: ignore[attr-defined]
                self.order.append(delta.request_id)

    def run(self, limit_s: float = 200.0) -> dict[str, GenerationResult]:
        """Step until nothing is left. The limit is a time: an engine steps while grammars are compiled elsewhere."""
        until = time.monotonic() + limit_s
        while self.step() and time.monotonic() < until:
            pass
        assert self.results.keys() == self.requests.keys(), "a request never ended"
        return self.results


def request(
    name: str,
    prompt: Sequence[int] = (5, 6, 7),
    *,
    max_tokens: int = 10,
    temperature: float = 1.0,
    seed: int | None = None,
    priority: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    **fields: object,
) -> GenerationRequest:
    sampling = SamplingParameters(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=sum(map(ord, name)) if seed is None else seed,
        stop_token_ids=stop_token_ids,
    )
    return GenerationRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=sampling,
        priority=priority,
        **fields,  # type: ignore[arg-type]
    )


def random_requests(rng: random.Random, count: int) -> list[GenerationRequest]:
    """Groups of equal prompts and loners, all temperatures, lengths from 1 to 24."""
    out: list[GenerationRequest] = []
    prompt: tuple[int, ...] = (1,)
    for index in range(count):
        if index % 3 == 0 or rng.random() < 0.3:
            prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20)))
        out.append(
            request(
                f"r{index}",
                prompt,
                max_tokens=rng.randint(1, 24),
                temperature=rng.choice([1.0, 1.0, 0.7, 1.6, 0.0]),
                seed=rng.getrandbits(64) - (1 << 63),
                priority=rng.randrange(4),
                stop_token_ids=rng.choice([(), (3,), (3, 9, 11)]),
            )
        )
    return out


def assert_logprobs(result: GenerationResult, expected: Tensor) -> None:
    got = torch.tensor(result.response.logprobs)
    assert got.shape == expected.shape
    assert sum(span.tokens for span in result.response.versions) == len(result.response.ids)
    if len(got):
        assert (got - expected).abs().max() <= TOLERANCE, (got - expected).abs().max()


def assert_ended_rightly(asked: GenerationRequest, result: GenerationResult) -> None:
    """Its last token, and no other, ends it."""
    how, ids = asked.sampling, result.response.ids
    stops = [index for index, token in enumerate(ids) if token in how.stop_token_ids]
    if result.finish_reason == "stop":
        assert stops == [len(ids) - 1]
    else:
        assert result.finish_reason == "length"
        assert not stops
        assert len(ids) == how.max_tokens


# --- the conditions -------------------------------------------------------------------------------------------


def check_logprobs_at_every_composition(make: MakeEngine, seed: int) -> None:
    """Random arrivals, lengths, temperatures: each token's log-probability is a teacher-forced forward's."""
    rng = random.Random(seed)
    session = Session(make(slots=rng.choice([1, 3, 8])))
    waiting = random_requests(rng, 14)
    while waiting:
        arriving = rng.randint(0, 5)
        session.submit(*waiting[:arriving])
        waiting = waiting[arriving:]
        session.step(rng.randint(1, 8))
    for name, result in session.run().items():
        asked = session.requests[name]
        assert_ended_rightly(asked, result)
        expected = forced_logprobs(model_of(0), asked.prompt_ids, result.response.ids, asked.sampling.temperature)
        assert_logprobs(result, expected)
        if asked.sampling.temperature == 0:
            assert_greedy(asked, result)


def assert_greedy(asked: GenerationRequest, result: GenerationResult) -> None:
    ids = torch.tensor([*asked.prompt_ids, *result.response.ids])
    with torch.no_grad():
        logits = model_of(0)(ids, [len(ids)])[len(asked.prompt_ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(result.response.ids)


def check_tokens_do_not_depend_on_neighbours(make: MakeEngine, seed: int) -> None:
    """Equal request and weights, equal tokens: alone, in company, in any order."""
    rng = random.Random(seed)
    requests = random_requests(rng, 10)
    together = Session(make(slots=5))
    together.submit(*requests)
    together.run()
    for one in rng.sample(requests, 4):
        alone = Session(make(slots=2))
        alone.submit(one)
        assert alone.run()[one.request_id].response.ids == together.results[one.request_id].response.ids


def check_updates_in_flight(make: MakeEngine, mode: UpdateMode, seed: int, waits: bool = True) -> None:
    """``keep``: a replay of the segments, old KV and all; ``recompute``: each segment is its version's own forward;
    ``finish``: every response is one version's. ``waits``: the engine samples in steps alone, so requests are open when
    an update comes; a server may have ended them."""
    rng = random.Random(seed)
    session = Session(make(slots=4))
    waiting = random_requests(rng, 12)
    version = 0
    crossed = 0
    while waiting or session.results.keys() != session.requests.keys():
        arriving = rng.randint(0, 4)
        session.submit(*waiting[:arriving])
        waiting = waiting[arriving:]
        session.step(rng.randint(1, 6))
        if version < 3 and len(session.requests) > 4 * version + 2 and rng.random() < 0.7:
            version += 1
            crossed += session.update(version, mode).in_flight
    if waits or mode == "finish":
        several = any(len(result.response.versions) > 1 for result in session.results.values())
        assert (crossed > 0) == several == (mode != "finish")
    assert len({span.version for result in session.results.values() for span in result.response.versions}) > 1
    for name, result in session.results.items():
        asked = session.requests[name]
        prompt, ids, temperature = asked.prompt_ids, result.response.ids, asked.sampling.temperature
        if mode == "keep":
            expected = replayed_logprobs(model_of, prompt, ids, result.response.versions, temperature)
        else:
            parts, first = [], 0
            for span in result.response.versions:
                own = forced_logprobs(model_of(span.version), prompt, ids[: first + span.tokens], temperature)
                parts.append(own[first:])
                first += span.tokens
            expected = torch.cat(parts)
            if mode == "finish":
                assert not result.reprefills
            assert result.reprefills >= len(result.response.versions) - 1 or len(prompt) == 1
        assert_logprobs(result, expected)


def check_update_changes_what_is_sampled(make: MakeEngine, mode: UpdateMode) -> None:
    """After an update of an idle engine everything is the new version's; going back gives the old tokens again."""
    session = Session(make())
    session.submit(request("before", max_tokens=16, seed=1))
    session.run()
    session.update(1, mode)
    session.submit(request("after", max_tokens=16, seed=1))
    session.run()
    session.update(0, mode)
    session.submit(request("again", max_tokens=16, seed=1))
    results = session.run()
    assert results["before"].response.ids == results["again"].response.ids != results["after"].response.ids
    assert_logprobs(results["after"], forced_logprobs(model_of(1), (5, 6, 7), results["after"].response.ids, 1.0))
    assert [span.version for span in results["after"].response.versions] == [1]


def check_prefix_is_not_shared_across_versions(make: MakeEngine) -> None:
    """A member that joins its group after a ``keep`` update gets a prompt computed by the new version."""
    session = Session(make(slots=4))
    prompt = tuple(range(2, 22))
    session.submit(request("old", prompt, max_tokens=12))
    session.step(3)
    session.update(1, "keep")
    session.submit(request("new", prompt, max_tokens=8))
    session.run()
    result = session.results["new"]
    assert [span.version for span in result.response.versions] == [1]
    assert_logprobs(result, forced_logprobs(model_of(1), prompt, result.response.ids, 1.0))


def check_prefix_is_not_shared_across_updates_of_one_version(make: MakeEngine) -> None:
    """A revived trainer publishes its version again: what was computed before that update is still not reused."""
    session = Session(make(slots=4))
    prompt = tuple(range(2, 22))
    session.submit(request("old", prompt, max_tokens=12))
    session.step(3)
    session.engine.update_weights(weights_of(model_of(1)), session.engine.version, "keep")
    session.submit(request("new", prompt, max_tokens=8))
    session.run()
    result = session.results["new"]
    assert_logprobs(result, forced_logprobs(model_of(1), prompt, result.response.ids, 1.0))


def check_abort_update_parks_and_resumes(make: MakeEngine) -> None:
    """In-flight requests come back with their tokens, waiting ones stay, uninterruptible ones go on."""
    session = Session(make(slots=3))
    session.submit(
        request("a", max_tokens=20, priority=0),
        request("b", max_tokens=20, priority=1),
        request("stays", max_tokens=20, priority=2, interruptible=False),
        request("waits", max_tokens=5, priority=3),
    )
    session.step(6)
    session.update(1, "abort")
    assert sorted(session.results) == ["a", "b"]
    for name in ("a", "b"):
        parked = session.results.pop(name)
        assert parked.finish_reason == "abort"
        assert [(span.version, span.tokens) for span in parked.response.versions] == [(0, 6)]
        session.submit(request(name, max_tokens=20, partial=parked.response))
    results = session.run()
    for name in ("a", "b"):
        response = results[name].response
        assert [(span.version, span.tokens) for span in response.versions] == [(0, 6), (1, 14)]
        assert results[name].reprefills == 1
        old = forced_logprobs(model_of(0), (5, 6, 7), response.ids[:6], 1.0)
        new = forced_logprobs(model_of(1), (5, 6, 7), response.ids, 1.0)[6:]
        assert_logprobs(results[name], torch.cat([old, new]))
    assert [span.version for span in results["stays"].response.versions] == [0, 1]
    assert [span.version for span in results["waits"].response.versions] == [1]


def check_resume_equals_uninterrupted(make: MakeEngine, seed: int) -> None:
    """Stopped anywhere and continued on another engine from its tokens: the same response."""
    rng = random.Random(seed)
    requests = random_requests(rng, 10)
    whole = Session(make(slots=6))
    whole.submit(*requests)
    whole.run()
    first = Session(make(slots=12))
    first.submit(*requests)
    first.step(rng.randint(1, 12))
    first.engine.abort([one.request_id for one in requests])
    first.collect()
    assert first.results.keys() == {one.request_id for one in requests}
    second = Session(make(slots=3))
    for one in requests:
        partial = first.results[one.request_id].response
        fields = {name: getattr(one, name) for name in ("request_id", "prompt_ids", "sampling", "priority")}
        second.submit(GenerationRequest(**fields, partial=partial))
    second.run()
    for one in requests:
        got, expected = second.results[one.request_id], whole.results[one.request_id]
        assert got.response.ids == expected.response.ids
        assert got.finish_reason == expected.finish_reason
        assert_logprobs(got, torch.tensor(expected.response.logprobs))


def check_abort(make: MakeEngine) -> None:
    """Running and waiting requests end with their tokens; the others don't notice; unknown ids are ignored."""
    session = Session(make(slots=2))
    session.submit(*(request(name, max_tokens=12, priority=i) for i, name in enumerate("abcd")))
    session.step(4)
    session.engine.abort(["a", "d", "nobody"])
    session.collect()
    assert {name: result.finish_reason for name, result in session.results.items()} == {"a": "abort", "d": "abort"}
    assert len(session.results["a"].response.ids) == 4
    assert session.results["d"].response.ids == ()
    results = session.run()
    assert [len(results[name].response.ids) for name in "bc"] == [12, 12]
    for name in "bc":
        assert_logprobs(results[name], forced_logprobs(model_of(0), (5, 6, 7), results[name].response.ids, 1.0))


def check_priorities(make: MakeEngine) -> None:
    """Lower first, then the order of arrival."""
    session = Session(make(slots=1))
    for name, priority in (("c", 2), ("a", 0), ("d", 2), ("b", 1)):
        session.submit(request(name, max_tokens=3, priority=priority))
    session.run()
    assert session.order == ["a", "b", "c", "d"]


def check_one_bad_request_is_its_own_error(make: MakeEngine) -> None:
    """What can't be served ends with a cause; its neighbours finish."""
    session = Session(make(slots=2, max_context_tokens=32))
    bad = {
        "long": request("long", [1] * 40),
        "empty": request("empty", []),
        "outside": request("outside", [1, VOCABULARY]),
        "negative": request("negative", [-1]),
        "temperature": request("temperature", temperature=-1.0),
        "nan": request("nan", temperature=float("nan")),
        "tokens": request("tokens", max_tokens=0),
        "cold": request("cold", temperature=1e-300),  # 0 in the engine's own precision
    }
    session.submit(request("good", max_tokens=5), *bad.values(), request("other", max_tokens=5))
    results = session.run()
    for name in bad:
        assert results[name].finish_reason == "error"
        assert results[name].error
        assert results[name].refused
        assert results[name].response.ids == ()
    assert [results[name].finish_reason for name in ("good", "other")] == ["length", "length"]


def check_context_limit(make: MakeEngine) -> None:
    """Prompt and response together never exceed the context."""
    session = Session(make(slots=2, max_context_tokens=32))
    session.submit(request("a", [4] * 31, max_tokens=100), request("b", [4] * 10, max_tokens=100))
    results = session.run()
    assert [len(results[name].response.ids) for name in "ab"] == [1, 22]
    assert {result.finish_reason for result in results.values()} == {"length"}


def check_preemption(make: MakeEngine, seed: int, capabilities: Capabilities = EXACT) -> None:
    """With too few KV tokens for all, the youngest wait and are recomputed: nothing is lost, no token differs."""
    rng = random.Random(seed)
    requests = [
        request(f"r{i}", [rng.randrange(VOCABULARY) for _ in range(8)], max_tokens=40, priority=i) for i in range(6)
    ]
    capacity = capabilities.whole_blocks(110)
    free, tight = Session(make(slots=6)), Session(make(slots=6, kv_capacity_tokens=capacity))
    for session in (free, tight):
        session.submit(*requests)
    while tight.step():
        assert tight.engine.statistics().kv_used_tokens <= capacity
    free.run()
    preemptions = tight.engine.statistics().preemptions
    assert preemptions > 0
    assert free.engine.statistics().preemptions == 0
    assert sum(result.reprefills for result in tight.results.values()) == preemptions
    assert tight.results["r0"].reprefills == 0  # the oldest is never preempted
    for one in requests:
        got, expected = tight.results[one.request_id], free.results[one.request_id]
        assert got.response.ids == expected.response.ids
        assert_logprobs(got, torch.tensor(expected.response.logprobs))


def check_statistics(make: MakeEngine, capabilities: Capabilities = EXACT) -> None:
    """Counters add up."""
    session = Session(make(slots=2))
    session.submit(*(request(name, max_tokens=7, priority=i) for i, name in enumerate("abc")))
    session.step(2)
    now = session.engine.statistics()
    assert (now.running, now.waiting, now.slots, now.generated_tokens) == (2, 1, 2, 4)
    assert now.kv_used_tokens == 2 * capabilities.whole_blocks(3 - 1 + 2)
    session.run()
    session.update(5, "keep")
    end = session.engine.statistics()
    assert (end.running, end.waiting, end.finished, end.generated_tokens) == (0, 0, 3, 21)
    assert (end.version, end.kv_used_tokens, end.decode_steps) == (5, 0, 14)
    assert end.busy_s > 0
    assert end.paused_s > 0
