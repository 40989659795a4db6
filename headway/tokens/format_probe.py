"""Finds out how a chat template writes tool calls, reasoning and content: probes are rendered and compared.

Two calls that differ in one part show what stands around that part. What is found is kept only if it reads the
template's own calls back, whole and token by token.
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
    certain,
    kept_ids,
    parse_output,
    response_text,
)
from headway.tokens.tokenizer import Tokenizer

_FIRST = "probe_first", {"key_a": 71001, "key_b": 71002}
_SECOND = "probe_second", {"key_c": 71003}
_ASKED = {"role": "user", "content": "QUESTION"}
_SAID, _THOUGHT, _VALUE = "PROBED CONTENT", "PROBED REASONING", "PROBED_VALUE"
_THINKS = re.compile(r"[<\[][^<>\[\]\s/]*(?:think|thought|reason)[^<>\[\]\s]*[>\]]", re.IGNORECASE)
_OPEN_MARK = re.compile(r"<[^<>]*$")
_THOUGHT_ENDS = re.compile(r"</[\w:|]*(?:think|thought|reason)\w*>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>")
_OPENINGS = {"<|END_THINKING|>": "<|START_THINKING|>", "<channel|>": "<|channel>thought"}  # else without the slash
_STRINGS = {key: {"type": "string", "description": "d"} for key in ("key_a", "key_b", "key_c")}
_BACK = {"key_a": 'it\'s "a" <b>\n2', "key_b": -7, "key_c": {"d": [1.5, "e", {}]}}
_TYPES = {"key_a": {"type": "string"}, "key_b": {"type": "integer"}, "key_c": {"type": "object"}}
_VARIABLES = {"strftime_now": lambda _: "today"}  # no date in what is found
UNKNOWN = (
    "the model's chat template writes tool calls in no form that is known here; endpoint.tools sets one, or 'none': "
    "calls stay in the answer's text"
)
Call = tuple[str, Mapping[str, Any]]  # name, arguments


def output_format(tokenizer: Tokenizer, tools: ToolFormat = "auto") -> OutputFormat:
    """The format that a tokenizer's chat template writes; ``tools`` sets the format of tool calls: a name of SYNTAXES,
    or "none". With "auto" it is found out; where it can't be, the format's ``unknown`` says so."""
    if tokenizer.chat_template is None:
        return _with_special(tokenizer, OutputFormat(tools="none" if tools == "auto" else tools))
    written = _turns_format(_Probe(tokenizer))
    if tools != "auto":
        return _with_special(tokenizer, replace(written, tools=tools))
    for form in (_Probe(tokenizer), _Probe(tokenizer, ids="named")):
        found = _call_syntax(form, written)
        names = [name for name in SYNTAXES if found is None or _alike(found, SYNTAXES[name])]
        for name in names or ["template"]:
            own = SYNTAXES.get(name, ()) if found is None else (found, *SYNTAXES.get(name, ()))
            tried = replace(written, tools=name, found=own)
            if reads_back(form, tried := _with_special(tokenizer, tried)):
                taken = form.ids == "named" or replace(form, ids="long").turn(calls=[_FIRST])
                return replace(tried, ids="any" if taken else "nine")
    return _with_special(tokenizer, replace(written, unknown=UNKNOWN))


def _with_special(tokenizer: Tokenizer, written: OutputFormat) -> OutputFormat:
    marks = [(tokenizer.token(i) or "", i) for i in kept_ids(tokenizer, written)]
    return replace(written, special=tuple(sorted(marks)))


def _alike(found: CallSyntax, known: Sequence[CallSyntax]) -> bool:
    """Whether a grammar is one of these, by its marks and by how it writes arguments."""

    def shape(one: CallSyntax) -> tuple[Any, ...]:
        return one.marks, one.keys, one.named_ids, one.pairs and one.pairs.before.strip()

    return any(shape(one) == shape(found) for one in known)


@dataclass(frozen=True)
class _Probe:
    """Renderings of made-up turns of the assistant."""

    tokenizer: Tokenizer
    ids: str = "nine"  # ids of calls: of nine letters and digits, "long", or "named": they hold the name

    def turn(self, content: str = "", calls: Sequence[Call] = (), thought: str = "") -> str:
        """The assistant's turn, with its role's mark; "": the template refuses it."""
        message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": thought}
        if calls:
            message["tool_calls"] = [
                {
                    "id": self.call_id(name, number),
                    "type": "function",
                    "function": {"name": name, "arguments": given},
                }
                for number, (name, given) in enumerate(calls)
            ]
        return self._rendered([_ASKED, message], asking=False)

    @property
    def tools(self) -> list[dict[str, Any]]:
        parameters = {"type": "object", "properties": _STRINGS}
        functions = [{"name": name, "description": "d", "parameters": parameters} for name, _ in (_FIRST, _SECOND)]
        return [{"type": "function", "function": function} for function in functions]

    def call_id(self, name: str, number: int) -> str:
        named = {"nine": f"probe000{number}", "long": f"call_probe_000{number}", "named": f"functions.{name}:{number}"}
        return named[self.ids]

    @property
    def prompt(self) -> str:
        """The text that asks for the assistant's turn."""
        return self._rendered([_ASKED], asking=True)

    @property
    def begun(self) -> str:
        """`prompt` without marks of reasoning."""
        return _THINKS.split(self.prompt, maxsplit=1)[0]

    def _rendered(self, messages: list[dict[str, Any]], asking: bool) -> str:
        try:
            before, text = (
                self.tokenizer.render_messages(some, tools=self.tools, add_generation_prompt=last, variables=_VARIABLES)
                for some, last in (([_ASKED], False), (messages, asking))
            )
        except ConfigurationError:
            return ""
        return _behind(text, before)


