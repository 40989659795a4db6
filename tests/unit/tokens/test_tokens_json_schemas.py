"""JSON schemas as grammars: what is sampled is valid, and what is valid may be sampled."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from grammar_walk import allowed_text, is_allowed
from random_schemas import random_schema
from recorded_agent import chat_of
from scratch_folders import scratch_folder

from headway.tokens.grammar import GrammarRefused, Grammars, json_grammar
from headway.tokens.tokenizer import Tokenizer

SUITE: Any = json.loads((Path(__file__).parents[2] / "fixtures/json_schema_suite.json").read_text())


@cache
def tokenizer() -> Tokenizer:
    return chat_of("chatml", scratch_folder("json-schemas")).tokenizer


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer())


@pytest.mark.slow
def test_the_json_schema_test_suite() -> None:
    """Of its groups, those whose schema is taken: nothing invalid may be sampled. What is valid and can't be has its
    keys in another order than the schema, or a number in another form (1.0 for 1), or isn't of a ``format``."""
    wrong, unwritten, cases = list[Any](), list[Any](), 0
    for described, schema, tests in SUITE["taken"]:
        grammar = json_grammar(schema)
        for data, valid in tests:
            cases += 1
            text = json.dumps(data, ensure_ascii=False)
            if is_allowed(grammars(), tokenizer(), grammar, text) != valid:
                (unwritten if valid else wrong).append((described, text))
    assert wrong == []
    assert len(unwritten) <= 22, unwritten
    assert (len(SUITE["taken"]), SUITE["groups"], cases, SUITE["cases"]) == (164, 368, 589, 1257)


@pytest.mark.slow
def test_whatever_is_sampled_is_valid_for_200_random_schemas() -> None:
    chance = random.Random(1)
    for number in range(200):
        schema = random_schema(chance)
        text = allowed_text(grammars(), tokenizer(), json_grammar(schema), chance)
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        assert validator.is_valid(json.loads(text)), (number, schema, text)


@pytest.mark.parametrize(
    ("bounds", "yes", "no"),
    [
        ({"exclusiveMinimum": 2, "maximum": 2.5}, ["2.1", "2.5"], ["2", "2.0", "2.6"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, ["0.0000005"], ["0", "0.000001"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0.0"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "1"]),
    ],
)
def test_exclusive_bounds_of_narrow_intervals(bounds: Any, yes: list[str], no: list[str]) -> None:
    """Which the library alone gets wrong."""
    for schema, form in (
        ({"type": "number", **bounds}, "{}"),
        ({"type": "array", "items": {"anyOf": [{"type": "number", **bounds}]}}, "[{}]"),
    ):
        grammar = json_grammar(schema)
        allowed = {text for text in (*yes, *no) if is_allowed(grammars(), tokenizer(), grammar, form.format(text))}
        assert allowed == set(yes)


def test_an_empty_interval_is_refused_and_data_are_left_alone() -> None:
    with pytest.raises(GrammarRefused, match=r"minimum \(2\) is greater than maximum"):
        grammars().matcher(json_grammar({"type": "number", "minimum": 2, "exclusiveMaximum": 2.0}))
    data = {"exclusiveMinimum": 0, "maximum": 0}
    assert is_allowed(grammars(), tokenizer(), json_grammar({"const": data}), json.dumps(data))
