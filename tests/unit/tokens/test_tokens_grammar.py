"""Grammars: masks against brute force over a finite language, what is refused and where, bounded caches."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from grammar_walk import kept_masks
from llguidance import LLParserLimits
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from headway.runtime.nodes.handshake import software
from headway.tokens import grammar as module
from headway.tokens import trial_compilation
from headway.tokens.grammar import (
    GRAMMAR_VERSION,
    GrammarExhausted,
    GrammarRefused,
    Grammars,
    Matcher,
    allowed_ids,
    fill_masks,
    json_grammar,
)
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.trial_compilation import GrammarTrial

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PIECES = [
    "<s>",
    "<end>",
    "<stop>",
    '"',
    "a",
    "b",
    "ab",
    '"a',
    'b"',
    '"ab"',
    "1",
    "2",
    "12",
    "[",
    "]",
    "tr",
    "u",
    "e",
    "true",
]
PIECES += ["true]", "[t", ",", ":", "{", "}", '{"', '":', "c", "null", " ", "<x>"]


def tokenizer_of(pieces: list[str] = PIECES) -> Tokenizer:
    """Ids are the places in ``pieces``; "<...>" are special, "<end>" and "<stop>" end a response."""
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<s>"))
    backend.add_special_tokens([AddedToken(p, special=True) for p in pieces if p.startswith("<") and p != "<x>"])
    return Tokenizer(backend, [pieces.index("<end>"), pieces.index("<stop>")])


TOKENIZER = tokenizer_of()
END, STOP = TOKENIZER.stop_ids


def ids(matcher: Matcher) -> set[int]:
    return set(allowed_ids(matcher.allowed()).tolist())


def test_masks_are_those_of_brute_force_everywhere():
    """The tokens after which some text of the language still begins with what was said, and the end of a whole one."""
    values: list[Any] = ["ab", "b", "", 12, 1, [True], [], [True, True], None, {"a": 1, "c": [12]}]
    language = {json.dumps(value, separators=(",", ":")) for value in values}
    begins = {text[:n] for text in language for n in range(len(text) + 1)}
    text, grammars = json_grammar({"enum": values, **COMPACT}), Grammars(TOKENIZER, 40)
    states = [("", [])]
    seen = 0
    while states:
        said, sampled = states.pop()
        matcher = grammars.matcher(text)
        for token in sampled:
            matcher.advance(token)
        wanted = {i for i, piece in enumerate(PIECES) if i not in (0, END, STOP) and said + piece in begins}
        if not wanted and said not in language:  # "[t": no token is "r"
            with pytest.raises(GrammarRefused, match="no token"):
                matcher.allowed()
            continue
        assert ids(matcher) == wanted | ({END, STOP} if said in language else set()), said
        assert matcher.ended == (said in language and not wanted)
        states += [(said + PIECES[token], [*sampled, token]) for token in wanted]
        seen += 1
    assert seen > 60


def test_masks_beyond_the_tokenizer_are_empty_and_parallel_ones_are_the_same():
    grammars, texts = Grammars(TOKENIZER, 100), [json_grammar({"const": value}) for value in ("ab", 12, None)] * 8
    assert grammars.words == 4
    matchers = [grammars.matcher(text) for text in texts]
    masks = np.full((30, 4), 0xFFFFFFFF, np.uint32)
    assert fill_masks([(matcher, row + 3) for row, matcher in enumerate(matchers)], masks) == {}
    for matcher, mask in zip(matchers, masks[3:27], strict=True):
        assert (mask == matcher.allowed()).all()
        assert allowed_ids(mask).max() < len(PIECES)
    assert (masks[[0, 1, 2, 27, 28, 29]] == 0xFFFFFFFF).all()


def test_a_response_is_followed_to_its_end():
    matcher = Grammars(TOKENIZER).matcher(json_grammar({"type": "integer", "maximum": 2, "minimum": 1}))
    with pytest.raises(GrammarRefused, match="token 4 at place 0 "):
        Grammars(TOKENIZER).matcher(json_grammar({"type": "integer"})).advance(4)
    assert not matcher.ended
    matcher.advance(PIECES.index("2"))
    assert matcher.ended
    assert ids(matcher) == {END, STOP}
    matcher.advance(STOP)
    assert matcher.finished
    with pytest.raises(GrammarRefused, match="has ended"):
        matcher.allowed()
    with pytest.raises(GrammarRefused, match="place 2 "):
        matcher.advance(STOP)


def test_masks_are_computed_again_from_a_response():
    grammars, text = Grammars(TOKENIZER), json_grammar({"enum": ["ab", "b", 12], **COMPACT})
    response = [PIECES.index('"a'), PIECES.index('b"'), END]
    masks = kept_masks(grammars, text, response)
    assert [[PIECES[i] for i in allowed_ids(mask)] for mask in masks] == [
        ['"', '"a', '"ab"', "1", "12"],
        ["b", 'b"'],
        ["<end>", "<stop>"],
    ]
    assert kept_masks(grammars, text, []).shape == (0, grammars.words)
    with pytest.raises(GrammarRefused, match="token 13 at place 1 "):
        kept_masks(grammars, text, [PIECES.index('"a'), PIECES.index("[")])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "JSON schema: Invalid type: objekt"),
        (
            {"properties": {"a": {"items": {"type": "strng"}}}},
            "JSON schema at /properties/a/items: Invalid type: strng",
        ),
        (
            {"$defs": {"x/y": {"anyOf": [{"type": "null"}, {"uniqueItems": True}]}}, "$ref": "#/$defs/x~1y"},
            'JSON schema at /$defs/x~1y/anyOf/1: Unimplemented keys: ["uniqueItems"]',
        ),
        ({"properties": {"a": 3}}, "JSON schema at /properties/a: schema must be an object or boolean"),
        ({"properties": []}, "JSON schema: properties must be an object"),
        ({"items": {"pattern": "(?=a)b"}}, "JSON schema at /items: regex parse error: .*look-around.*not supported"),
        ({"items": {"format": "riddle", "not": {}}}, 'JSON schema at /items: Unimplemented keys: ["not"]'),
        ({"$ref": "#/nope"}, "JSON schema: Pointer '/nope' does not exist"),
        (False, "JSON schema: Unsatisfiable schema: schema is false"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, r"minimum \(5\) is greater than maximum \(3\)"),
    ],
)
def test_the_place_of_what_is_wrong_with_a_schema(schema: Any, message: str):
    with pytest.raises(GrammarRefused, match=message.replace("[", r"\[").replace("$", r"\$")):
        Grammars(TOKENIZER).matcher(json_grammar(schema))


def test_what_is_no_json_is_refused_at_once():
    for schema, message in (([], "not list"), ({"const": float("nan")}, "no JSON"), ({"const": {1, 2}}, "no JSON")):
        with pytest.raises(GrammarRefused, match=message):
            json_grammar(schema)  # type: ignore[arg-type]
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(GrammarRefused, match="no JSON"):
        json_grammar(deep)


def test_a_grammar_that_the_tokenizer_has_no_characters_for_is_refused():
    with pytest.raises(GrammarRefused, match="no token"):
        Grammars(tokenizer_of(["<s>", "<end>", "<stop>", "a"])).matcher(json_grammar())
    lacking = tokenizer_of(["<s>", "<end>", "<stop>", "{", '"', "a", "}"])  # no colon: found where it is needed
    matcher = Grammars(lacking).matcher(json_grammar({"required": ["a"], "type": "object"}))
    for token in (3, 4, 5, 4):
        matcher.advance(token)
    with pytest.raises(GrammarRefused, match="at place 4 of the response: no token"):
        matcher.allowed()
    with pytest.raises(GrammarRefused, match="no stop token"):
        Grammars(TOKENIZER, 1).matcher(json_grammar())


def test_whitespace_is_bounded_and_other_grammars_are_taken():
    grammars, spaces = Grammars(TOKENIZER), PIECES.index(" ")
    matcher = grammars.matcher(json_grammar({"type": "object"}))
    matcher.advance(PIECES.index("{"))
    for _ in range(32):
        assert spaces in ids(matcher)
        matcher.advance(spaces)
    assert spaces not in ids(matcher)
    assert {PIECES[i] for i in ids(grammars.matcher('start: "a" | %json {"const": 1}'))} == {"a", "1"}
    with pytest.raises(GrammarRefused, match='grammar: unknown name: "b"'):
        grammars.matcher('start: "a" b')


@pytest.mark.slow
def test_the_cache_is_bounded_and_a_copy_does_not_move_it():
    grammars = Grammars(TOKENIZER)
    texts = [json_grammar({"const": "a" * n}) for n in range(200)]
    for text in texts:
        grammars.matcher(text).advance(PIECES.index('"'))
    assert len(grammars) == module._MOST_COMPILED
    assert ids(grammars.matcher(texts[-1])) >= {PIECES.index('"')}
    long = "a" * (module.MOST_CHARACTERS // 2)
    for n in range(2 * module._MOST_CACHED_CHARACTERS // len(long)):
        grammars.matcher(json_grammar({"const": long + str(n)}))
    assert len(grammars) <= module._MOST_CACHED_CHARACTERS // len(long)
    with pytest.raises(GrammarRefused, match="are valid"):
        grammars.matcher(json_grammar({"const": long * 3}))


def test_a_grammar_whose_states_a_response_has_used_up_is_compiled_again(monkeypatch: pytest.MonkeyPatch):
    few_states(monkeypatch)
    grammars, text = Grammars(TOKENIZER), json_grammar({"type": "string", "maxLength": 4000})
    quote, letter = PIECES.index('"'), PIECES.index("a")
    with pytest.raises(GrammarExhausted, match="too many states"):  # alone, too
        kept_masks(grammars, text, [quote, *[letter] * 2000])
    assert len(kept_masks(grammars, text, [quote, letter, quote])) == 3


RUNS = 'start: /a{1,250}/ "1" | /b{1,250}/ "1" | /c{1,250}/ "1"'  # each way has states of its own


def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these 300 the runs of one letter take two thirds."""
    limits = LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(module, "_limits", lambda states, fuel: limits)


