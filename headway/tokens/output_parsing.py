"""Parsing of a model's output into content, reasoning and tool calls, as its chat template writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headway.records.conversations import ToolFormat
from headway.tokens.messages import Message, ToolCall, assistant_message, encodable, json_text
from headway.tokens.tokenizer import Tokenizer

Tools = Literal["hermes", "llama_json", "none"]

THINK, THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_json = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """The way a chat template writes the assistant's turns."""

    tools: Tools = "none"
    reasoning: bool = False  # written in <think> blocks, which a client gets in a separate field
    reasoning_field: bool = False  # the chat template reads that field; else it looks for reasoning in the content


def output_format(template: str | None, tools: ToolFormat = "auto") -> OutputFormat:
    """The format that a chat template writes; ``tools`` overrides the format of tool calls detected in it.

    "hermes": ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them behind the content
    (Hermes, Qwen 2.5 and 3). "llama_json": ``{"name": ..., "parameters": {...}}`` and nothing else (Llama 3.1). A
    template that writes calls otherwise has "none": they stay in the content.
    """
    text = template or ""
    if tools == "auto":
        tools = _tools_of(text)
    return OutputFormat(tools=tools, reasoning=THOUGHT in text, reasoning_field="reasoning_content" in text)


def _tools_of(template: str) -> Tools:
    if _CALL in template:
        other = "<function=" in template or "<arg_key>" in template  # XML inside the tags: Qwen3-Coder, GLM 4.5
        return "none" if other else "hermes"
    return "llama_json" if '"parameters": ' in template and '"name": ' in template else "none"


def begins_inside_reasoning(prompt: str) -> bool:
    """Whether a prompt's text ends with an open ``<think>``, so that what follows is reasoning."""
    return prompt.rstrip().endswith(THINK)


def parse_output(text: str, written: OutputFormat, *, calls: bool, opened: bool, call_prefix: str = "call_") -> Message:
    """Parse a response's ``text`` into a message.

    ``calls``: its request allows tool calls. ``opened``: it begins inside reasoning. Calls have the ids ``call_prefix``
    + number. Unclosed reasoning extends to the end. If a tool call is malformed, all of them stay in the content, so
    that the caller can name the mistake (as vLLM's parser of this format does).
    """
    reasoning, rest = _reasoning(text, opened) if written.reasoning else ("", text)
    parser = _PARSERS.get(written.tools) if calls else None
    content, unnamed = (parser(rest) if parser else None) or (rest, ())
    tool_calls = tuple(replace(call, call_id=f"{call_prefix}{number}") for number, call in enumerate(unnamed))
    if not written.reasoning:
        return assistant_message(content, calls=tool_calls)
    # written: as a template without a field for reasoning would find it in the content
    inside = text[: len(text) - len(rest)] + content if reasoning else ""
    return assistant_message(content.lstrip("\n"), reasoning, tool_calls, written=inside)


