"""Grammars of whole answers, in llguidance's dialect of Lark: JSON of a schema, tool calls as the model's chat template
writes them, or either, after reasoning where the template has it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.records.conversations import RequestRefused
from headway.tokens.argument_values import kinds_of
from headway.tokens.call_syntax import CALL_ID, NAME, CallSyntax, Pairs
from headway.tokens.grammar import json_part
from headway.tokens.messages import json_text
from headway.tokens.output_parsing import OutputFormat

_ANY = r"(.|\n)*"
_NOTHING = '""'
_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]*/"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedSchema:
    """A JSON schema that a request asks for."""

    param: str  # the request's field that holds the schema
    schema: Mapping[str, Any] | bool
    strict: bool = True  # a keyword that grammars don't know is an error; False: it is ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class CallableTool:
    """A tool that an answer may call."""

    name: str
    arguments: RequestedSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """A request's demand on its answer: JSON of a schema, calls of these tools alone, or either.

    Calls that are not ``forced`` may be left out: the answer is a text then.
    """

    text: RequestedSchema | None = None  # None: any text
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
    def schemas(self) -> Sequence[RequestedSchema]:
        """All schemas of the constraint."""
        text_schemas = () if self.text is None else (self.text,)
        return [*text_schemas, *(tool.arguments for tool in self.tools)]


def answer_grammar(constraint: Constraint, written: OutputFormat, *, opened: bool = False) -> str:
    """Build the grammar of an answer in the format ``written``; ``opened``: the answer begins inside reasoning.
    Reasoning is free, and the constraint begins after it. Raises RequestRefused for calls that the chat template has no
    form for, and GrammarRefused as `json_part`.

    Example, an answer that may call one tool, in the format "hermes" (the arguments are a grammar of their own, so that
    references inside their schema stay as they are):

        start: (TEXT | mark0 first more*)
        TEXT: ...without <tool_call>...
        mark0[lazy]: ...up to the first <tool_call>...
        first: "\n{\"name\": \"add\", \"arguments\": " arguments0 "}\n</tool_call>"
        arguments0: %json {...}
        more: "\n<tool_call>\n{\"name\": \"add\", \"arguments\": " arguments0 "}\n</tool_call>"
    """
    _require_expressible(constraint, written)
    syntax = next(iter(written.syntaxes), None)
    rules = _Rules(dict(written.special))
    opening, closing = written.thought
    may_think = written.reasoning and not opened  # an answer that begins with the mark is reasoning
    mark_is_text = may_think and not rules.pieces(opening)[0][1]
    unthought = rf" & ~/\s*{_pattern(opening)}{_ANY}/" if mark_is_text else ""
    allows_text = constraint.text is None and not constraint.forced
    mark_rule = f"({rules.literal(written.content_mark)})? " if written.content_mark else ""
    choices = list[str]()
    if constraint.text is not None:
        choices.append(mark_rule + "json")
        rules.add(f"json: {_schema_rule(constraint.text)}")
    if allows_text:
        choices.append(mark_rule + "TEXT")
        rules.add(f"TEXT: {_free_text(syntax)}{unthought}")
    if constraint.tools and syntax is not None:
        choices.append(_calls(constraint, syntax, rules, unthought if allows_text else None))
    start_rule = f"({' | '.join(choices)})"
    if written.reasoning:
        start_rule = f"(thought BREAK)? {start_rule}" if may_think else f"thought BREAK {start_rule}"
        if len(rules.pieces(opening + closing)) == 1:
            begin_pattern = rf"\s*{_pattern(opening)}" if may_think else ""
            rules.add(f"thought[lazy]: /{begin_pattern}{_ANY}{_pattern(closing)}/")
        else:
            rules.add(f"thought: {rules.literal(opening) if may_think else ''} {rules.up_to(closing)}")
        rules.add(r"BREAK: /\n{0,2}/")
    return "\n".join([f"start: {start_rule}", *rules.lines, ""])


class _Rules:
    """The rules of a grammar that is being built."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """``special``: marks that are special tokens, which no text has."""
        self.lines = list[str]()
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")

    def add(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def pieces(self, text: str) -> list[tuple[str, int | None]]:
        """Split a mark into texts and special tokens; a special token comes with its id."""
        parts, end = list[tuple[str, int | None]](), 0
        for token in self._split.finditer(text):
            parts += [(text[end : token.start()], None)] * (end < token.start()) + [(token[0], self._special[token[0]])]
            end = token.end()
        return parts + [(text[end:], None)] * (end < len(text) or not parts)

    def literal(self, text: str) -> str:
        return " ".join(f"<[{i}]>" if i is not None else _quoted(piece) for piece, i in self.pieces(text) if piece)

    def up_to(self, mark: str, without: str = "") -> str:
        """Return a rule for any text up to and with the first ``mark``; ``without``: an intersection for the text."""
        (first_piece, token_id), *rest = self.pieces(mark)
        rule_name = f"mark{len(self.lines)}"
        if token_id is None:
            self.add(f"{rule_name.upper()}: /{_ANY}{_pattern(first_piece)}/{without}")
            self.add(f"{rule_name}[lazy]: {rule_name.upper()}")
        else:
            self.add(f"{rule_name.upper()}: /{_ANY}/{without}")
            rule_name = f"{rule_name.upper()} <[{token_id}]>"
        return " ".join([rule_name, self.literal("".join(piece for piece, _ in rest))]).strip()


def _free_text(syntax: CallSyntax | None) -> str:
    """Return the pattern of texts that contain no call."""
    if syntax is None:
        return f"/{_ANY}/"
    if not syntax.marks:
        return rf"/\s*([^{re.escape(_first_call(syntax).strip()[0])}\s]{_ANY})?/"
    return " & ".join([f"/{_ANY}/", *(f"~/{_ANY}{_pattern(mark)}{_ANY}/" for mark in syntax.marks)])


def _first_call(syntax: CallSyntax) -> str:
    return (syntax.opening + syntax.head).lstrip("\n")


def _calls(constraint: Constraint, syntax: CallSyntax, rules: _Rules, text_filter: str | None) -> str:
    """Return the sequence of calls alone, or of a text and calls after it where ``text_filter``, an intersection for
    the text, isn't None."""
    head, text_rule = _first_call(syntax), ""
    if text_filter is not None and syntax.marks:
        mark, _ = rules.pieces(head.lstrip())[0] if rules.pieces(head.lstrip())[0][1] else (syntax.marks[0], None)
        head, text_rule = head.lstrip()[len(mark) :], rules.up_to(mark, text_filter)
    for number, tool in enumerate(constraint.tools):
        if syntax.pairs is None:
            rules.add(f"arguments{number}: {_schema_rule(tool.arguments)}")
        else:
            _add_pairs(tool, number, syntax.pairs, rules)
    head_by_rule = {"first": head, "more": (syntax.between or "; " * (not syntax.marks)) + syntax.head}
    allows_more = not constraint.single and syntax.max_calls != 1
    for rule_name, head_text in head_by_rule.items():
        if rule_name == "first" or allows_more:
            choices = [_call(tool, number, head_text, syntax, rules) for number, tool in enumerate(constraint.tools)]
            rules.add(f"{rule_name}: {' | '.join(choices)}")
    return " ".join(filter(None, (text_rule, "first", "more*" * allows_more, rules.literal(syntax.closing.rstrip()))))


