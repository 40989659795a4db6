"""Grammars of tool calls: the marks around calls, names and arguments, as records, and the reader of all of them.

A call is ``head arguments tail``; several stand as ``opening call between call closing``. `NAME` and `CALL_ID` in a
head or tail stand for the call's own. White space between marks may be written otherwise.
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
Schemas = Mapping[str, Any]  # of the arguments, by the tool's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Arguments written one by one: ``before name assign value end``, with ``separator`` between them."""

    before: str = ""
    assign: str
    end: str = ""
    separator: str = ""
    assign_text: str = ""  # in place of `assign` where the value is a text; "": the same
    quote: str = ""  # closes a text; "": values stand between the marks, texts as they are and all else as JSON
    escapes: bool = False  # quoted texts have them


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
    keys: tuple[str, str] | None = None  # the call is a JSON object, which has name and arguments under these
    pairs: Pairs | None = None  # None: the arguments are a JSON object
    named_ids: bool = False  # a call's id holds its name, and is what the model writes
    most: int | None = None  # calls in one turn; None: any number
    content_behind: bool = False  # the turn's text stands behind the calls

    @property
    def object_head(self) -> tuple[str, str]:
        """`head` as what stands before the call's JSON object, and the object's beginning."""
        at = self.head.index("{") if self.keys else len(self.head)
        return self.head[:at], self.head[at:]

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of which calls begin with one, and nothing else does; none: calls are told by their form alone."""
        starts = (self.opening, self.object_head[0])
        found = (re.match(rf"[^\s{NAME}{CALL_ID}>\]]*[>\]]?", start.lstrip()) for start in starts)
        return tuple(mark[0] for mark in found if mark and any(map(str.isalpha, mark[0])))

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        pairs = self.pairs or Pairs(assign="")
        own = (self.opening, self.head, self.tail, self.between, self.closing)
        return *own, pairs.before, pairs.assign, pairs.assign_text, pairs.end, pairs.separator, pairs.quote


def _calls(
    head: str, tail: str = "", between: str = "", opening: str = "", closing: str = "", **more: Any
) -> CallSyntax:
    return CallSyntax(head=head, tail=tail, between=between, opening=opening, closing=closing, **more)


# As models write them where their template doesn't say; "auto" finds out these and others.
_XML = Pairs(before="\n<parameter=", assign=">\n", end="\n</parameter>")
_GLM = Pairs(before="\n<arg_key>", assign="</arg_key>\n<arg_value>", end="</arg_value>")
_INVOKE = Pairs(before='<parameter name="', assign='">', end="</parameter>\n")
_PYTHON = Pairs(assign="=", assign_text="='", quote="'", separator=", ", escapes=True)
_GEMMA = Pairs(assign=":", assign_text=':<|"|>', quote='<|"|>', separator=",")
_NAMED = ("name", "arguments")
_OBJECT, _LLAMA = f'{{"name": "{NAME}", "arguments": ', f'{{"name": "{NAME}", "parameters": '
_COMMENTARY = f"<|channel|>commentary to=functions.{NAME}"
SYNTAXES: Mapping[str, tuple[CallSyntax, ...]] = {
    "hermes": (_calls(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", "\n", keys=_NAMED),),
    "llama_json": (_calls(_LLAMA, "}", "; ", keys=("name", "parameters")),),
    "qwen_xml": (_calls(f"<tool_call>\n<function={NAME}>", "\n</function>\n</tool_call>", "\n", pairs=_XML),),
    "glm": (_calls(f"<tool_call>{NAME}", "\n</tool_call>", "\n", pairs=_GLM),),
    "minimax": (
        _calls(
            *(f'<invoke name="{NAME}">\n', "</invoke>\n", "", "<minimax:tool_call>\n", "</minimax:tool_call>"),
            pairs=_INVOKE,
        ),
    ),
    "deepseek": (
        _calls(
            *(f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", ""),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    "kimi": (
        _calls(
            *(f"<|tool_call_begin|>{CALL_ID}<|tool_call_argument_begin|>", "<|tool_call_end|>", ""),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            named_ids=True,
        ),
    ),
    "mistral": (
        _calls(f"[TOOL_CALLS]{NAME}[ARGS]"),
        _calls(_OBJECT, "}", ", ", "[TOOL_CALLS][", "]", keys=_NAMED),
    ),
    "gpt_oss": (
        _calls(f" to=functions.{NAME}<|channel|>commentary json<|message|>", most=1),
        _calls(f"{_COMMENTARY} <|constrain|>json<|message|>", most=1),
        _calls(f"{_COMMENTARY}<|message|>", most=1),
    ),
    "gemma": (_calls(f"<|tool_call>call:{NAME}{{", "}<tool_call|>", pairs=_GEMMA),),
    "python": (_calls(f"{NAME}(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>", pairs=_PYTHON),),
}


class Unreadable(ValueError):
    """A call that isn't written as its grammar says; ``cut``: it may be the beginning of one."""

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


