"""Grammars of whole answers, in llguidance's dialect of Lark: text of a JSON schema, tool calls as the model's chat
template writes them, or either; behind reasoning where the template has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.records.conversations import RequestRefused
from headway.tokens.grammar import json_part
from headway.tokens.messages import json_text
from headway.tokens.output_parsing import OutputFormat

_CALL, _CALLED = "<tool_call>", "</tool_call>"
_ANY, _OPENING, _CLOSING = r"(.|\n)*", r"\s*<think>", r"<\/think>"
_UNREASONED = f" & ~/{_OPENING}{_ANY}/"


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedSchema:
    """A JSON schema that a request asks for."""

    param: str  # the request's field that has it
    schema: Mapping[str, Any] | bool
    strict: bool = True  # a keyword that grammars don't know is an error; False: it is ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class CallableTool:
    """A tool that an answer may call."""

    name: str
    arguments: AskedSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """A request's demand on its answer: JSON of a schema, calls of these tools alone, or either.

    Calls that are not ``forced`` may be left out: the answer is a text then.
    """

    text: AskedSchema | None = None  # None: any text
    tools: tuple[CallableTool, ...] = ()
    forced: bool = False  # a tool is called, and no text written
    single: bool = False  # one call at most
    calls_param: str = ""  # the request's field that constrains calls; "": none does
    optional: bool = False  # asked for by strict tools alone

    @property
    def param(self) -> str:
        """The request's field that constrains the answer."""
        return self.calls_param if self.text is None else self.text.param

    @property
    def schemas(self) -> Sequence[AskedSchema]:
        """All schemas in it."""
        texts = () if self.text is None else (self.text,)
        return [*texts, *(tool.arguments for tool in self.tools)]


def answer_grammar(wanted: Constraint, written: OutputFormat, *, opened: bool = False) -> str:
    """The grammar of an answer that ``written`` says how to write; ``opened``: it begins inside reasoning. Reasoning is
    free, and the constraint begins behind it. Raises RequestRefused for calls that the chat template has no form for,
    and GrammarRefused as `json_part`.

    Example, an answer that may call one tool, in the format "hermes" (the arguments are a grammar of their own, so that
    references inside their schema stay as they are):

        start: (TEXT | head call more*)
        TEXT: ...without <tool_call>...
        head[lazy]: ...up to the first <tool_call>...
        call: "\n{\"name\": " ("\"add\", \"arguments\": " arguments0) "}\n</tool_call>"
        arguments0: %json {...}
        more: "\n<tool_call>" call
    """
    _require_written(wanted, written)
    tools = wanted.tools if written.tools != "none" else ()
    thinks = written.reasoning and not opened  # an answer that begins with the tag is reasoning
    free = wanted.text is None and not wanted.forced
    ways, rules = list[str](), list[str]()
    if wanted.text is not None:
        ways.append("json")
        rules.append(f"json: {_part(wanted.text)}")
    if free:
        ways.append("TEXT")
        text = f"/{_ANY}/ & ~/{_ANY}{_CALL}{_ANY}/" if written.tools == "hermes" else rf"/\s*([^{{\s]{_ANY})?/"
        rules.append(f"TEXT: {text}{_UNREASONED if thinks else ''}")
    if tools and written.tools == "hermes":
        ways.append(("head" if free else f'"{_CALL}"') + " call" + ("" if wanted.single else " more*"))
        rules += [*_call_rules(tools, "arguments", "\n", f"\n{_CALLED}"), f'more: "\\n{_CALL}" call']
        if free:
            rules += [f"HEAD: /{_ANY}{_CALL}/{_UNREASONED if thinks else ''}", "head[lazy]: HEAD"]
    elif tools:
        ways.append("call")
        rules += _call_rules(tools, "parameters", "", "")
    start = f"({' | '.join(ways)})"
    if written.reasoning:
        start = f"(thought BREAK)? {start}" if thinks else f"thought BREAK {start}"
        rules += [f"thought[lazy]: /{_OPENING if thinks else ''}{_ANY}{_CLOSING}/", r"BREAK: /\n{0,2}/"]
    return "\n".join([f"start: {start}", *rules, ""])


def _call_rules(tools: Sequence[CallableTool], key: str, before: str, behind: str) -> list[str]:
    """The rule ``call``, of one call, and those it needs."""
    names = [_literal(f'{json_text(tool.name)}, "{key}": ') for tool in tools]
    ways = " | ".join(f"{name} arguments{number}" for number, name in enumerate(names))
    opening, closing = _literal(before + '{"name": '), _literal("}" + behind)
    arguments = [f"arguments{number}: {_part(tool.arguments)}" for number, tool in enumerate(tools)]
    return [f"call: {opening} ({ways}) {closing}", *arguments]


def _part(asked: AskedSchema) -> str:
    return json_part(asked.schema, lenient=not asked.strict)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _require_written(wanted: Constraint, written: OutputFormat) -> None:
    """Raise RequestRefused where answers can't be written as wanted."""
    if wanted.calls_param and written.tools == "none":
        why = "the model's chat template writes tool calls in no form that is known here (endpoint.tools sets one)"
        valid = "false" if wanted.calls_param.endswith("strict") else "'auto' and 'none'"
        raise RequestRefused(f"{wanted.calls_param}: {why}; valid: {valid}", param=wanted.calls_param)
    if wanted.text is not None and wanted.tools and written.tools == "llama_json":
        why = "the model's chat template writes tool calls as bare JSON, which can't be told from an answer in JSON"
        raise RequestRefused(f"{wanted.param}: beside tools, {why}; valid: tool_choice = 'none'", param=wanted.param)
