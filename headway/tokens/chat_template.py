"""Chat templates: demonstrations, tasks, agents and environments all turn messages into text by this module.

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
from headway.tokens.messages import THOUGHT, json_text, object_or_text, openai_tool_call

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; the first is the usual one
LOSS = ("weight", "loss", "trainable")  # keys of a message that decide whether it is learned; templates don't get them
PROBE = "xQpRoBeQx"  # no text has it by accident, and no template changes it
_SCHEMA = {"type": "object", "properties": {PROBE: {"type": "string", "description": "?"}}, "required": [PROBE]}
PROBE_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "?", "parameters": _SCHEMA}}]


class _Conventions(NamedTuple):
    """A template's conventions for messages, observed by rendering probes."""

    reasoning: bool  # it reads reasoning from a separate field; else from the content, or not at all
    parts: bool  # it takes contents only as lists of parts
    worded: bool  # it takes arguments of calls as JSON text, which it concatenates with its own text


class TurnEnd(NamedTuple):
    """The text that a template writes after the last word of an assistant's turn."""

    calls: bool  # the turn ends with a call, whose argument is the last word
    final: str  # the text where the conversation ends there
    followed: str  # the text where another message follows
    between: str  # the text between two calls; "": none, or the template takes a single call


class ChatTemplates:
    """The chat templates of a model folder, by name, with the variables that every rendering has."""

    def __init__(self, texts: Mapping[str, str], variables: Mapping[str, Any], started: datetime, origin: str) -> None:
        """``started``: the time that ``strftime_now`` writes, the run's start, so that resumed runs render equally."""
        self.texts = dict(texts)
        self._variables = variables
        self._started = started
        self._origin = origin
        self._renders: dict[tuple[str, bool], Callable[..., str]] = {}  # source, with marks or without -> template
        self._conventions: dict[str, _Conventions] = {}
        self.rendered: set[Any] = set()  # tools and sequences of roles that `require_rendered` has checked

    def source(self, tools: Sequence[Any] | None) -> str:
        """Choose the template of a conversation with ``tools`` or without, among named ones as transformers does.
        Raises ConfigurationError where there is none."""
        template = (self.texts.get("tool_use") if tools else None) or self.texts.get("default")
        if template is None and self.texts:
            names = ", ".join(map(repr, sorted(self.texts)))
            raise ConfigurationError(f"{self._origin}: the chat template 'default' is missing; it has: {names}")
        if template is None:
            raise ConfigurationError(
                f"{self._origin}: no chat template (chat_template in tokenizer_config.json, or chat_template.jinja); "
                "use template 'raw'"
            )
        return template

    def reads_reasoning(self, tools: Sequence[Any] | None) -> bool:
        """Whether the template renders reasoning that a message has in a separate field."""
        return self._conventions_of(self.source(tools)).reasoning

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        marks: bool = False,
    ) -> str:
        """Render ``messages``; ``marks``: whether marks enclose ``{% generation %}`` blocks. Raises
        ConfigurationError."""
        source = self.source(tools)
        context = {**self._variables, **variables, "tools": tools, "documents": None}
        entries = self._entries(messages, self._conventions_of(source))
        try:
            return self._rendered(source, {**context, "messages": entries}, marks)
        except Exception as error:  # the boundary to a template, which is foreign code
            raise ConfigurationError(f"{self._origin}: the chat template fails: {error}") from None

    def _rendered(self, source: str, context: Mapping[str, Any], marks: bool) -> str:
        if (source, marks) not in self._renders:
            self._renders[source, marks] = _environment(marks, self._started).from_string(source).render
        return self._renders[source, marks](context)

    def turn_ends(self) -> Iterator[TurnEnd]:
        """Yield the end of a turn of text and that of a turn with calls, as far as the template renders them."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}
        tool_message = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "f", "content": "?"}
        call_message = _with_call({PROBE: PROBE})
        for turn, next_message, tools in ((answer, question, None), (call_message, tool_message, PROBE_TOOLS)):
            ended_text, followed_text, two_calls_text = "", "", ""
            with contextlib.suppress(ConfigurationError):  # it is raised again for messages that need this
                ended_text = self.render([question, turn], tools, {"add_generation_prompt": False})
                followed_text = self.render([question, turn, next_message], tools, {"add_generation_prompt": False})
                two_calls = {**turn, "tool_calls": [*turn.get("tool_calls", ()), *call_message["tool_calls"]]}
                two_calls_text = self.render([question, two_calls], tools, {"add_generation_prompt": False})
            if PROBE in ended_text:
                ended_text, followed_text = (text.rpartition(PROBE)[2] for text in (ended_text, followed_text))
                between = two_calls_text.rpartition(PROBE)[0].rpartition(PROBE)[0].rpartition(PROBE)[2]
                yield TurnEnd("tool_calls" in turn, ended_text, followed_text, between)

    def _conventions_of(self, source: str) -> _Conventions:
        if source not in self._conventions:

            def renders(*messages: Mapping[str, Any], text: str = PROBE) -> bool:
                return text in self._try_render(source, *messages)

            user, parts = {"role": "user", "content": PROBE}, [{"type": "text", "text": PROBE}]
            needs_parts, value = not renders(user) and renders({**user, "content": parts}), {PROBE: "?"}
            user = {**user, "content": [{"type": "text", "text": "?"}] if needs_parts else "?"}
            answer = {**user, "role": "assistant", **dict.fromkeys(REASONING, PROBE)}
            reads = any(renders(user, turn) for turn in (answer, _with_call({}, answer), _with_call("{}", answer)))
            garbles_objects = not renders(user, _with_call(value)) or renders(user, _with_call(value), text=repr(value))
            worded = garbles_objects and renders(user, _with_call(json_text(value)))
            self._conventions[source] = _Conventions(reasoning=reads, parts=needs_parts, worded=worded)
        return self._conventions[source]

    def _try_render(self, source: str, *messages: Mapping[str, Any]) -> str:
        """Render ``messages`` as they are; "" where the template refuses them."""
        context = {**self._variables, "messages": messages, "tools": None, "documents": None}
        try:
            return self._rendered(source, {**context, "add_generation_prompt": False}, False)
        except Exception:  # the boundary to a template; `render` reports why it refuses real messages
            return ""

    def _entries(self, messages: Sequence[Mapping[str, Any]], conventions: _Conventions) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for message in messages:
            adapted = {key: value for key, value in message.items() if value is not None and key not in LOSS}
            adapted.setdefault("content", "")
            if adapted.get("role") == "developer":  # OpenAI's newer name; few templates know it
                adapted["role"] = "system"
            if adapted.get("role") == "assistant":
                _place_reasoning(adapted, conventions.reasoning)
            if isinstance(adapted.get("tool_calls"), Sequence):
                adapted["tool_calls"] = [normalized_call(call, conventions.worded) for call in adapted["tool_calls"]]
            if conventions.parts and isinstance(adapted["content"], str):
                adapted["content"] = [{"type": "text", "text": adapted["content"]}] if adapted["content"] else []
            entries.append(adapted)
        return entries


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message has in a separate field; "" when there is none."""
    return next((text for key in REASONING if isinstance(text := message.get(key), str) and text.strip()), "").strip()


