"""Chat templates: the one way from messages to text, for demonstrations, tasks, agents and environments alike.

Messages come in many forms: an instruction as ``developer``, arguments of calls as text or object, reasoning in one of
three fields or inside the content. A template is given one normal form of them, in which equal conversations are equal.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.records.errors import ConfigurationError
from headway.tokens.messages import THOUGHT, called, json_text, object_or_text

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; the first is the usual one
LOSS = ("weight", "loss", "trainable")  # keys of a message that say whether it is learned: no template's business
PROBE = "xQpRoBeQx"  # no text has it by accident, and no template changes it
_SCHEMA = {"type": "object", "properties": {PROBE: {"type": "string", "description": "?"}}, "required": [PROBE]}
PROBE_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "?", "parameters": _SCHEMA}}]


class _Conventions(NamedTuple):
    """A template's conventions for messages, observed by rendering probes."""

    reasoning: bool  # in a field of its own; else it looks for it in the content, or nowhere
    parts: bool  # contents as lists of parts alone
    worded: bool  # arguments of calls as JSON text: it joins them to its own


class TurnEnd(NamedTuple):
    """The text that a template writes behind an assistant's last word."""

    calls: bool  # which is the argument of a call
    own: str  # where the conversation ends there
    followed: str  # where another message follows
    between: str  # between two calls; "": none, or the template takes one alone


class ChatTemplates:
    """The chat templates of a model folder, by name, with the variables that every rendering has."""

    def __init__(self, named: Mapping[str, str], variables: Mapping[str, Any], started: datetime, origin: str) -> None:
        """``started``: the time that ``strftime_now`` tells, the run's start, so that a resumed run renders alike."""
        self.named = dict(named)
        self._variables = variables
        self._started = started
        self._origin = origin
        self._renders: dict[tuple[str, bool], Callable[..., str]] = {}  # source, with marks or without -> template
        self._conventions: dict[str, _Conventions] = {}
        self.rendered: set[Any] = set()  # tools and sequences of roles that `require_rendered` found in their text

    def source(self, tools: Sequence[Any] | None) -> str:
        """The template of a conversation with ``tools`` or without, chosen among named ones as transformers does.
        Raises ConfigurationError where there is none."""
        found = (self.named.get("tool_use") if tools else None) or self.named.get("default")
        if found is None and self.named:
            names = ", ".join(map(repr, sorted(self.named)))
            raise ConfigurationError(f"{self._origin}: the chat template 'default' is missing; it has: {names}")
        if found is None:
            raise ConfigurationError(
                f"{self._origin}: no chat template (chat_template in tokenizer_config.json, or chat_template.jinja); "
                "use template 'raw'"
            )
        return found

    def reads_reasoning(self, tools: Sequence[Any] | None) -> bool:
        """Whether the template renders reasoning that a message has in a field of its own."""
        return self._conventions_of(self.source(tools)).reasoning

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        marks: bool = False,
    ) -> str:
        """The text of ``messages``; ``marks``: around ``{% generation %}`` blocks. Raises ConfigurationError."""
        source = self.source(tools)
        given = {**self._variables, **variables, "tools": tools, "documents": None}
        entries = self._entries(messages, self._conventions_of(source))
        try:
            return self._rendered(source, {**given, "messages": entries}, marks)
        except Exception as error:  # the boundary to a template, a program that isn't ours
            raise ConfigurationError(f"{self._origin}: the chat template fails: {error}") from None

    def _rendered(self, source: str, context: Mapping[str, Any], marks: bool) -> str:
        if (source, marks) not in self._renders:
            self._renders[source, marks] = _environment(marks, self._started).from_string(source).render
        return self._renders[source, marks](context)

    def turn_ends(self) -> Iterator[TurnEnd]:
        """The ends of a turn of text and of one of calls; of those that the template renders."""
        asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}
        result = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "f", "content": "?"}
        call = _called({PROBE: PROBE})
        for turn, follows, tools in ((said, asked, None), (call, result, PROBE_TOOLS)):
            own, whole, twice = "", "", ""
            with contextlib.suppress(ConfigurationError):  # said of the messages that need it
                own = self.render([asked, turn], tools, {"add_generation_prompt": False})
                whole = self.render([asked, turn, follows], tools, {"add_generation_prompt": False})
                two = {**turn, "tool_calls": [*turn.get("tool_calls", ()), *call["tool_calls"]]}
                twice = self.render([asked, two], tools, {"add_generation_prompt": False})
            if PROBE in own:
                own, whole = (text.rpartition(PROBE)[2] for text in (own, whole))
                between = twice.rpartition(PROBE)[0].rpartition(PROBE)[0].rpartition(PROBE)[2]
                yield TurnEnd("tool_calls" in turn, own, whole, between)

    def _conventions_of(self, source: str) -> _Conventions:
        if source not in self._conventions:

            def shown(*messages: Mapping[str, Any], text: str = PROBE) -> bool:
                return text in self._tried(source, *messages)

            ask, parts = {"role": "user", "content": PROBE}, [{"type": "text", "text": PROBE}]
            listed, value = not shown(ask) and shown({**ask, "content": parts}), {PROBE: "?"}
            ask = {**ask, "content": [{"type": "text", "text": "?"}] if listed else "?"}
            said = {**ask, "role": "assistant", **dict.fromkeys(REASONING, PROBE)}
            reads = any(shown(ask, one) for one in (said, _called({}, said), _called("{}", said)))
            spelled = not shown(ask, _called(value)) or shown(ask, _called(value), text=repr(value))
            worded = spelled and shown(ask, _called(json_text(value)))
            self._conventions[source] = _Conventions(reasoning=reads, parts=listed, worded=worded)
        return self._conventions[source]

    def _tried(self, source: str, *messages: Mapping[str, Any]) -> str:
        """The text of ``messages`` as they are; "" where the template refuses them."""
        given = {**self._variables, "messages": messages, "tools": None, "documents": None}
        try:
            return self._rendered(source, {**given, "add_generation_prompt": False}, False)
        except Exception:  # the boundary to a template; `render` says what it has against real messages
            return ""

    def _entries(self, messages: Sequence[Mapping[str, Any]], conventions: _Conventions) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for message in messages:
            entry = {key: value for key, value in message.items() if value is not None and key not in LOSS}
            entry.setdefault("content", "")
            if entry.get("role") == "developer":  # OpenAI's newer name; few templates know it
                entry["role"] = "system"
            if entry.get("role") == "assistant":
                _place_reasoning(entry, conventions.reasoning)
            if isinstance(entry.get("tool_calls"), Sequence):
                entry["tool_calls"] = [normal_call(call, conventions.worded) for call in entry["tool_calls"]]
            if conventions.parts and isinstance(entry["content"], str):
                entry["content"] = [{"type": "text", "text": entry["content"]}] if entry["content"] else []
            entries.append(entry)
        return entries


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning that a message has in a field of its own; "" when there is none."""
    return next((text for key in REASONING if isinstance(text := message.get(key), str) and text.strip()), "").strip()


def _place_reasoning(entry: dict[str, Any], reads: bool) -> None:
    """Put an assistant's reasoning where the template looks for it: in its field, or inside the content."""
    reasoning, content = reasoning_of(entry), entry["content"]
    if not isinstance(content, str):
        return
    if reads and not reasoning and (thought := THOUGHT.fullmatch(content)) is not None:
        reasoning, entry["content"] = thought[1].strip(), thought[2]
    if reasoning:
        for key in REASONING:
            entry.pop(key, None)
        if reads:
            entry |= dict.fromkeys(REASONING, reasoning)
        else:
            entry["content"] = f"<think>\n{reasoning}\n</think>\n\n{content}"


