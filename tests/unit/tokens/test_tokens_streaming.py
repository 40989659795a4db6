"""Answers handed out piece by piece add up to the whole, whatever was sampled and however it came."""

from __future__ import annotations

import random

import pytest
from endpoint_server import chat
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_agent import Engine

from headway.tokens.output_parsing import (
    OutputFormat,
    openai_message,
    overlap,
    parse_output,
    response_text,
    settled_parts,
)
from headway.tokens.streaming import AnswerStream

KINDS = ("chatml", "qwen3", "r1", "llama3.1", "metaspace", "gemma")
PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '{"name": 1}', "\n", " ",
     "<", "<th", "</", "<tool", "<|python_tag|>", ";", "so", "é"]
)  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(
    st.lists(PIECES, max_size=9).map("".join),
    st.sampled_from(["none", "hermes", "llama_json"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_certain_text_is_a_prefix_of_final_answer(
    text: str, tools: str, reasoning: bool, calls: bool, opened: bool
) -> None:
    written = OutputFormat(tools=tools, reasoning=reasoning)
    message = parse_output(text, written, calls=calls, opened=opened)
    whole = openai_message(message, written)
    told = ("", "")
    for end in range(len(text) + 1):
        found = settled_parts(text[:end], written, calls=calls, opened=opened)
        assert all(now.startswith(before) for now, before in zip(found, told, strict=True))
        told = found
    assert whole.get("reasoning_content", "").startswith(told[0])
    assert (whole["content"] or "").startswith(told[1])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**9), st.booleans(), st.sampled_from([(), ("\nObservation:",), ("er", "answer")]))
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_add_up_to_the_answer(kind: str, seed: int, tools: bool, stop: tuple[str, ...]) -> None:
    model, chance = chat(kind), random.Random(seed)
    engine = Engine(model.tokenizer, chance)
    ids = engine.spelled(engine._text() + chance.choice(["", *stop, "the answ"])) or [5]
    ids.append(chance.choice([*model.tokenizer.stop_ids, 7]))
    opened = chance.random() < 0.3
    answer = model.answer(ids, "<think>\n" if opened else "", calls=tools, stop=stop)
    stream = AnswerStream(model.tokenizer, model.written, calls=tools, opened=opened, stop=stop)
    told, end = ["", ""], 0
    while end < len(ids):
        end = min(len(ids), end + chance.randint(1, 5))
        for place, piece in enumerate(stream.push(ids[:end])):
            told[place] += piece
    whole = openai_message(answer.message, model.written)
    wanted = whole.get("reasoning_content", ""), whole["content"] or ""
    for place, piece in enumerate(stream.finish(*wanted)):
        told[place] += piece
    assert tuple(told) == wanted


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**9))
@pytest.mark.parametrize("kind", ["chatml", "metaspace"])
def test_plain_text_adds_up(kind: str, seed: int) -> None:
    tokenizer, chance = chat(kind).tokenizer, random.Random(seed)
    ids = Engine(tokenizer, chance).spelled("".join(chance.choices("ab \né你<", k=chance.randint(0, 12))))
    ids += chance.choices(range(tokenizer.vocabulary_size), k=chance.randint(0, 4))
    stream = AnswerStream(tokenizer, None, stop=("b ",))
    told = "".join(stream.push(ids[:end])[1] for end in range(len(ids) + 1))
    whole = response_text(tokenizer, ids, OutputFormat(), ("b ",))
    assert told + stream.finish("", whole)[1] == whole


def test_text_comes_as_soon_as_it_is_certain() -> None:
    model = chat("qwen3")
    stream = AnswerStream(model.tokenizer, model.written, calls=True)
    text, found = "<think>\nhm so</think>\n\nyes <tool_call>{", list[tuple[str, str]]()
    ids = [i for character in text for i in model.tokenizer.encode(character)]
    for end in range(len(ids) + 1):
        found.append(stream.push(ids[:end]))
    assert "".join(reasoning for reasoning, _ in found) == "hm so"
    assert "".join(content for _, content in found) == "yes"
    assert sum(bool(reasoning) for reasoning, _ in found) > 3


@pytest.mark.parametrize(("text", "tag", "length"), [("ab<th", "<think>", 3), ("<think>", "<think>", 0), ("", "x", 0)])
def test_overlap_is_longest_suffix_that_begins_tag(text: str, tag: str, length: int) -> None:
    assert overlap(text, tag) == length
