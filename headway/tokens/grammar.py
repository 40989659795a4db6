"""Grammars of responses, compiled for a tokenizer, and their masks over its vocabulary, token by token.

A mask depends on the grammar and the bytes of tokens alone, so whoever has both computes the engine's masks again.

Shapes: n rows, w words of 32 bits, v vocabulary; bit i of a mask, from the lowest of the first word, is token i.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeGuard

import llguidance
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from headway.tokens.grammar_schemas import readable
from headway.tokens.grammar_trial import TRIAL_S, grammar_trial
from headway.tokens.quoted_lark import quoted_lark
from headway.tokens.tokenizer import Tokenizer

MOST_CHARACTERS = 1 << 17  # of a grammar: what the library takes for one with thousands of properties is quadratic
_MOST_COMPILED = 128  # grammars in a cache ...
_MOST_CACHED_CHARACTERS = 1 << 21  # ... of their texts together: compiled, a character takes some hundred bytes ...
_FEW_STATES = 4_000  # ... of the lexer's states in each ...
_MOST_LARGE = 4  # ... but for so many that were compiled again, because those were used up, ...
_MOST_STATES = 40_000  # ... which have so many, as one that is compiled for a single response
STATE_BYTES = 500  # of a state, as long texts and patterns that count have them
MOST_CACHED_BYTES = (_MOST_COMPILED * _FEW_STATES + _MOST_LARGE * _MOST_STATES) * STATE_BYTES
_STEP_FUEL = 100_000  # of a mask's work, in the lexer's steps: 14,000 take about a millisecond
_PATIENT_FUEL = 5_000_000  # where nobody else waits
# Whitespace between two parts of JSON is bounded: a model that likes it would else fill its response with it.
_SPACES = r"[\x20\x0A\x0D\x09]{1,32}"
# Any tokens whose bytes match may be sampled, not only those into which the tokenizer would split a forced text.
_OPTIONS = '{"no_forcing": true}'
_HEAD = f"%llguidance {_OPTIONS}\n"
GRAMMAR_VERSION = f"llguidance {llguidance.__version__} {_OPTIONS}"  # what masks depend on, beside texts and tokens
_SHORT = 200  # characters of the library's messages that are shown
_PLACE_S = 0.5  # in which parts of a schema are tried to find the one at fault
_PARALLEL_ROWS = 8  # fewer masks are computed one after another: handing them out costs more
_DEAD_END = "no token of the vocabulary goes on as the grammar wants"
_MOST_THREADS = 8
_ANY = {"type": "object"}
_LIMIT = re.compile("fuel|too (big|large|complex)|max is|Unable to determine|limit")
LARK = "x-lark"  # keyword of a text that matches a grammar, where it is all that an object has
_SHARED = ("$defs", "definitions")  # of the whole schema: its parts refer to them
_SCHEMAS_BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


class GrammarRefused(ValueError):
    """A grammar that can't be used, or a token outside of it; the message names the place."""


class GrammarExhausted(GrammarRefused):
    """The library's limits are reached, maybe by other responses, as those of a compiled grammar share the states that
    it may have: in a grammar compiled for this response alone (`Grammars.alone`) it may go on."""


def json_grammar(schema: Mapping[str, Any] | bool | None = None) -> str:
    """Text of the grammar for the JSON values of a schema; None: any JSON object. Properties come in the schema's
    order. Raises GrammarRefused for what is no JSON; what is no schema is found when the text is compiled."""
    return f"start: {json_part(schema)}\n"


def json_part(schema: Mapping[str, Any] | bool | None = None, *, lenient: bool = False) -> str:
    """A JSON schema as a part of a grammar in llguidance's dialect of Lark. ``lenient``: keywords that it doesn't know
    are ignored. Raises GrammarRefused as `json_grammar`."""
    schema = _ANY if schema is None else schema
    if not isinstance(schema, Mapping | bool):
        raise GrammarRefused(f"a JSON schema is an object or a boolean, not {type(schema).__name__}")
    if not isinstance(schema, bool) and "x-guidance" not in schema:
        schema = {**schema, "x-guidance": {"whitespace_pattern": _SPACES, **({"lenient": True} if lenient else {})}}
    if lark := _lark_of(schema):
        return lark
    try:
        return f"%json {json.dumps(_narrowed(schema), allow_nan=False, separators=(',', ':'))}"
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarRefused(f"the JSON schema is no JSON: {error}") from None


def _lark_of(schema: Any) -> str:
    """The grammar of an object whose one text matches a grammar in Lark; "": the schema is of another kind."""
    names = schema.get("properties") if isinstance(schema, Mapping) else None
    for name, text in names.items() if isinstance(names, Mapping) and len(names) == 1 else ():
        if isinstance(text, Mapping) and isinstance(text.get(LARK), str):
            try:
                inner = quoted_lark(text[LARK])
            except ValueError as error:
                raise GrammarRefused(f"grammar: {error}") from None
            opening = json.dumps(f'{{{json.dumps(name)}: "')
            return f'{opening} %lark {{\n{inner}\n}} "\\"}}"'
    return ""