def follow(grammars: Grammars, response: list[int]) -> None:
    matcher = grammars.matcher(RUNS)
    for token in response:
        matcher.allowed()
        matcher.advance(token)


def run_of(letter: str) -> list[int]:
    return [*[PIECES.index(letter)] * 200, PIECES.index("1"), END]


def test_masks_of_responses_that_share_too_few_states_are_computed_all_the_same(monkeypatch: pytest.MonkeyPatch):
    whole = Grammars(TOKENIZER)
    expected = [kept_masks(whole, RUNS, run_of(letter)) for letter in "abc"]
    few_states(monkeypatch)
    grammars = Grammars(TOKENIZER)
    for letter, masks in zip("abc", expected, strict=True):
        assert (kept_masks(grammars, RUNS, run_of(letter)) == masks).all()


def test_a_response_goes_on_after_another_has_used_up_the_states(monkeypatch: pytest.MonkeyPatch):
    few_states(monkeypatch)
    grammars, (letter, *_) = Grammars(TOKENIZER), run_of("a")
    neighbour = grammars.matcher(RUNS)
    neighbour.advance(letter)
    expected = ids(neighbour)
    follow(grammars, run_of("b"))
    with pytest.raises(GrammarExhausted):
        follow(grammars, run_of("c"))
    with pytest.raises(GrammarExhausted):
        neighbour.allowed()
    again = grammars.start(RUNS, [letter]).result(20)
    assert ids(again) == expected
    assert not again.exclusive
    full = grammars.start(RUNS, run_of("b")[:200]).result(20)
    behind = grammars.start(RUNS, run_of("c")[:200]).result(20)  # the other leaves too little for it
    assert (full.exclusive, behind.exclusive) == (False, True)
    assert ids(behind) == {PIECES.index("c"), PIECES.index("1")}


