"""Recording an agent's calls: what is fed is what was sampled, and every sampled token is learned once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_agent import (
    APPEND_ONLY,
    KINDS,
    TOOLS,
    USER,
    Agent,
    chat,
    chat_of,
    committed,
    played,
    recorder,
    request,
    result,
    said,
    spelled,
)

from headway.config.endpoint import EndpointConfig
from headway.generator.recording.answer_tree import CallRequest
from headway.generator.recording.recorder import Recorder
from headway.records.conversations import RecordedConversation
from headway.records.tokens import TokenRows
from headway.tokens.continuation import Chat
from headway.tokens.tokenizer import Tokenizer


def require_exact(agent: Agent, conversation: RecordedConversation) -> None:
    """Every sampled token is learned in one place, behind the very tokens it was sampled after, or was abandoned."""
    context = agent.engine.context
    learned: Counter[float] = Counter()
    constrained: set[tuple[str, float]] = set()
    for branch in conversation.branches:
        ids = (*branch.prompt_ids, *branch.response_ids)
        tokens = len(branch.response_ids)
        assert tokens == len(branch.response_logprobs) == len(branch.response_mask) == branch.turn_ends[-1]
        assert tokens == sum(span.tokens for span in branch.versions)
        assert branch.response_mask[0]
        rows = branch.token_rows.get("read", TokenRows())
        assert rows.values.tolist() == list(ids[: len(rows)])
        assert len(rows) < len(ids)
        among = branch.token_rows.get("sampled", TokenRows())
        assert among.values.tolist() == [ids[at] for at in np.flatnonzero(among.lengths.array)]
        for text, runs in branch.grammars.items():
            constrained |= {(text, branch.response_logprobs[at]) for run in runs for at in range(*run)}
        for place, (logprob, mask) in enumerate(zip(branch.response_logprobs, branch.response_mask, strict=True)):
            if mask:
                learned[logprob] += 1
                assert context[logprob] == ids[: len(branch.prompt_ids) + place + 1]
            else:
                assert logprob == 0.0
    assert set(learned.values()) <= {1}
    asked = [(agent.made[turn.call].request.grammar, turn.logprobs) for turn in agent.recorder.turns]
    by_grammar = {(text, one) for text, logprobs in asked if text for one in logprobs if one in learned}
    assert {one for one in constrained if one[1] in learned} == by_grammar
    assert learned.total() + conversation.abandoned_tokens == len(context)
    for turn in agent.recorder.turns:
        call = agent.made[turn.call]
        fed = (*call.prompt_ids, *turn.answer.ids)
        assert any((*b.prompt_ids, *b.response_ids)[: len(fed)] == fed for b in conversation.branches)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**9), st.sampled_from(["whole", "litellm", "without reasoning"]), st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_an_agent_does_is_recorded_token_exact(kind: str, seed: int, manner: str, restore: bool) -> None:
    alternate = kind in ("mistral", "metaspace")
    options = {"manner": manner, "history_reasoning": "restore" if restore else "as_sent", "alternate": alternate}
    agent, conversation = played(chat(kind), seed, 7, **options)  # type: ignore[arg-type]
    require_exact(agent, conversation)
    if kind in APPEND_ONLY and manner == "whole":
        assert "rewritten" not in conversation.causes


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**9))
@pytest.mark.parametrize("kind", ["chatml", "qwen2.5"])
def test_a_prompt_reads_as_the_template_writes_it(kind: str, seed: int) -> None:
    agent, _ = played(chat(kind), seed, 6, tools=False, plain=True)
    for call in agent.made:
        text = chat(kind).tokenizer.decode(call.prompt_ids, keep_special=True)
        assert text == chat(kind).render(agent.asked[call.number])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**9))
def test_the_order_in_which_calls_come_back_changes_no_random_number(seed: int) -> None:
    talk = [USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "sure?"}]
    prompts = [talk[:1], talk[:1], talk, [{"role": "system", "content": "x"}, *talk]]
    one, other = recorder(), recorder()
    asked = [request(*messages, seed=seed % 3) for messages in prompts]
    forth = [one.begin(r).purposes for r in asked]
    back = [other.begin(r).purposes for r in reversed(asked)][::-1]
    assert sorted(forth) == sorted(back)
    assert len(set(forth)) == len(prompts)


def test_the_order_in_which_calls_come_back_changes_nothing() -> None:
    text = '<tool_call>{"name": "bash", "arguments": {}}</tool_call>'
    found = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        record = recorder()
        calls = [record.begin(request(USER, tools=TOOLS)) for _ in range(2)]
        calls.append(record.begin(request({"role": "user", "content": "else"}, tools=TOOLS)))
        for number in order:
            committed(record, calls[number], [result(spelled(text + "." * number), version=number)])
        ids = [turn.message.calls[0].call_id for call in calls for turn in call.turns if turn is not None]
        assert len(set(ids)) == 3
        found.append((ids, record.close()))
    assert found[0] == found[1] == found[2]


def test_an_answer_is_fed_again_as_it_was_sampled() -> None:
    record = recorder()
    tokenizer = chat("qwen2.5").tokenizer
    ids = spelled("the answer")
    assert ids[:-1] != tokenizer.encode("the answer")
    first = record.begin(request(USER))
    assert first.prompt_ids == tokenizer.render([USER], "chat")
    committed(record, first, [result(ids)])
    talk = [USER, {"role": "assistant", "content": "the answer"}, {"role": "user", "content": "sure?"}]
    second = record.begin(request(*talk))
    behind = tokenizer.encode("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids == (*first.prompt_ids, *ids, *behind)
    assert (first.planned.cause, second.planned.cause) == ("start", "continued")


def test_the_ids_of_tool_calls_tell_answers_of_one_text_apart() -> None:
    text = 'so\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    record = recorder()
    call = record.begin(request(USER, tools=TOOLS, choices=3))
    written = [spelled(text), chat("qwen2.5").tokenizer.encode(text + "<|im_end|>"), spelled(text)]
    committed(record, call, [result(ids) for ids in written])
    messages = [turn.message for turn in call.turns if turn is not None]
    assert len({message.calls[0].call_id for message in messages}) == 3
    assert messages[0].content == "so"
    for ids, message in zip(written, messages, strict=True):
        answer = {
            "role": "assistant",
            "content": "so",
            "tool_calls": [
                {"id": message.calls[0].call_id, "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
            ],
        }
        reply = {"role": "tool", "tool_call_id": message.calls[0].call_id, "content": "a\n"}
        again = record.begin(request(USER, answer, reply, tools=TOOLS))
        assert again.prompt_ids[: len(call.prompt_ids) + len(ids)] == (*call.prompt_ids, *ids)
    nameless = {"role": "assistant", "content": "so", "tool_calls": [{"function": answer["tool_calls"][0]["function"]}]}
    newest = record.begin(request(USER, nameless, {"role": "tool", "content": "a\n"}, tools=TOOLS))
    assert newest.prompt_ids[: len(call.prompt_ids) + len(written[2])] == (*call.prompt_ids, *written[2])


def test_a_retry_is_the_same_call_unless_nothing_came_of_it() -> None:
    record = recorder()
    assert record.earlier("a") is None
    call = record.begin(request(USER), "a")
    assert record.earlier("a") is call
    committed(record, call, [result(spelled("3"))])
    assert record.earlier("a") is call
    failed = record.begin(request(USER), "b")
    committed(record, failed, [result(spelled("4")[:1], "error")])
    left = record.begin(request(USER), "c")
    record.abandon(left, [result(spelled("45")[:2], "abort")])
    record.abandon(left)
    assert record.earlier("b") is record.earlier("c") is None
    conversation = record.close()
    assert (conversation.calls, conversation.abandoned_calls, conversation.abandoned_tokens) == (1, 2, 3)
    assert len(conversation.branches) == 1


def test_only_the_newest_answers_can_be_repeated() -> None:
    record = recorder(calls=1000)
    first = record.begin(request(USER), "first")
    left = record.begin(request(USER), "open")
    committed(record, first, [result(spelled("3"))])
    for number in range(16):
        assert record.earlier("first") is first
        committed(record, record.begin(request(USER), f"{number}"), [result(spelled("3"))])
    assert record.earlier("first") is None
    assert record.earlier("15") is not None
    assert record.earlier("open") is left


def test_a_stop_string_is_fed_and_not_shown() -> None:
    record = recorder()
    ids = spelled("do it\nObservation:", ended=False)
    call = record.begin(request(USER, stop=("\nObservation:",)))
    committed(record, call, [result(ids)])
    assert call.turns[0] is not None
    assert call.turns[0].message.content == "do it"
    talk = [USER, {"role": "assistant", "content": "do it"}, {"role": "user", "content": "done"}]
    tail = chat("qwen2.5").tokenizer.encode("<|im_end|>\n<|im_start|>user\ndone<|im_end|>\n<|im_start|>assistant\n")
    assert record.begin(request(*talk)).prompt_ids == (*call.prompt_ids, *ids, *tail)


def test_a_stop_string_that_the_template_writes_anyway_is_not_there_twice(tmp_path: Path) -> None:
    chat_of("chatml", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}assistant: "
    )
    plain = Chat(Tokenizer.load(tmp_path))
    record = Recorder(plain, EndpointConfig(), 1000)
    ids = plain.tokenizer.encode("3\nuser:")
    call = record.begin(request(USER, stop=("\nuser:",)))
    committed(record, call, [result(ids)])
    second = record.begin(request(USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "sure?"}))
    assert second.prompt_ids == (*call.prompt_ids, *ids, *plain.tokenizer.encode(" sure?\nassistant: "))


def test_a_template_that_closes_nothing_goes_on_behind_what_was_sampled(tmp_path: Path) -> None:
    chat_of("chatml", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    plain = Chat(Tokenizer.load(tmp_path))
    record = Recorder(plain, EndpointConfig(), 1000)
    ids = plain.tokenizer.encode("27") + plain.tokenizer.encode("-3=")
    call = record.begin(request({"role": "user", "content": "30-3-3="}, stop=("=",)))
    committed(record, call, [result(ids)])
    talk = [{"role": "user", "content": "30-3-3="}, {"role": "assistant", "content": "27-3"}]
    second = record.begin(request(*talk, {"role": "user", "content": "="}))
    assert (second.planned.cause, second.prompt_ids) == ("continued", (*call.prompt_ids, *ids))
    third = record.begin(request(*talk, {"role": "user", "content": "+1="}))  # its "=" isn't what was sampled
    assert (third.planned.cause, plain.tokenizer.decode(third.prompt_ids)) == ("rewritten", "30-3-3=27-3+1=")


def test_an_answer_that_was_cut_is_closed_by_the_template() -> None:
    record = recorder()
    ids = spelled("the ans", ended=False)
    call = record.begin(request(USER, max_tokens=7))
    assert call.max_tokens == 7
    committed(record, call, [result(ids, "length")])
    talk = [USER, {"role": "assistant", "content": "the ans"}, {"role": "user", "content": "on"}]
    tail = chat("qwen2.5").tokenizer.encode("<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n")
    second = record.begin(request(*talk))
    assert second.prompt_ids == (*call.prompt_ids, *ids, *tail)
    committed(record, second, [result(spelled("ok"))])
    (branch,) = record.close().branches
    assert branch.response_mask == (True,) * 7 + (False,) * len(tail) + (True,) * 3
    assert branch.turn_ends == (7 + len(tail), 7 + len(tail) + 3)


THOUGHT = "<think>\nhm\n</think>\n\n3"


def test_a_template_that_drops_reasoning_starts_a_branch_that_keeps_the_prompt() -> None:
    record = recorder("qwen3")
    first = said(record, THOUGHT, USER)
    answer = {"role": "assistant", "content": "3", "reasoning_content": "hm"}
    second = said(record, "yes", USER, answer, {"role": "user", "content": "sure?"})
    assert second.planned.cause == "rewritten"
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "hm" not in chat("qwen3").tokenizer.decode(second.prompt_ids)
    trunk, branch = record.close().branches
    assert (trunk.prompt_ids, branch.prompt_ids) == (second.prompt_ids, first.prompt_ids)
    assert (len(trunk.response_ids), len(branch.response_ids)) == (4, len(spelled(THOUGHT)))


@pytest.mark.parametrize("mode", ["as_sent", "restore"])
def test_reasoning_that_a_client_leaves_out(mode: str) -> None:
    """Between an answer and those of its tools the template keeps reasoning; the client doesn't send it."""
    record = recorder("qwen3", history_reasoning=mode)
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    first = said(record, text, USER, tools=TOOLS)
    assert first.turns[0] is not None
    assert (first.turns[0].message.reasoning, first.turns[0].message.content) == ("hm", "")
    answer = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
    second = record.begin(request(USER, answer, {"role": "tool", "content": "a"}, tools=TOOLS))
    fed = (*first.prompt_ids, *spelled(text))
    assert (second.prompt_ids[: len(fed)] == fed) == (mode == "restore")
    assert second.planned.cause == ("continued" if mode == "restore" else "branched")


