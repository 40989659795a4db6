"""Grammars of responses, compiled for a tokenizer, and their masks over its vocabulary, token by token.

A mask depends on the grammar and the bytes of tokens alone, so any process that has both can recompute the engine's.

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

from headway.tokens.grammar_schemas import supported_schema
from headway.tokens.quoted_lark import quoted_lark
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.trial_compilation import TRIAL_S, grammar_trial

MOST_CHARACTERS = 1 << 17  # of a grammar: the library's time for one with thousands of properties is quadratic
_MOST_COMPILED = 128  # grammars in a cache
_MOST_CACHED_CHARACTERS = 1 << 21  # of their texts together: compiled, a character takes some hundred bytes
_FEW_STATES = 4_000  # lexer states of a cached grammar
_MOST_LARGE = 4  # cached grammars that were compiled again because their states were used up
_MOST_STATES = 40_000  # lexer states of those, and of a grammar that is compiled for a single response
STATE_BYTES = 500  # of a state, in long texts and in patterns with counts
MOST_CACHED_BYTES = (_MOST_COMPILED * _FEW_STATES + _MOST_LARGE * _MOST_STATES) * STATE_BYTES
_STEP_FUEL = 100_000  # limit of a mask's work, in the lexer's steps: 14,000 take about a millisecond
_PATIENT_FUEL = 5_000_000  # the same where no other response waits
# Whitespace between two parts of JSON is bounded: else a model that favours it would fill its response with it.
_SPACES = r"[\x20\x0A\x0D\x09]{1,32}"
# Any tokens whose bytes match may be sampled, not only those into which the tokenizer would split a forced text.
_OPTIONS = '{"no_forcing": true}'
_HEAD = f"%llguidance {_OPTIONS}\n"
GRAMMAR_VERSION = f"llguidance {llguidance.__version__} {_OPTIONS}"  # masks depend on it, and on texts and tokens
_SHORT = 200  # characters of the library's messages that are shown
_FAULT_SEARCH_S = 0.5  # limit of the search for the part of a schema at fault
_PARALLEL_ROWS = 8  # fewer masks are computed one after another: distributing them costs more
_DEAD_END = "no token of the vocabulary continues the grammar"
_MOST_THREADS = 8
_ANY = {"type": "object"}
_LIMIT = re.compile("fuel|too (big|large|complex)|max is|Unable to determine|limit")
LARK = "x-lark"  # keyword of a schema whose text matches a grammar; the text must be its object's only property
_SHARED = ("$defs", "definitions")  # keys of the whole schema that its parts refer to
_SCHEMAS_BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


class GrammarRefused(ValueError):
    """Raised for a grammar that can't be used, or a token outside of it; the message names the position."""


class GrammarExhausted(GrammarRefused):
    """Raised when the library's limits are reached, maybe by other responses: those of a compiled grammar share its
    states. With a grammar compiled for it alone (`Grammars.exclusive_matcher`) the response may continue."""


def json_grammar(schema: Mapping[str, Any] | bool | None = None) -> str:
    """Write the grammar of the JSON values of a schema; None: any JSON object. Properties come in the schema's order.
    Raises GrammarRefused for a schema that is no JSON; an invalid schema is refused when the text is compiled."""
    return f"start: {json_part(schema)}\n"


def json_part(schema: Mapping[str, Any] | bool | None = None, *, lenient: bool = False) -> str:
    """Write a JSON schema as a part of a grammar in llguidance's dialect of Lark. ``lenient``: unknown keywords are
    ignored. Raises GrammarRefused as `json_grammar`."""
    schema = _ANY if schema is None else schema
    if not isinstance(schema, Mapping | bool):
        raise GrammarRefused(f"a JSON schema is an object or a boolean, not {type(schema).__name__}")
    if not isinstance(schema, bool) and "x-guidance" not in schema:
        schema = {**schema, "x-guidance": {"whitespace_pattern": _SPACES, **({"lenient": True} if lenient else {})}}
    if lark_part := _lark_of(schema):
        return lark_part
    try:
        return f"%json {json.dumps(_narrowed(schema), allow_nan=False, separators=(',', ':'))}"
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarRefused(f"the JSON schema is no JSON: {error}") from None


