"""Sampled text as a message, and prompts that go on from it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random

import pytest
import real_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_agent import KINDS, LLAMA31, QWEN3, QWEN25, R1, chat_of
from scratch_folders import scratch_folder

from headway.tokens.call_syntax import CALL_ID, NAME, SYNTAXES
from headway.tokens.continuation import Chat
from headway.tokens.format_probe import output_format
from headway.tokens.messages import Message, same_answer
from headway.tokens.output_parsing import (
    OutputFormat,
    begins_inside_reasoning,
    parse_output,
    response_text,
)
from headway.tokens.tokenizer import Tokenizer

HERMES = OutputFormat(tools="hermes")
LLAMA = OutputFormat(tools="llama_json")
THINKS = OutputFormat(tools="hermes", reasoning=True)
LS = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def parsed(text: str, written: OutputFormat = HERMES, *, calls: bool = True, opened: bool = False) -> Message:
    return parse_output(text, written, calls=calls, opened=opened)


def called(message: Message) -> list[tuple[str, str]]:
    return [call.meaning for call in message.calls]


def tokenizer_with(template: str | None) -> Tokenizer:
    """A tokenizer of Qwen's manner with another chat template."""
    folder = scratch_folder("formats")
    real_tokenizers.write("qwen", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN25, "hermes", False),
        (QWEN3, "hermes", True),
        (LLAMA31, "llama_json", False),
        (R1, "none", True),
        ("<tool_call>\n<function=x>", "none", False),
        ("<tool_call>{{ name }}<arg_key>", "none", False),
        (None, "none", False),
    ],
)
def test_output_format_is_found_out(template: str | None, tools: str, reasoning: bool) -> None:
    tokenizer = tokenizer_with(template)
    found = output_format(tokenizer)
    assert (found.tools, found.reasoning) == (tools, reasoning)
    assert output_format(tokenizer, "llama_json").tools == "llama_json"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ("  kept\n", "  kept\n", []),
        (LS, "", [("bash", '{"command":"ls"}')]),
        (f"I look.\n{LS}\n{LS}", "I look.", [("bash", '{"command":"ls"}')] * 2),
        (f"{LS}\nand so on", "", [("bash", '{"command":"ls"}')]),
        ('<tool_call>{"name": "bash"}', "", [("bash", "{}")]),
        ('<tool_call>{"name": "b", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("b", '{"a":1}')]),
        (
            '<tool_call>{"name": "b", "arguments": {"c": "</tool_call>"}}</tool_call>',
            "",
            [("b", '{"c":"</tool_call>"}')],
        ),
        ('<tool_call>{"name": "b", "arguments": {"c": "<tool_call>"}}</tool_call>', "", [("b", '{"c":"<tool_call>"}')]),
    ],
)
def test_hermes_calls_are_parsed(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    message = parsed(text)
    assert (message.content, called(message)) == (content, calls)
    assert [call.call_id for call in message.calls] == [f"call_{number}" for number in range(len(calls))]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "bash", "arguments": {"command": </tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        f'{LS}<tool_call>{{"name": 3}}</tool_call>',
        '<tool_call>{"name": "bash"} and then</tool_call>',
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_malformed_calls_stay_in_content(text: str) -> None:
    message = parsed(text)
    assert (message.content, message.calls) == (text, ())


def test_calls_that_are_not_allowed_are_content() -> None:
    assert parsed(LS, calls=False).content == LS
    assert parsed(LS, OutputFormat()).content == LS


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "b", "parameters": {"a": 1}}', [("b", '{"a":1}')]),
        ('<|python_tag|>{"name": "b", "parameters": {}}; {"name": "c", "parameters": {}}', [("b", "{}"), ("c", "{}")]),
        ('{"name": "b", "parameters": {}} so', []),
        ('I call {"name": "b", "parameters": {}}', []),
        ("", []),
        ('{"a": 1}', []),
    ],
)
def test_llama_json_calls_are_parsed(text: str, calls: list[tuple[str, str]]) -> None:
    message = parsed(text, LLAMA)
    assert called(message) == calls
    assert message.content == ("" if calls else text)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n3", False, "hm", "3"),
        ("hm\n</think>\n\n3", True, "hm", "3"),
        ("hm and no end", True, "hm and no end", ""),
        ("<think>no end", False, "no end", ""),
        ("<think>\n\n</think>\n\n3", False, "", "3"),
        ("3 </think> 4", False, "", "3 </think> 4"),
        (f"<think>a</think>{LS}", False, "a", ""),
        (f"<think>{LS}</think>3", False, LS, "3"),
    ],
)
def test_reasoning_is_split_from_content(text: str, opened: bool, reasoning: str, content: str) -> None:
    message = parsed(text, THINKS, opened=opened)
    assert (message.reasoning, message.content) == (reasoning, content)
    assert len(message.calls) == (text.endswith(LS) and not text.endswith("3"))


