"""Messages in their normal form: what means the same is equal, what doesn't isn't, and what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.records.conversations import RequestRefused
from headway.tokens.messages import (
    Message,
    canonical_json,
    history_keys,
    message_key,
    normal_message,
    normal_messages,
    normal_tools,
    same_answer,
    template_form,
)

ASKED = {"role": "user", "content": "1+2?"}


def call(arguments: Any, call_id: str = "a", name: str = "bash") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(**fields: Any) -> Message:
    return normal_message({"role": "assistant", **fields}, "m")


THOUGHT = "<think>\nhm\n</think>\n\n3"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "3"}, {"content": "3", "function_call": None, "refusal": None, "annotations": []}),
        ({"content": "3"}, {"content": " 3\n"}),
        ({"content": "3"}, {"content": [{"type": "text", "text": "3", "cache_control": {"type": "ephemeral"}}]}),
        ({"content": None}, {"content": ""}),
        ({"content": None}, {}),
        ({"content": THOUGHT}, {"content": "3", "reasoning_content": "hm"}),
        ({"content": THOUGHT}, {"content": "\n\n3", "reasoning_content": "\nhm\n"}),
        ({"content": "3", "reasoning": "hm"}, {"content": "3", "reasoning_content": "hm"}),
        ({"tool_calls": [call('{"a": 1, "b": [2]}')]}, {"tool_calls": [call('{"b":[2],"a":1}', "other")]}),
        ({"tool_calls": [call("")]}, {"tool_calls": [call("{}")]}),
        ({"tool_calls": [call({"a": "é"})]}, {"tool_calls": [call('{"a": "\\u00e9"}')]}),
        ({"tool_calls": [call('{"a": ')]}, {"tool_calls": [call('{"a": ')]}),
        ({"tool_calls": []}, {"tool_calls": None}),
    ],
)
def test_equal_answers_are_recognised(one: Any, other: Any) -> None:
    assert same_answer(answer(**one), answer(**other))
    assert same_answer(answer(**other), answer(**one))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "3"}, {"content": "4"}),
        ({"content": "a b"}, {"content": "a  b"}),
        ({"tool_calls": [call("{}")]}, {"tool_calls": []}),
        ({"tool_calls": [call('{"a": 1}')]}, {"tool_calls": [call('{"a": "1"}')]}),
        ({"tool_calls": [call('{"a": 1}')]}, {"tool_calls": [call('{"a": 1.0}')]}),
        ({"tool_calls": [call('{"a": ')]}, {"tool_calls": [call('{"a":')]}),
        ({"tool_calls": [call("{}")]}, {"tool_calls": [call("{}", name="sh")]}),
        ({"tool_calls": [call("{}"), call('{"a": 1}')]}, {"tool_calls": [call('{"a": 1}'), call("{}")]}),
        ({"content": "3", "reasoning_content": "hm"}, {"content": "3", "reasoning_content": "ah"}),
    ],
)
def test_different_answers_are_distinguished(one: Any, other: Any) -> None:
    assert not same_answer(answer(**one), answer(**other))


def test_reasoning_affects_equality_but_not_message_key() -> None:
    recorded, sent = answer(content=THOUGHT), answer(content="3")
    assert not same_answer(recorded, sent)
    assert message_key(recorded) == message_key(sent)


def test_user_messages_are_compared_exactly() -> None:
    one, other = normal_messages([ASKED, {**ASKED, "content": "1+2? "}])
    assert message_key(one) != message_key(other)
    parts = normal_message({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, "m")
    assert parts.content == "a\nb"
    assert normal_message({"role": "developer", "content": "x"}, "m").role == "system"


@settings(deadline=None)
@given(st.lists(st.sampled_from(["u", "v", "<think>a</think>u"]), min_size=1, max_size=6), st.integers(0, 5))
def test_keys_of_histories_are_equal_for_equal_beginnings_alone(texts: list[str], place: int) -> None:
    def talk(last: str) -> list[Message]:
        roles = ["user", "assistant"] * 3
        said = [*texts[:place], last, *texts[place + 1 :]] if place < len(texts) else texts
        return [normal_message({"role": r, "content": t}, "m") for r, t in zip(roles, said, strict=False)]

    same, other = history_keys("root", talk("w")), history_keys("root", talk("x"))
    place = min(place, len(texts))
    assert same[: place + 1] == other[: place + 1]
    assert not set(same[place + 1 :]) & set(other[place + 1 :])
    assert len(set(same)) == len(texts) + 1
    assert not set(same) & set(history_keys("another root", talk("w")))


def test_template_form_of_messages() -> None:
    talk = normal_messages(
        [
            {"role": "assistant", "content": THOUGHT, "tool_calls": [call('{"b": 1, "a": 2}'), call("oops", "b")]},
            {"role": "tool", "tool_call_id": "b", "content": None, "name": "bash"},
        ]
    )
    first, second = template_form(talk, reasoning_field=True)
    assert (first["content"], first["reasoning_content"]) == ("3", "hm")
    arguments = [entry["function"]["arguments"] for entry in first["tool_calls"]]
    assert arguments == [{"b": 1, "a": 2}, "oops"]
    assert list(arguments[0]) == ["b", "a"]  # in the order they were written in
    assert second == {"role": "tool", "content": "", "tool_call_id": "b", "name": "bash"}
    inline = template_form(talk, reasoning_field=False)[0]
    assert inline["content"] == THOUGHT
    assert "reasoning_content" not in inline
    apart = answer(content="3", reasoning_content="hm")
    assert template_form([apart], reasoning_field=False)[0]["content"] == THOUGHT


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        (None, "messages", "a list of one or more"),
        ([], "messages", "a list of one or more"),
        ("hi", "messages", "a list of one or more"),
        (["hi"], "messages[0]", "not str"),
        ([ASKED, {"role": "critic", "content": "x"}], "messages[1].role", "'critic': valid: 'system'"),
        ([{"role": "user", "content": 3}], "messages[0].content", "not int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
            "of text alone",
        ),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content", "surrogate"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name", "not int"),
        ([{"role": "assistant", "function_call": {}}], "messages[0].function_call", "tool_calls instead"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function", "an object"),
        ([{"role": "assistant", "tool_calls": [call(3)]}], "messages[0].tool_calls[0].function", "its name is a text"),
        (
            [{"role": "assistant", "tool_calls": [call("{}")]}, {"role": "tool", "tool_call_id": "z", "content": ""}],
            "messages[1].tool_call_id",
            "'z': the assistant's message before it has 'a'",
        ),
        ([ASKED, {"role": "tool", "tool_call_id": "z", "content": ""}], "messages[1].tool_call_id", "no tool calls"),
    ],
)
def test_errors_name_the_invalid_field(messages: Any, param: str, says: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        normal_messages(messages)
    assert refused.value.param == param
    assert refused.value.code == "invalid_request_error"
    assert says in str(refused.value)


def test_tools_are_normalised_or_refused() -> None:
    assert normal_tools(None) is normal_tools([]) is None
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    assert normal_tools([tool]) == [tool]
    bare = {"type": "function", "function": {"name": "bash"}}
    empty = {"parameters": {"type": "object", "properties": {}}, "description": ""}
    assert normal_tools([bare]) == [{"type": "function", "function": {"name": "bash", **empty}}]
    for bad in ({"type": "web_search"}, {"type": "function"}, {"type": "function", "function": {"name": 3}}, "bash"):
        with pytest.raises(RequestRefused, match=r"tools\[1\]") as refused:
            normal_tools([tool, bad])
        assert refused.value.param == "tools[1]"
    with pytest.raises(RequestRefused, match="a list is needed"):
        normal_tools("bash")


@settings(deadline=None)
@given(st.integers(-9, 9), st.text(max_size=5), st.lists(st.booleans(), max_size=3))
def test_canonical_arguments_do_not_depend_on_how_they_are_written(number: int, text: str, flags: list[bool]) -> None:
    value = {"b": number, "a": {"y": text, "x": flags}}
    written = [
        json.dumps(value),
        json.dumps(value, indent=3, ensure_ascii=False),
        json.dumps(dict(reversed(value.items()))),
    ]
    assert len({canonical_json(entry) for entry in written}) == 1
    assert json.loads(canonical_json(written[0])) == value


def test_arguments_nested_too_deeply_stand_for_themselves() -> None:
    deep = "[" * 100_000
    assert canonical_json(deep) == deep