def test_an_answer_that_the_client_dropped_is_learned_all_the_same() -> None:
    record = recorder()
    said(record, "I won't", USER)
    said(record, "3", USER, {"role": "user", "content": "format error"})
    trunk, branch = record.close().branches
    tokenizer = chat("qwen2.5").tokenizer
    assert (tokenizer.decode(trunk.response_ids), tokenizer.decode(branch.response_ids)) == ("3", "I won't")
    assert trunk.response_mask == (True, True)


def test_an_answer_that_the_template_spaces_anew_is_not_ended_twice() -> None:
    record = recorder()
    text = '<tool_call>{"name":"bash",  "arguments": { } }</tool_call>'
    call = said(record, text, USER, tools=TOOLS)
    answer = {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
    again = record.begin(request(USER, answer, {"role": "user", "content": "on"}, tools=TOOLS))
    tail = chat("qwen2.5").tokenizer.encode("\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n")
    assert again.prompt_ids == (*call.prompt_ids, *spelled(text), *tail)
    assert record.begin(request(USER, tools=TOOLS)).planned.cause == "sibling"


def test_choices_share_their_prompt_and_one_goes_on() -> None:
    record = recorder()
    call = record.begin(request(USER, choices=2))
    committed(record, call, [result(spelled("3")), result(spelled("4"))])
    talk = [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    said(record, "yes", *talk)
    conversation = record.close()
    assert (conversation.turns, conversation.calls) == (3, 2)
    trunk, branch = conversation.branches
    assert trunk.prompt_ids == branch.prompt_ids == call.prompt_ids
    assert trunk.response_ids[:2] == tuple(spelled("4"))
    assert branch.response_ids == tuple(spelled("3"))


def test_shared_answers_are_learned_once_and_are_prompt_elsewhere() -> None:
    record = recorder()
    said(record, "3", USER)
    talk = [USER, {"role": "assistant", "content": "3"}]
    left = said(record, "a", *talk, {"role": "user", "content": "l"})
    right = said(record, "b", *talk, {"role": "user", "content": "r"})
    trunk, branch = record.close().branches
    assert sum(trunk.response_mask) == 4  # "3" and "b" with their ends
    assert branch.prompt_ids == left.prompt_ids
    assert sum(branch.response_mask) == 2
    assert (*trunk.prompt_ids, *trunk.response_ids) == (*right.prompt_ids, *spelled("b"))


def test_raw_prompts_go_on_where_their_text_or_ids_do() -> None:
    record = recorder()
    tokenizer = chat("qwen2.5").tokenizer
    first = record.begin(CallRequest(prompt="def f("))
    assert first.prompt_ids == tokenizer.render("def f(")
    ids = spelled("x):\n", ended=False)
    committed(record, first, [result(ids, "length")])
    second = record.begin(CallRequest(prompt="def f(x):\n    return"))
    assert second.prompt_ids == (*first.prompt_ids, *ids, *tokenizer.encode("    return"))
    third = record.begin(CallRequest(prompt=(*first.prompt_ids, *ids, 5)))
    assert third.prompt_ids == (*first.prompt_ids, *ids, 5)
    assert (second.planned.cause, third.planned.cause) == ("continued", "continued")
    assert record.begin(CallRequest(prompt="def f(")).planned.cause == "sibling"
    assert record.begin(CallRequest(prompt="def g(")).planned.cause == "branched"
    committed(record, third, [result([7])])
    assert len(record.close().branches) == 1


class Counted(tuple[int, ...]):
    """Token ids that know how many of them were looked at."""

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.looked += len(found) if isinstance(at, slice) else 1
        return found


def test_a_long_history_in_token_ids_is_looked_at_once() -> None:
    record = recorder(context_tokens=100_000)
    ids: tuple[int, ...] = (5,) * 50
    for _ in range(100):
        call = record.begin(CallRequest(prompt=ids))
        committed(record, call, [result([6] * 50)])
        ids = (*ids, *[6] * 50, *[5] * 50)
    prompt = Counted(ids)
    twin = record.begin(CallRequest(prompt=ids[:50]))
    committed(record, twin, [result([6] * 50)])  # equal to the first answer, and newer
    assert record.begin(CallRequest(prompt=prompt)).planned.parent is record.turns[99]
    assert prompt.looked < 3 * len(prompt)
    assert record.begin(CallRequest(prompt=ids[:101])).planned.parent is twin.turns[0]


def test_a_raw_prompt_that_only_begins_like_another_is_encoded_whole() -> None:
    record = recorder()
    tokenizer = chat("qwen2.5").tokenizer
    committed(record, record.begin(CallRequest(prompt="the ans")), [result(spelled("x"))])
    whole = tokenizer.render("the answer")
    assert whole != (*tokenizer.render("the ans"), *tokenizer.encode("wer"))
    assert record.begin(CallRequest(prompt="the answer")).prompt_ids == whole


def test_other_tools_or_template_arguments_are_another_conversation() -> None:
    record = recorder()
    said(record, "3", USER)
    talk = [USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "sure?"}]
    assert record.begin(request(*talk, variables={"enable_thinking": False})).planned.cause == "branched"
    assert record.begin(request(*talk, tools=TOOLS)).planned.cause == "branched"
    assert record.begin(request(*talk)).planned.cause == "continued"