def _place_reasoning(entry: dict[str, Any], reads: bool) -> None:
    """Put an assistant's reasoning where the template reads it: in its field, or inside the content."""
    reasoning, content = reasoning_of(entry), entry["content"]
    if not isinstance(content, str):
        return
    if reads and not reasoning and (match := THOUGHT.fullmatch(content)) is not None:
        reasoning, entry["content"] = match[1].strip(), match[2]
    if reasoning:
        for key in REASONING:
            entry.pop(key, None)
        if reads:
            entry |= dict.fromkeys(REASONING, reasoning)
        else:
            entry["content"] = f"<think>\n{reasoning}\n</think>\n\n{content}"


def normalized_call(call: Any, worded: bool = False) -> Any:
    """Convert a tool call for templates: its arguments become an object where they parse as one, or (``worded``) that
    object's JSON text."""
    if not isinstance(call, Mapping):
        return call
    tool_call = cast("Mapping[str, Any]", call)
    function = tool_call.get("function")
    if not isinstance(function, Mapping):
        if "name" not in tool_call:
            return tool_call
        function = {key: tool_call[key] for key in ("name", "arguments") if key in tool_call}
        tool_call = {key: value for key, value in tool_call.items() if key not in function}
    arguments = cast("Mapping[str, Any]", function).get("arguments")
    arguments = object_or_text(arguments or "") if isinstance(arguments, str | None) else arguments
    if worded and isinstance(arguments, Mapping):
        arguments = json_text(arguments)
    return {"id": "", "type": "function", **tool_call, "function": {**function, "arguments": arguments}}


def _with_call(arguments: Any, fields: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Make a message of the assistant with a call and these further ``fields``."""
    return {"role": "assistant", **fields, "content": "", "tool_calls": [openai_tool_call("f", arguments, "abcdefgh1")]}


# Marks around a generation block's content: private-use characters, which no text has by accident.
OPEN, CLOSE = "\U0010f8a1\U0010f8a2", "\U0010f8a2\U0010f8a1"
MARK = re.compile(f"({OPEN}|{CLOSE})")


class _Generation(Extension):
    """The tag ``{% generation %}``, which encloses the assistant's text; plain rendering outputs its content alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGeneration(_Generation):
    """The tag ``{% generation %}`` with marks at its beginning and end in the text, also inside macros and loops."""

    def parse(self, parser: Any) -> list[nodes.Node]:
        block_nodes = super().parse(parser)
        open_mark, close_mark = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
        return [open_mark, *block_nodes, close_mark]


def _environment(marks: bool, started: datetime) -> ImmutableSandboxedEnvironment:
    """Make the Jinja sandbox that chat templates expect: block trimming, loop controls, plain-JSON ``tojson``, the
    date. ``marks``: generation blocks are marked in the text."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_MarkedGeneration if marks else _Generation, loopcontrols]
    )
    environment.filters["tojson"] = json_text
    environment.globals |= {"raise_exception": refuse, "strftime_now": started.strftime}
    return environment
