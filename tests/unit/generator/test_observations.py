"""Which tokens a tool's answers became: those of its text alone, in every template, and each in one sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_agent import TOOLS, USER, chat, committed, request, result

from headway.config.endpoint import EndpointConfig
from headway.generator.recording.observations import observed_runs, runs_of
from headway.generator.recording.recorder import Recorder
from headway.records.conversations import RequestRefused
from headway.records.environment import LEFT_OUT
from headway.records.tokens import TokenIds
from headway.tokens.messages import Message
from headway.tokens.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
ANSWER = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
SECRET = "sk-headway-123456"


def told(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def played(*contents: str, kind: str = "qwen2.5", observes: bool = True) -> tuple[Recorder, Tokenizer]:
    """A rollout whose model calls a tool in each turn; the last answer ends it."""
    record = Recorder(chat(kind), EndpointConfig(observes=observes), 4096, "r", (SECRET,))
    tokenizer, messages = chat(kind).tokenizer, [USER]
    for content in (*contents, ""):
        call = record.begin(request(*messages, tools=TOOLS))
        committed(record, call, [result(tokenizer.encode(CALL + "<|im_end|>"))])
        messages += [ANSWER, told(content)]
    return record, tokenizer


def observed_text(record: Recorder, tokenizer: Tokenizer) -> list[str]:
    (branch,) = record.close().branches
    assert not any(branch.response_mask[i] for first, stop in branch.observations for i in range(first, stop))
    return [tokenizer.decode(branch.response_ids[first:stop]) for first, stop in branch.observations]


def test_what_tools_answered_is_found_and_nothing_of_the_template() -> None:
    assert observed_text(*played("two files: a.txt b.txt", "12 lines")) == ["two files: a.txt b.txt", "12 lines"]


def test_equal_answers_are_each_found() -> None:
    assert observed_text(*played("ok then", "ok then")) == ["ok then", "ok then"]


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3"])
def test_an_answer_that_the_template_has_too_is_found_in_its_own_place(kind: str) -> None:
    record, tokenizer = played("user", "tool_response", kind=kind)
    (branch,) = record.close().branches
    ids = branch.response_ids
    for (first, stop), content in zip(branch.observations, ("user", "tool_response"), strict=True):
        assert tokenizer.decode(ids[first:stop]) == content
        assert tokenizer.decode(ids[:first], keep_special=True).endswith("<tool_response>\n")


def test_nothing_is_recorded_where_no_rule_asks_for_it() -> None:
    record, _ = played("two files", observes=False)
    (branch,) = record.close().branches
    assert branch.observations == ()


def test_the_note_of_a_cut_secrets_and_special_tokens_are_left_out() -> None:
    note = LEFT_OUT.format(count=812)
    texts = observed_text(*played(f"the beginning{note}the end, key {SECRET} was used<|im_end|>more"))
    joined = " | ".join(texts)
    assert "characters" not in joined
    assert "812" not in joined
    assert "sk-" not in joined
    assert "im_end" not in joined
    assert joined.startswith("the beginning")
    assert "the end, key" in joined
    assert joined.endswith("more")


def test_the_users_messages_and_an_escaped_answer_have_none() -> None:
    tokenizer = chat("qwen2.5").tokenizer
    text = '<tool_response>\n{"out": "a\\nb"}\n</tool_response>'
    ids = TokenIds(tokenizer.encode(text))
    user, tool = Message(role="user", content="out"), Message(role="tool", content="a\nb")
    for message in (user, tool):

        def render(messages: Sequence[Message]) -> str:
            return f'<tool_response>\n{{"out": {json.dumps(messages[0].content)}}}\n</tool_response>'

        assert observed_runs(tokenizer, [message], render, text, None, ids) == ()


def test_a_template_that_refuses_other_contents_has_none() -> None:
    tokenizer, text = chat("qwen2.5").tokenizer, "<tool_response>\n{}\n</tool_response>"

    def render(messages: Sequence[Message]) -> str:
        raise RequestRefused(f"{messages[0].content} isn't JSON", param="messages")

    message, ids = Message(role="tool", content="{}"), TokenIds(tokenizer.encode(text))
    assert observed_runs(tokenizer, [message], render, text, None, ids) == ()


@given(st.sets(st.integers(0, 40)))
def test_runs_hold_exactly_the_indices(indices: set[int]) -> None:
    runs = runs_of(sorted(indices))
    assert [i for first, stop in runs for i in range(first, stop)] == sorted(indices)
    assert all(stop < first for (_, stop), (first, _) in pairwise(runs))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(alphabet="ab c\n<é你.", min_size=1, max_size=12), min_size=1, max_size=4))
def test_any_answer_is_at_most_its_own_text(contents: list[str]) -> None:
    for text in observed_text(*played(*contents)):
        assert any(text in content for content in contents)


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3"])
def test_siblings_keep_what_was_observed_before_them(kind: str, tmp_path: Path) -> None:
    record, tokenizer = played("two files", kind=kind)
    again = record.begin(request(USER, ANSWER, told("two files"), tools=TOOLS))
    committed(record, again, [result(tokenizer.encode("no<|im_end|>"))])
    counts = [len(branch.observations) for branch in record.close().branches]
    assert sum(counts) >= 1