def test_only_some_grammars_may_have_many_states(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_FEW_STATES", 300)
    grammars = Grammars(TOKENIZER)
    kept_masks(grammars, RUNS, run_of("a"))
    kept_masks(grammars, RUNS, run_of("b"))
    assert not grammars._compiled[RUNS].large
    monkeypatch.setattr(grammars, "exclusive_matcher", None)  # not needed any more
    for letter in "abc":
        kept_masks(grammars, RUNS, run_of(letter))
    grammars = Grammars(TOKENIZER)
    for n in range(2 * module._MOST_LARGE):
        text = RUNS.replace("250", str(400 + n))
        for _ in range(2):
            kept_masks(grammars, text, [*[PIECES.index("a")] * 350, PIECES.index("1"), END])
    assert sum(one.large for one in grammars._compiled.values()) == module._MOST_LARGE
    assert len(grammars) == module._MOST_LARGE


def test_a_mask_takes_bounded_work(monkeypatch: pytest.MonkeyPatch):
    """In an engine, others wait for it; a trainer takes its time."""
    monkeypatch.setattr(module, "_STEP_FUEL", 10)
    text = json_grammar({"type": "string", "pattern": "^[a-c]*[ab][a-c]{25}$"})
    with pytest.raises(GrammarRefused, match="too many expressions"):
        Grammars(TOKENIZER).matcher(text)
    assert PIECES.index('"') in ids(Grammars(TOKENIZER, patient=True).matcher(text))


def test_compiling_happens_in_another_thread_once(monkeypatch: pytest.MonkeyPatch):
    grammars, text, compiled, go = Grammars(TOKENIZER), json_grammar({"const": 1}), [], threading.Event()
    compile_ = grammars._compile

    def slow(text: str, large: bool) -> Any:
        go.wait(10)
        compiled.append((text, threading.current_thread()))
        return compile_(text, large)

    monkeypatch.setattr(grammars, "_compile", slow)
    futures = [grammars.start(text), grammars.start(text), grammars.start(json_grammar(False))]
    assert not any(map(Future.done, futures))
    go.set()
    assert ids(futures[0].result(10)) == ids(futures[1].result(10)) == {PIECES.index("1")}
    with pytest.raises(GrammarRefused, match="schema is false"):
        futures[2].result(10)
    assert threading.main_thread() not in {thread for _, thread in compiled}
    assert grammars.start(text).done()
    assert isinstance(grammars.start(json_grammar(False)).exception(0), GrammarRefused)
    assert [one for one, _ in compiled] == [text, json_grammar(False)]  # the error is kept as well


@pytest.mark.slow
@pytest.mark.parametrize("schema", [
    {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(12)]},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2500)}},
    {"type": "string", "minLength": 10**9},
    {"enum": [f"v{n}" for n in range(10_000)]},
])  # fmt: skip
def test_schema_bombs_end_in_time(schema: Any):
    grammars, began = Grammars(TOKENIZER), time.monotonic()
    with contextlib.suppress(GrammarRefused):
        grammars.matcher(json_grammar(schema)).allowed()
    assert time.monotonic() - began < 60  # the machine's, beside other tests; 11 s alone


