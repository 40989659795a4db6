"""Parsing of a model's output into content, reasoning and tool calls, in the format of its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal

from headway.tokens.call_syntax import PYTHON_TAG, SYNTAXES, CallSyntax, read_calls
from headway.tokens.messages import Message, ToolCall, assistant_message, openai_tool_call
from headway.tokens.tokenizer import Tokenizer

Ids = Literal["any", "nine"]


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """The way a chat template writes the assistant's turns."""

    tools: str = "none"  # the call format's name in SYNTAXES; "template": only the template defines it
    reasoning: bool = False  # reasoning is written between marks, and a client gets it in a separate field
    thought: tuple[str, str] = ("<think>", "</think>")  # marks of reasoning
    content_mark: str = ""  # mark before the content
    detected: tuple[CallSyntax, ...] = ()  # detected grammars of calls; (): those that the name has in SYNTAXES
    ids: Ids = "any"  # ids of calls that the template takes; "nine": only nine letters and digits
    special: tuple[tuple[str, int], ...] = ()  # marks that are special tokens, with their ids
    unknown: str = ""  # reason why calls can't be read; "": they can, or needn't be

    @property
    def syntaxes(self) -> tuple[CallSyntax, ...]:
        """Grammars of calls; the first is the template's."""
        return self.detected or SYNTAXES.get(self.tools, ())


def begins_inside_reasoning(prompt: str, written: OutputFormat) -> bool:
    """Whether a prompt's text ends with an open mark of reasoning, so that reasoning follows."""
    return prompt.rstrip().endswith(written.thought[0])


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the schemas of the arguments of a request's tools, by name."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {str(function.get("name")): function.get("parameters") for function in functions}


def parse_output(
    text: str,
    written: OutputFormat,
    *,
    calls: bool,
    opened: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    call_prefix: str = "call_",
) -> Message:
    """Parse a response's ``text`` into a message.

    ``calls``: the request allows tool calls, of ``tools``. ``opened``: the response begins inside reasoning. Calls get
    the ids ``call_prefix`` + number, or ids of the form that the template takes. Unclosed reasoning extends to the end.
    If a tool call is malformed, all of them stay in the content, so that the caller can name the mistake (as vLLM's
    parsers do).
    """
    reasoning, rest_text = _split_reasoning(text, written, opened) if written.reasoning else ("", text)
    rest_text = _without_content_mark(rest_text, written.content_mark)
    content, parsed_calls = rest_text, tuple[ToolCall, ...]()
    schemas = schemas_of(tools)
    for syntax in written.syntaxes if calls else ():
        if (parsed := read_calls(rest_text, syntax, schemas)) is not None:
            content, parsed_calls = parsed
            break
    tool_calls = tuple(
        call if call.call_id else replace(call, call_id=_call_id(f"{call_prefix}{number}", written))
        for number, call in enumerate(parsed_calls)
    )
    if not written.reasoning:
        return assistant_message(content, calls=tool_calls)
    # written: the content as a template without a field for reasoning reads it
    written_text = text[: len(text) - len(rest_text)] + content if reasoning else ""
    return assistant_message(content.lstrip("\n"), reasoning, tool_calls, written=written_text)


def _call_id(plain: str, written: OutputFormat) -> str:
    return plain if written.ids == "any" else blake2b(plain.encode(), digest_size=8).hexdigest()[:9]


def _without_content_mark(text: str, mark: str) -> str:
    stripped = text.lstrip()
    return stripped[len(mark) :] if mark and stripped.startswith(mark) else text


def _split_reasoning(text: str, written: OutputFormat, opened: bool) -> tuple[str, str]:
    """Split ``text`` into (reasoning, the text after it)."""
    opening, closing = written.thought
    if text.lstrip().startswith(opening):
        text = text.lstrip()[len(opening) :]
    elif not opened:
        return "", text
    reasoning, _, rest = text.partition(closing)
    return reasoning.strip(), rest


