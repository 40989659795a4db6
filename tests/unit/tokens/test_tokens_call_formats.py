"""Calls of tools in every format: what a chat template writes is read back, whole and at every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from call_templates import SHAPES, published_templates, tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.tokens.continuation import Chat
from headway.tokens.messages import Message, ToolCall, json_text
from headway.tokens.output_parsing import openai_message
from headway.tokens.streaming import AnswerStream

PUBLISHED = published_templates()
ORIGINALS = [name for name in PUBLISHED if not name.endswith("_training")]
WITH_TOOLS = (
    *("deepseekv3", "diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe"),
    *("gptoss", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2", "llama3_1", "llama3_2", "muse_glimmer"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen2_5", "qwen3"),
    *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
)
ALL = {name: PUBLISHED[name] for name in PUBLISHED if name.removesuffix("_training") in WITH_TOOLS} | dict(SHAPES)
# A template for training writes its twin's calls: found out once, with marks that are no special tokens.
FORMS = [(name, special) for name in ALL for special in (False, True) if not (special and name.endswith("_training"))]
# Quotes and marks of a format can't be told from those of a text in it: these templates don't escape them.
UNESCAPED = ("lfm2_2_5", "lfm2_2_5_v2")
PROPERTIES: Mapping[str, Any] = {
    "text": {"type": "string", "description": "?"},
    "whole": {"type": "integer", "description": "?"},
    "number": {"type": "number", "description": "?"},
    "yes": {"type": "boolean", "description": "?"},
    "thing": {"type": "object", "description": "?", "properties": {}},
    "list": {"type": "array", "description": "?", "items": {"type": "string"}},
    "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}], "description": "?", "type": "integer"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "?", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("get_weather", "browser.open-tab", "f2")
]
ASKED = Message(role="user", content="1+2?")
DATE = {"strftime_now": lambda form: "2026"}

PIECES = st.sampled_from(
    ["a", " ", "\n", "é", "你", "7", "true", "null", '"', "'", "\\", "{", "}", "[1]", ",", ":", "=", ")", "<b>", "</b>",
     "&amp;", "\\n", "%", "x=y", "<", ">", "1e999", "NaN", "  ", "-"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=6).map("".join)
PLAIN = st.lists(st.sampled_from(["a", " b", "7", "é", "-", ".", "<i>"]), max_size=5).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6, width=32) | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "l2", "m_n"]), inner, max_size=3),
    max_leaves=5,
)


def arguments_of(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "text": texts,
            "whole": st.integers(-(10**12), 10**12),
            "number": st.floats(-1e6, 1e6, width=32),
            "yes": st.booleans(),
            "thing": st.dictionaries(st.sampled_from(["k", "l2"]), VALUES, max_size=3),
            "list": st.lists(VALUES, max_size=3),
        },
    )


@cache
def chat_of(name: str, special: bool = False) -> Chat:
    return Chat(tokenizer_with(ALL[name], special=special))


def rendered(chat: Chat, calls: Sequence[ToolCall], content: str = "") -> tuple[str, str]:
    """The prompt for a turn of these calls, and the turn without its end."""
    tools = TOOLS
    said = Message(role="assistant", content=content, calls=tuple(calls))
    prompt = chat.render([ASKED], tools, DATE)
    whole = chat.render([ASKED, said], tools, DATE, add_generation_prompt=False)
    plain = chat.render([ASKED, Message(role="assistant", content="SAID")], tools, DATE, add_generation_prompt=False)
    for open_mark in (prompt, prompt.rstrip(), prompt.partition("<think>")[0]):
        if whole.startswith(open_mark):
            return open_mark, whole[len(open_mark) :].removesuffix(plain.rpartition("SAID")[2])
    raise AssertionError((prompt, whole))


def read(chat: Chat, prompt: str, turn: str) -> Message:
    """The message that the turn's tokens are, after they were streamed one by one."""
    ids = chat.tokenizer.encode(turn)
    ends = [at for at, token in enumerate(ids) if token in chat.tokenizer.stop_ids]
    ids = ids[: ends[0] + 1] if ends else ids
    message = chat.answer(ids, prompt, calls=True, tools=TOOLS).message
    opened = prompt.rstrip().endswith(chat.written.thought[0])
    stream, told = AnswerStream(chat.tokenizer, chat.written, calls=True, opened=opened), ["", ""]
    for end in range(len(ids) + 1):
        for place, piece in enumerate(stream.push(ids[:end])):
            told[place] += piece
    whole = openai_message(message, chat.written)
    assert whole.get("reasoning_content", "").startswith(told[0])
    assert (whole["content"] or "").startswith(told[1])
    return message


def made(*calls: tuple[str, Mapping[str, Any]], named: bool = False) -> list[ToolCall]:
    return [
        ToolCall(name=name, arguments=json_text(given), call_id=f"functions.{name}:{n}" if named else f"abcdefg0{n}")
        for n, (name, given) in enumerate(calls)
    ]


@pytest.mark.slow
def test_published_templates_give_their_own_calls_back() -> None:
    assert len(ORIGINALS) >= 41
    unread = {name: chat_of(name).written.unknown for name in WITH_TOOLS if chat_of(name).written.unknown}
    print(f"{len(WITH_TOOLS) - len(unread)} of {len(WITH_TOOLS)} templates with tools; not read: {unread or 'none'}")
    assert len(WITH_TOOLS) == 28
    assert not unread
    others = [Chat(tokenizer_with(PUBLISHED[name])) for name in ORIGINALS if name not in WITH_TOOLS]
    assert all(chat.written.unknown for chat in others)  # they drop calls without a word


@pytest.mark.slow
@pytest.mark.parametrize(("name", "special"), FORMS)
def test_every_shape_is_found_out(name: str, special: bool) -> None:
    written = chat_of(name, special).written
    assert not written.unknown
    assert written.tools != "none"


@pytest.mark.slow
@settings(deadline=None, max_examples=3)
@given(st.lists(st.tuples(st.sampled_from(["get_weather", "f2"]), st.randoms()), min_size=1, max_size=3), st.data())
@pytest.mark.parametrize(("name", "special"), [form for form in FORMS if not form[0].endswith("_training")])
def test_render_parse_render_is_the_identity(name: str, special: bool, chosen: Any, data: Any) -> None:
    chat = chat_of(name, special)
    texts = PLAIN if name.removesuffix("_training") in UNESCAPED else TEXTS
    calls = made(
        *((called, data.draw(arguments_of(texts))) for called, _ in chosen[: chat.written.syntaxes[0].max_calls]),
        named=chat.written.syntaxes[0].named_ids,
    )
    prompt, turn = rendered(chat, calls)
    message = read(chat, prompt, turn)
    assert [call.meaning for call in message.calls] == [call.meaning for call in calls], turn
    again = [
        ToolCall(name=call.name, arguments=call.arguments, call_id=first.call_id)
        for call, first in zip(message.calls, calls, strict=True)
    ]
    assert rendered(chat, again)[1] == turn