def _lark_of(schema: Any) -> str:
    """Write the grammar of an object whose only text matches a grammar in Lark; "" for any other schema."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    for name, property_schema in properties.items() if isinstance(properties, Mapping) and len(properties) == 1 else ():
        if isinstance(property_schema, Mapping) and isinstance(property_schema.get(LARK), str):
            try:
                lark_body = quoted_lark(property_schema[LARK])
            except ValueError as error:
                raise GrammarRefused(f"grammar: {error}") from None
            opening = json.dumps(f'{{{json.dumps(name)}: "')
            return f'{opening} %lark {{\n{lark_body}\n}} "\\"}}"'
    return ""


def _narrowed(schema: Any) -> Any:
    """Rewrite a schema, nested ones too, for the library; it allows the same values or fewer. Vacuous keywords go and
    patterns lose their lookaheads (`supported_schema`). Exclusive bounds of a number that are less than 1 apart move
    inwards by a millionth of that: the library would allow such a bound itself, and any number where they are equal."""
    if not isinstance(schema, Mapping):
        return schema
    schema = supported_schema(schema)
    narrowed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            narrowed[key] = {name: _narrowed(child) for name, child in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            narrowed[key] = [_narrowed(child) for child in value]
        else:
            narrowed[key] = _narrowed(value) if key in _SCHEMAS else value
    open_low, open_high = narrowed.get("exclusiveMinimum"), narrowed.get("exclusiveMaximum")
    low = max((n for n in (open_low, narrowed.get("minimum")) if _is_number(n)), default=-math.inf)
    high = min((n for n in (open_high, narrowed.get("maximum")) if _is_number(n)), default=math.inf)
    if 0 <= high - low < 1 and (low == open_low or high == open_high):
        margin = max((high - low) * 1e-6, 1e-12)
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            narrowed.pop(keyword, None)
        narrowed |= {"minimum": low + margin * (low == open_low), "maximum": high - margin * (high == open_high)}
    return narrowed


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Matcher:
    """The position of one response in its grammar; not to be used by two threads at once."""

    def __init__(self, inner: LLMatcher, words: int, stop_ids: frozenset[int], exclusive: bool) -> None:
        self.inner = inner
        self.exclusive = exclusive  # no other response shares its states
        self.tokens = 0  # number of tokens so far
        self.finished = False  # the response ended with a stop token
        self.words = words  # 32-bit words of a mask
        self._stop_ids = stop_ids

    @property
    def ended(self) -> bool:
        """Whether only a stop token may follow."""
        return self.inner.is_stopped()

    def allowed(self) -> NDArray[np.uint32]:
        """Compute the mask of the tokens that may follow, [w]. Raises GrammarRefused if none may, GrammarExhausted."""
        masks = np.empty((1, self.words), np.uint32)
        for error in fill_masks([(self, 0)], masks).values():
            raise error
        return masks[0]

    def advance(self, token: int) -> bool:
        """Append a token; return whether it ended the response. Raises GrammarRefused for a token that isn't allowed
        here, and GrammarExhausted where following it exceeds the library's limits."""
        if self.finished or not self.inner.consume_token(token):
            reason = _message(self.inner.get_error())
            if self.finished or "satisfy the grammar" in reason:
                raise GrammarRefused(f"token {token} at place {self.tokens} of the response is outside its grammar")
            raise GrammarExhausted(f"grammar, at place {self.tokens} of the response: {reason}")
        self.tokens += 1
        self.finished = token in self._stop_ids
        return self.finished


class _Compiled(NamedTuple):
    """A cached grammar, or the error of its compilation; neither where its states were used up."""

    outcome: LLMatcher | GrammarRefused | None
    large: bool


