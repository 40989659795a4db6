"""Grammars of tool calls, as records of the marks around calls, names and arguments, and one parser for all of them.

A call is ``head arguments tail``; several are ``opening call between call closing``. `NAME` and `CALL_ID` in a head or
tail are placeholders for the call's name and id. White space between marks may differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from headway.tokens.argument_values import JSON, literal_at, typed
from headway.tokens.messages import ToolCall, encodable, json_text

NAME, CALL_ID = "\U0010f8a4", "\U0010f8a5"  # private use: no template has them by accident
PYTHON_TAG = "<|python_tag|>"
Schemas = Mapping[str, Any]  # tool name -> schema of its arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Arguments written one by one: ``start name assign value end``, with ``separator`` between them."""

    start: str = ""
    assign: str
    end: str = ""
    separator: str = ""
    assign_text: str = ""  # replaces `assign` where the value is a text; "": the same
    quote: str = ""  # closes a text; "": values are between the marks, texts as they are and other values as JSON
    escapes: bool = False  # quoted texts have escapes


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSyntax:
    """A grammar of tool calls.

    Example, Qwen3-Coder: head ``<tool_call>\\n<function=NAME>``, pairs ``\\n<parameter=`` name ``>\\n`` value
    ``\\n</parameter>``, tail ``\\n</function>\\n</tool_call>``, between ``\\n``.
    """

    head: str
    tail: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    keys: tuple[str, str] | None = None  # the call is a JSON object, with name and arguments under these keys
    pairs: Pairs | None = None  # None: the arguments are a JSON object
    named_ids: bool = False  # the model writes a call's id, which holds its name, in place of the name
    max_calls: int | None = None  # limit of calls in one turn; None: any number
    content_behind: bool = False  # the turn's text follows the calls

    @property
    def object_head(self) -> tuple[str, str]:
        """The head, split into the text before the call's JSON object and the object's beginning."""
        object_start = self.head.index("{") if self.keys else len(self.head)
        return self.head[:object_start], self.head[object_start:]

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts with which calls begin, and nothing else does; (): calls are recognised by their form alone."""
        starts = (self.opening, self.object_head[0])
        matches = (re.match(rf"[^\s{NAME}{CALL_ID}>\]]*[>\]]?", start.lstrip()) for start in starts)
        return tuple(mark[0] for mark in matches if mark and any(map(str.isalpha, mark[0])))

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the grammar."""
        pairs = self.pairs or Pairs(assign="")
        call_marks = (self.opening, self.head, self.tail, self.between, self.closing)
        return *call_marks, pairs.start, pairs.assign, pairs.assign_text, pairs.end, pairs.separator, pairs.quote


def _syntax(
    head: str, tail: str = "", between: str = "", opening: str = "", closing: str = "", **more: Any
) -> CallSyntax:
    return CallSyntax(head=head, tail=tail, between=between, opening=opening, closing=closing, **more)