def _reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Split ``text`` into (reasoning, the text behind it)."""
    if text.lstrip().startswith(THINK):
        text = text.lstrip()[len(THINK) :]
    elif not opened:
        return "", text
    reasoning, _, rest = text.partition(THOUGHT)
    return reasoning.strip(), rest


def certain(text: str, written: OutputFormat, *, calls: bool, opened: bool) -> tuple[str, str]:
    """(reasoning, content) that are certain for a response beginning with ``text``: prefixes of the final
    `client_form`, whatever follows."""
    reasoning = ""
    if written.reasoning:
        begun = text.lstrip()
        if THINK.startswith(begun):
            return "", ""  # or it is the beginning of one
        if begun.startswith(THINK) or opened:
            inside = begun.removeprefix(THINK) if begun.startswith(THINK) else text
            thought, closed, text = inside.partition(THOUGHT)
            if not closed:
                return _before(thought.lstrip(), THOUGHT), ""
            reasoning = thought.strip()
        text = text.lstrip("\n")
        if not reasoning and (THINK.startswith(text.lstrip()) or text.lstrip().startswith(THINK)):
            return "", ""  # behind an empty block: another one would be the reasoning
    if not calls or written.tools == "none":
        return reasoning, text
    if written.tools == "hermes":
        content, tag, _ = text.partition(_CALL)
        return reasoning, content.rstrip() if tag else _before(text, _CALL)
    begun = text.lstrip()
    json_so_far = not begun or begun[0] == "{" or begun.startswith(PYTHON_TAG) or PYTHON_TAG.startswith(begun)
    return reasoning, "" if json_so_far else text


def _before(text: str, tag: str) -> str:
    """``text`` without a suffix that may be the beginning of ``tag``, and without white space before that."""
    return text[: len(text) - overlap(text, tag)].rstrip()


def overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``tag``."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


def _hermes(text: str) -> tuple[str, tuple[ToolCall, ...]] | None:
    """(content before the first call, calls); text between and behind calls is dropped. None for malformed calls."""
    content, tag, _ = text.partition(_CALL)
    if not tag:
        return None
    calls: list[ToolCall] = []
    at = len(content)
    while at >= 0:
        found = _call_at(text, at + len(_CALL), "arguments")
        if found is None:
            return None
        call, end = found
        closing = text[end:].lstrip()
        if closing and not closing.startswith(_CALLED):
            return None
        calls.append(call)
        at = text.find(_CALL, end)
    return content.rstrip(), tuple(calls)


def _llama_json(text: str) -> tuple[str, tuple[ToolCall, ...]] | None:
    """("", calls) of a text that is calls separated by semicolons and nothing else; None otherwise."""
    text = text.strip().removeprefix(PYTHON_TAG)
    calls: list[ToolCall] = []
    at = 0
    while at < len(text):
        found = _call_at(text, at, "parameters")
        if found is None:
            return None
        call, end = found
        calls.append(call)
        behind = re.compile(r"\s*(;|$)").match(text, end)
        if behind is None:
            return None
        at = behind.end()
    return ("", tuple(calls)) if calls else None


def _call_at(text: str, at: int, key: str) -> tuple[ToolCall, int] | None:
    """The call whose JSON begins at ``at`` (or behind white space there), and its end; None when it isn't a call."""
    start = len(text) - len(text[at:].lstrip())
    try:
        value, end = _json.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name: Any = value.get("name")
    arguments: Any = value.get(key, value.get("arguments", value.get("parameters", {})))
    written = arguments if isinstance(arguments, str) else json_text(arguments)
    if not isinstance(name, str) or not encodable(name + written):
        return None
    return ToolCall(name=name, arguments=written), end


def client_form(message: Message, written: OutputFormat) -> dict[str, Any]:
    """An answer in the form of OpenAI's chat API, with ``reasoning_content``. Where the model's chat template doesn't
    know reasoning, it stays in the content as written."""
    content = message.content if written.reasoning else message.inline
    entry: dict[str, Any] = {"role": "assistant", "content": None if message.calls and not content else content}
    if message.reasoning and written.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.calls:
        entry["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return entry


_PARSERS = {"hermes": _hermes, "llama_json": _llama_json}


def response_text(tokenizer: Tokenizer, ids: Sequence[int], written: OutputFormat, stop: Sequence[str] = ()) -> str:
    """Text of sampled tokens for `parse_output`: without the token that ended the response and other special tokens,
    and cut at the first stop string."""
    if ids and ids[-1] in tokenizer.stop_ids:
        ids = ids[:-1]
    if written.tools == "llama_json":  # whose tag is a special token
        kept = tokenizer.token_id(PYTHON_TAG)
        ids = [i for i in ids if i == kept or i not in tokenizer.special_ids]
        text = tokenizer.decode(ids, keep_special=True)
    else:
        text = tokenizer.decode(ids)
    places = [at for string in stop if string and (at := text.find(string)) >= 0]
    return text[: min(places)] if places else text