class Grammars:
    """The grammars of one tokenizer, compiled when they are first needed; the last ones used are cached.

    Example::

        matcher = Grammars(tokenizer, model.vocabulary).matcher(json_grammar({"type": "integer"}))
        matcher.advance(allowed_ids(matcher.allowed())[0])
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int | None = None, *, patient: bool = False) -> None:
        """``vocabulary``: size of the model's vocabulary; ids without a text are never allowed. ``patient``: masks may
        take long, since no other response waits for them."""
        self._tokenizer = tokenizer
        self._fuel = _PATIENT_FUEL if patient else _STEP_FUEL
        self.vocabulary = tokenizer.vocabulary_size if vocabulary is None else vocabulary
        self.words = -(-self.vocabulary // 32)
        self.stop_ids = frozenset(i for i in tokenizer.stop_ids if i < self.vocabulary)
        self._inner: LLTokenizer | None = None
        # By text, the last used last. A matcher is copied for each response, and an error is raised again.
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._lock = threading.Lock()  # around the cache
        self._compiling = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def matcher(self, text: str) -> Matcher:
        """Return a matcher at the beginning of a response, after compiling its grammar if that isn't kept. Raises
        GrammarRefused."""
        compiled = self._cached(text)
        if compiled is None:
            with self._compiling:
                compiled = self._cached(text) or self._compile_and_cache(text)
        return self._matcher_from(compiled)

    def exclusive_matcher(self, text: str, ids: Sequence[int]) -> Matcher:
        """Return a matcher after the tokens ``ids``, of a grammar compiled for it alone. Raises GrammarRefused, and
        GrammarExhausted where the limits are reached even so."""
        with self._compiling:
            compiled = self._compile(text, True)
        return _advanced(self._matcher_from(compiled, exclusive=True), ids)

    def masks(self, text: str, ids: Sequence[int]) -> Iterator[NDArray[np.uint32]]:
        """Yield, for each of a response's tokens, the mask that it was sampled under, [w]. Raises GrammarRefused, as
        `Matcher`, for ids outside the grammar, and GrammarExhausted as `exclusive_matcher`."""
        matcher = self.matcher(text)
        for position, token in enumerate(ids):
            try:
                mask = matcher.allowed()
                matcher.advance(token)
            except GrammarExhausted:
                matcher = self.exclusive_matcher(text, ids[:position])
                mask = matcher.allowed()
                matcher.advance(token)
            yield mask

    def start(self, text: str, ids: Sequence[int] = (), *, exclusive: bool = False) -> Future[Matcher]:
        """Prepare a matcher after the tokens ``ids`` in a separate thread of low priority, one grammar after another.
        The future is done at once where the grammar is cached and ``ids`` is empty. ``exclusive``, or where the states
        are used up: the grammar is compiled for this matcher alone."""
        if not ids and not exclusive and (compiled := self._cached(text)) is not None:
            future: Future[Matcher] = Future()
            try:
                future.set_result(self._matcher_from(compiled))
            except GrammarRefused as error:
                future.set_exception(error)
            return future
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "grammars", _lower_priority)
        return self._pool.submit(self._advanced_matcher, text, ids, exclusive)

    def _advanced_matcher(self, text: str, ids: Sequence[int], exclusive: bool) -> Matcher:
        if not exclusive:
            with contextlib.suppress(GrammarExhausted):
                return _advanced(self.matcher(text), ids)
        return self.exclusive_matcher(text, ids)

    def _matcher_from(self, compiled: LLMatcher | GrammarRefused, *, exclusive: bool = False) -> Matcher:
        if isinstance(compiled, GrammarRefused):
            raise GrammarRefused(*compiled.args)
        return Matcher(compiled.deep_copy(), self.words, self.stop_ids, exclusive)

    def __len__(self) -> int:
        """Return the number of cached grammars."""
        return len(self._compiled)

    def _cached(self, text: str) -> LLMatcher | GrammarRefused | None:
        with self._lock:
            if (compiled := self._compiled.get(text)) is None:
                return None
            self._compiled.move_to_end(text)
            if isinstance(compiled.outcome, LLMatcher) and _states_exhausted(compiled.outcome):
                compiled = self._compiled[text] = _Compiled(None, large=True)
            return compiled.outcome

    def _compile_and_cache(self, text: str) -> LLMatcher | GrammarRefused:
        """Compile a grammar and cache it: with few states, or with many once those didn't suffice."""
        previous, cache = self._compiled.get(text), self._compiled
        is_large = previous is not None and previous.large
        outcome = self._compile(text, is_large)
        if not is_large and isinstance(outcome, GrammarExhausted):
            is_large, outcome = True, self._compile(text, True)
        if len(text) > MOST_CHARACTERS:
            return outcome
        with self._lock:
            cache.pop(text, None)
            cache[text] = _Compiled(outcome, is_large)
            for grammar_text in [grammar_text for grammar_text in cache if cache[grammar_text].large][:-_MOST_LARGE]:
                del cache[grammar_text]
            while len(cache) > _MOST_COMPILED or sum(map(len, cache)) > _MOST_CACHED_CHARACTERS:
                cache.popitem(last=False)
        return outcome

    def _compile(self, text: str, large: bool) -> LLMatcher | GrammarRefused:
        if len(text) > MOST_CHARACTERS:
            return GrammarRefused(f"a grammar of {len(text)} characters: at most {MOST_CHARACTERS} are valid")
        if self._inner is None:
            if not self.stop_ids:
                return GrammarRefused(f"the model's {self.vocabulary} tokens have no stop token to end a response with")
            wrapped_texts = TokenizerWrapper(_Texts(self._tokenizer, self.vocabulary, self.stop_ids))
            self._inner = LLTokenizer(wrapped_texts, eos_token=sorted(self.stop_ids))
        if not grammar_trial().compiles_safely(_HEAD + text):
            return GrammarRefused(
                f"grammar: it can't be compiled within {TRIAL_S:.0f} s and a gibibyte: make it simpler"
            )
        limits = _limits(_MOST_STATES if large else _FEW_STATES, self._fuel)
        matcher = LLMatcher(self._inner, _HEAD + text, log_level=0, limits=limits)
        if not (error_text := matcher.get_error()):
            matcher.compute_bitmask()  # of the first token: the states that it needs are then computed for all copies
            error_text = matcher.get_error()
        if "too many states" in error_text:
            return GrammarExhausted(f"grammar: {_message(error_text)}")
        return GrammarRefused(_located_error(text, error_text)) if error_text else matcher


