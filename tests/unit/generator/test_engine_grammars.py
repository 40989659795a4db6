"""Engines sample within grammars: answers are valid, masks are replayed, and what can't be compiled ends alone."""

from __future__ import annotations

import copy
import functools
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from grammar_walk import kept_masks
from jsonschema import Draft202012Validator
from llguidance import LLParserLimits
from scratch_folders import scratch_folder

from headway.generator.engines import grammars as waiting
from headway.generator.engines.hf.engine import HfEngine
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.hf.model import load_hf
from headway.models.loading import save_model, weights_of
from headway.records.generation import (
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    SamplingParameters,
    VersionSpan,
)
from headway.records.tokens import KEPT
from headway.tokens import grammar as grammar_module
from headway.tokens.grammar import GrammarRefused, Grammars, allowed_ids, json_grammar
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer
from tests.conformance.engine import Session
from tests.conformance.reference import random_model

torch.set_num_threads(1)
VOCABULARY = 320  # a few more than the tokenizer's
PROMPT = (5, 6, 7)
TEXTS = ['{"name": "Ada", "tags": ["x", "y"], "ok": true, "n": -12.5e3}', "null false true", '"}, {"', "0123456789"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine compiles what it is given late."""
    monkeypatch.setattr(waiting, "COMPILE_S", 600.0)


@functools.cache
def tokenizer() -> Tokenizer:
    return train_byte_fallback_tokenizer(TEXTS * 3, 312, scratch_folder("grammars") / "tokenizer")


@functools.cache
def model(seed: int = 0) -> Any:
    return random_model(100 + seed, vocabulary=VOCABULARY)


def make_torch(**options: Any) -> TorchEngine:
    options = {"slots": 4, "max_context_tokens": 500, "tokenizer": tokenizer(), **options}
    return TorchEngine(copy.deepcopy(model()), **options)


def make_deterministic(**options: Any) -> TorchEngine:
    return make_torch(deterministic=True, **options)


def make_plain(**options: Any) -> TorchEngine:
    return make_torch(native_kernels=False, **options)


@functools.cache
def hub_folder() -> Any:
    folder = scratch_folder("grammars") / "hub"
    save_model(model(), folder)
    return folder


def make_hub(**options: Any) -> HfEngine:
    options = {"slots": 4, "max_context_tokens": 500, "tokenizer": tokenizer(), **options}
    return HfEngine(load_hf(hub_folder(), "float32", "cpu"), **options)


MAKERS = pytest.mark.parametrize("make", [make_torch, make_deterministic, make_plain, make_hub])
ENGINES = pytest.mark.parametrize("make", [make_torch, make_hub])


def request(name: str, grammar: str = "", *, partial: PartialResponse = PartialResponse(), **how: Any):
    stop = tokenizer().stop_ids if grammar else ()
    how = {"max_tokens": 480, "seed": sum(map(ord, name)), "stop_token_ids": stop, **how}
    sampling = SamplingParameters(**how, grammar=grammar)
    return GenerationRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, partial=partial)


def random_schema(random: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of values that end: strings, arrays and objects are bounded."""
    kinds = ["integer", "number", "boolean", "null", "string", "pattern", "format", "enum", "const"]
    kinds += ["array", "object", "anyOf", "map", "tuple", "allOf"] * (depth < 3)
    below = functools.partial(random_schema, random, depth + 1)
    kind = random.choice(kinds) if depth else random.choice(["object", "array", "anyOf", "map"])
    low = random.randint(-50, 50)
    match kind:
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 200)}
        case "number":
            return {"type": "integer", "multipleOf": random.randint(1, 9), "minimum": -999, "exclusiveMaximum": 999}
        case "string":
            return {"type": "string", "minLength": random.randint(0, 3), "maxLength": random.randint(3, 6)}
        case "pattern":
            return {"type": "string", "pattern": random.choice(["^[a-c]{2,5}$", "^(x|yy)+z$", r"^\d{3}-\d{2}$"])}
        case "format":
            return {"type": "string", "format": random.choice(["date", "uuid", "ipv4", "time"])}
        case "enum":
            return {"enum": random.sample(["a", "é", '"\\', "ab", 1, 2.5, None, True, [1], {"k": "v"}], 3)}
        case "const":
            return {"const": random.choice(["x y", 12, None, {"a": [1, 2]}, "\n"])}
        case "array":
            return {"type": "array", "items": below(), "minItems": random.randint(0, 1), "maxItems": 3}
        case "tuple":
            return {"type": "array", "prefixItems": [below(), below()], "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [below(), below()]}
        case "map":
            return {"type": "object", "properties": {"k": below(), "l": below()}, "additionalProperties": False}
        case "allOf":
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 30}]}
        case "object":
            names = random.sample(["a", "b", "name", "ünï", "x-1"], random.randint(1, 3))
            required = random.sample(names, random.randint(0, len(names)))
            properties = {name: below() for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case _:
            return {"type": kind}


@pytest.mark.slow
def test_answers_to_random_schemas_are_valid():
    """Sampled from random weights: nothing but the grammar makes them valid."""
    chance = random.Random(5)
    schemas = {f"s{n}": random_schema(chance) for n in range(60)}
    session = Session(make_torch(slots=16))
    session.submit(
        *(
            request(name, json_grammar(schema), temperature=chance.choice([0.0, 0.7, 1.0, 1.5]))
            for name, schema in schemas.items()
        )
    )
    results, ended = session.run(), 0
    for name, schema in schemas.items():
        result = results[name]
        assert result.finish_reason in ("stop", "length"), (schema, result.error)
        if result.finish_reason == "stop":
            ended += 1
            Draft202012Validator(schema).validate(json.loads(tokenizer().decode(result.response.ids)))
    assert ended >= 56  # the others said one thing again and again


def require_masks(result: GenerationResult, how: SamplingParameters, versions: dict[int, Any]) -> None:
    """Log-probabilities are each version's over what the grammar, top-p and top-k kept."""
    ids, response = [*PROMPT, *result.response.ids], result.response
    masks = kept_masks(Grammars(tokenizer(), VOCABULARY), how.grammar, list(response.ids))
    rows, at = response.token_rows.get(KEPT), 0
    for span in response.versions:
        with torch.no_grad():
            decoder = versions[span.version]
            logits = decoder.head(decoder.forward_packed(torch.tensor(ids), [len(ids)]))
        for n in range(at, at + span.tokens):
            kept = allowed_ids(masks[n]).tolist()
            if rows is not None:
                among = rows[len(PROMPT) + n : len(PROMPT) + n + 1].values.tolist()
                assert set(among) <= set(kept)
                kept = among
            assert response.ids[n] in kept
            z = logits[len(PROMPT) + n - 1].double() / (how.temperature or 1)
            expected = z[response.ids[n]] - (z[kept] if how.kept_sets else z).logsumexp(0)
            assert response.logprobs[n] == pytest.approx(float(expected), abs=1e-4)
        at += span.tokens
    assert at == len(response.ids)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["xy", "z"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
KINDS: dict[str, dict[str, Any]] = {
    "grammar": {"kept_sets": 400},
    "top-p": {"kept_sets": 400, "top_p": 0.7},
    "top-k": {"kept_sets": 400, "top_k": 2, "temperature": 1.4},
    "greedy": {"kept_sets": 400, "temperature": 0.0},
    "serving": {"top_p": 0.9},
}


def submit_kinds(session: Session, partial: Callable[[str], PartialResponse] = lambda _: PartialResponse()) -> None:
    session.engine._compiling.grammars.matcher(json_grammar(SCHEMA))  # so that all begin at once
    for name, how in KINDS.items():
        session.submit(request(name, json_grammar(SCHEMA), partial=partial(name), **how))


def require_kinds(session: Session, versions: dict[int, Any]) -> None:
    for name in KINDS:
        result = session.results[name]
        assert result.finish_reason == "stop", result.error
        assert (KEPT in result.response.token_rows) == (name in ("top-p", "top-k"))
        require_masks(result, session.requests[name].sampling, versions)
        Draft202012Validator(SCHEMA).validate(json.loads(tokenizer().decode(result.response.ids)))


@MAKERS
def test_logprobs_and_sets_within_grammars(make: Callable[..., Any]):
    session = Session(make(slots=3))
    submit_kinds(session)
    session.submit(request("free", max_tokens=9), request("end", 'start: "z"', stop_token_ids=()))
    session.run()
    require_kinds(session, {0: model()})
    assert session.results["free"].finish_reason == "length"
    assert session.results["end"].finish_reason == "stop"  # after a stop token, asked for or not
    assert tokenizer().decode(session.results["end"].response.ids) == "z"


@ENGINES
def test_tokens_within_grammars_do_not_depend_on_neighbours(make: Callable[..., Any]):
    together = Session(make(slots=6))
    submit_kinds(together)
    together.submit(request("free", max_tokens=30))
    together.run()
    for name in [*KINDS, "free"]:
        alone = Session(make(slots=1))
        alone.submit(together.requests[name])
        assert alone.run()[name].response.ids == together.results[name].response.ids


@pytest.mark.parametrize("mode", ["recompute", "abort"])
def test_grammars_over_updates_in_flight_parking_and_moves(mode: Any):
    session = Session(make_torch(slots=5))
    submit_kinds(session)
    session.step(5)
    versions = {0: model(0), 1: model(1)}
    session.engine.update_weights(weights_of(versions[1]), 1, mode)
    session.collect()
    if mode == "abort":
        parked = session.results
        assert parked.keys() == KINDS.keys()
        session = Session(TorchEngine(versions[1], slots=2, max_context_tokens=500, version=1, tokenizer=tokenizer()))
        submit_kinds(session, lambda name: parked[name].response)
    session.run()
    assert [span.version for span in session.results["grammar"].response.versions] == [0, 1]
    require_kinds(session, versions)


@ENGINES
def test_grammars_of_preempted_requests(make: Callable[..., Any]):
    session = Session(make(slots=5, kv_capacity_tokens=60))
    submit_kinds(session)
    session.run()
    assert session.engine.statistics().preemptions > 0
    require_kinds(session, {0: model()})


@ENGINES
def test_what_is_wrong_ends_its_own_request(make: Callable[..., Any]):
    session = Session(make())
    wrong = {
        "no schema": (json_grammar({"properties": {"a": {"type": "strg"}}}), "JSON schema at /properties/a: Invalid"),
        "keyword": (json_grammar({"not": {}}), "Unimplemented keys"),
        "nothing": (json_grammar(False), "Unsatisfiable"),
        "large": (json_grammar({"enum": ["a" * 100_000, "b" * 100_000]}), "are valid"),
        "no grammar": ('start: "ab" lost', 'unknown name: "lost"'),
    }
    for name, (grammar, _) in wrong.items():
        session.submit(request(name, grammar))
    session.submit(request("right", json_grammar(SCHEMA)), request("free", max_tokens=20))
    session.submit(request("astray", json_grammar(SCHEMA), partial=partial_of([70])))
    session.run()
    for name, (_, message) in wrong.items():
        result = session.results[name]
        assert (result.finish_reason, result.refused) == ("error", True), name
        assert message in result.error
    assert "token 70 at place 0 of the response is outside its grammar" in session.results["astray"].error
    assert session.results["right"].finish_reason == "stop"
    assert session.results["free"].finish_reason == "length"
    bare = Session(make(tokenizer=None))
    bare.submit(request("a", json_grammar()))
    assert "grammars need a tokenizer" in bare.run()["a"].error


def partial_of(ids: list[int]) -> PartialResponse:
    return PartialResponse(ids=ids, logprobs=[-1.0] * len(ids), versions=(VersionSpan(version=0, tokens=len(ids)),))


@ENGINES
def test_a_dead_end_is_found_where_it_is(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    """A tokenizer that lacks a character: the request has what it said so far, and a typed error."""
    texts = tokenizer().vocabulary_bytes()
    monkeypatch.setattr(Tokenizer, "vocabulary_bytes", lambda _: [b"" if b":" in text else text for text in texts])
    session = Session(make())
    session.submit(request("a", json_grammar(SCHEMA)), request("free", max_tokens=60))
    results = session.run()
    assert (results["a"].finish_reason, results["a"].refused) == ("error", True)
    assert "no token of the vocabulary continues" in results["a"].error
    assert '"a"' in tokenizer().decode(results["a"].response.ids)
    assert results["free"].finish_reason == "length"


@ENGINES
def test_others_go_on_while_a_grammar_is_compiled(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    go, compile_ = threading.Event(), Grammars._compile

    def slow(*given: Any) -> Any:
        go.wait(20)
        return compile_(*given)

    monkeypatch.setattr(Grammars, "_compile", slow)
    session = Session(make())
    session.submit(request("a", json_grammar(SCHEMA)), request("b", json_grammar()), request("free", max_tokens=20))
    session.submit(request("next", max_tokens=5))
    session.step(40)
    assert session.results.keys() == {"free", "next"}
    assert session.step()  # it isn't idle
    assert session.engine.statistics().waiting == session.engine.statistics().compiling == 2
    session.engine.abort(["b"])
    session.collect()
    assert session.results["b"].finish_reason == "abort"
    go.set()
    assert session.run()["a"].finish_reason == "stop"
    assert not session.engine._compiling


def test_a_grammar_that_takes_too_long_fails_its_request_which_may_be_tried_again(monkeypatch: pytest.MonkeyPatch):
    go, now = threading.Event(), [0.0]
    monkeypatch.setattr(Grammars, "_compile", lambda *_: go.wait(20) and GrammarRefused("late"))
    session = Session(make_torch(now=lambda: now[0]))
    session.submit(request("a", json_grammar(SCHEMA)))
    assert session.step()
    now[0] = waiting.COMPILE_S + 1
    result = session.run()["a"]
    go.set()
    assert (result.finish_reason, result.refused) == ("error", False)
    assert "wasn't compiled within 600 s" in result.error


def test_what_the_library_raises_is_that_requests_error(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> Any:
        raise RuntimeError("panicked")

    monkeypatch.setattr(Grammars, "_compile", broken)
    session = Session(make_torch())
    session.submit(request("a", json_grammar(SCHEMA)), request("free", max_tokens=5))
    results = session.run()
    assert (results["a"].finish_reason, results["a"].refused) == ("error", False)
    assert "panicked" in results["a"].error
    assert results["free"].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"top_p": 0.9, "kept_sets": 400}])
def test_a_grammar_that_is_too_complex_to_follow_ends_its_request(how: dict[str, Any]):
    """Found before its first token: of 520 properties any may be next."""
    wide = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(520)}}
    session = Session(make_torch())
    session.submit(request("a", json_grammar(wide), **how), request("free", max_tokens=60))
    results = session.run()
    assert (results["a"].finish_reason, results["a"].refused) == ("error", True)
    assert "grammar, at place 0 of the response: " in results["a"].error
    assert "outside" not in results["a"].error
    assert not results["a"].response.ids
    assert not results["a"].response.token_rows
    assert results["free"].finish_reason == "length"