def _narrowed(schema: Any) -> Any:
    """The schema as the library reads it, by the same meaning or a narrower one. Keywords that say nothing go
    and patterns lose their lookaheads (`readable`). Exclusive bounds of a number that are less than 1 apart move
    inwards by a millionth of that: the library would take such a bound itself, and any number where they are equal."""
    if not isinstance(schema, Mapping):
        return schema
    schema = readable(schema)
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _narrowed(part) for name, part in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            found[key] = [_narrowed(part) for part in value]
        else:
            found[key] = _narrowed(value) if key in _SCHEMAS else value
    over, under = found.get("exclusiveMinimum"), found.get("exclusiveMaximum")
    low = max((n for n in (over, found.get("minimum")) if _is_number(n)), default=-math.inf)
    high = min((n for n in (under, found.get("maximum")) if _is_number(n)), default=math.inf)
    if 0 <= high - low < 1 and (low == over or high == under):
        step = max((high - low) * 1e-6, 1e-12)
        for exclusive in ("exclusiveMinimum", "exclusiveMaximum"):
            found.pop(exclusive, None)
        found |= {"minimum": low + step * (low == over), "maximum": high - step * (high == under)}
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Matcher:
    """The position of one response in its grammar; not to be used by two threads at once."""

    def __init__(self, inner: LLMatcher, words: int, stop_ids: frozenset[int], alone: bool) -> None:
        self.inner = inner
        self.alone = alone  # no other response shares its states
        self.tokens = 0  # so far
        self.finished = False  # it ended with a stop token
        self.words = words  # of its masks
        self._stop_ids = stop_ids

    @property
    def ended(self) -> bool:
        """Whether only a stop token may follow."""
        return self.inner.is_stopped()

    def allowed(self) -> NDArray[np.uint32]:
        """The mask of the tokens that may follow, [w]. Raises GrammarRefused where there is none, GrammarExhausted."""
        masks = np.empty((1, self.words), np.uint32)
        for error in fill_masks([(self, 0)], masks).values():
            raise error
        return masks[0]

    def advance(self, token: int) -> bool:
        """Append a token; whether it ended the response. Raises GrammarRefused for one that isn't allowed here, and
        GrammarExhausted where following it takes more than the library's limits."""
        if self.finished or not self.inner.consume_token(token):
            why = _message(self.inner.get_error())
            if self.finished or "satisfy the grammar" in why:
                raise GrammarRefused(f"token {token} at place {self.tokens} of the response is outside its grammar")
            raise GrammarExhausted(f"grammar, at place {self.tokens} of the response: {why}")
        self.tokens += 1
        self.finished = token in self._stop_ids
        return self.finished


class _Compiled(NamedTuple):
    """A grammar, or why there is none; neither where its states were used up."""

    found: LLMatcher | GrammarRefused | None
    large: bool


