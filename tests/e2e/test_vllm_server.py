"""A real `vllm serve` as the engine: the conditions every engine must meet, as far as a server can meet them, updates
with many requests in flight, probes that find wrong weights, and a server that dies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mirrored_engine import VERSIONS, check_versions_by_deltas
from vllm_engines import model_of, needs_vllm
from vllm_servers import LONGEST_TOKENS, PublishedServerEngine, Served, engine_of, model_folder, served

from headway.generator.engines.vllm.server_client import VllmServer
from headway.models.loading import weights_of
from headway.records.errors import ConfigurationError, WeightsMismatch
from headway.records.generation import GenerationRequest
from headway.records.tokens import TokenIds
from tests.conformance import engine as conformance
from tests.conformance.reference import forced_logprobs, replayed_logprobs

pytestmark = needs_vllm
REQUESTS = 36
NATS = 1e-3
LONG = 300  # tokens: 3 s, in which a busy machine looks again


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(model_folder(tied=True), tmp_path_factory.mktemp("server") / "server.log") as one:
        yield one


@pytest.fixture
def make(server: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(conformance, "model_of", model_of)
    return functools.partial(engine_of, server.address)


@pytest.mark.parametrize("seed", range(2))
def test_logprobs_equal_teacher_forcing_at_every_composition(make: Any, seed: int) -> None:
    conformance.check_logprobs_at_every_composition(make, seed)


def test_tokens_do_not_depend_on_neighbours(make: Any) -> None:
    conformance.check_tokens_do_not_depend_on_neighbours(make, 0)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_updates_in_flight(make: Any, mode: Any) -> None:
    conformance.check_updates_in_flight(make, mode, 0, waits=False)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_update_changes_what_is_sampled(make: Any, mode: Any) -> None:
    conformance.check_update_changes_what_is_sampled(make, mode)


def test_prefix_is_not_shared_across_versions(make: Any) -> None:
    conformance.check_prefix_is_not_shared_across_versions(make)


def test_prefix_is_not_shared_across_updates_of_one_version(make: Any) -> None:
    conformance.check_prefix_is_not_shared_across_updates_of_one_version(make)


def test_versions_come_by_deltas(make: Any, tmp_path: Path) -> None:
    assert check_versions_by_deltas(make(), model_of(0), tmp_path) >= 0.6 * VERSIONS


def test_priorities(make: Any) -> None:
    conformance.check_priorities(make)


def test_one_bad_request_is_its_own_error(make: Any) -> None:
    conformance.check_one_bad_request_is_its_own_error(make)


def test_context_limit(make: Any) -> None:
    conformance.check_context_limit(make)


@pytest.mark.parametrize("mode", ["keep", pytest.param("recompute", marks=pytest.mark.long), "abort"])
def test_updates_with_many_requests_in_flight(make: Any, mode: Any) -> None:
    many_in_flight(make, mode)


def many_in_flight(make: Any, mode: Any) -> None:
    """None is dropped, every token has the version that sampled it (which the server's own word is compared with at
    each request's end), and its log-probability."""
    session = conformance.Session(make(slots=REQUESTS, max_context_tokens=LONGEST_TOKENS))
    asked = [conformance.request(f"r{i}", [1 + i // 4, *range(i % 7)], max_tokens=240 + i % 5) for i in range(REQUESTS)]
    session.submit(*asked)
    for version in (1, 2):
        while not all(entry.sampled for entry in session.engine._open.values()):  # type: ignore[attr-defined]
            session.step()
        assert session.update(version, mode).in_flight == REQUESTS
        if mode == "abort":
            parked = dict(session.results)
            assert len(parked) == REQUESTS
            assert {result.finish_reason for result in parked.values()} == {"abort"}
            session.results.clear()
            for one in asked:
                fields = {name: getattr(one, name) for name in ("request_id", "prompt_ids", "sampling", "priority")}
                session.submit(GenerationRequest(**fields, partial=parked[one.request_id].response))
    worst, results = 0.0, session.run(limit_s=600.0)  # a step may bring a token of one request alone
    for one in asked:
        result = results[one.request_id]
        assert (result.finish_reason, result.error) == ("length", "")
        assert len(result.response.ids) == one.sampling.max_tokens
        assert [span.version for span in result.response.versions] == [0, 1, 2]
    for one in asked[::9]:  # token by token
        result = results[one.request_id]
        worst = max(worst, float((torch.tensor(result.response.logprobs) - expected(one, result, mode)).abs().max()))
    print(f"{mode}: largest difference {worst:.1e} nats")
    assert worst <= NATS


def expected(one: Any, result: Any, mode: str) -> torch.Tensor:
    ids, spans = result.response.ids, result.response.versions
    if mode == "keep":
        return replayed_logprobs(conformance.model_of, one.prompt_ids, ids, spans, 1.0)
    parts, first = [], 0
    for span in spans:
        own = forced_logprobs(conformance.model_of(span.version), one.prompt_ids, ids, 1.0)
        parts.append(own[first : first + span.tokens])
        first += span.tokens
    return torch.cat(parts)


def test_an_aborted_request_keeps_its_tokens_and_goes_on(make: Any) -> None:
    session = conformance.Session(make(slots=2, max_context_tokens=LONGEST_TOKENS))
    session.submit(*(conformance.request(name, max_tokens=LONG, priority=i) for i, name in enumerate("abcd")))
    while not all(session.engine._open[name].sampled for name in "ab"):
        session.step()
    session.engine.abort(["a", "d", "nobody"])
    session.collect()
    assert {name: result.finish_reason for name, result in session.results.items()} == {"a": "abort", "d": "abort"}
    partial = session.results.pop("a").response
    assert 0 < len(partial.ids) < LONG
    session.submit(conformance.request("a", max_tokens=LONG, partial=partial))
    results = session.run()
    assert results["a"].response.ids[: len(partial.ids)] == partial.ids
    assert results["a"].reprefills == 1
    for name in "abc":
        assert len(results[name].response.ids) == LONG
        forced = forced_logprobs(model_of(0), (5, 6, 7), results[name].response.ids, 1.0)
        assert (torch.tensor(results[name].response.logprobs) - forced).abs().max() <= NATS


def test_statistics(make: Any) -> None:
    session = conformance.Session(make(slots=2, max_context_tokens=LONGEST_TOKENS))
    session.submit(*(conformance.request(name, max_tokens=LONG) for name in "abc"))
    while session.engine._generated < 10:
        session.step()
    now = session.engine.statistics()
    assert (now.slots, now.running + now.waiting, now.kv_capacity_tokens % 32) == (2, 3, 0)
    assert now.kv_used_tokens > 0
    session.run()
    end = session.engine.statistics()
    assert (end.running, end.waiting, end.finished, end.generated_tokens, end.kv_used_tokens) == (0, 0, 3, 3 * LONG, 0)
    assert 2 * LONG <= end.decode_steps <= 3 * LONG + 10
    assert end.prefilled_tokens == 9


def test_one_that_samples_from_anothers_weights(make: Any) -> None:
    """Both connect to it and load version 0; the first must not take the second's tokens for its own."""
    first, second = make(), make()
    first.submit([conformance.request("open", max_tokens=40)])
    while first.open_requests:
        first.step()
    deltas = first.take_deltas()
    assert [(one.finish_reason, one.ids, one.void) for one in deltas if one.finish_reason] == [("error", (), True)]
    assert "or serves another run too" in deltas[-1].error
    with pytest.raises(ConnectionError):
        first.step()
    second.submit([conformance.request("own", max_tokens=5)])
    while second.open_requests:
        second.step()
    assert [one.finish_reason for one in second.take_deltas() if one.finish_reason] == ["length"]


def test_prompts_beside_requests_and_across_updates(make: Any) -> None:
    engine, ids = make(max_context_tokens=LONGEST_TOKENS), TokenIds([1 + i * 7 % 30 for i in range(LONGEST_TOKENS - 1)])
    session = conformance.Session(engine)
    session.submit(*(conformance.request(name, max_tokens=40) for name in "abc"))
    session.step(4)
    for version in (0, 1):
        scores = engine.prompt_pass(ids, 20).advance()
        assert scores.version == version
        assert scores.top_ids.shape == (len(ids), 20)
        expected_logprobs = forced_logprobs(model_of(version), ids[:1], ids[1:], 1.0)
        assert (torch.from_numpy(scores.logprobs[1:]) - expected_logprobs).abs().max() <= 1e-4
        assert (scores.top_logprobs[1:, 0] >= scores.logprobs[1:]).all()
        session.update(1, "keep")
    assert {len(result.response.ids) for result in session.run().values()} == {40}
    with pytest.raises(ConfigurationError, match=r"prompt: HTTP 400: .*prompt logprobs of 30.* max allowed: 20"):
        engine.prompt_pass(ids, 30).advance()
    make()
    with pytest.raises(SystemExit, match=r"computes with weights '.*:0', which this run did not publish"):
        engine.prompt_pass(ids).advance()


# --- probes -----------------------------------------------------------------------------------------------


def without(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is not told."""
    post = VllmServer.post

    def silent(self: VllmServer, path: str, body: Any = None) -> Any:
        return None if path.startswith(method) else post(self, path, body)

    monkeypatch.setattr(VllmServer, "post", silent)


def test_weights_that_were_not_loaded_are_found(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.submit([conformance.request("open", max_tokens=50)])
    engine.step()
    without("/collective_rpc", monkeypatch)
    with pytest.raises(WeightsMismatch, match="version 1: log-probabilities of a probe differ"):
        engine.update_weights(weights_of(model_of(1)), 1, "keep")
    assert not engine.step()


def test_a_tied_head_that_is_not_packed_again_is_found(make: Any) -> None:
    """What the head's second copy in the file is for."""
    engine = make()
    engine._tied = False
    with pytest.raises(WeightsMismatch, match="log-probabilities of a probe differ"):
        engine.update_weights(weights_of(model_of(1)), 1, "keep")


def test_a_folder_it_can_not_read(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = make(exchange_directory=tmp_path)
    written = engine._checkpoint
    monkeypatch.setattr(engine, "_checkpoint", lambda: {name.upper(): one for name, one in written().items()})
    with pytest.raises(WeightsMismatch, match=r"it can't load .*headway"):
        engine.update_weights(weights_of(model_of(1)), 1, "keep")
    assert list(tmp_path.iterdir()) == []  # nothing stays behind


def test_another_servers_settings(server: Served) -> None:
    with pytest.raises(
        ConfigurationError, match=r"--max-num-seqs 41 leaves no slot .* generator.slots = 41; valid: 42"
    ):
        engine_of(server.address, slots=41)
    with pytest.raises(ConfigurationError, match="--max-model-len 320 is less than 321"):
        engine_of(server.address, max_context_tokens=321)


def test_raw_logprobs_untied_heads_and_a_server_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "model_of", functools.partial(model_of, tied=False))
    options = ("--logprobs-mode", "raw_logprobs")
    with served(model_folder(tied=False), tmp_path / "server.log", options=options) as untied:
        make = functools.partial(engine_of, untied.address, tied=False)
        with pytest.raises(WeightsMismatch, match="start it with --logprobs-mode processed_logprobs"):
            make()
        monkeypatch.setattr(PublishedServerEngine, "_probe_temperature", lambda *arguments: None)
        many_in_flight(make, "keep")  # at T = 1, where it makes no difference
        engine = make(max_context_tokens=LONGEST_TOKENS)
        engine.submit([conformance.request("open", max_tokens=LONG)])
        engine.step()
        untied.kill()
        with pytest.raises(OSError, match=r"closed a stream|refused|reset"):
            step_on(engine)
        with pytest.raises(SystemExit, match="the server is unreachable"):
            engine.statistics()


def step_on(engine: Any) -> None:
    while engine.step():
        pass