def settled_parts(text: str, written: OutputFormat, *, calls: bool, opened: bool) -> tuple[str, str]:
    """Return the (reasoning, content) that are final for a response beginning with ``text``: prefixes of those in the
    final `openai_message`, for any continuation."""
    reasoning, (opening, closing) = "", written.thought
    if written.reasoning:
        stripped = text.lstrip()
        if opening.startswith(stripped):
            return "", ""  # it may be the beginning of a mark
        if stripped.startswith(opening) or opened:
            inner_text = stripped.removeprefix(opening) if stripped.startswith(opening) else text
            thought_text, closed, text = inner_text.partition(closing)
            if not closed:
                return _stable(thought_text.lstrip(), closing), ""
            reasoning = thought_text.strip()
        text = text.lstrip("\n")
        if not reasoning and (opening.startswith(text.lstrip()) or text.lstrip().startswith(opening)):
            return "", ""  # after an empty block, another block would be the reasoning
    if written.content_mark.startswith(stripped := text.lstrip()) and stripped != written.content_mark:
        return reasoning, ""
    text = _without_content_mark(text, written.content_mark)
    if written.content_mark and written.reasoning:
        text = text.lstrip("\n")
    for syntax in written.syntaxes if calls else ():
        text = _certain_content(text, syntax)
    return reasoning, text


def _certain_content(text: str, syntax: CallSyntax) -> str:
    """Return the part of a content that no call of this grammar can change."""
    if not syntax.marks:
        stripped, form = text.lstrip(), (syntax.opening + syntax.object_head[1] + syntax.head).lstrip()[0]
        return (
            ""
            if not stripped or stripped[0] == form or stripped.startswith(PYTHON_TAG) or PYTHON_TAG.startswith(stripped)
            else text
        )
    starts = [start for mark in syntax.marks if (start := text.find(mark)) >= 0]
    return text[: min(starts)].rstrip() if starts else min((_stable(text, mark) for mark in syntax.marks), key=len)


def _stable(text: str, tag: str) -> str:
    """Cut from ``text`` a suffix that may be the beginning of ``tag``, and white space before it."""
    return text[: len(text) - overlap(text, tag)].rstrip()


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``tag``."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


def openai_message(message: Message, written: OutputFormat) -> dict[str, Any]:
    """Convert an answer to the form of OpenAI's chat API, with ``reasoning_content``. Where the model's chat template
    has no reasoning, it stays in the content as written."""
    content = message.content if written.reasoning else message.inline
    api_form: dict[str, Any] = {"role": "assistant", "content": None if message.calls and not content else content}
    if message.reasoning and written.reasoning:
        api_form["reasoning_content"] = message.reasoning
    if message.calls:
        api_form["tool_calls"] = [openai_tool_call(call.name, call.arguments, call.call_id) for call in message.calls]
    return api_form


@lru_cache(maxsize=16)
def mark_token_ids(tokenizer: Tokenizer, written: OutputFormat) -> frozenset[int]:
    """Return the special tokens that are marks of this format, whose text parsing needs."""
    texts = [*written.thought * written.reasoning, written.content_mark, PYTHON_TAG * (written.tools == "llama_json")]
    joined_marks = "\n".join([*texts, *(text for syntax in written.syntaxes for text in syntax.texts)])
    special_ids = tokenizer.special_ids.difference(tokenizer.stop_ids)
    return frozenset(i for i in special_ids if (token := tokenizer.token(i)) and token in joined_marks)


def response_text(tokenizer: Tokenizer, ids: Sequence[int], written: OutputFormat, stop: Sequence[str] = ()) -> str:
    """Decode sampled tokens for `parse_output`, without the token that ended the response and without special tokens
    other than the format's marks, cut at the first stop string."""
    if ids and ids[-1] in tokenizer.stop_ids:
        ids = ids[:-1]
    kept_ids = mark_token_ids(tokenizer, written)
    text = tokenizer.decode((i for i in ids if i in kept_ids or i not in tokenizer.special_ids), keep_special=True)
    positions = [position for stop_text in stop if stop_text and (position := text.find(stop_text)) >= 0]
    return text[: min(positions)] if positions else text
