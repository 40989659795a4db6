"""Parsing of a model's output into content, reasoning and tool calls, as its chat template writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal

from headway.tokens.call_syntax import PYTHON_TAG, SYNTAXES, CallSyntax, read_calls
from headway.tokens.messages import Message, ToolCall, assistant_message, called
from headway.tokens.tokenizer import Tokenizer

Ids = Literal["any", "nine"]


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """The way a chat template writes the assistant's turns."""

    tools: str = "none"  # its name among SYNTAXES, "template" for one that is found in the template alone
    reasoning: bool = False  # written between marks, and a client gets it in a separate field
    thought: tuple[str, str] = ("<think>", "</think>")  # marks of reasoning
    content_mark: str = ""  # stands before the content
    found: tuple[CallSyntax, ...] = ()  # grammars of calls in place of those of the name
    ids: Ids = "any"  # of calls, that the template takes: nine letters and digits
    special: tuple[tuple[str, int], ...] = ()  # marks that are special tokens
    unknown: str = ""  # why calls can't be read; "": they can, or aren't to be

    @property
    def syntaxes(self) -> tuple[CallSyntax, ...]:
        """Grammars of calls; the first is the template's."""
        return self.found or SYNTAXES.get(self.tools, ())


def begins_inside_reasoning(prompt: str, written: OutputFormat) -> bool:
    """Whether a prompt's text ends with an open mark of reasoning, so that what follows is reasoning."""
    return prompt.rstrip().endswith(written.thought[0])


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Schemas of the arguments of a request's tools, by name."""
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

    ``calls``: its request allows tool calls, of ``tools``. ``opened``: it begins inside reasoning. Calls have the ids
    ``call_prefix`` + number, or such as the template takes. Unclosed reasoning extends to the end. If a tool call is
    malformed, all of them stay in the content, so that the caller can name the mistake (as vLLM's parsers do).
    """
    reasoning, rest = _reasoning(text, written, opened) if written.reasoning else ("", text)
    rest = _behind_mark(rest, written.content_mark)
    content, unnamed = rest, tuple[ToolCall, ...]()
    schemas = schemas_of(tools)
    for syntax in written.syntaxes if calls else ():
        if (read := read_calls(rest, syntax, schemas)) is not None:
            content, unnamed = read
            break
    tool_calls = tuple(
        call if call.call_id else replace(call, call_id=_call_id(f"{call_prefix}{number}", written))
        for number, call in enumerate(unnamed)
    )
    if not written.reasoning:
        return assistant_message(content, calls=tool_calls)
    # written: as a template without a field for reasoning would find it in the content
    inside = text[: len(text) - len(rest)] + content if reasoning else ""
    return assistant_message(content.lstrip("\n"), reasoning, tool_calls, written=inside)


def _call_id(plain: str, written: OutputFormat) -> str:
    return plain if written.ids == "any" else blake2b(plain.encode(), digest_size=8).hexdigest()[:9]


def _behind_mark(text: str, mark: str) -> str:
    begun = text.lstrip()
    return begun[len(mark) :] if mark and begun.startswith(mark) else text


def _reasoning(text: str, written: OutputFormat, opened: bool) -> tuple[str, str]:
    """Split ``text`` into (reasoning, the text behind it)."""
    opening, closing = written.thought
    if text.lstrip().startswith(opening):
        text = text.lstrip()[len(opening) :]
    elif not opened:
        return "", text
    reasoning, _, rest = text.partition(closing)
    return reasoning.strip(), rest


def certain(text: str, written: OutputFormat, *, calls: bool, opened: bool) -> tuple[str, str]:
    """(reasoning, content) that are certain for a response beginning with ``text``: prefixes of the final
    `client_form`, whatever follows."""
    reasoning, (opening, closing) = "", written.thought
    if written.reasoning:
        begun = text.lstrip()
        if opening.startswith(begun):
            return "", ""  # or it is the beginning of one
        if begun.startswith(opening) or opened:
            inside = begun.removeprefix(opening) if begun.startswith(opening) else text
            thought, closed, text = inside.partition(closing)
            if not closed:
                return _before(thought.lstrip(), closing), ""
            reasoning = thought.strip()
        text = text.lstrip("\n")
        if not reasoning and (opening.startswith(text.lstrip()) or text.lstrip().startswith(opening)):
            return "", ""  # behind an empty block: another one would be the reasoning
    if written.content_mark.startswith(begun := text.lstrip()) and begun != written.content_mark:
        return reasoning, ""
    text = _behind_mark(text, written.content_mark)
    if written.content_mark and written.reasoning:
        text = text.lstrip("\n")
    for syntax in written.syntaxes if calls else ():
        text = _certain_content(text, syntax)
    return reasoning, text


def _certain_content(text: str, syntax: CallSyntax) -> str:
    """The part of a content that no call of this grammar can change."""
    if not syntax.marks:
        begun, form = text.lstrip(), (syntax.opening + syntax.object_head[1] + syntax.head).lstrip()[0]
        return (
            ""
            if not begun or begun[0] == form or begun.startswith(PYTHON_TAG) or PYTHON_TAG.startswith(begun)
            else text
        )
    places = [at for mark in syntax.marks if (at := text.find(mark)) >= 0]
    return text[: min(places)].rstrip() if places else min((_before(text, mark) for mark in syntax.marks), key=len)


def _before(text: str, tag: str) -> str:
    """``text`` without a suffix that may be the beginning of ``tag``, and without white space before that."""
    return text[: len(text) - overlap(text, tag)].rstrip()


def overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``tag``."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


def client_form(message: Message, written: OutputFormat) -> dict[str, Any]:
    """An answer in the form of OpenAI's chat API, with ``reasoning_content``. Where the model's chat template doesn't
    know reasoning, it stays in the content as written."""
    content = message.content if written.reasoning else message.inline
    entry: dict[str, Any] = {"role": "assistant", "content": None if message.calls and not content else content}
    if message.reasoning and written.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.calls:
        entry["tool_calls"] = [called(call.name, call.arguments, call.call_id) for call in message.calls]
    return entry


@lru_cache(maxsize=16)
def kept_ids(tokenizer: Tokenizer, written: OutputFormat) -> frozenset[int]:
    """Special tokens that are marks of this format: their text is needed."""
    texts = [*written.thought * written.reasoning, written.content_mark, PYTHON_TAG * (written.tools == "llama_json")]
    marks = "\n".join([*texts, *(text for syntax in written.syntaxes for text in syntax.texts)])
    special = tokenizer.special_ids.difference(tokenizer.stop_ids)
    return frozenset(i for i in special if (token := tokenizer.token(i)) and token in marks)


def response_text(tokenizer: Tokenizer, ids: Sequence[int], written: OutputFormat, stop: Sequence[str] = ()) -> str:
    """Text of sampled tokens for `parse_output`: without the token that ended the response and special tokens other
    than the format's marks, and cut at the first stop string."""
    if ids and ids[-1] in tokenizer.stop_ids:
        ids = ids[:-1]
    kept = kept_ids(tokenizer, written)
    text = tokenizer.decode((i for i in ids if i in kept or i not in tokenizer.special_ids), keep_special=True)
    places = [at for string in stop if string and (at := text.find(string)) >= 0]
    return text[: min(places)] if places else text