def _flexible(text: str) -> str:
    """A pattern of a mark, which takes other white space inside; its borders are as they are."""
    pieces = re.split(r"(\s+|(?<=[>\]}])(?=[<\[{]))", text)
    return "".join(r"\s*" if number % 2 else re.escape(piece) for number, piece in enumerate(pieces))


def _named(text: str, named_ids: bool) -> str:
    """A pattern of a head: the name's first place is a group, further ones are equal to it."""
    name = r"""(?P<name>[^\s<>"'(){}\[\],]{1,256})"""
    call_id = rf"(?P<id>(?:functions\.)?{name}(?::\d+)?)" if named_ids else r"[\w.:-]*"
    first, *further = _flexible(text.strip()).split(NAME)
    pattern = first + "".join((r"(?P=name)" if number else name) + piece for number, piece in enumerate(further))
    return pattern.replace(CALL_ID, call_id.replace("[^", "[^:") if named_ids else call_id)


def _border(text: str) -> str:
    """A pattern of a mark beside a value: a line break between them is the mark's, if it is there."""
    before, inner, behind = text[: len(text) - len(text.lstrip())], text.strip(), text[len(text.rstrip()) :]
    return f"(?:{re.escape(before)})?{_flexible(inner)}(?:{re.escape(behind)})?"


@cache
def _patterns(syntax: CallSyntax) -> _Patterns:
    head = _named(syntax.object_head[0], syntax.named_ids)
    opening = _flexible(syntax.opening.strip())
    opening += r"\s*+" * bool(opening)  # possessive here and below: long runs of blanks would take quadratic time
    pre = re.split(f"[{NAME}{CALL_ID}]", syntax.object_head[0])[0]
    marked = any(character.isalpha() for character in pre)
    first = rf"(?:{opening})?{head}" if marked else opening + head
    if not syntax.marks:
        first = rf"\s*+(?:{re.escape(PYTHON_TAG)}\s*+)?{first}"
    tail = syntax.tail
    if syntax.keys:  # the object's own end is JSON
        whole = re.sub(f"[{NAME}{CALL_ID}]", "x", syntax.object_head[1] + "{}" + tail)
        tail = whole[JSON.raw_decode(whole)[1] :]
    pairs = syntax.pairs or Pairs(assign="")
    steps = [_flexible(step) for step in re.findall(r"<[^>]*>|[^\s<]+", tail)] or [""]
    ends = r"(?:\s*+".join(steps) + ")?" * (len(steps) - 1)  # the first, and as many as were written
    key = r"[^\n]*?" if pairs.before.strip() else r"[^\s=:,(){}]+"
    assign = "|".join(_border(text) for text in (pairs.assign_text, pairs.assign) if text)
    separator = _flexible(pairs.separator.strip())
    pair = r"\s*+" + rf"(?:{separator}\s*+)?" * bool(separator) + _flexible(pairs.before.strip())
    ahead = rf"(?={pair}{key}(?:{assign})|\s*+{ends})"
    return _Patterns(
        first=re.compile(first),
        later=re.compile(head if marked else rf"\s*(?:{_flexible(syntax.between.strip()) or '[;,]'}|[;,])\s*{head}"),
        tail=re.compile(r"\s*+" + ends),
        tail_mark=re.compile(ends),
        closed=re.compile(rf"\s*+(?:;\s*+)?(?:{_flexible(syntax.closing.strip())}\s*+)?$"),
        pair=re.compile(rf"{pair}(?P<key>{key})(?P<assign>{assign})"),
        end=re.compile((_border(pairs.quote + pairs.end) if pairs.quote + pairs.end else "") + ahead),
        close=re.compile(rf"\s*{_flexible(pairs.end.strip())}"),
        behind="".join(tail.split()),
        marked=marked,
    )


