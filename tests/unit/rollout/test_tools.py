"""Functions as tools: their schemas, and what a model is told of calls that don't fit."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from headway.records.errors import ConfigurationError, InfrastructureError
from headway.records.sandbox import SandboxError, model_failure
from headway.rollout.tools import Tool, ToolCalls, ToolError, as_text, call_tool, tools_by_name
from headway.runtime.hooks import storable


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


class Mute(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        return str(1 // 0)


RAISED: dict[str, BaseException] = {
    "told": ToolError("no such file"),
    "bug": RuntimeError("a bug"),
    "name": FileNotFoundError(2, "No such file or directory", "a.txt"),
    "exit": SystemExit(3),
    "cancelled": asyncio.CancelledError(),
    "mute": Mute(),
    "machine": OSError(errno.ENOSPC, "No space left on device"),
    "own": InfrastructureError("no search"),
    "sandbox": SandboxError(model_failure("out of memory")),
}


def fails(kind: str) -> None:
    """Fail."""
    raise RAISED[kind]


async def fails_later(kind: str) -> None:
    """Fail."""
    raise RAISED[kind]


@pytest.mark.parametrize("function", [fails, fails_later])
def test_what_a_tool_raises_is_told_but_for_infrastructures_failures(function: Any) -> None:
    def told(kind: str) -> str:
        text, well = call(function, f'{{"kind": "{kind}"}}')
        assert not well
        return text

    assert told("told") == "error: no such file"
    assert told("bug") == "error: RuntimeError: a bug"
    assert told("name") == "error: FileNotFoundError: [Errno 2] No such file or directory: 'a.txt'"
    assert told("mute") == "error: Mute, whose text raises ZeroDivisionError"
    assert "SystemExit: 3" in told("exit")
    assert "CancelledError" in told("cancelled")
    for kind in ("machine", "own", "sandbox"):
        with pytest.raises(type(RAISED[kind])):
            told(kind)


def test_a_result_that_has_no_text_is_told_too() -> None:
    def keyed() -> Any:
        """Get it."""
        return {(1, 2): 3}

    assert call(keyed, "{}") == ("error: TypeError: keys must be str, int, float, bool or None, not tuple", False)


def test_a_fatal_tools_exceptions_pass() -> None:
    async def act(written: str, episode: Any) -> str:
        raise RuntimeError("the game is broken")

    with pytest.raises(RuntimeError, match="broken"):
        call(Tool.described("act", "Act.", {}, act, fatal=True), "{}")


def test_a_tool_of_which_half_of_the_calls_raise_is_reported_once() -> None:
    events: list[Any] = []
    calls = ToolCalls()
    calls.report = lambda *event: events.append(event)

    def sometimes(well: bool) -> str:
        """Try."""
        if not well:
            raise KeyError("x")
        return "yes"

    async def main(*wells: bool) -> list[int]:
        seen = []
        for well in wells:
            await call_tool(tools_by_name([sometimes]), "sometimes", f'{{"well": {str(well).lower()}}}', None, calls)
            seen.append(len(events))
        return seen

    assert asyncio.run(main(False, True, True, True, False, False, False, False)) == [0, 0, 0, 0, 0, 1, 1, 1]
    [(name, what, data)] = events
    assert (name, data) == ("tool_raises", {"tool": "sometimes", "calls": 6, "raised": 3})
    assert what.startswith("3 of 6 calls of the tool sometimes raised, the last KeyError: 'x' (test_tools.py:")


def test_a_call_that_takes_too_long_is_given_up_and_delays_nobody() -> None:
    events: list[Any] = []
    calls, go_on = ToolCalls(0.2), threading.Event()
    calls.report = lambda *event: events.append(event)

    def waits(seconds: float = 10) -> str:
        """Wait."""
        go_on.wait(seconds)
        return "done"

    async def main() -> list[Any]:
        tools = tools_by_name([waits])
        abandoned = asyncio.create_task(call_tool(tools, "waits", "{}", None, calls))
        await asyncio.sleep(0.05)
        abandoned.cancel()
        many = [call_tool(tools, "waits", "{}", None, calls) for _ in range(40)]
        told = await asyncio.gather(*many, call_tool(tools, "waits", '{"seconds": 0}', None, calls))
        await asyncio.sleep(0.1)
        go_on.set()
        return told

    told = asyncio.run(main())
    assert told == [("error: waits gave no answer in 0.2 s", False)] * 40 + [("done", True)]
    assert [data for _, _, data in events][-1] == {"tool": "waits", "stuck": 41}


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


@pytest.mark.parametrize("kind", [str, list, dict, BaseModel])
def test_a_text_without_a_utf8_form_is_told_and_stored(kind: Any) -> None:
    class Named(BaseModel):
        name: str

    name = "na\udcffme"
    results = {str: name, list: [name], dict: {name: name}, BaseModel: Named.model_construct(name=name)}

    def get() -> Any:
        """Get it."""
        return results[kind]

    text, well = call(get, "{}")
    assert well
    assert "na\ufffdme" in storable(text)


def test_a_tool_that_stops_an_iteration_is_told() -> None:
    def first() -> Any:
        """Get it."""
        return next(iter(()))

    assert call(first, "{}") == ("error: RuntimeError: StopIteration: ", False)


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
