"""Detection of how a chat template writes tool calls, reasoning and content: probes are rendered and compared.

Two calls that differ in one part show the text around that part. A detected format is kept only if the template's own
calls are parsed back by it, whole and token by token.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headway.records.conversations import ToolFormat
from headway.records.errors import ConfigurationError
from headway.tokens.argument_values import JSON
from headway.tokens.call_syntax import CALL_ID, NAME, SYNTAXES, CallSyntax, Pairs
from headway.tokens.messages import canonical_value
from headway.tokens.output_parsing import (
    OutputFormat,
    begins_inside_reasoning,
    mark_token_ids,
    parse_output,
    response_text,
    settled_parts,
)
from headway.tokens.tokenizer import Tokenizer

_FIRST = "probe_first", {"key_a": 71001, "key_b": 71002}
_SECOND = "probe_second", {"key_c": 71003}
_QUESTION = {"role": "user", "content": "QUESTION"}
_CONTENT, _THOUGHT, _VALUE = "PROBED CONTENT", "PROBED REASONING", "PROBED_VALUE"
_THINKS = re.compile(r"[<\[][^<>\[\]\s/]*(?:think|thought|reason)[^<>\[\]\s]*[>\]]", re.IGNORECASE)
_OPEN_MARK = re.compile(r"<[^<>]*$")
_THOUGHT_ENDS = re.compile(r"</[\w:|]*(?:think|thought|reason)\w*>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>")
_OPENINGS = {"<|END_THINKING|>": "<|START_THINKING|>", "<channel|>": "<|channel>thought"}  # else without the slash
_STRINGS = {key: {"type": "string", "description": "d"} for key in ("key_a", "key_b", "key_c")}
_ROUND_TRIP_ARGUMENTS = {"key_a": 'it\'s "a" <b>\n2', "key_b": -7, "key_c": {"d": [1.5, "e", {}]}}
_TYPES = {"key_a": {"type": "string"}, "key_b": {"type": "integer"}, "key_c": {"type": "object"}}
_VARIABLES = {"strftime_now": lambda _: "today"}  # keeps dates out of the detected format
UNKNOWN = (
    "the model's chat template writes tool calls in an unknown form; endpoint.tools sets one, or 'none': "
    "calls stay in the answer's text"
)
Call = tuple[str, Mapping[str, Any]]  # name, arguments


def output_format(tokenizer: Tokenizer, tools: ToolFormat = "auto") -> OutputFormat:
    """Detect the format that a tokenizer's chat template writes. ``tools`` sets the format of tool calls: a name of
    SYNTAXES, or "none". With "auto" it is detected; where it can't be, the format's ``unknown`` has the reason."""
    if tokenizer.chat_template is None:
        return _with_special(tokenizer, OutputFormat(tools="none" if tools == "auto" else tools))
    base_format = _turns_format(_Probe(tokenizer))
    if tools != "auto":
        return _with_special(tokenizer, replace(base_format, tools=tools))
    for probe in (_Probe(tokenizer), _Probe(tokenizer, ids="named")):
        syntax = _call_syntax(probe, base_format)
        names = [name for name in SYNTAXES if syntax is None or _matches_any(syntax, SYNTAXES[name])]
        for name in names or ["template"]:
            syntaxes = SYNTAXES.get(name, ()) if syntax is None else (syntax, *SYNTAXES.get(name, ()))
            tried_format = replace(base_format, tools=name, detected=syntaxes)
            if round_trips(probe, tried_format := _with_special(tokenizer, tried_format)):
                takes_any_id = probe.ids == "named" or replace(probe, ids="long").turn(calls=[_FIRST])
                return replace(tried_format, ids="any" if takes_any_id else "nine")
    return _with_special(tokenizer, replace(base_format, unknown=UNKNOWN))


def _with_special(tokenizer: Tokenizer, written: OutputFormat) -> OutputFormat:
    texts_and_ids = [(tokenizer.token(i) or "", i) for i in mark_token_ids(tokenizer, written)]
    return replace(written, special=tuple(sorted(texts_and_ids)))


def _matches_any(probed: CallSyntax, known: Sequence[CallSyntax]) -> bool:
    """Whether the ``probed`` grammar has the marks and the form of arguments of one of the ``known`` ones."""

    def shape(syntax: CallSyntax) -> tuple[Any, ...]:
        return syntax.marks, syntax.keys, syntax.named_ids, syntax.pairs and syntax.pairs.start.strip()

    return any(shape(syntax) == shape(probed) for syntax in known)


@dataclass(frozen=True)
class _Probe:
    """Renderings of invented turns of the assistant."""

    tokenizer: Tokenizer
    ids: str = "nine"  # form of the calls' ids: "nine" letters and digits, "long", or "named" after the tool

    def turn(self, content: str = "", calls: Sequence[Call] = (), thought: str = "") -> str:
        """Render a turn of the assistant, with its role's mark; "" where the template refuses it."""
        message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": thought}
        if calls:
            message["tool_calls"] = [
                {
                    "id": self.call_id(name, number),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for number, (name, arguments) in enumerate(calls)
            ]
        return self._rendered([_QUESTION, message], asking=False)

    @property
    def tools(self) -> list[dict[str, Any]]:
        parameters = {"type": "object", "properties": _STRINGS}
        functions = [{"name": name, "description": "d", "parameters": parameters} for name, _ in (_FIRST, _SECOND)]
        return [{"type": "function", "function": function} for function in functions]

    def call_id(self, name: str, number: int) -> str:
        ids = {"nine": f"probe000{number}", "long": f"call_probe_000{number}", "named": f"functions.{name}:{number}"}
        return ids[self.ids]

    @property
    def prompt(self) -> str:
        """The text that asks for the assistant's turn."""
        return self._rendered([_QUESTION], asking=True)

    @property
    def begun(self) -> str:
        """The prompt without marks of reasoning."""
        return _THINKS.split(self.prompt, maxsplit=1)[0]

    def _rendered(self, messages: list[dict[str, Any]], asking: bool) -> str:
        try:
            question_text, text = (
                self.tokenizer.render_messages(part, tools=self.tools, add_generation_prompt=asks, variables=_VARIABLES)
                for part, asks in (([_QUESTION], False), (messages, asking))
            )
        except ConfigurationError:
            return ""
        return _after_prompt(text, question_text)


def _turns_format(probe: _Probe) -> OutputFormat:
    """Detect how the template writes reasoning and content."""
    thought_marks = ("", "")
    if probe.tokenizer.templates.reads_reasoning(probe.tools):  # else it would be in the content, between our marks
        turns = (probe.turn(_CONTENT, thought=_THOUGHT), probe.turn("", [_FIRST], _THOUGHT))
        thought_parts = [_after_prompt(turn, probe.begun).partition(_THOUGHT) for turn in turns if _THOUGHT in turn]
        if thought_parts:
            closings = [rest.partition(_CONTENT)[0] for _, _, rest in thought_parts]
            closing = re.sub(r"\s+[^\s>]*$", "", _common_prefix(*closings)) if len(closings) == 2 else closings[0]
            if _CONTENT not in thought_parts[0][2]:  # without content to end it: one mark
                closing = (re.findall(r"<[^<>]*>|\[[^\[\]]*\]", closing) or [""])[0]
            thought_marks = (thought_parts[0][0].strip(), closing.strip())
    template_source = probe.tokenizer.chat_template or ""
    if not all(thought_marks):
        match = _THOUGHT_ENDS.search(template_source)
        thought_marks = (_OPENINGS.get(match[0], match[0].replace("/", "", 1)), match[0]) if match else ("", "")
    reasoning = all(thought_marks)
    lead_parts = _after_prompt(probe.turn(_CONTENT), probe.begun).partition(_CONTENT)
    mark = (lead_parts[0].split(thought_marks[1])[-1] if reasoning else lead_parts[0]).strip() if lead_parts[1] else ""
    special_texts = {probe.tokenizer.token(i) or "" for i in probe.tokenizer.special_ids}
    if not re.sub("|".join(map(re.escape, sorted(special_texts - {""}))) or "(?!)", "", mark).strip():
        mark = ""  # nothing is left of it in decoded text
    return OutputFormat(
        reasoning=reasoning,
        thought=thought_marks if reasoning else OutputFormat.thought,
        content_mark=mark,
    )


class _Span(NamedTuple):
    """The position of a call in a rendered turn, and the call's own text around its arguments."""

    start: int
    end: int
    head: str
    tail: str


def _call_syntax(probe: _Probe, written: OutputFormat) -> CallSyntax | None:
    """Infer the grammar of calls from two probes; None where no call is recognised."""
    calls = [_FIRST, _SECOND]
    body = _body(probe, written, calls)
    if _SECOND[0] not in body and body.count(CALL_ID) < 2:
        calls = [_FIRST]
        body = _body(probe, written, calls)
    pair_syntax, keys = None, _keys(body)
    if _FIRST[0] not in body and probe.ids != "named":
        return None
    call_spans = _json_call_spans(body, calls, keys)
    if not call_spans:
        pair_syntax, call_spans = _pairs(probe, written, body, calls)
    if not call_spans:
        return None
    prefix, suffix = body[: call_spans[0].start], body[call_spans[-1].end :]
    opening = between = closing = ""
    if len(calls) == 2:
        amid = body[call_spans[0].end : call_spans[1].start]
        head = _common_suffix(prefix, amid)
        tail = _common_prefix(amid[: len(amid) - len(head)], suffix)
        opening, between, closing = prefix.removesuffix(head), amid.removesuffix(head)[len(tail) :], suffix[len(tail) :]
        prefix, suffix = head, tail
    content_turn = probe.turn(_CONTENT, calls[:1])
    return CallSyntax(
        opening=opening,
        head=prefix + call_spans[0].head,
        tail=call_spans[0].tail + suffix,
        between=between,
        closing=closing,
        keys=keys,
        pairs=pair_syntax,
        named_ids=probe.ids == "named",
        max_calls=None if len(calls) == 2 else 1,
        content_behind=-1 < content_turn.find(_FIRST[0]) < content_turn.find(_CONTENT),
    )


def _body(probe: _Probe, written: OutputFormat, calls: Sequence[Call]) -> str:
    """Render a turn of calls alone: the text after its role's mark and reasoning, with CALL_ID for the ids."""
    text = _response(probe, probe.turn(calls=calls), probe.begun)
    lead_text = text.partition(_FIRST[0])[0].rpartition(written.thought[1])[0] if written.reasoning else ""
    text = text[len(lead_text) :].removeprefix(written.thought[1])
    for number, (name, _) in enumerate(calls):
        text = text.replace(probe.call_id(name, number), CALL_ID)
    return text


def _response(probe: _Probe, turn: str, prompt: str) -> str:
    """Return the part of a turn that a model writes after the prompt, without the turn's end."""
    text = _after_prompt(turn, prompt)
    text = text.removesuffix(_common_suffix(text, probe.turn(_CONTENT).partition(_CONTENT)[2]))
    end_positions = [text.find(end) for i in probe.tokenizer.stop_ids if (end := probe.tokenizer.token(i))]
    return text[: min((position for position in end_positions if position >= 0), default=len(text))]


def _keys(body: str) -> tuple[str, str] | None:
    """Find the keys of name and arguments where the first call is a JSON object; None where it is none."""
    for _, _, value in _objects(body):
        for level in (value, *value.values()):
            if isinstance(level, dict):
                matching_keys = [key for part in _FIRST for key, member in level.items() if member == part]
                if len(matching_keys) == 2:
                    return matching_keys[0], matching_keys[1]
    return None


def _objects(body: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the JSON objects in a text, nested ones too, as (start, end, value)."""
    for brace in re.finditer("{", body):
        with contextlib.suppress(ValueError):
            value, end = JSON.raw_decode(body, brace.start())
            yield brace.start(), end, value


def _json_call_spans(body: str, calls: Sequence[Call], keys: tuple[str, str] | None) -> list[_Span]:
    """Find the spans of calls whose arguments are JSON objects; empty where one isn't found."""
    spans, offset, has_names = list[_Span](), 0, _FIRST[0] in body
    for name, args in calls:
        inner = next(((start, end) for start, end, value in _objects(body) if value == args and start >= offset), None)
        objects = [(start, end) for start, end, _ in _objects(body) if keys and inner and start < inner[0] < end]
        name_start = body.find(name if has_names else CALL_ID, offset)
        if inner is None or (keys and not objects) or name_start < 0:
            return []
        start, end = objects[0] if keys else (name_start, inner[1])
        spans.append(_Span(start, end, _slots(body[start : inner[0]], name), _slots(body[inner[1] : end], name)))
        offset = end
    if keys and len({span.head for span in spans}) == 2:  # calls are numbered
        spans = [call_span._replace(head=re.sub(r'"\d+"', f'"{CALL_ID}"', call_span.head)) for call_span in spans]
    return spans


def _slots(text: str, name: str) -> str:
    return text.replace(name, NAME)


def _pairs(probe: _Probe, written: OutputFormat, body: str, calls: Sequence[Call]) -> tuple[Pairs | None, list[_Span]]:
    """Infer how arguments are written one by one, and the spans of such calls; (None, []) where they aren't."""
    pieces, offset = list[str](), 0  # texts between name, keys and values
    for name, arguments in calls:
        first_key = body.find(next(iter(arguments)), offset)
        name_start = body.rfind(name, offset, max(first_key, 0))
        if first_key < 0 or name_start < 0:
            return None, []
        for known_text in (name, *(str(part) for pair in arguments.items() for part in pair)):
            position = body.find(known_text, name_start if known_text == name else offset)
            if position < 0:
                return None, []
            pieces.append(body[offset:position])
            offset = position + len(known_text)
    head, assign, middle = pieces[1:4]
    key_prefix = _common_suffix(head, middle)
    end = _common_prefix(middle[: len(middle) - len(key_prefix)], body[offset:])
    spans, offset = list[_Span](), 0
    for name, arguments in calls:
        start, values = body.index(name, offset), [str(value) for value in arguments.values()]
        args_start = body.index(next(iter(arguments)), start) - len(key_prefix)
        offset = body.index(values[-1], args_start) + len(values[-1]) + len(end)
        spans.append(_Span(start, offset, _slots(body[start:args_start], name), ""))
    probe_texts = [_body(probe, written, [(_FIRST[0], {"key_a": value})]) for value in (_VALUE, 71001, "\\")]
    text_pair, number_pair = (text.partition("key_a")[2] for text in probe_texts[:2])
    assign_text, quote = text_pair.partition(_VALUE)[0], text_pair.partition(_VALUE)[2]
    end_plain = number_pair.partition("71001")[2]
    quote = quote.removesuffix(end_plain) if quote.endswith(end_plain) else ""
    pair_syntax = Pairs(
        start=key_prefix,
        assign=assign,
        end=end,
        separator=middle[len(end) : len(middle) - len(key_prefix)],
        assign_text="" if assign_text == assign else assign_text,
        quote=quote,
        escapes=bool(quote) and "\\\\" in probe_texts[2],
    )
    return pair_syntax, spans


def round_trips(probe: _Probe, written: OutputFormat) -> bool:
    """Whether parsing returns the calls that were rendered, from tokens, whole and streamed."""
    parameter_schema = {"type": "object", "properties": _TYPES}
    tools = [{"function": {"name": name, "parameters": parameter_schema}} for name, _ in (_FIRST, _SECOND)]
    allows_several = written.syntaxes[0].max_calls is None
    for calls in (
        [(_FIRST[0], _ROUND_TRIP_ARGUMENTS)],
        [(_FIRST[0], _ROUND_TRIP_ARGUMENTS), (_SECOND[0], {}), (_SECOND[0], {"key_b": 1})][: 3 * allows_several],
    ):
        turn = probe.turn(calls=calls)
        prompt = _common_prefix(probe.prompt, turn)
        text = _response(probe, turn, prompt)
        ids = probe.tokenizer.encode(text)
        if probe.tokenizer.decode(ids, keep_special=True) == text:  # else a small vocabulary can't write the probe
            text = response_text(probe.tokenizer, ids, written)
        opened = begins_inside_reasoning(prompt, written)
        message = parse_output(text, written, calls=True, opened=opened, tools=tools)
        if [call.meaning for call in message.calls] != [(name, canonical_value(args)) for name, args in calls]:
            return False
        if any("".join(settled_parts(text[:end], written, calls=True, opened=opened)) for end in range(len(text))):
            return False
    return True


# --- texts that are compared; no mark is cut in two -------------------------------------------------------------------


def _common_prefix(text: str, other: str) -> str:
    """Return the common prefix of two texts, which ends before an open mark."""
    size = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return _OPEN_MARK.sub("", text[:size])


def _common_suffix(first: str, second: str) -> str:
    """Return the common suffix of two texts, which begins after a mark that it would cut."""
    size = min(len(first), len(second))
    size = next((n for n in range(size) if first[-n - 1] != second[-n - 1]), size)
    suffix = first[len(first) - size :]
    cuts_mark = any(_OPEN_MARK.search(text[: len(text) - size]) for text in (first, second))
    return suffix.partition(">")[2] if cuts_mark else suffix


def _after_prompt(text: str, prompt: str) -> str:
    return text[len(_common_prefix(prompt, text)) :]