class Grammars:
    """The grammars of one tokenizer, compiled when they are first asked for; the last ones are kept.

    Example::

        matcher = Grammars(tokenizer, model.vocabulary).matcher(json_grammar({"type": "integer"}))
        matcher.advance(allowed_ids(matcher.allowed())[0])
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int | None = None, *, patient: bool = False) -> None:
        """``vocabulary``: the model's; ids without a text are never allowed. ``patient``: masks may take long, since no
        other response waits for them."""
        self._tokenizer = tokenizer
        self._fuel = _PATIENT_FUEL if patient else _STEP_FUEL
        self.vocabulary = tokenizer.vocabulary_size if vocabulary is None else vocabulary
        self.words = -(-self.vocabulary // 32)
        self.stop_ids = frozenset(i for i in tokenizer.stop_ids if i < self.vocabulary)
        self._inner: LLTokenizer | None = None
        # By text, the last used last. A matcher is copied for each response, an error raised again.
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._lock = threading.Lock()  # around the cache
        self._compiling = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def matcher(self, text: str) -> Matcher:
        """Return a matcher at the beginning of a response, after compiling its grammar if that isn't kept. Raises
        GrammarRefused."""
        found = self._kept(text)
        if found is None:
            with self._compiling:
                found = self._kept(text) or self._keep(text)
        return self._opened(found)

    def alone(self, text: str, ids: Sequence[int]) -> Matcher:
        """A matcher behind the tokens ``ids``, of a grammar compiled for it. Raises GrammarRefused, GrammarExhausted
        where the limits are reached even so."""
        with self._compiling:
            found = self._compile(text, True)
        return _behind(self._opened(found, alone=True), ids)

    def masks(self, text: str, ids: Sequence[int]) -> Iterator[NDArray[np.uint32]]:
        """The mask that each of a response's tokens was sampled under, [w]. Raises GrammarRefused, as `Matcher`, for
        ids that its grammar can't have produced, and GrammarExhausted as `alone`."""
        matcher = self.matcher(text)
        for place, token in enumerate(ids):
            try:
                mask = matcher.allowed()
                matcher.advance(token)
            except GrammarExhausted:
                matcher = self.alone(text, ids[:place])
                mask = matcher.allowed()
                matcher.advance(token)
            yield mask

    def start(self, text: str, ids: Sequence[int] = (), *, alone: bool = False) -> Future[Matcher]:
        """`matcher`, behind the tokens ``ids``, in a thread of its own: one grammar after another, and behind the
        machine's other work. At once where the grammar is kept and nothing is to be followed. ``alone``, or where the
        states are used up: of a grammar compiled for it."""
        if not ids and not alone and (found := self._kept(text)) is not None:
            future: Future[Matcher] = Future()
            try:
                future.set_result(self._opened(found))
            except GrammarRefused as error:
                future.set_exception(error)
            return future
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "grammars", _yield_to_others)
        return self._pool.submit(self._followed, text, ids, alone)

    def _followed(self, text: str, ids: Sequence[int], alone: bool) -> Matcher:
        if not alone:
            with contextlib.suppress(GrammarExhausted):
                return _behind(self.matcher(text), ids)
        return self.alone(text, ids)

    def _opened(self, found: LLMatcher | GrammarRefused, *, alone: bool = False) -> Matcher:
        if isinstance(found, GrammarRefused):
            raise GrammarRefused(*found.args)
        return Matcher(found.deep_copy(), self.words, self.stop_ids, alone)

    def __len__(self) -> int:
        """Grammars that are kept."""
        return len(self._compiled)

    def _kept(self, text: str) -> LLMatcher | GrammarRefused | None:
        with self._lock:
            if (one := self._compiled.get(text)) is None:
                return None
            self._compiled.move_to_end(text)
            if isinstance(one.found, LLMatcher) and _worn_out(one.found):
                one = self._compiled[text] = _Compiled(None, large=True)
            return one.found

    def _keep(self, text: str) -> LLMatcher | GrammarRefused:
        """Compile a grammar, with few states until that was seen not to do, and keep it."""
        before, kept = self._compiled.get(text), self._compiled
        large = before is not None and before.large
        found = self._compile(text, large)
        if not large and isinstance(found, GrammarExhausted):
            large, found = True, self._compile(text, True)
        if len(text) > MOST_CHARACTERS:
            return found
        with self._lock:
            kept.pop(text, None)
            kept[text] = _Compiled(found, large)
            for one in [one for one in kept if kept[one].large][:-_MOST_LARGE]:
                del kept[one]
            while len(kept) > _MOST_COMPILED or sum(map(len, kept)) > _MOST_CACHED_CHARACTERS:
                kept.popitem(last=False)
        return found

    def _compile(self, text: str, large: bool) -> LLMatcher | GrammarRefused:
        if len(text) > MOST_CHARACTERS:
            return GrammarRefused(f"a grammar of {len(text)} characters: {MOST_CHARACTERS} are the most")
        if self._inner is None:
            if not self.stop_ids:
                return GrammarRefused(f"the model's {self.vocabulary} tokens have no stop token to end a response with")
            texts = TokenizerWrapper(_Texts(self._tokenizer, self.vocabulary, self.stop_ids))
            self._inner = LLTokenizer(texts, eos_token=sorted(self.stop_ids))
        if not grammar_trial().survives(_HEAD + text):
            return GrammarRefused(
                f"grammar: it can't be compiled within {TRIAL_S:.0f} s and a gibibyte: make it simpler"
            )
        limits = _limits(_MOST_STATES if large else _FEW_STATES, self._fuel)
        inner = LLMatcher(self._inner, _HEAD + text, log_level=0, limits=limits)
        if not (error := inner.get_error()):
            inner.compute_bitmask()  # of the first token: what it needs is then computed for all copies
            error = inner.get_error()
        if "too many states" in error:
            return GrammarExhausted(f"grammar: {_message(error)}")
        return GrammarRefused(_explained(text, error)) if error else inner


def _behind(matcher: Matcher, ids: Sequence[int]) -> Matcher:
    """Advance a matcher. Its next mask is computed, too: that takes more states than following."""
    for token in ids:
        matcher.advance(token)
    if ids:
        matcher.allowed()
    return matcher


def _worn_out(compiled: LLMatcher) -> bool:
    """Whether responses have used up the states that a compiled grammar may have: all of its copies share them."""
    first = compiled.deep_copy()
    first.compute_bitmask()
    return first.is_error()