def _advanced(matcher: Matcher, ids: Sequence[int]) -> Matcher:
    """Advance a matcher by ``ids``. Its next mask is computed, too: that takes more states than advancing."""
    for token in ids:
        matcher.advance(token)
    if ids:
        matcher.allowed()
    return matcher


def _states_exhausted(compiled: LLMatcher) -> bool:
    """Whether responses have used up the states that a compiled grammar may have: all of its copies share them."""
    first_copy = compiled.deep_copy()
    first_copy.compute_bitmask()
    return first_copy.is_error()


class _Texts:
    """The tokenizer in the form that llguidance reads: the bytes of each id."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: frozenset[int]) -> None:
        token_bytes = tokenizer.vocabulary_bytes()[:vocabulary]
        self.tokens = token_bytes + [b""] * (vocabulary - len(token_bytes))
        self.eos_token_id = min(stop_ids)
        self.special_token_ids = sorted(i for i in tokenizer.special_ids | stop_ids if i < vocabulary)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return no tokens: a text is never split, since none is forced."""
        return []


def fill_masks(rows: Sequence[tuple[Matcher, int]], masks: NDArray[np.uint32]) -> dict[int, GrammarRefused]:
    """Write the mask of the tokens that may follow in each response into its row of ``masks`` [n, w], contiguous.
    Return an error, by the row's number, where no token may follow: that row's mask is undefined."""
    assert masks.flags.c_contiguous
    row_bytes = masks.shape[1] * masks.itemsize
    address, pool = masks.ctypes.data, _threads() if len(rows) >= _PARALLEL_ROWS else None
    if pool is not None:
        pool.unsafe_compute_mask_ptr([(matcher.inner, row) for matcher, row in rows], address, row_bytes, len(masks))
    else:
        for matcher, row in rows:
            matcher.inner.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
    errors, has_allowed = dict[int, GrammarRefused](), (masks != 0).any(axis=1)
    for matcher, row in rows:
        if matcher.finished or matcher.inner.is_error() or not has_allowed[row]:
            reason = "the response has ended" if matcher.finished else _message(matcher.inner.get_error()) or _DEAD_END
            error_class = GrammarRefused if matcher.finished or reason == _DEAD_END else GrammarExhausted
            errors[row] = error_class(f"grammar, at place {matcher.tokens} of the response: {reason}")
    return errors