def test_rows_without_a_grammar_pay_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.generator.engines.torch.slot_table.fill_masks", None)
    session = Session(make_torch())
    session.submit(request("a", max_tokens=5), request("b", max_tokens=5, top_p=0.5))
    assert {one.finish_reason for one in session.run().values()} == {"length"}
    assert np.isfinite(session.results["a"].response.logprobs).all()


def test_an_engine_steps_for_as_long_as_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch):
    """However many steps that are."""
    go, compile_, steps = threading.Event(), Grammars._compile, 0
    monkeypatch.setattr(waiting, "_PAUSE_S", 0.0)
    monkeypatch.setattr(Grammars, "_compile", lambda *given: go.wait(60) and compile_(*given))
    engine = make_torch()
    step = engine.step

    def counted() -> bool:
        nonlocal steps
        steps += 1
        if steps == 2000:
            go.set()
        return step()

    monkeypatch.setattr(engine, "step", counted)
    session = Session(engine)
    session.submit(request("a", json_grammar(SCHEMA)))
    assert session.run()["a"].finish_reason == "stop"


# --- states that responses share --------------------------------------------------------------------------------------

RUNS = "start: " + " | ".join(f"/{letter}{{60}}/" for letter in "abdegklm")  # each has states of its own
HOW: dict[str, dict[str, Any]] = {"e": {"top_p": 0.9, "kept_sets": 400}, "f": {"stop": ("never",)}}


