"""What is vLLM's own: many requests across updates, probes that find wrong weights, noise, truncated sampling."""

from __future__ import annotations

import functools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from mirrored_engine import VERSIONS, check_versions_by_deltas
from tiers import first
from vllm_engines import CONTEXT_TOKENS, PublishedEngine, make_engine, model_of, needs_vllm, publisher

from headway.config.auto import VLLM_TEMPERATURES
from headway.generator.engines.settings import EngineSettings
from headway.models.loading import weights_of
from headway.records.errors import WeightsCorrupt, WeightsMismatch
from headway.records.generation import GenerationRequest, SamplingParameters
from tests.conformance import engine as conformance
from tests.conformance.reference import forced_logprobs, replayed_logprobs

pytestmark = needs_vllm
REQUESTS = 36
NATS = 1e-3


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(conformance, "model_of", functools.partial(model_of, tied=request.param))
    return request.param


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_updates_with_many_requests_in_flight(tied: bool, mode: str) -> None:
    """None is dropped, every token has the version that sampled it, and its log-probability."""
    session = conformance.Session(make_engine(slots=REQUESTS, tied=tied))
    asked = [
        conformance.request(f"r{index}", [1 + index // 4, *range(index % 7)], max_tokens=30 + index % 5)
        for index in range(REQUESTS)
    ]
    session.submit(*asked)
    for version in (1, 2):
        session.step(5)
        assert session.update(version, mode).in_flight == REQUESTS
        if mode == "abort":
            parked = dict(session.results)
            assert len(parked) == REQUESTS
            session.results.clear()
            for one in asked:
                fields = {name: getattr(one, name) for name in ("request_id", "prompt_ids", "sampling", "priority")}
                session.submit(GenerationRequest(**fields, partial=parked[one.request_id].response))
    results = session.run()
    second = 5 if mode == "abort" else 6  # the probe's step gives a token to all that are in flight
    worst = 0.0
    for one in asked:
        result = results[one.request_id]
        spans = [(span.version, span.tokens) for span in result.response.versions]
        assert spans == [(0, 5), (1, second), (2, one.sampling.max_tokens - 5 - second)]
        got = torch.tensor(result.response.logprobs)
        if mode == "keep":
            expected = replayed_logprobs(
                conformance.model_of, one.prompt_ids, result.response.ids, result.response.versions, 1.0
            )
        else:
            parts = []
            for version, first, last in ((0, 0, 5), (1, 5, 5 + second), (2, 5 + second, None)):
                own = conformance.model_of(version)
                parts.append(forced_logprobs(own, one.prompt_ids, result.response.ids, 1.0)[first:last])
            expected = torch.cat(parts)
        worst = max(worst, float((got - expected).abs().max()))
    print(f"{mode}, {'tied' if tied else 'untied'}: largest difference {worst:.1e} nats")
    assert worst <= NATS


# --- probes -----------------------------------------------------------------------------------------------


def mismatch(engine: PublishedEngine, version: int) -> str:
    """What the update to ``version`` is refused with; the engine must sample no more."""
    engine.submit([conformance.request("open", max_tokens=50), conformance.request("ends in the probe", max_tokens=2)])
    engine.step()
    assert len(engine.take_deltas()) == 2
    with pytest.raises(WeightsMismatch) as raised:
        engine.update_weights(weights_of(model_of(version)), version, "keep")
    assert not engine.step()
    deltas = {delta.request_id: delta for delta in engine.take_deltas()}
    assert deltas.keys() == {"open", "ends in the probe"}
    assert all((one.void, one.finish_reason, one.ids) == (True, "error", ()) for one in deltas.values())
    return str(raised.value)


def test_a_tied_head_that_is_not_packed_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.generator.engines.vllm import worker

    engine = make_engine()
    monkeypatch.setattr(worker, "repack_tied_heads", lambda model: None)
    assert "module lm_head" in mismatch(engine, 1)


def test_the_probe_of_a_sequence_finds_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.generator.engines.vllm import worker

    engine = make_engine()
    monkeypatch.setattr(worker, "repack_tied_heads", lambda model: None)
    monkeypatch.setattr(worker, "differing_module", lambda *arguments: None)
    assert "log-probabilities of a probe differ" in mismatch(engine, 1)


@pytest.mark.parametrize(
    ("tensor", "module"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_norm"),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj"),
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj"),
        ("model.norm.weight", "model.norm"),
    ],
)
def test_the_first_module_with_other_weights_is_named(
    tensor: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.generator.engines.vllm import worker

    engine = make_engine()
    load = worker.load_weights

    def loses_one_row(model, model_config, tensors):
        def damaged():
            for name, values in tensors:
                if name == tensor:
                    values = values.clone()
                    values[-1:] *= 1.01
                yield name, values

        load(model, model_config, damaged())

    monkeypatch.setattr(worker, "load_weights", loses_one_row)
    assert f"module {module}:" in mismatch(engine, 1)


@pytest.mark.long
def test_flips_that_probes_find_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 flips of a bit of a float32 weight: those of the highest exponent bit are found, whatever the weight is."""
    from headway.generator.engines.vllm import worker

    chance, load = random.Random(0), worker.load_weights
    tensors = weights_of(model_of(1, tied=False))
    trials, found = Counter[int](), Counter[int]()
    for trial in range(200):
        bit = 30 if trial % 4 == 0 else chance.randrange(32)

        def flipped(model: Any, model_config: Any, loaded: Any, bit=bit) -> None:
            weights = {name: weight.clone() for name, weight in loaded}
            bits_n = chance.choice(list(weights.values())).view(torch.int32).flatten()
            bits_n[chance.randrange(len(bits_n))] ^= 1 << bit if bit < 31 else -(1 << 31)
            load(model, model_config, weights.items())

        engine = make_engine(tied=False)
        trials[bit] += 1
        with monkeypatch.context() as patched:
            patched.setattr(worker, "load_weights", flipped)
            try:
                engine.update_weights(tensors, 1, "keep")
            except WeightsMismatch:
                found[bit] += 1
    print("flips found by bit:", {bit: f"{found[bit]} of {trials[bit]}" for bit in sorted(trials, reverse=True)})
    assert found[30] == trials[30] > 40


@pytest.mark.parametrize("mode", ["keep", pytest.param("recompute", marks=pytest.mark.long)])
def test_versions_come_by_deltas(tmp_path: Path, mode: Any) -> None:
    assert check_versions_by_deltas(make_engine(), model_of(0), tmp_path, mode) >= 0.6 * VERSIONS


def test_without_probes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the probes are there for: the engine goes on with the new body and the old head."""
    from headway.generator.engines.vllm import worker

    make_engine()
    core = make_engine()._core
    settings = EngineSettings(
        model_path="", dtype="float32", slots=2, max_context_tokens=CONTEXT_TOKENS, probe_every_updates=0
    )
    engine = PublishedEngine(core, settings, conformance.VOCABULARY)
    with monkeypatch.context() as patched:
        patched.setattr(worker, "repack_tied_heads", lambda model: None)
        engine.update_weights(weights_of(model_of(1)), 1, "keep")
    session = conformance.Session(engine)
    session.submit(conformance.request("corrupt", max_tokens=20))
    result = session.run()["corrupt"]
    expected = forced_logprobs(model_of(1), (5, 6, 7), result.response.ids, 1.0)
    assert (torch.tensor(result.response.logprobs) - expected).abs().max() > 0.1


def test_a_corrupt_slot_changes_nothing() -> None:
    engine = make_engine()
    published = publisher().publish(7, weights_of(model_of(1)))
    publisher().publish(8, weights_of(model_of(1)))
    publisher().publish(9, weights_of(model_of(1)))
    publisher().publish(10, weights_of(model_of(1)))  # the slot of version 7
    with pytest.raises(WeightsCorrupt, match="version 7"):
        engine.apply(published, "keep")
    assert engine.version == 0
    session = conformance.Session(engine)
    session.submit(conformance.request("after", max_tokens=20))
    result = session.run()["after"]
    expected = forced_logprobs(model_of(0), (5, 6, 7), result.response.ids, 1.0)
    assert (torch.tensor(result.response.logprobs) - expected).abs().max() <= NATS


def test_weights_that_one_rank_refuses_are_loaded_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    core: Any = engine._core._engine
    ask = core.collective_rpc

    def one_refuses(method: str, **named: Any) -> list[Any]:
        return [*ask(method, **named), *(["damaged"] if method == "headway_attach" else [])]

    monkeypatch.setattr(core, "collective_rpc", one_refuses)
    with pytest.raises(WeightsCorrupt, match="damaged"):
        engine.apply(publisher().publish(1, weights_of(model_of(1))), "keep")
    session = conformance.Session(engine)
    session.submit(conformance.request("after", max_tokens=20))
    result = session.run()["after"]
    expected = forced_logprobs(model_of(0), (5, 6, 7), result.response.ids, 1.0)
    assert (torch.tensor(result.response.logprobs) - expected).abs().max() <= NATS


# --- sampling ---------------------------------------------------------------------------------------------


def test_truncated_sampling_keeps_to_its_set_and_reports_the_full_distribution() -> None:
    session = conformance.Session(make_engine(slots=20))
    for index in range(20):
        session.submit(
            GenerationRequest(
                request_id=f"r{index}",
                prompt_ids=(4, 8, index),
                sampling=SamplingParameters(max_tokens=20, temperature=1.3, top_k=3, top_p=0.9, seed=index),
            )
        )
    for name, result in session.run().items():
        asked, ids = session.requests[name], result.response.ids
        expected = forced_logprobs(model_of(0), asked.prompt_ids, ids, 1.3)
        assert (torch.tensor(result.response.logprobs) - expected).abs().max() <= NATS
        sequence = torch.tensor([*asked.prompt_ids, *ids])
        with torch.no_grad():
            logits = model_of(0)(sequence, [len(sequence)])[len(asked.prompt_ids) - 1 : -1]
        for row, token in zip(logits, ids, strict=True):
            assert token in row.topk(3).indices


def test_noise_follows_the_distribution() -> None:
    """First tokens of 4000 seeds: each token as often as its probability says, within 5 standard deviations."""
    count = 4000
    session = conformance.Session(make_engine(slots=40))
    session.submit(*(conformance.request(f"r{seed}", (5, 6, 7), max_tokens=1, seed=seed) for seed in range(count)))
    seen = Counter(result.response.ids[0] for result in session.run().values())
    with torch.no_grad():
        probabilities = torch.softmax(model_of(0)(torch.tensor([5, 6, 7]), [3])[-1], dim=-1)
    for token, probability in enumerate(probabilities.tolist()):
        deviation = (probability * (1 - probability) * count) ** 0.5
        assert abs(seen[token] - probability * count) <= 5 * deviation + 1


def test_seeds_that_differ_in_high_bits_alone_differ() -> None:
    session = conformance.Session(make_engine(slots=8))
    session.submit(*(conformance.request(f"r{bit}", max_tokens=20, seed=1 << bit) for bit in (0, 20, 33, 47, 61, 62)))
    assert len({result.response.ids for result in session.run().values()}) == 6


def test_a_prompt_of_several_steps() -> None:
    """Longer than a step's budget, beside others that go on."""
    session = conformance.Session(make_engine(slots=4, kv_capacity_tokens=BLOCKED_TOKENS))
    session.submit(conformance.request("short", max_tokens=20))
    session.step(2)
    prompt = [index % conformance.VOCABULARY for index in range(80)]
    session.submit(conformance.request("long", prompt, max_tokens=10))
    results = session.run()
    for name, of in (("short", (5, 6, 7)), ("long", prompt)):
        expected = forced_logprobs(model_of(0), of, results[name].response.ids, 1.0)
        assert (torch.tensor(results[name].response.logprobs) - expected).abs().max() <= NATS


def test_one_that_is_preempted_after_an_update_computes_all_its_kv_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own blocks of older weights are still there, under the salt it came with."""
    monkeypatch.setattr(conformance, "model_of", model_of)
    session = conformance.Session(make_engine(slots=2, kv_capacity_tokens=BLOCKED_TOKENS))
    session.submit(*(conformance.request(name, max_tokens=90, priority=i, seed=i) for i, name in enumerate("ab")))
    session.step(40)  # a block of each is full of version 0's KV
    session.engine._probe_every_updates = 0  # a probe would take the blocks
    assert session.update(1, "keep").in_flight == 2
    results = session.run()
    assert results["b"].reprefills > 0
    spans = [span.tokens for span in results["b"].response.versions]
    new = forced_logprobs(model_of(1), (5, 6, 7), results["b"].response.ids, 1.0)
    got = torch.tensor(results["b"].response.logprobs)
    assert (got[-20:] - new[-20:]).abs().max() <= NATS  # after the preemption, which is at 64 tokens of each
    assert (got[spans[0] : spans[0] + 10] - new[spans[0] : spans[0] + 10]).abs().max() > NATS  # with the old KV before


BLOCKED_TOKENS = 128  # the capacity of the conformance suite's tight engine: no other is built


def test_temperatures_vllm_would_change_are_refused() -> None:
    session = conformance.Session(make_engine())
    session.submit(conformance.request("cold", temperature=0.005), conformance.request("hot", temperature=2.5))
    for result in session.run().values():
        assert result.finish_reason == "error"
        assert "vLLM samples at 0 and from 0.01 to 2.0" in result.error
    assert VLLM_TEMPERATURES == (0.01, 2.0)


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids, *, keep_special: bool = False) -> str:
        return "".join(chr(ord("0") + token) for token in ids)

    def is_open(self, token: int) -> bool:
        return False


def test_stop_strings_end_a_response_with_the_token_that_completes_them() -> None:
    """And a resumed one remembers what it had."""
    free = conformance.Session(make_engine(tokenizer=Letters()))
    free.submit(conformance.request("free", max_tokens=40, seed=3))
    ids = free.run()["free"].response.ids
    stop = Letters().decode(ids[8:11])
    end = next(count for count in range(1, 41) if stop in Letters().decode(ids[:count]))
    how = SamplingParameters(max_tokens=40, seed=3, stop=("never there", stop))
    whole = conformance.Session(make_engine(tokenizer=Letters()))
    whole.submit(GenerationRequest(request_id="a", prompt_ids=(5, 6, 7), sampling=how))
    whole.step(end - 1)
    whole.engine.abort(["a"])
    whole.collect()
    partial = whole.results["a"].response
    assert partial.ids == ids[: end - 1]
    rest = conformance.Session(make_engine(tokenizer=Letters()))
    rest.submit(GenerationRequest(request_id="a", prompt_ids=(5, 6, 7), sampling=how, partial=partial))
    assert (rest.run()["a"].response.ids, rest.results["a"].finish_reason) == (ids[:end], "stop")
    refused = conformance.Session(make_engine())
    refused.submit(GenerationRequest(request_id="a", prompt_ids=(5, 6, 7), sampling=how))
    assert "stop strings need a tokenizer" in refused.run()["a"].error


@pytest.mark.parametrize("family", first(1, ["gemma3", "llama", "gemma2"], pytest.mark.long))
def test_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows shorter than the sequences, soft caps, two rotary embeddings: updated in flight."""
    monkeypatch.setattr(conformance, "model_of", functools.partial(model_of, family=family))
    conformance.check_updates_in_flight(functools.partial(make_engine, family=family), "recompute", 0)
