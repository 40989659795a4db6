"""Functions as tools: their schemas, and what a model is told of calls that don't fit."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from headway.records.errors import ConfigurationError
from headway.rollout.tools import Tool, ToolError, as_text, call_tool, tools_by_name


def call(function: Any, arguments: str, episode: Any = None, name: str = "") -> tuple[str, bool]:
    tools = tools_by_name([function])
    return asyncio.run(call_tool(tools, name or next(iter(tools)), arguments, episode))


def search(query: str, most: int = 5, order: Literal["old", "new"] = "new") -> str:
    """Search the archive.

    query: words that must be in it
    most: of what is found
    """
    return f"{query} {most} {order}"


def test_a_schema_says_what_the_signature_and_the_docstring_do() -> None:
    assert Tool.of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words that must be in it"},
                    "most": {"type": "integer", "default": 5, "description": "of what is found"},
                    "order": {"enum": ["old", "new"], "type": "string", "default": "new"},
                },
                "required": ["query"],
            },
        },
    }


def test_arguments_are_checked_and_defaults_filled_in() -> None:
    assert call(search, '{"query": "x", "order": "old"}') == ("x 5 old", True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"query": ', "error: the arguments are not valid JSON"),
        ("[1]", "error: the arguments must be a JSON object"),
        ('{"most": 1}', "error: query: Field required"),
        ('{"query": "x", "most": "many"}', "error: most: Input should be a valid integer"),
        ('{"query": "x", "colour": 1}', "error: colour: Extra inputs are not permitted"),
        ('{"query": "x", "order": "big"}', "error: order: Input should be 'old' or 'new'"),
        ("[" * 100_000, "error: the arguments are not valid JSON"),
    ],
)
def test_what_does_not_fit_is_told_and_not_raised(arguments: str, told: str) -> None:
    text, well = call(search, arguments)
    assert text.startswith(told)
    assert not well


def test_an_unknown_tool_is_told_which_there_are() -> None:
    assert call(search, "{}", name="find") == ("error: there is no tool 'find'; valid: search", False)


def test_the_episode_is_given_and_no_part_of_the_schema() -> None:
    async def note(text: str, episode: Any) -> int:
        """Write it down."""
        episode.append(text)
        return len(episode)

    seen: list[str] = []
    assert call(note, '{"text": "a"}', seen) == ("1", True)
    assert seen == ["a"]
    assert list(Tool.of(note).schema["function"]["parameters"]["properties"]) == ["text"]
    assert call(note, '{"text": "a", "episode": []}', seen)[0] == "error: episode: Extra inputs are not permitted"


def test_errors_for_the_model_are_told_and_others_pass() -> None:
    def fails(kind: str) -> None:
        """Fail."""
        raise ToolError("no such file") if kind == "told" else RuntimeError("a bug")

    assert call(fails, '{"kind": "told"}') == ("error: no such file", False)
    with pytest.raises(RuntimeError, match="a bug"):
        call(fails, '{"kind": "other"}')


def test_results_of_any_kind_are_texts() -> None:
    class Point(BaseModel):
        x: int

    assert [as_text(value) for value in ("a", None, {"b": "ä"}, [1, 2], Point(x=1), 1.5)] == [
        "a",
        "",
        '{"b": "ä"}',
        "[1, 2]",
        '{"x":1}',
        "1.5",
    ]


def test_what_can_not_be_a_tool_is_refused_by_name() -> None:
    def silent(a: int) -> None: ...

    def untyped(a) -> None:  # type: ignore[no-untyped-def]
        """Do."""

    def several(*a: int) -> None:
        """Do."""

    for function, says in ((silent, "docstring"), (untyped, "the parameter a has no type"), (several, "need names")):
        with pytest.raises(ConfigurationError, match=says):
            Tool.of(function)
    with pytest.raises(ConfigurationError, match="two tools are called search"):
        tools_by_name([search, search])