def _turns_format(probe: _Probe) -> OutputFormat:
    """How reasoning and content are written."""
    thought = ("", "")
    if probe.tokenizer.templates.reads_reasoning(probe.tools):  # else it would be in the content, between our marks
        turns = (probe.turn(_SAID, thought=_THOUGHT), probe.turn("", [_FIRST], _THOUGHT))
        opened = [_behind(turn, probe.begun).partition(_THOUGHT) for turn in turns if _THOUGHT in turn]
        if opened:
            rests = [rest.partition(_SAID)[0] for _, _, rest in opened]
            closing = re.sub(r"\s+[^\s>]*$", "", _shared(*rests)) if len(rests) == 2 else rests[0]
            if _SAID not in opened[0][2]:  # without content to end it: one mark
                closing = (re.findall(r"<[^<>]*>|\[[^\[\]]*\]", closing) or [""])[0]
            thought = (opened[0][0].strip(), closing.strip())
    source = probe.tokenizer.chat_template or ""
    if not all(thought):
        ends = _THOUGHT_ENDS.search(source)
        thought = (_OPENINGS.get(ends[0], ends[0].replace("/", "", 1)), ends[0]) if ends else ("", "")
    reasoning = all(thought)
    lead = _behind(probe.turn(_SAID), probe.begun).partition(_SAID)
    mark = (lead[0].split(thought[1])[-1] if reasoning else lead[0]).strip() if lead[1] else ""
    special = {probe.tokenizer.token(i) or "" for i in probe.tokenizer.special_ids}
    if not re.sub("|".join(map(re.escape, sorted(special - {""}))) or "(?!)", "", mark).strip():
        mark = ""  # nothing is left of it in decoded text
    return OutputFormat(
        reasoning=reasoning,
        thought=thought if reasoning else OutputFormat.thought,
        content_mark=mark,
    )


class _Place(NamedTuple):
    """A call in a rendered turn: what is its own, but for its arguments, and where."""

    start: int
    end: int
    head: str
    tail: str


