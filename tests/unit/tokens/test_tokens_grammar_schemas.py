"""Schemas as the library of grammars reads them: the same values, or fewer."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from headway.tokens.grammar import _narrowed, json_grammar
from headway.tokens.grammar_schemas import supported_schema

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
TEXTS = (
    "",
    "a",
    "a@b.cd",
    ".a@b.cd",
    "a..b@c.de",
    "a.b@c.de",
    "+.",
    "0.5",
    "-",
    "aa",
    "a.a",
    "..",
    "1",
    "+1.",
    "b" * 12,
)


@pytest.mark.parametrize(
    "pattern",
    [EMAIL, DECIMAL["anyOf"][1]["pattern"], r"^(?=.{1,3}$)a*", r"^(?!a)", r"^(?!.*a)b*", r"^(?=a)(?=.*\.)[a.]*$"],
)
def test_patterns_without_lookaheads_mean_what_they_meant(pattern: str) -> None:
    found = supported_schema({"type": "string", "pattern": pattern})
    patterns = [found["pattern"], *(one["pattern"] for one in found.get("allOf", ()))]
    assert not any("(?=" in one or "(?!" in one for one in patterns)
    for text in TEXTS:
        assert all(re.search(one, text) for one in patterns) is bool(re.search(pattern, text)), (text, patterns)


SCHEMAS: list[tuple[Any, list[Any]]] = [  # with values, valid and not
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}, {"c": 1}, {"b": "x"}, {}],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}},
        [{"xa": 1}, {"c": 1}, {}],
    ),
    (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        [["a"], ["a", "a"], [], ["a", "b"], ["d"]],
    ),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [[], [False, True], [True, True]]),
    (DECIMAL, [1, 0.5, "x", None]),
    ({"if": {"type": "string"}}, [1, "a"]),
    ({"type": "array", "maxContains": 1, "items": {"type": "integer"}}, [[1, 2], ["a"]]),
    (
        {"type": "object", "properties": {"a": {"type": "string", "format": "phone"}}, "dependentRequired": {}},
        [{"a": "1"}, {"a": 1}],
    ),
]


@pytest.mark.parametrize(("schema", "values"), SCHEMAS)
def test_schemas_allow_no_more_than_they_did(schema: Any, values: list[Any]) -> None:
    assert not LLMatcher.validate_grammar(json_grammar(schema))
    before, behind = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(_narrowed(schema))
    for value in values:
        assert before.is_valid(value) or not behind.is_valid(value), json.dumps(value)
    assert any(behind.is_valid(value) for value in values)