def test_reasoning_in_content_is_given_out_as_it_was_written() -> None:
    """A template that knows nothing of reasoning: the client's text is the model's."""
    text = "<think>\nhm\n</think>\n\n3"
    message = parsed(text)
    assert (message.inline, message.reasoning, message.content) == (text, "hm", "3")
    searched = parsed("hm</think>3", OutputFormat(reasoning=True), opened=True)
    assert searched.inline == "hm</think>3"


def test_open_reasoning_in_prompt_is_detected() -> None:
    assert begins_inside_reasoning("<|im_start|>assistant\n<think>\n", THINKS)
    assert not begins_inside_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINKS)
    assert not begins_inside_reasoning("<|im_start|>assistant\n", THINKS)


def test_response_text_drops_stop_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = chat_of("qwen2.5", tmp_path).tokenizer
    ids = [*tokenizer.encode("go on\nObservation: x<|im_start|>y"), tokenizer.eos_id]
    assert response_text(tokenizer, ids, HERMES) == "go on\nObservation: xy"
    assert response_text(tokenizer, ids, HERMES, ("x", "\nObservation:", "")) == "go on"
    assert response_text(tokenizer, ids[:-1], HERMES) == "go on\nObservation: xy"
    assert response_text(tokenizer, [], HERMES) == ""
    plain = tokenizer.token_id("</think>")  # not a special token
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{tokenizer.eos_id}, {plain}]}}')
    ended = [*tokenizer.encode("on"), plain]
    assert response_text(tokenizer, ended, HERMES) == "on</think>"
    assert response_text(Tokenizer.load(tmp_path), ended, HERMES) == "on"


@cache
def chat_in_memory(kind: str) -> Chat:
    return chat_of(kind, scratch_folder("parsing"))


SAID = ["3", " 3", "é\n", "", "<think>\na b\n</think>\n\n3", LS, f"so\n{LS}", f"{LS}\n{LS}", "<tool_call>{", "你好 <|x"]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "r1"])
def test_a_template_that_shows_an_answer_is_read_as_that_answer(kind: str, seed: int) -> None:
    """Whatever was sampled: where the next prompt has it, it goes on right behind it; else it isn't there."""
    chat = chat_in_memory(kind)
    chance = Random(seed)
    text = chance.choice(SAID)
    ids = [i for character in text for i in chat.tokenizer.encode(character)]
    ids = ids[: chance.randint(1, max(1, len(ids)))] if chance.random() < 0.3 else [*ids, chat.tokenizer.stop_ids[0]]
    if not ids:
        return
    asked = Message(role="user", content="1+2?")
    prompt = chat.render([asked])
    answer = chat.answer(ids, prompt, calls=True)
    later = chat.render([asked, answer.message, Message(role="user", content="sure?")])
    behind = chat.answer_end(answer, later, len(prompt))
    kept = not (kind == "qwen3" and answer.message.reasoning) and (
        len(answer.message.calls) < 2 or chat.written.tools != "llama_json"
    )
    assert (behind is not None) == kept
    if behind is not None:
        assert "sure?" in later[behind:]
        there = later[len(prompt) : behind]
        if ids[-1] in chat.tokenizer.stop_ids:
            there = there.removesuffix(chat.tokenizer.token(ids[-1]) or "")
        shown = parse_output(there, chat.written, calls=True, opened=False)
        assert same_answer(answer.message, shown)
    other = chat.render([asked, Message(role="assistant", content="another"), Message(role="user", content="sure?")])
    assert chat.answer_end(answer, other, len(prompt)) is None


def test_text_is_encoded_as_it_stands_behind_a_special_token(tmp_path: Path) -> None:
    for kind in ("mistral", "metaspace"):
        chat = chat_of(kind, tmp_path / kind)
        tokenizer = chat.tokenizer
        end = tokenizer.stop_ids[0]
        text = "[INST] the answer [/INST]"
        whole = tokenizer.encode("a" + (tokenizer.token(end) or "") + text)
        assert chat.encode_after(end, text) == whole[whole.index(end) + 1 :]
        assert chat.encode_after(None, text) == tokenizer.encode(text)
        assert chat.encode_after(end, "") == []


@pytest.mark.parametrize("tools", SYNTAXES)
def test_long_runs_of_blanks_behind_a_mark_take_no_time(tools: str):
    """A policy that writes nothing but line breaks to its limit stalled its worker for seconds (quadratic)."""
    syntax = SYNTAXES[tools][0]
    head = (syntax.opening + syntax.head).replace(NAME, "f").replace(CALL_ID, "f:0")
    for begun in (*syntax.marks, head):
        text = begun + "\n" * 200_000
        assert not parsed(text, OutputFormat(tools=tools)).calls