def _call_syntax(probe: _Probe, written: OutputFormat) -> CallSyntax | None:
    """The grammar of calls that two probes show; None: none is seen."""
    calls = [_FIRST, _SECOND]
    body = _body(probe, written, calls)
    if _SECOND[0] not in body and body.count(CALL_ID) < 2:
        calls = [_FIRST]
        body = _body(probe, written, calls)
    pairs, keys = None, _keys(body)
    if _FIRST[0] not in body and probe.ids != "named":
        return None
    places = _json_places(body, calls, keys)
    if not places:
        pairs, places = _pairs(probe, written, body, calls)
    if not places:
        return None
    before, behind = body[: places[0].start], body[places[-1].end :]
    opening = between = closing = ""
    if len(calls) == 2:
        amid = body[places[0].end : places[1].start]
        head = _shared_end(before, amid)
        tail = _shared(amid[: len(amid) - len(head)], behind)
        opening, between, closing = before.removesuffix(head), amid.removesuffix(head)[len(tail) :], behind[len(tail) :]
        before, behind = head, tail
    said = probe.turn(_SAID, calls[:1])
    return CallSyntax(
        opening=opening,
        head=before + places[0].head,
        tail=places[0].tail + behind,
        between=between,
        closing=closing,
        keys=keys,
        pairs=pairs,
        named_ids=probe.ids == "named",
        most=None if len(calls) == 2 else 1,
        content_behind=-1 < said.find(_FIRST[0]) < said.find(_SAID),
    )


def _body(probe: _Probe, written: OutputFormat, calls: Sequence[Call]) -> str:
    """A turn of calls alone, from behind its role's mark and reasoning to its end, with the ids as CALL_ID."""
    text = _response(probe, probe.turn(calls=calls), probe.begun)
    lead = text.partition(_FIRST[0])[0].rpartition(written.thought[1])[0] if written.reasoning else ""
    text = text[len(lead) :].removeprefix(written.thought[1])
    for number, (name, _) in enumerate(calls):
        text = text.replace(probe.call_id(name, number), CALL_ID)
    return text


def _response(probe: _Probe, turn: str, prompt: str) -> str:
    """The part of a turn that a model writes behind a prompt, without the turn's end."""
    text = _behind(turn, prompt)
    text = text.removesuffix(_shared_end(text, probe.turn(_SAID).partition(_SAID)[2]))
    ends = [text.find(end) for i in probe.tokenizer.stop_ids if (end := probe.tokenizer.token(i))]
    return text[: min((at for at in ends if at >= 0), default=len(text))]


def _keys(body: str) -> tuple[str, str] | None:
    """The keys of name and arguments in the JSON object that the first call is; None: it is none."""
    for _, _, value in _objects(body):
        for level in (value, *value.values()):
            if isinstance(level, dict):
                found = [key for part in _FIRST for key, own in level.items() if own == part]
                if len(found) == 2:
                    return found[0], found[1]
    return None