class _Texts:
    """The tokenizer as llguidance reads it: the bytes of each id."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: frozenset[int]) -> None:
        texts = tokenizer.vocabulary_bytes()[:vocabulary]
        self.tokens = texts + [b""] * (vocabulary - len(texts))
        self.eos_token_id = min(stop_ids)
        self.special_token_ids = sorted(i for i in tokenizer.special_ids | stop_ids if i < vocabulary)

    def __call__(self, text: bytes | str) -> list[int]:
        """Nothing is ever split into tokens: no text is forced."""
        return []


def fill_masks(rows: Sequence[tuple[Matcher, int]], masks: NDArray[np.uint32]) -> dict[int, GrammarRefused]:
    """Write the mask of what may follow in each response into its row of ``masks`` [n, w], contiguous; return an error
    for each row, by number, where nothing may follow: its mask is undefined."""
    assert masks.flags.c_contiguous
    row_bytes = masks.shape[1] * masks.itemsize
    start, threads = masks.ctypes.data, _threads() if len(rows) >= _PARALLEL_ROWS else None
    if threads is not None:
        threads.unsafe_compute_mask_ptr([(one.inner, row) for one, row in rows], start, row_bytes, len(masks))
    else:
        for matcher, row in rows:
            matcher.inner.unsafe_compute_mask_ptr(start + row * row_bytes, row_bytes)
    errors, some = dict[int, GrammarRefused](), (masks != 0).any(axis=1)
    for matcher, row in rows:
        if matcher.finished or matcher.inner.is_error() or not some[row]:
            why = "the response has ended" if matcher.finished else _message(matcher.inner.get_error()) or _DEAD_END
            kind = GrammarRefused if matcher.finished or why == _DEAD_END else GrammarExhausted
            errors[row] = kind(f"grammar, at place {matcher.tokens} of the response: {why}")
    return errors


def allowed_ids(mask: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The ids of a mask [w], ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).astype(np.int32)


@functools.cache
def _threads() -> LLExecutor | None:
    """The threads in which many masks are computed, as many as this process has cores; None: it has one."""
    cores = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    return LLExecutor(cores) if cores > 1 else None


def _limits(states: int, fuel: int) -> LLParserLimits:
    """Bounds of a grammar's compilation, of a mask's work, and of what both may hold."""
    return LLParserLimits(max_lexer_states=states, step_lexer_fuel=fuel, max_grammar_size=100_000, verbose_errors=False)


def _yield_to_others() -> None:
    """Give this thread a tenth of the core that others compute on."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


# --- what is wrong with a grammar ---------------------------------------------------------------------------------


def _explained(text: str, error: str) -> str:
    """The library's message, with the place in the JSON schema at fault where there is one."""
    message, decoder = _message(error), json.JSONDecoder()
    if _LIMIT.search(message):  # what took long isn't tried again in parts
        return f"grammar: {message}"
    for part in re.finditer(r"%json\s*", text):
        try:
            schema, _ = decoder.raw_decode(text, part.end())
        except (ValueError, RecursionError):
            continue
        if fault := _fault(schema):
            return f"JSON schema{_place(schema, fault)}: {fault}"
    return f"grammar: {message}"


def _fault(schema: Any) -> str:
    """Why a schema can't be compiled for any tokenizer; "": it can."""
    return _message(
        LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}", limits=_limits(_MOST_STATES, _STEP_FUEL))
    )


def _place(schema: Any, fault: str) -> str:
    """Where in a schema the innermost part with this fault is, as " at" and a JSON pointer; "": it is the whole."""
    shared = {key: schema[key] for key in _SHARED if isinstance(schema, dict) and key in schema}
    place, until = "", time.monotonic() + _PLACE_S
    while True:
        for part, where in itertools.takewhile(lambda _: time.monotonic() < until, _parts(schema)):
            if _fault({**shared, **part} if isinstance(part, dict) else part) == fault:
                schema, place = part, place + where
                break
        else:
            return f" at {place}" if place else ""


def _parts(schema: Any) -> Iterator[tuple[Any, str]]:
    """The schemas one level below, with their places."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from ((part, f"/{key}/{name.replace('~', '~0').replace('/', '~1')}") for name, part in value.items())
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            yield from ((part, f"/{key}/{i}") for i, part in enumerate(value))
        elif key in _SCHEMAS:
            yield value, f"/{key}"


def _message(error: str) -> str:
    """A message of the library in one line, without the grammar's text and its parser's state."""
    error = re.split(r"\n\s*\d+ \| |\n<state>", error, maxsplit=1)[0]
    error = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?| <non-verbose/>$", "", " ".join(error.split()))
    if error == "NoExtensionBias":
        return _DEAD_END
    return error if len(error) <= _SHORT else error[:_SHORT] + " ..."