def allowed_ids(mask: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Return the ids that a mask [w] allows, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).astype(np.int32)


@functools.cache
def _threads() -> LLExecutor | None:
    """Return the pool of threads for many masks, one for each core of this process; None where it has one core."""
    core_count = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    return LLExecutor(core_count) if core_count > 1 else None


def _limits(states: int, fuel: int) -> LLParserLimits:
    """Make the limits of a grammar's compilation, of a mask's work, and of the states that both may hold."""
    return LLParserLimits(max_lexer_states=states, step_lexer_fuel=fuel, max_grammar_size=100_000, verbose_errors=False)


def _lower_priority() -> None:
    """Lower this thread's priority to about a tenth of a core that other threads compute on."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


# --- errors of a grammar ------------------------------------------------------------------------------------------


def _located_error(text: str, error: str) -> str:
    """Return the library's message, with the part of the JSON schema that is at fault where there is one."""
    reason, decoder = _message(error), json.JSONDecoder()
    if _LIMIT.search(reason):  # a grammar that took long isn't tried again in parts
        return f"grammar: {reason}"
    for json_match in re.finditer(r"%json\s*", text):
        try:
            schema, _ = decoder.raw_decode(text, json_match.end())
        except (ValueError, RecursionError):
            continue
        if fault := _fault(schema):
            return f"JSON schema{_fault_location(schema, fault)}: {fault}"
    return f"grammar: {reason}"


def _fault(schema: Any) -> str:
    """Return the reason why a schema can't be compiled for any tokenizer; "": it can."""
    return _message(
        LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}", limits=_limits(_MOST_STATES, _STEP_FUEL))
    )


def _fault_location(schema: Any, fault: str) -> str:
    """Find a schema's innermost part with this fault; return " at" and its JSON pointer, "" for the whole schema."""
    definitions = {key: schema[key] for key in _SHARED if isinstance(schema, dict) and key in schema}
    pointer, deadline_s = "", time.monotonic() + _FAULT_SEARCH_S
    while True:
        for part, part_pointer in itertools.takewhile(lambda _: time.monotonic() < deadline_s, _parts(schema)):
            if _fault({**definitions, **part} if isinstance(part, dict) else part) == fault:
                schema, pointer = part, pointer + part_pointer
                break
        else:
            return f" at {pointer}" if pointer else ""


def _parts(schema: Any) -> Iterator[tuple[Any, str]]:
    """Yield the schemas one level below, with their JSON pointers."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from ((part, f"/{key}/{name.replace('~', '~0').replace('/', '~1')}") for name, part in value.items())
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            yield from ((part, f"/{key}/{i}") for i, part in enumerate(value))
        elif key in _SCHEMAS:
            yield value, f"/{key}"


def _message(error: str) -> str:
    """Return a message of the library in one line, without the grammar's text and its parser's state."""
    error = re.split(r"\n\s*\d+ \| |\n<state>", error, maxsplit=1)[0]
    error = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?| <non-verbose/>$", "", " ".join(error.split()))
    if error == "NoExtensionBias":
        return _DEAD_END
    return error if len(error) <= _SHORT else error[:_SHORT] + " ..."