def runs_of(session: Session, names: str = "abcdefgh") -> list[Any]:
    session.submit(*(request(name, RUNS, temperature=9.0, **HOW.get(name, {})) for name in names))
    results = session.run()
    assert {results[name].finish_reason for name in names} == {"stop"}, [one.error for one in results.values()]
    return [(results[name].response.ids, results[name].response.token_rows) for name in names]


@ENGINES
def test_responses_that_share_too_few_states_are_sampled_all_the_same(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    expected = runs_of(Session(make()))
    letters = {tokenizer().decode(ids)[0] for ids, _ in expected}
    assert len(letters) > 2  # together they need more states than there are
    limits = LLParserLimits(max_lexer_states=160, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_limits", lambda states, fuel: limits)
    engine, again = make(), list[str]()
    follow = engine._recompile_grammar
    monkeypatch.setattr(engine, "_recompile_grammar", lambda entry: again.append(entry.request_id) or follow(entry))
    assert runs_of(Session(engine)) == expected
    assert again


def test_a_response_that_uses_up_all_states_alone_ends(monkeypatch: pytest.MonkeyPatch):
    limits = LLParserLimits(max_lexer_states=160, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_limits", lambda states, fuel: limits)
    session = Session(make_torch())
    session.submit(
        request("long", "start: /a{400}/"), request("short", "start: /b{20}/"), request("free", max_tokens=9)
    )
    results = session.run()
    assert (results["long"].finish_reason, results["long"].refused) == ("error", True)
    assert "too many states" in results["long"].error
    assert 40 < len(results["long"].response.ids) < 160  # what it sampled is there
    assert (results["short"].finish_reason, results["free"].finish_reason) == ("stop", "length")
