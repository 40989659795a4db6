"""What is the torch engine's own: shared prefills, stop strings, fixed shapes, faults."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.generator.engines.torch.engine import TorchEngine
from headway.generator.service import GeneratorService
from headway.models.initialise import initialise_model
from headway.models.loading import load_model, weights_of
from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.runtime.devices import parse_device
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer
from headway.weights.shared_memory import Publisher
from tests.conformance.engine import VOCABULARY, Session, model_of, request
from tests.conformance.reference import forced_logprobs, random_model

torch.set_num_threads(1)


def make_engine(*, slots: int = 4, max_context_tokens: int = 96, model: Any = None, **options: Any) -> TorchEngine:
    model = copy.deepcopy(model_of(0)) if model is None else model
    return TorchEngine(model, slots=slots, max_context_tokens=max_context_tokens, **options)


# --- prefill, batches, shapes -----------------------------------------------------------------------------------


def test_a_group_is_prefilled_once_and_exactly():
    """Members admitted together, and later ones while a sibling runs, share one computation of the prompt."""
    prompt = tuple(range(3, 33))
    session = Session(make_engine(slots=3))
    session.submit(*(request(f"m{i}", prompt, max_tokens=4 + 5 * i) for i in range(6)))
    session.run()
    assert session.engine.statistics().prefilled_tokens == len(prompt) - 1
    for i in range(6):
        alone = Session(make_engine(slots=3))
        alone.submit(request(f"m{i}", prompt, max_tokens=4 + 5 * i))
        expected = alone.run()[f"m{i}"].response
        got = session.results[f"m{i}"].response
        assert got.ids == expected.ids
        assert np.allclose(got.logprobs, expected.logprobs, atol=1e-5)


def test_prefill_budget_spreads_long_prompts_over_steps():
    session = Session(make_engine(slots=4, prefill_tokens_per_step=30))
    session.submit(*(request(f"r{i}", [i + 1] * 25, max_tokens=6) for i in range(4)))
    running = []
    for _ in range(4):
        session.step()
        running.append(session.engine.statistics().running)
    assert running == [1, 2, 3, 4]
    session.run()
    for i in range(4):
        response = session.results[f"r{i}"].response
        expected = forced_logprobs(model_of(0), [i + 1] * 25, response.ids, 1.0)
        assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4)


def test_recompute_in_chunks():
    session = Session(make_engine(slots=4, prefill_tokens_per_step=30))
    session.submit(*(request(f"r{i}", [i + 1] * 20, max_tokens=12) for i in range(4)))
    session.step(5)
    applied = session.update(1, "recompute")
    assert applied.in_flight == 4
    assert applied.reprefilled_tokens == sum(19 + n for n in (5, 4, 4, 3))  # the third is let in with the second's rest
    session.run()
    for i in range(4):
        spans = session.results[f"r{i}"].response.versions
        response = session.results[f"r{i}"].response
        expected = forced_logprobs(model_of(1), [i + 1] * 20, response.ids, 1.0)[spans[0].tokens :]
        assert torch.allclose(torch.tensor(response.logprobs[spans[0].tokens :]), expected, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_deterministic_rows_do_not_depend_on_their_neighbours(seed):
    """Bit-equal log-probabilities whoever runs beside it, whichever slot it gets, whenever it comes."""
    rng = random.Random(seed)
    watched = [request(f"w{i}", [rng.randrange(VOCABULARY) for _ in range(9)], max_tokens=25) for i in range(3)]
    seen: list[list[tuple[float, ...]]] = []
    for trial in range(3):
        engine = make_engine(slots=7, deterministic=True)
        session = Session(engine)
        others = [
            request(
                f"o{i}", [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))], max_tokens=rng.randint(1, 30)
            )
            for i in range(4 * trial)
        ]
        queue = [*others, *watched]
        rng.shuffle(queue)
        for one in queue:
            session.submit(one)
            session.step(rng.randint(0, 3))
        session.run()
        seen.append([session.results[one.request_id].response.logprobs for one in watched])
    assert seen[0] == seen[1] == seen[2]


def test_bfloat16_engine_stays_near_float32():
    model = random_model(4, vocabulary=VOCABULARY)
    exact = copy.deepcopy(model)
    session = Session(make_engine(model=model.to(torch.bfloat16)))
    session.submit(*(request(f"r{i}", [2, 3, 4, i], max_tokens=20) for i in range(4)))
    for i, result in enumerate(session.run().values()):
        expected = forced_logprobs(exact, session.requests[result.request_id].prompt_ids, result.response.ids, 1.0)
        assert i >= 0
        assert (torch.tensor(result.response.logprobs) - expected).abs().mean() < 0.1


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen3", False)])
def test_llama_and_untied_models(family, tied):
    model = random_model(8, vocabulary=VOCABULARY, family=family, tied=tied)
    other = random_model(9, vocabulary=VOCABULARY, family=family, tied=tied)
    engine = make_engine(model=copy.deepcopy(model))
    session = Session(engine)
    session.submit(request("a", max_tokens=10), request("b", [1] * 20, max_tokens=10))
    session.run()
    engine.update_weights(weights_of(other), 1, "keep")
    session.submit(request("c", max_tokens=10))
    session.run()
    for name, owner in (("a", model), ("b", model), ("c", other)):
        asked, response = session.requests[name], session.results[name].response
        expected = forced_logprobs(owner, asked.prompt_ids, response.ids, 1.0)
        assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4)


# --- stops, faults ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = Path(tmp_path_factory.mktemp("tokenizer"))
    train_byte_fallback_tokenizer(["the answer is 42. hello world " * 4], 330, path)
    return Tokenizer.load(path)


def test_stop_strings(tokenizer):
    """The response ends with the token that completes a stop string, and not before; resumed ones remember."""
    model = random_model(2, vocabulary=-(-tokenizer.vocabulary_size // 8) * 8)
    free = Session(make_engine(model=copy.deepcopy(model), tokenizer=tokenizer))
    free.submit(*(request(f"r{i}", max_tokens=40, seed=i) for i in range(6)))
    free.run()
    for i in range(6):
        ids = free.results[f"r{i}"].response.ids
        text = tokenizer.decode(ids)
        if len(text) < 12:
            continue
        stop = text[8:11]
        end = next(n for n in range(1, 41) if stop in tokenizer.decode(ids[:n]))
        how = SamplingParameters(max_tokens=40, seed=i, stop=("never there", stop))
        whole = Session(make_engine(model=copy.deepcopy(model), tokenizer=tokenizer))
        whole.submit(GenerationRequest(request_id="a", prompt_ids=(5, 6, 7), sampling=how))
        result = whole.run()["a"]
        assert (result.response.ids, result.finish_reason) == (ids[:end], "stop")
        first = Session(make_engine(model=copy.deepcopy(model), tokenizer=tokenizer))
        first.submit(GenerationRequest(request_id="a", prompt_ids=(5, 6, 7), sampling=how))
        first.step(max(1, end - 1))
        first.engine.abort(["a"])
        first.collect()
        partial = first.results["a"].response
        second = Session(make_engine(model=copy.deepcopy(model), tokenizer=tokenizer))
        second.submit(GenerationRequest(request_id="a", prompt_ids=(5, 6, 7), sampling=how, partial=partial))
        assert second.run()["a"].response.ids == ids[:end]


def test_stop_strings_without_a_tokenizer_are_an_error():
    session = Session(make_engine())
    how = SamplingParameters(stop=("x",))
    session.submit(GenerationRequest(request_id="a", prompt_ids=(5,), sampling=how))
    assert "tokenizer" in session.run()["a"].error


@pytest.mark.parametrize(("ids", "how"), [((1, 3), {"stop_token_ids": (3,)}), ((1, 2, 4), {"max_tokens": 3})])
def test_a_resumed_request_that_is_complete_ends_at_once(ids, how):
    session = Session(make_engine())
    partial = Session(make_engine())
    partial.submit(request("a", max_tokens=5))
    whole = partial.run()["a"].response
    done = type(whole)(ids=ids, logprobs=whole.logprobs[: len(ids)], versions=())
    sampling = SamplingParameters(**{"max_tokens": 9, **how})
    engine = session.engine
    engine.submit([GenerationRequest(request_id="a", prompt_ids=(5,), sampling=sampling, partial=done)])
    assert engine.step() is False
    (delta,) = engine.take_deltas()
    assert delta.finish_reason == ("length" if len(ids) == 3 else "stop")
    assert delta.ids == ()


def test_not_finite_output_fails_the_request_and_poisons_nobody():
    """A model that turns NaN ends its requests with a cause; healthy weights then find no NaN left in any slot."""
    session = Session(make_engine())
    session.submit(*(request(f"bad{i}", max_tokens=20) for i in range(4)))
    session.step(3)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights_of(model_of(0)).items()}
    session.engine.update_weights(broken, 1, "keep")
    session.run()
    for i in range(4):
        result = session.results[f"bad{i}"]
        assert result.finish_reason == "error"
        assert "not finite" in result.error
        assert not result.refused
        assert np.isfinite(result.response.logprobs).all()
        assert len(result.response.ids) == 3
    session.update(0, "keep")
    session.submit(*(request(f"good{i}", [1 + i, 2], max_tokens=20) for i in range(4)))
    session.run()
    for i in range(4):
        assert session.results[f"good{i}"].finish_reason == "length"
        response = session.results[f"good{i}"].response
        expected = forced_logprobs(model_of(0), [1 + i, 2], response.ids, 1.0)
        assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4)


def test_foreign_weights_change_nothing():
    session = Session(make_engine())
    session.submit(request("a", max_tokens=10))
    session.step(2)
    foreign = weights_of(random_model(1, vocabulary=VOCABULARY + 8))
    with pytest.raises(ConfigurationError):
        session.engine.update_weights(foreign, 7, "keep")
    result = session.run()["a"]
    assert [(span.version, span.tokens) for span in result.response.versions] == [(0, 10)]
    assert torch.allclose(
        torch.tensor(result.response.logprobs),
        forced_logprobs(model_of(0), (5, 6, 7), result.response.ids, 1.0),
        atol=1e-4,
    )


def test_an_open_id_is_refused_before_anything_is_taken():
    engine = make_engine()
    engine.submit([request("a")])
    with pytest.raises(ValueError, match="unique"):
        engine.submit([request("b"), request("a")])
    with pytest.raises(ValueError, match="unique"):
        engine.submit([request("c"), request("c")])
    assert engine.statistics().waiting == 1


def test_idle_busy_and_paused_time_add_up():
    """Every second is one of busy, idle, paused or bookkeeping, and none is counted twice."""
    clock = iter(float(tick) for tick in range(10_000))
    engine = make_engine(now=lambda: next(clock))
    engine.submit([request("a", max_tokens=5)])
    while engine.step():
        engine.take_deltas()
    before = engine.statistics()
    engine.update_weights(weights_of(model_of(1)), 1, "keep")
    statistics = engine.statistics()
    assert statistics.idle_s - before.idle_s == 2  # three ticks later, one of them paused
    assert statistics.busy_s == 5
    assert statistics.paused_s == 1
    assert statistics.idle_s > 0
    assert statistics.busy_s + statistics.paused_s + statistics.idle_s <= next(clock)


@pytest.mark.parametrize("fails", [False, True])
def test_fetching_weights_counts_as_paused_and_not_as_idle(fails):
    time_s = 0.0
    engine = make_engine(now=lambda: time_s)
    with contextlib.suppress(WeightsCorrupt), engine.paused():
        time_s = 3.0
        if fails:
            raise WeightsCorrupt("checksum")
    time_s = 5.0
    assert (engine.statistics().paused_s, engine.statistics().idle_s) == (3.0, 2.0)


def test_a_replica_reports_all_of_its_pause(tmp_path, monkeypatch):
    initialise_model(tmp_path / "m", ["8+3=11"], vocabulary_size=280, width=16, layers=1, heads=2, kv_heads=1)
    context: Any = SimpleNamespace(device=parse_device("cpu:0"))
    service = GeneratorService(context, model_path=str(tmp_path / "m"), dtype="float32", slots=2, max_context_tokens=32)
    with Publisher("run", directory=tmp_path) as publisher:
        published = publisher.publish(1, weights_of(load_model(tmp_path / "m")))
        happened: list[str] = []
        engine: Any = service._engine
        paused, fetch = engine.paused, engine._subscriber.fetch

        @contextlib.contextmanager
        def watched() -> Iterator[None]:
            with paused():
                happened.append("pause")
                yield
                happened.append("end")

        monkeypatch.setattr(engine, "paused", watched)
        monkeypatch.setattr(engine._subscriber, "fetch", lambda *of: (happened.append("fetch"), fetch(*of))[1])
        applied = service.update_weights(published, "keep")
        assert happened == ["pause", "fetch", "end", "pause", "end"]  # fetching, then applying
        assert 0 < applied.fetch_s < applied.pause_s
        assert service.statistics().paused_s > 0


def test_fetched_weights_are_the_models_own_until_the_next_are_whole(tmp_path):
    """They are not copied once more; a version that turns out corrupt, half written over or not, changes nothing."""
    initialise_model(tmp_path / "m", ["8+3=11"], vocabulary_size=280, width=16, layers=1, heads=2, kv_heads=1)
    context: Any = SimpleNamespace(device=parse_device("cpu:0"))
    service = GeneratorService(context, model_path=str(tmp_path / "m"), dtype="float32", slots=2, max_context_tokens=32)
    engine: Any = service._engine
    first = load_model(tmp_path / "m")
    sets = []
    for scale in (1.0, 2.0, 3.0, 4.0):
        sets.append({name: scale * tensor for name, tensor in weights_of(first).items()})

    def computes_with(index: int) -> bool:
        return all(torch.equal(tensor, sets[index][name]) for name, tensor in weights_of(engine._model).items())

    def sampled(name: str) -> tuple[int, ...]:
        engine.submit([request(name, max_tokens=12, seed=1)])
        while engine.step():
            pass
        return tuple(token for delta in engine.take_deltas() for token in delta.ids)

    with Publisher("run", directory=tmp_path) as publisher:
        tokens = [sampled("r0")]
        for version in (1, 2, 3):
            service.update_weights(publisher.publish(version, sets[version]), "keep")
            assert computes_with(version)
            tokens.append(sampled(f"r{version}"))
        buffers = {engine._subscriber._buffer.payload.data_ptr(), engine._subscriber._kept.payload.data_ptr()}
        inside = [one.data_ptr() for one in weights_of(engine._model).values()]
        size = len(engine._subscriber._buffer.payload)
        assert all(any(start <= address < start + size for start in buffers) for address in inside)
        corrupt = msgspec.structs.replace(publisher.publish(4, sets[0]), checksum="0" * 32)
        with pytest.raises(WeightsCorrupt):
            service.update_weights(corrupt, "keep")
        assert computes_with(3)
        assert sampled("again") == tokens[3]
        service.update_weights(publisher.publish(5, sets[0]), "keep")
        assert sampled("back") == tokens[0]
    assert len(set(tokens)) > 1


@given(st.lists(st.integers(1, 8), min_size=5, max_size=14), st.integers(2, 6), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_rows_moved_in_the_step_of_their_admission_keep_their_own_prompt(lengths, slots, late):
    """More rows end at once than requests wait: the remaining holes are closed in the same step."""
    session = Session(make_engine(slots=slots))
    prompts = [tuple((7 * i + j) % (VOCABULARY - 2) + 1 for j in range(3 + i % 4)) for i in range(len(lengths))]
    requests = [request(f"r{i}", prompts[i], max_tokens=length) for i, length in enumerate(lengths)]
    session.submit(*requests[: slots + 1])
    session.step(late)
    session.submit(*requests[slots + 1 :])
    session.run()
    for i, prompt in enumerate(prompts):
        response = session.results[f"r{i}"].response
        expected = forced_logprobs(model_of(0), prompt, response.ids, 1.0)
        assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4)


def test_memory_is_the_capacity_and_not_slots_times_context():
    """Half the KV tokens need half the memory, and change nothing but when requests run."""
    prompts = [[1 + i % 3, 2, 3] * 8 for i in range(9)]
    sessions = {capacity: Session(make_engine(slots=8, kv_capacity_tokens=capacity)) for capacity in (768, 384, 96)}
    for session in sessions.values():
        session.submit(*(request(f"r{i}", prompt, max_tokens=40, seed=i) for i, prompt in enumerate(prompts)))
        session.run()
        assert session.engine._pool.used == 0
    cache_bytes = {capacity: session.engine._runner.cache.all.nbytes for capacity, session in sessions.items()}
    block_bytes = cache_bytes[768] // (768 // 16 + 1)
    assert cache_bytes[384] - block_bytes == (cache_bytes[768] - block_bytes) // 2  # a block is everybody's padding
    whole, *others = ({name: result.response.ids for name, result in s.results.items()} for s in sessions.values())
    assert all(one == whole for one in others)
    assert sessions[96].engine.statistics().preemptions > 0


def test_a_prompt_of_a_group_is_in_memory_once():
    session = Session(make_engine(slots=4, max_context_tokens=96))
    session.submit(*(request(f"r{i}", [7] * 64, max_tokens=8, seed=i) for i in range(3)))
    session.step(2)
    session.submit(request("late", [7] * 64, max_tokens=8, seed=9))
    session.step(2)
    assert session.engine.statistics().kv_used_tokens == 16 * (3 + 1 + 3 + 2)  # shared; the last one's copy; responses
    session.run()