def _objects(body: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The JSON objects in a text, inner ones too, with their places."""
    for brace in re.finditer("{", body):
        with contextlib.suppress(ValueError):
            value, end = JSON.raw_decode(body, brace.start())
            yield brace.start(), end, value


def _json_places(body: str, calls: Sequence[Call], keys: tuple[str, str] | None) -> list[_Place]:
    """Where the calls are whose arguments are JSON objects."""
    places, at, named_names = list[_Place](), 0, _FIRST[0] in body
    for name, given in calls:
        inner = next(((start, end) for start, end, value in _objects(body) if value == given and start >= at), None)
        outer = [(start, end) for start, end, _ in _objects(body) if keys and inner and start < inner[0] < end]
        named = body.find(name if named_names else CALL_ID, at)
        if inner is None or (keys and not outer) or named < 0:
            return []
        start, end = outer[0] if keys else (named, inner[1])
        places.append(_Place(start, end, _slots(body[start : inner[0]], name), _slots(body[inner[1] : end], name)))
        at = end
    if keys and len({place.head for place in places}) == 2:  # calls are numbered
        places = [p._replace(head=re.sub(r'"\d+"', f'"{CALL_ID}"', p.head)) for p in places]
    return places


def _slots(text: str, name: str) -> str:
    return text.replace(name, NAME)


def _pairs(probe: _Probe, written: OutputFormat, body: str, calls: Sequence[Call]) -> tuple[Pairs | None, list[_Place]]:
    """How arguments are written one by one, and where such calls are."""
    pieces, at = list[str](), 0  # what stands between name, keys and values
    for name, given in calls:
        first_key = body.find(next(iter(given)), at)
        named = body.rfind(name, at, max(first_key, 0))
        if first_key < 0 or named < 0:
            return None, []
        for known in (name, *(str(part) for pair in given.items() for part in pair)):
            place = body.find(known, named if known == name else at)
            if place < 0:
                return None, []
            pieces.append(body[at:place])
            at = place + len(known)
    head, assign, amid = pieces[1:4]
    before = _shared_end(head, amid)
    end = _shared(amid[: len(amid) - len(before)], body[at:])
    places, at = list[_Place](), 0
    for name, given in calls:
        start, values = body.index(name, at), [str(value) for value in given.values()]
        args = body.index(next(iter(given)), start) - len(before)
        at = body.index(values[-1], args) + len(values[-1]) + len(end)
        places.append(_Place(start, at, _slots(body[start:args], name), ""))
    texts = [_body(probe, written, [(_FIRST[0], {"key_a": value})]) for value in (_VALUE, 71001, "\\")]
    as_text, plain = (text.partition("key_a")[2] for text in texts[:2])
    assign_text, quote = as_text.partition(_VALUE)[0], as_text.partition(_VALUE)[2]
    end_plain = plain.partition("71001")[2]
    quote = quote.removesuffix(end_plain) if quote.endswith(end_plain) else ""
    pairs = Pairs(
        before=before,
        assign=assign,
        end=end,
        separator=amid[len(end) : len(amid) - len(before)],
        assign_text="" if assign_text == assign else assign_text,
        quote=quote,
        escapes=bool(quote) and "\\\\" in texts[2],
    )
    return pairs, places


def reads_back(probe: _Probe, written: OutputFormat) -> bool:
    """Whether calls are parsed as they were rendered, from tokens, whole and streamed."""
    types = {"type": "object", "properties": _TYPES}
    tools = [{"function": {"name": name, "parameters": types}} for name, _ in (_FIRST, _SECOND)]
    several = written.syntaxes[0].most is None
    for calls in (
        [(_FIRST[0], _BACK)],
        [(_FIRST[0], _BACK), (_SECOND[0], {}), (_SECOND[0], {"key_b": 1})][: 3 * several],
    ):
        turn = probe.turn(calls=calls)
        prompt = _shared(probe.prompt, turn)
        text = _response(probe, turn, prompt)
        ids = probe.tokenizer.encode(text)
        if probe.tokenizer.decode(ids, keep_special=True) == text:  # else a small vocabulary can't write the probe
            text = response_text(probe.tokenizer, ids, written)
        opened = begins_inside_reasoning(prompt, written)
        message = parse_output(text, written, calls=True, opened=opened, tools=tools)
        if [call.meaning for call in message.calls] != [(name, canonical_value(given)) for name, given in calls]:
            return False
        if any("".join(certain(text[:end], written, calls=True, opened=opened)) for end in range(len(text))):
            return False
    return True


# --- texts that are compared; no mark is cut in two -------------------------------------------------------------------


def _shared(one: str, other: str) -> str:
    """The beginning that both texts have."""
    size = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return _OPEN_MARK.sub("", one[:size])


def _shared_end(one: str, other: str) -> str:
    """The end that both texts have."""
    size = min(len(one), len(other))
    size = next((n for n in range(size) if one[-n - 1] != other[-n - 1]), size)
    end = one[len(one) - size :]
    cut = any(_OPEN_MARK.search(text[: len(text) - size]) for text in (one, other))
    return end.partition(">")[2] if cut else end


def _behind(text: str, prompt: str) -> str:
    return text[len(_shared(prompt, text)) :]