# The forms that models write where their template doesn't define one; "auto" detects these and others.
_XML = Pairs(start="\n<parameter=", assign=">\n", end="\n</parameter>")
_GLM = Pairs(start="\n<arg_key>", assign="</arg_key>\n<arg_value>", end="</arg_value>")
_INVOKE = Pairs(start='<parameter name="', assign='">', end="</parameter>\n")
_PYTHON = Pairs(assign="=", assign_text="='", quote="'", separator=", ", escapes=True)
_GEMMA = Pairs(assign=":", assign_text=':<|"|>', quote='<|"|>', separator=",")
_NAMED = ("name", "arguments")
_OBJECT, _LLAMA = f'{{"name": "{NAME}", "arguments": ', f'{{"name": "{NAME}", "parameters": '
_COMMENTARY = f"<|channel|>commentary to=functions.{NAME}"
SYNTAXES: Mapping[str, tuple[CallSyntax, ...]] = {
    "hermes": (_syntax(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", "\n", keys=_NAMED),),
    "llama_json": (_syntax(_LLAMA, "}", "; ", keys=("name", "parameters")),),
    "qwen_xml": (_syntax(f"<tool_call>\n<function={NAME}>", "\n</function>\n</tool_call>", "\n", pairs=_XML),),
    "glm": (_syntax(f"<tool_call>{NAME}", "\n</tool_call>", "\n", pairs=_GLM),),
    "minimax": (
        _syntax(
            *(f'<invoke name="{NAME}">\n', "</invoke>\n", "", "<minimax:tool_call>\n", "</minimax:tool_call>"),
            pairs=_INVOKE,
        ),
    ),
    "deepseek": (
        _syntax(
            *(f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", ""),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    "kimi": (
        _syntax(
            *(f"<|tool_call_begin|>{CALL_ID}<|tool_call_argument_begin|>", "<|tool_call_end|>", ""),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            named_ids=True,
        ),
    ),
    "mistral": (
        _syntax(f"[TOOL_CALLS]{NAME}[ARGS]"),
        _syntax(_OBJECT, "}", ", ", "[TOOL_CALLS][", "]", keys=_NAMED),
    ),
    "gpt_oss": (
        _syntax(f" to=functions.{NAME}<|channel|>commentary json<|message|>", max_calls=1),
        _syntax(f"{_COMMENTARY} <|constrain|>json<|message|>", max_calls=1),
        _syntax(f"{_COMMENTARY}<|message|>", max_calls=1),
    ),
    "gemma": (_syntax(f"<|tool_call>call:{NAME}{{", "}<tool_call|>", pairs=_GEMMA),),
    "python": (_syntax(f"{NAME}(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>", pairs=_PYTHON),),
}


class UnreadableCall(ValueError):
    """Raised for a call that doesn't follow its grammar; ``cut``: it may be the beginning of one that does."""

    def __init__(self, cut: bool) -> None:
        super().__init__("no call")
        self.cut = cut


class _Patterns(NamedTuple):
    first: re.Pattern[str]  # up to the first call's object or arguments, from its mark on
    later: re.Pattern[str]
    tail: re.Pattern[str]
    tail_mark: re.Pattern[str]  # without blanks before it
    closed: re.Pattern[str]
    pair: re.Pattern[str]
    end: re.Pattern[str]  # of a value that is a text
    close: re.Pattern[str]  # of another value
    behind: str  # the tail behind the call's object
    marked: bool  # each call has a mark of its own


def _lenient(text: str) -> str:
    """Return a pattern of a mark that accepts any white space inside it; its borders are matched exactly."""
    pieces = re.split(r"(\s+|(?<=[>\]}])(?=[<\[{]))", text)
    return "".join(r"\s*" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))


def _head_pattern(text: str, named_ids: bool) -> str:
    """Return a pattern of a head: the first placeholder of the name is a group, and further ones refer to it."""
    name_pattern = r"""(?P<name>[^\s<>"'(){}\[\],]{1,256})"""
    id_pattern = rf"(?P<id>(?:functions\.)?{name_pattern}(?::\d+)?)" if named_ids else r"[\w.:-]*"
    first, *further = _lenient(text.strip()).split(NAME)
    pattern = first + "".join((r"(?P=name)" if i else name_pattern) + piece for i, piece in enumerate(further))
    return pattern.replace(CALL_ID, id_pattern.replace("[^", "[^:") if named_ids else id_pattern)


def _edge_pattern(text: str) -> str:
    """Return a pattern of a mark beside a value: white space between them is optional, and belongs to the mark."""
    leading, inner, trailing = text[: len(text) - len(text.lstrip())], text.strip(), text[len(text.rstrip()) :]
    return f"(?:{re.escape(leading)})?{_lenient(inner)}(?:{re.escape(trailing)})?"


@cache
def _patterns(syntax: CallSyntax) -> _Patterns:
    head = _head_pattern(syntax.object_head[0], syntax.named_ids)
    opening = _lenient(syntax.opening.strip())
    opening += r"\s*+" * bool(opening)  # possessive here and below: long runs of blanks would take quadratic time
    head_start = re.split(f"[{NAME}{CALL_ID}]", syntax.object_head[0])[0]
    marked = any(character.isalpha() for character in head_start)
    first_pattern = rf"(?:{opening})?{head}" if marked else opening + head
    if not syntax.marks:
        first_pattern = rf"\s*+(?:{re.escape(PYTHON_TAG)}\s*+)?{first_pattern}"
    tail = syntax.tail
    if syntax.keys:  # the object's own end is JSON
        sample = re.sub(f"[{NAME}{CALL_ID}]", "x", syntax.object_head[1] + "{}" + tail)
        tail = sample[JSON.raw_decode(sample)[1] :]
    pairs = syntax.pairs or Pairs(assign="")
    tail_steps = [_lenient(step) for step in re.findall(r"<[^>]*>|[^\s<]+", tail)] or [""]
    tail_pattern = r"(?:\s*+".join(tail_steps) + ")?" * (len(tail_steps) - 1)  # the first, and as many as were written
    key = r"[^\n]*?" if pairs.start.strip() else r"[^\s=:,(){}]+"
    assign = "|".join(_edge_pattern(text) for text in (pairs.assign_text, pairs.assign) if text)
    separator = _lenient(pairs.separator.strip())
    pair = r"\s*+" + rf"(?:{separator}\s*+)?" * bool(separator) + _lenient(pairs.start.strip())
    lookahead = rf"(?={pair}{key}(?:{assign})|\s*+{tail_pattern})"
    return _Patterns(
        first=re.compile(first_pattern),
        later=re.compile(head if marked else rf"\s*(?:{_lenient(syntax.between.strip()) or '[;,]'}|[;,])\s*{head}"),
        tail=re.compile(r"\s*+" + tail_pattern),
        tail_mark=re.compile(tail_pattern),
        closed=re.compile(rf"\s*+(?:;\s*+)?(?:{_lenient(syntax.closing.strip())}\s*+)?$"),
        pair=re.compile(rf"{pair}(?P<key>{key})(?P<assign>{assign})"),
        end=re.compile((_edge_pattern(pairs.quote + pairs.end) if pairs.quote + pairs.end else "") + lookahead),
        close=re.compile(rf"\s*{_lenient(pairs.end.strip())}"),
        behind="".join(tail.split()),
        marked=marked,
    )


def read_calls(text: str, syntax: CallSyntax, schemas: Schemas) -> tuple[str, tuple[ToolCall, ...]] | None:
    """Parse a text into (content beside the calls, calls); None where there are none or they can't be read. Text
    between and after calls is dropped, and so is a last call that was cut, if an earlier one is complete."""
    patterns = _patterns(syntax)
    head_match = patterns.first.search(text) if syntax.marks else patterns.first.match(text)
    if head_match is None:
        return None
    content, calls, end = text[: head_match.start()].rstrip(), list[ToolCall](), 0
    while head_match is not None:
        try:
            call, end = _call(text, head_match, syntax, patterns, schemas)
        except UnreadableCall as error:
            if error.cut and calls:
                break
            return None
        calls.append(call)
        head_match = patterns.later.search(text, end) if patterns.marked else patterns.later.match(text, end)
    else:
        if not syntax.marks and not patterns.closed.match(text, end):
            return None
        if syntax.content_behind:
            content += text[end:].replace(syntax.closing, "", 1)
    return content if syntax.marks else "", tuple(calls[: syntax.max_calls])


def _call(
    text: str, head_match: re.Match[str], syntax: CallSyntax, patterns: _Patterns, schemas: Schemas
) -> tuple[ToolCall, int]:
    """Read the call whose head is ``head_match``; return it and its end. Raises UnreadableCall."""
    position = head_match.end()
    if syntax.keys:
        call_value, position = _json_at(text, position)
        name, arguments = _name_and_arguments(call_value, syntax.keys, None if syntax.marks else schemas)
    else:
        name = head_match["name"]
        if syntax.pairs is None:
            arguments, position = _json_at(text, position)
        else:
            arguments, position = _read_pairs(text, position, syntax.pairs, patterns, schemas.get(name))
    if syntax.pairs is None:
        tail_match, rest_text = patterns.tail.match(text, position), "".join(text[position:].split())
        if tail_match is None and not patterns.behind.startswith(rest_text):  # nor was it cut in its tail
            raise UnreadableCall(cut=False)
        position = tail_match.end() if tail_match else len(text)
    arguments_text = _arguments_text(arguments)
    if arguments_text is None or not encodable(name + arguments_text):
        raise UnreadableCall(cut=False)
    return ToolCall(name=name, arguments=arguments_text, call_id=head_match["id"] if syntax.named_ids else ""), position


def _json_at(text: str, position: int) -> tuple[Any, int]:
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        return JSON.raw_decode(text, position)
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or re.fullmatch(r"[\w.+\\-]{0,6}\s*", text[error.pos :]) is not None
        raise UnreadableCall(cut) from None
    except (ValueError, RecursionError):
        raise UnreadableCall(cut=False) from None


def _name_and_arguments(value: Any, keys: tuple[str, str], tools: Schemas | None) -> tuple[str, Any]:
    """Return name and arguments of a call's object. ``tools`` is given where no mark identifies a call: then the object
    must have arguments, or the name of one of them. Raises UnreadableCall."""
    levels = [value, *value.values()] if isinstance(value, dict) else []
    for level in levels:
        if isinstance(level, dict) and isinstance(name := level.get(keys[0], level.get("name")), str):
            argument_keys = [key for key in (keys[1], "arguments", "parameters") if key in level]
            if argument_keys or tools is None or name in tools:
                return name, level[argument_keys[0]] if argument_keys else {}
    raise UnreadableCall(cut=False)


def _arguments_text(arguments: Any) -> str | None:
    """Write arguments as the text that a client gets; None where they are no object."""
    if isinstance(arguments, str):
        try:
            parsed = JSON.decode(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            return None
        return arguments if isinstance(parsed, dict) else "{}" if parsed is None else None
    return "{}" if arguments is None else json_text(arguments) if isinstance(arguments, dict) else None


def _read_pairs(text: str, position: int, pairs: Pairs, patterns: _Patterns, schema: Any) -> tuple[dict[str, Any], int]:
    """Read arguments written one by one from ``position`` on; return them and the call's end. Raises UnreadableCall."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    arguments = dict[str, Any]()
    while (tail_match := patterns.tail.match(text, position)) is None:
        pair = patterns.pair.match(text, position)
        if pair is None:
            raise UnreadableCall(cut=patterns.tail_mark.search(text, position) is None)
        key, position = pair["key"], pair.end()
        is_text = bool(pairs.assign_text) and re.fullmatch(_edge_pattern(pairs.assign_text), pair["assign"]) is not None
        if pairs.quote and (pairs.escapes or not is_text):
            start, mark = pair.start("assign") + len(pairs.assign), "" if pairs.quote in ("'", '"') else pairs.quote
            try:
                arguments[key], position = literal_at(text, start, mark)
            except (ValueError, RecursionError) as error:
                raise UnreadableCall(cut=isinstance(error, json.JSONDecodeError)) from None
            if (close_match := patterns.close.match(text, position)) is None:
                raise UnreadableCall(cut=not text[position:].strip())
            position = close_match.end()
            continue
        end_match = patterns.end.search(text, position)
        if end_match is None:
            raise UnreadableCall(cut=patterns.tail_mark.search(text, position) is None)
        value_text, position = text[position : end_match.start()], end_match.end()
        value_schema = properties.get(key, {}) if isinstance(properties, Mapping) else {}
        arguments[key] = value_text if is_text else typed(value_text, value_schema, schema)
    return arguments, tail_match.end()