def read_calls(text: str, syntax: CallSyntax, schemas: Schemas) -> tuple[str, tuple[ToolCall, ...]] | None:
    """(content beside the calls, calls) of a text; None where there are none or they can't be read. What stands
    between and behind calls is dropped; a last call that was cut is, too, if one before it is whole."""
    patterns = _patterns(syntax)
    begun = patterns.first.search(text) if syntax.marks else patterns.first.match(text)
    if begun is None:
        return None
    content, calls, end = text[: begun.start()].rstrip(), list[ToolCall](), 0
    while begun is not None:
        try:
            call, end = _call(text, begun, syntax, patterns, schemas)
        except Unreadable as error:
            if error.cut and calls:
                break
            return None
        calls.append(call)
        begun = patterns.later.search(text, end) if patterns.marked else patterns.later.match(text, end)
    else:
        if not syntax.marks and not patterns.closed.match(text, end):
            return None
        if syntax.content_behind:
            content += text[end:].replace(syntax.closing, "", 1)
    return content if syntax.marks else "", tuple(calls[: syntax.most])


def _call(
    text: str, begun: re.Match[str], syntax: CallSyntax, patterns: _Patterns, schemas: Schemas
) -> tuple[ToolCall, int]:
    """The call that ``begun`` is the head of, and its end. Raises Unreadable."""
    at = begun.end()
    if syntax.keys:
        value, at = _json_at(text, at)
        name, arguments = _of_object(value, syntax.keys, None if syntax.marks else schemas)
    else:
        name = begun["name"]
        if syntax.pairs is None:
            arguments, at = _json_at(text, at)
        else:
            arguments, at = _read_pairs(text, at, syntax.pairs, patterns, schemas.get(name))
    if syntax.pairs is None:
        behind, rest = patterns.tail.match(text, at), "".join(text[at:].split())
        if behind is None and not patterns.behind.startswith(rest):  # nor was it cut in its tail
            raise Unreadable(cut=False)
        at = behind.end() if behind else len(text)
    written = _written(arguments)
    if written is None or not encodable(name + written):
        raise Unreadable(cut=False)
    return ToolCall(name=name, arguments=written, call_id=begun["id"] if syntax.named_ids else ""), at


def _json_at(text: str, at: int) -> tuple[Any, int]:
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or re.fullmatch(r"[\w.+\\-]{0,6}\s*", text[error.pos :]) is not None
        raise Unreadable(cut) from None
    except (ValueError, RecursionError):
        raise Unreadable(cut=False) from None


def _of_object(value: Any, keys: tuple[str, str], tools: Schemas | None) -> tuple[str, Any]:
    """Name and arguments of a call's object. Where nothing else says that it is a call, ``tools`` is given, and it has
    arguments or the name of one of them."""
    inner = [value, *value.values()] if isinstance(value, dict) else []
    for level in inner:
        if isinstance(level, dict) and isinstance(name := level.get(keys[0], level.get("name")), str):
            given = [key for key in (keys[1], "arguments", "parameters") if key in level]
            if given or tools is None or name in tools:
                return name, level[given[0]] if given else {}
    raise Unreadable(cut=False)


def _written(arguments: Any) -> str | None:
    """Arguments as the text that a client gets; None where they are no object."""
    if isinstance(arguments, str):
        try:
            inner = JSON.decode(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            return None
        return arguments if isinstance(inner, dict) else "{}" if inner is None else None
    return "{}" if arguments is None else json_text(arguments) if isinstance(arguments, dict) else None


def _read_pairs(text: str, at: int, pairs: Pairs, patterns: _Patterns, schema: Any) -> tuple[dict[str, Any], int]:
    """Arguments written one by one from ``at`` on, and the end of their call. Raises Unreadable."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found = dict[str, Any]()
    while (behind := patterns.tail.match(text, at)) is None:
        pair = patterns.pair.match(text, at)
        if pair is None:
            raise Unreadable(cut=patterns.tail_mark.search(text, at) is None)
        key, at = pair["key"], pair.end()
        is_text = bool(pairs.assign_text) and re.fullmatch(_border(pairs.assign_text), pair["assign"]) is not None
        if pairs.quote and (pairs.escapes or not is_text):
            start, mark = pair.start("assign") + len(pairs.assign), "" if pairs.quote in ("'", '"') else pairs.quote
            try:
                found[key], at = literal_at(text, start, mark)
            except (ValueError, RecursionError) as error:
                raise Unreadable(cut=isinstance(error, json.JSONDecodeError)) from None
            if (closed := patterns.close.match(text, at)) is None:
                raise Unreadable(cut=not text[at:].strip())
            at = closed.end()
            continue
        end = patterns.end.search(text, at)
        if end is None:
            raise Unreadable(cut=patterns.tail_mark.search(text, at) is None)
        written, at = text[at : end.start()], end.end()
        kind = properties.get(key, {}) if isinstance(properties, Mapping) else {}
        found[key] = written if is_text else typed(written, kind, schema)
    return found, behind.end()