def test_the_version_names_the_library_and_its_options():
    assert GRAMMAR_VERSION.startswith("llguidance 1.")
    assert GRAMMAR_VERSION.endswith('{"no_forcing": true}')
    assert software()["llguidance"] == GRAMMAR_VERSION.split()[1]  # nodes with another aren't admitted


# --- compiled in a process of its own first -----------------------------------------------------------------------


def chain(links: int) -> dict[str, Any]:
    """A schema whose parts refer to one another, ``links`` deep."""
    parts = {f"p{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/p{i + 1}"}}} for i in range(links)}
    return {"$ref": "#/$defs/p0", "$defs": {**parts, f"p{links}": {"type": "integer"}}}


def test_a_schema_that_overflows_the_library_s_stack_is_refused_and_others_go_on():
    grammars = Grammars(TOKENIZER)
    with pytest.raises(GrammarRefused, match="it can't be compiled within 10 s and a gibibyte"):
        grammars.matcher(json_grammar(chain(1000)))
    assert not grammars.matcher(json_grammar(chain(5))).ended


def test_a_process_that_somebody_kills_is_started_again():
    trial = GrammarTrial()
    assert trial.compiles_safely(json_grammar({"type": "integer"}))
    assert trial._process is not None
    trial._process.kill()
    assert trial.compiles_safely(json_grammar({"type": "string"}))
    first = trial._process
    assert trial.compiles_safely(json_grammar({"type": "number"}))
    assert trial._process is first


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_ends_its_process(monkeypatch: pytest.MonkeyPatch):
    slow = json_grammar({"type": "integer", "multipleOf": 100_000_007})
    source = "from headway.tokens import trial_compilation as g; g.TRIAL_S = 0.5; g.main()"
    monkeypatch.setattr(trial_compilation, "_COMMAND", ("-c", source))
    trial = GrammarTrial()
    assert not trial.compiles_safely(slow)
    assert trial.compiles_safely(json_grammar({"type": "integer", "multipleOf": 7}))


def test_a_grammar_is_not_refused_because_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch):
    """What counts is a core's time: this one only waits for longer."""
    source = (
        "import time; from headway.tokens import trial_compilation as g; real, g.TRIAL_S = g.LLMatcher, 0.5; "
        "g.LLMatcher = lambda *given, **how: time.sleep(1.0) or real(*given, **how); g.main()"
    )
    monkeypatch.setattr(trial_compilation, "_COMMAND", ("-c", source))
    assert GrammarTrial().compiles_safely(json_grammar({"type": "integer"}))
