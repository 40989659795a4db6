"""Adapters in the real vLLM, in this process and over HTTP: updates in flight, several at once, what probes find."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from tiers import first
from vllm_adapters import (
    CRITIC,
    LORA_OPTIONS,
    REVISIONS,
    adapter_engine,
    adapter_of,
    adapters_with,
    base_folder,
    labels,
    merged_model,
    published,
    settings_with,
)
from vllm_engines import model_of, needs_vllm, publisher
from vllm_servers import KEY, Served, served

from headway.generator.engines.vllm import adapters as adapters_module
from headway.generator.engines.vllm.reference import PublishedModel
from headway.generator.engines.vllm.server_client import KEY_VARIABLE, VllmServer
from headway.generator.engines.vllm.server_engine import VllmServerEngine
from headway.generator.engines.vllm.server_info import connect
from headway.models.loading import weights_of
from headway.records.errors import ConfigurationError, WeightsMismatch
from headway.records.generation import GenerationRequest, GenerationResult
from tests.conformance import engine as conformance
from tests.conformance.reference import forced_logprobs

pytestmark = needs_vllm
REQUESTS = 24
NATS = 2e-3
CONTEXT = 320


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with served(base_folder(), log, options=LORA_OPTIONS) as one:
        yield one


def server_engine(address: str, **fields: Any) -> VllmServerEngine:
    server, model = VllmServer(address), model_of(0)
    settings = settings_with(max_context_tokens=CONTEXT, **fields)
    base = PublishedModel(model.config)
    base.take(weights_of(model))
    adapters = adapters_with(settings)
    found = connect(
        server, slots=settings.slots, context_tokens=settings.max_context_tokens, adapters=adapters.arguments
    )
    return VllmServerEngine(server, found, base, settings, None, adapters)


@pytest.fixture(params=["process", "server"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "process":
        return adapter_engine
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return functools.partial(server_engine, request.getfixturevalue("server").address)


def length_of(engine: Any) -> int:
    """Tokens of a request: a server samples a hundred while a test looks away."""
    return 60 if engine.context_tokens < CONTEXT else 200


def differences(
    asked: GenerationRequest, result: GenerationResult, versions: dict[str, int] | None = None
) -> torch.Tensor:
    """Of each token's log-probability from a replay: each span is its own version's, on KV of that version alone."""
    ids, first, parts = result.response.ids, 0, []
    for span in result.response.versions:
        version = (versions or {}).get(asked.adapter, span.version)
        own = forced_logprobs(merged_model(version), asked.prompt_ids, ids, 1.0)
        parts.append(own[first : first + span.tokens])
        first += span.tokens
    assert first == len(ids)
    return (torch.tensor(result.response.logprobs) - torch.cat(parts)).abs()


def spans_of(result: GenerationResult) -> list[int]:
    return [span.version for span in result.response.versions]


def many(engine: Any) -> list[GenerationRequest]:
    tokens = length_of(engine)
    return [
        conformance.request(f"r{i}", [1 + i // 4, *range(i % 7)], max_tokens=tokens + i % 5) for i in range(REQUESTS)
    ]


def until_all_sampled(session: conformance.Session) -> None:
    while not all(entry.sampled for entry in session.engine._open.values()):  # type: ignore[attr-defined]
        session.step()


@pytest.mark.parametrize("mode", first(1, ["finish", "recompute", "abort"], pytest.mark.long))
def test_updates_with_many_requests_in_flight(make: Any, mode: Any) -> None:
    engine = make()
    session = conformance.Session(engine)
    session.submit(*(asked := many(engine)))
    for version in (1, 2):
        until_all_sampled(session)
        applied = engine.apply(published(version), mode)
        session.collect()
        assert applied.in_flight == (0 if mode == "finish" else REQUESTS)
        assert (applied.reprefilled_tokens > 0) == (mode == "recompute")
        assert labels(engine) == [("policy", one) for one in range(0 if mode == "finish" else version, version + 1)]
        if mode == "finish":
            late = [conformance.request(f"late{version}-{i}", [9, i], max_tokens=8) for i in range(4)]
            session.submit(*late)
            asked += late
        if mode == "abort":
            parked = dict(session.results)
            assert len(parked) == REQUESTS
            session.results.clear()
            for one in asked:
                fields = {name: getattr(one, name) for name in ("request_id", "prompt_ids", "sampling", "priority")}
                session.submit(GenerationRequest(**fields, partial=parked[one.request_id].response))
    results = session.run(limit_s=600.0)
    found = []
    for one in asked:
        result = results[one.request_id]
        assert (result.finish_reason, result.error) == ("length", "")
        assert len(result.response.ids) == one.sampling.max_tokens
        begun = int(one.request_id[4]) if one.request_id.startswith("late") else 0
        assert spans_of(result) == ([begun] if mode == "finish" else [0, 1, 2])
        found.append(differences(one, result))
    gaps = torch.cat(found)
    print(f"{mode}: mean {gaps.mean():.1e}, largest {gaps.max():.1e} nats of {len(gaps)} tokens")
    assert gaps.max() <= NATS
    assert labels(engine) == [("policy", 2)]
    require_loaded(engine)


def require_loaded(engine: Any) -> None:
    """vLLM has the LoRAs of the registered revisions, and no other."""
    registered = engine._adapters.registered
    if isinstance(engine, VllmServerEngine):
        assert engine._adapter_ids() == {one.handle for one in registered}
        return
    assert engine._core._engine.list_loras() == {one.handle.lora_int_id for one in registered}


def test_base_and_adapters_by_name_in_one_batch(make: Any) -> None:
    """With a LoRA in every slot, where vLLM on a CPU would compute those without an adapter by the last one's."""
    engine = make(critic=True)
    session = conformance.Session(engine)
    for version in (0, 1, 2):
        if version:
            engine.apply(published(version), "finish")
        session.submit(conformance.request(f"holds {version}", max_tokens=length_of(engine)))
        until_all_sampled(session)
    assert len(engine._adapters.registered) == REVISIONS + 2
    names = ["base", "", "critic", "policy"]
    asked = [
        conformance.request(f"r{i}", [5, 6, 7 + i // 4], max_tokens=30, seed=i // 4, adapter=names[i % 4])
        for i in range(16)
    ]
    session.submit(*asked, conformance.request("unknown", adapter="poet"))
    results = session.run(limit_s=600.0)
    assert results["unknown"].refused
    assert "no adapter 'poet'; valid: policy, critic, base" in results["unknown"].error
    for one in asked:
        assert spans_of(results[one.request_id]) == [2 if one.adapter in ("", "policy") else 0]
        assert differences(one, results[one.request_id], {"base": 0, "critic": CRITIC}).max() <= NATS


def test_kv_is_not_shared_between_revisions_and_adapters(make: Any) -> None:
    """A prompt of two whole blocks, by every adapter twice, before an update and after."""
    engine = make(critic=True)
    session = conformance.Session(engine)
    prompt = [index % 37 for index in range(70)]
    asked = []
    for version in (1, 2):
        engine.apply(published(version), "finish")
        for name in ("policy", "critic", "base", "policy", "critic", "base"):
            asked.append(conformance.request(f"r{len(asked)}", prompt, max_tokens=10, seed=len(asked), adapter=name))
            session.submit(asked[-1])
            session.run(limit_s=600.0)
    for one in asked:
        result = session.results[one.request_id]
        assert differences(one, result, {"base": 0, "critic": CRITIC}).max() <= NATS


def test_requests_of_the_oldest_revision_move_when_too_many_are_held(make: Any) -> None:
    engine = make()
    session = conformance.Session(engine)
    asked: list[GenerationRequest] = []
    for version in range(4):
        if version:
            engine.apply(published(version), "finish")
            session.collect()
        asked.append(conformance.request(f"r{version}", [3, version], max_tokens=length_of(engine), seed=version))
        session.submit(asked[-1])
        until_all_sampled(session)
        assert len(labels(engine)) <= REVISIONS
        require_loaded(engine)
    results = session.run(limit_s=600.0)
    assert [spans_of(results[f"r{version}"]) for version in range(4)] == [[0, 3], [1], [2], [3]]
    for one in asked:
        assert differences(one, results[one.request_id]).max() <= NATS


class StopsAfter:
    """Stop strings of which one is complete at the ``tokens``-th token."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def push(self, token: int) -> bool:
        self.left -= 1
        return self.left == 0


def test_revisions_of_stopped_requests_are_unloaded_at_once(make: Any) -> None:
    """Headway ends a request at a stop string, which vLLM doesn't know: it must not have it any more when the revision
    goes."""
    engine = make()
    session = conformance.Session(engine)
    for version in range(1, 6):
        session.submit(*(asked := [conformance.request(f"{version}{i}", [4, i], max_tokens=60) for i in range(8)]))
        for one in asked:
            engine._open[one.request_id].stop_strings = StopsAfter(12)
        until_all_sampled(session)
        engine.apply(published(version), "finish")
        session.run(limit_s=600.0)
        assert labels(engine) == [("policy", version)]
        require_loaded(engine)
        for one in asked:
            result = session.results[one.request_id]
            assert (result.finish_reason, len(result.response.ids)) == ("stop", 12)
            assert spans_of(result) == [version - 1]
            assert differences(one, result).max() <= NATS


def test_a_response_resumes_on_its_revision_while_that_is_there(make: Any) -> None:
    engine = make()
    session = conformance.Session(engine)
    length = length_of(engine)
    session.submit(*(conformance.request(name, max_tokens=length, seed=ord(name)) for name in "ab"))
    until_all_sampled(session)
    engine.abort(["a"])
    session.collect()
    partial = session.results.pop("a").response
    engine.apply(published(1), "finish")
    session.submit(asked := conformance.request("a", max_tokens=length, seed=ord("a"), partial=partial))
    results = session.run(limit_s=600.0)
    assert (spans_of(results["a"]), spans_of(results["b"])) == ([0], [0])
    assert differences(asked, results["a"]).max() <= NATS
    assert labels(engine) == [("policy", 1)]


# --- what is refused, and what the probes find ------------------------------------------------------------


def test_bad_updates_change_nothing(make: Any) -> None:
    engine = make()
    shapes = publisher().publish(1, {name: one[:, :2] for name, one in adapter_of(1).weights().items()})
    shapes = msgspec.structs.replace(shapes, adapter="policy")
    for give, mode, said in [
        (lambda: shapes, "finish", "shape .* does not fit"),
        (lambda: published(1, name="poet"), "finish", "an update of adapter 'poet'; valid: policy$"),
        (lambda: published(1, name="base"), "finish", "an update of adapter 'base'; valid: policy$"),
        (lambda: published(1), "keep", "KV is of the revision that it came with"),
        (lambda: publisher().publish(1, weights_of(model_of(1))), "finish", "an update of adapter ''; valid: policy$"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            engine.apply(give(), mode)  # type: ignore[arg-type]
    assert (engine.version, labels(engine)) == (0, [("policy", 0)])
    session = conformance.Session(engine)
    session.submit(asked := conformance.request("after", max_tokens=20))
    assert differences(asked, session.run(limit_s=600.0)["after"]).max() <= NATS


def leaving_out(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that drops a kind of target silently."""
    save = adapters_module.save_adapter

    def without(lora: Any, folder: Any, model: Any) -> None:
        lora = copy.deepcopy(lora)
        for pair in lora.pairs():
            if pair.target.name.endswith(end):
                pair.b.data.zero_()
        save(lora, folder, model)

    monkeypatch.setattr(adapters_module, "save_adapter", without)


@pytest.mark.parametrize("end", ["down_proj", "k_proj"])
def test_a_target_that_is_left_out_is_named_before_anything_is_sampled(
    make: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving_out(end, monkeypatch)
    with pytest.raises(ConfigurationError, match=f"does not compute adapter 'policy' .* it leaves out {end}"):
        make()


def test_an_update_that_is_not_loaded_is_found(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.submit([conformance.request("open", max_tokens=length_of(engine))])
    while not any(entry.sampled for entry in engine._open.values()):
        engine.step()
    monkeypatch.setattr(
        adapters_module, "save_adapter", functools.partial(save_other, adapters_module.save_adapter, adapter_of(2))
    )
    with pytest.raises(WeightsMismatch, match="version 1: adapter 'policy': log-probabilities of a probe differ"):
        engine.apply(published(1), "finish")
    assert not engine.step()
    assert [(one.void, one.finish_reason) for one in engine.take_deltas() if one.finish_reason] == [(True, "error")]


def save_other(save: Any, other: Any, lora: Any, folder: Any, model: Any) -> None:
    save(other, folder, model)


def test_an_adapter_that_vllm_can_not_load(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    monkeypatch.setattr(adapters_module, "save_adapter", lambda *arguments: None)
    with pytest.raises(WeightsMismatch, match="can't load"):
        engine.apply(published(1), "finish")
    assert not engine.step()


@pytest.mark.parametrize("family", first(1, ["gemma3", "llama", "gemma2"], pytest.mark.long))
def test_other_families(family: str) -> None:
    engine = adapter_engine(family)
    engine.apply(published(1, family=family), "finish")
    session = conformance.Session(engine)
    session.submit(asked := conformance.request("r", range(20), max_tokens=40))
    result = session.run()["r"]
    own = forced_logprobs(merged_model(1, family), asked.prompt_ids, result.response.ids, 1.0)
    assert (torch.tensor(result.response.logprobs) - own).abs().max() <= NATS


def step_on(engine: Any) -> None:
    while engine.step():
        pass


def names_of(server: VllmServer) -> Sequence[str]:
    return [one["id"] for one in msgspec.json.decode(server.get("/v1/models"))["data"][1:]]


def test_a_servers_adapters_of_a_killed_replica_are_unloaded(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    first = server_engine(server.address)
    first.apply(published(1), "finish")
    left = names_of(first._server)
    second = server_engine(server.address)
    assert not set(left) & set(names_of(first._server))
    require_loaded(second)
    first.submit([conformance.request("open", max_tokens=5)])
    with pytest.raises(ConnectionError, match="has no adapters"):
        step_on(first)


def test_a_server_without_room_for_the_adapters(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(ConfigurationError, match="--enable-lora --max-loras 9 --max-cpu-loras 9 --max-lora-rank 8"):
        server_engine(server.address, adapter_revisions=8)