def normal_call(call: Any, worded: bool = False) -> Any:
    """A call of a tool as templates take it: its arguments an object, wherever they parse as one, or (``worded``) that
    object's JSON text."""
    if not isinstance(call, Mapping):
        return call
    given = cast("Mapping[str, Any]", call)
    function = given.get("function")
    if not isinstance(function, Mapping):
        if "name" not in given:
            return given
        function = {key: given[key] for key in ("name", "arguments") if key in given}
        given = {key: value for key, value in given.items() if key not in function}
    arguments = cast("Mapping[str, Any]", function).get("arguments")
    arguments = object_or_text(arguments or "") if isinstance(arguments, str | None) else arguments
    if worded and isinstance(arguments, Mapping):
        arguments = json_text(arguments)
    return {"id": "", "type": "function", **given, "function": {**function, "arguments": arguments}}


def _called(arguments: Any, said: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """An assistant's message with a call."""
    return {"role": "assistant", **said, "content": "", "tool_calls": [called("f", arguments, "abcdefgh1")]}


# Marks around a generation block's content: private-use characters, which no text has by accident.
OPEN, CLOSE = "\U0010f8a1\U0010f8a2", "\U0010f8a2\U0010f8a1"
MARK = re.compile(f"({OPEN}|{CLOSE})")


class _Generation(Extension):
    """``{% generation %}`` encloses the assistant's text; plain rendering outputs its content alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGeneration(_Generation):
    """``{% generation %}`` with marks in the text at its beginning and end, wherever a macro or a loop puts it."""

    def parse(self, parser: Any) -> list[nodes.Node]:
        content = super().parse(parser)
        first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
        return [first, *content, last]


def _environment(marks: bool, started: datetime) -> ImmutableSandboxedEnvironment:
    """The Jinja sandbox that chat templates expect: block trimming, loop controls, plain-JSON ``tojson``, the date.
    ``marks``: generation blocks are marked in the text."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_MarkedGeneration if marks else _Generation, loopcontrols]
    )
    environment.filters["tojson"] = json_text
    environment.globals |= {"raise_exception": refuse, "strftime_now": started.strftime}
    return environment