def _call(tool: CallableTool, number: int, head: str, syntax: CallSyntax, rules: _Rules) -> str:
    name = json_text(tool.name)[1:-1] if syntax.keys else tool.name
    call_id = (f"functions.{name}:", "/[0-9]{1,3}/") if syntax.named_ids else ("", "/[A-Za-z0-9]{1,9}/")
    parts = [[rules.literal(part) for part in text.replace(NAME, name).split(CALL_ID)] for text in (head, syntax.tail)]
    id_rule = f" {rules.literal(call_id[0])} {call_id[1]} "
    return " ".join([id_rule.join(parts[0]), f"arguments{number}", id_rule.join(parts[1])])


def _add_pairs(tool: CallableTool, number: int, pairs: Pairs, rules: _Rules) -> None:
    """Add the rule ``arguments`` + ``number`` for arguments that are written one by one, in the schema's order."""
    schema = tool.arguments.schema if isinstance(tool.arguments.schema, Mapping) else {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    separator_rule = rules.literal(pairs.separator)
    open_ended = schema.get("additionalProperties", not properties) is not False
    other_pair = f"{rules.literal(pairs.start)} {_KEY} {_value(None, schema, pairs, rules, tool)}"
    property_count, other_pairs = len(properties), f"({separator_rule} other{number})*"
    if open_ended:
        rules.add(f"other{number}: {other_pair}")
    rules.add(f"pairs{number}_{property_count}: " + (f"(other{number} {other_pairs})?" if open_ended else _NOTHING))
    rules.add(f"further{number}_{property_count}: " + (other_pairs if open_ended else _NOTHING))
    for index, (key, part) in reversed(list(enumerate(properties.items()))):
        rules.add(
            f"pair{number}_{index}: {rules.literal(pairs.start + key)} {_value(part, schema, pairs, rules, tool)}"
        )
        for rule, joint in (("pairs", ""), ("further", separator_rule)):
            skip_rule = "" if key in (schema.get("required") or ()) else f" | {rule}{number}_{index + 1}"
            rules.add(f"{rule}{number}_{index}: {joint} pair{number}_{index} further{number}_{index + 1}{skip_rule}")
    rules.add(f"arguments{number}: pairs{number}_0")


def _value(part: Any, root: Mapping[str, Any], pairs: Pairs, rules: _Rules, tool: CallableTool) -> str:
    """Return the rule of a value with its marks; ``part``: its schema, None for any text."""
    type_names = kinds_of(part, root)
    choices = list[str]()
    if part is None or not type_names or "string" in type_names:
        text_start = rules.literal(pairs.assign_text or pairs.assign)
        listed_values = part.get("enum") if isinstance(part, Mapping) and type_names == {"string"} else None
        if isinstance(listed_values, list):
            choices += [f"{text_start} {rules.literal(value + pairs.quote + pairs.end)}" for value in listed_values]
        elif pairs.quote in ("'", '"'):
            choices.append(rf"{text_start} /[^{pairs.quote}\\\n]*/ {rules.literal(pairs.quote + pairs.end)}")
        else:
            choices.append(f"{text_start} {rules.up_to(pairs.quote + pairs.end)}")
    if other_types := sorted(type_names - {"string"}):
        rule_name = f"literal{len(rules.lines)}"
        if pairs.quote and not type_names & {"integer", "number"}:
            _add_literals(pairs.quote, rules)
            rules.add(f"{rule_name}: {' | '.join(f'{kind}_literal' for kind in other_types)}")
        else:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            value_schema = {**(part or {}), **definitions}
            typed_schema = {**value_schema, "type": other_types} if "type" in value_schema else value_schema
            rules.add(f"{rule_name}: {json_part(typed_schema, lenient=not tool.arguments.strict)}")
        choices.append(f"{rules.literal(pairs.assign)} {rule_name} {rules.literal(pairs.end)}")
    return f"({' | '.join(choices)})"


def _add_literals(quote: str, rules: _Rules) -> None:
    """Add rules, by type, for values that aren't written as JSON."""
    is_python = quote in ("'", '"')
    text_rule = r"/'[^'\\\n]*'/" if is_python else f"{rules.literal(quote)} {rules.up_to(quote)}"
    rules.add("boolean_literal: " + ('"True" | "False"' if is_python else '"true" | "false"'))
    rules.add("null_literal: " + ('"None"' if is_python else '"null"'))
    rules.add('number_literal: %json {"type": "number"}')
    rules.add(f"string_literal: {text_rule}")
    rules.add('array_literal: "[" (any_literal ("," " "? any_literal)*)? "]"')
    key = "string_literal" if is_python else _KEY
    rules.add(f'object_literal: "{{" ({key} ":" " "? any_literal ("," " "? {key} ":" " "? any_literal)*)? "}}"')
    type_names = ("boolean", "null", "number", "string", "array", "object")
    rules.add(f"any_literal: {' | '.join(f'{kind}_literal' for kind in type_names)}")


def _schema_rule(asked: RequestedSchema) -> str:
    return json_part(asked.schema, lenient=not asked.strict)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """Escape a text for a regular expression of the grammar."""
    return re.escape(text).replace("\\\n", r"\n").replace("\\ ", " ").replace("/", r"\/")


def _require_expressible(constraint: Constraint, written: OutputFormat) -> None:
    """Raise RequestRefused where the format has no form for the constraint."""
    if constraint.calls_param and not written.syntaxes:
        reason = "the model's chat template writes tool calls in an unknown form (endpoint.tools sets one)"
        valid_values = "false" if constraint.calls_param.endswith("strict") else "'auto' and 'none'"
        raise RequestRefused(f"{constraint.calls_param}: {reason}; valid: {valid_values}", param=constraint.calls_param)
    if constraint.text is not None and constraint.tools and written.syntaxes and not written.syntaxes[0].marks:
        reason = "the model's chat template writes tool calls as bare JSON, which looks the same as an answer in JSON"
        raise RequestRefused(
            f"{constraint.param}: beside tools, {reason}; valid: tool_choice = 'none'", param=constraint.param
        )
