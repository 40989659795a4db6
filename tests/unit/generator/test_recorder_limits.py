"""What a recorder refuses, and what a conversation comes to as a rollout."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from recorded_agent import USER, committed, recorder, request, result, said, spelled

from headway.records.conversations import RecordedConversation, RequestRefused, rollout_from
from headway.records.rollout import Failure, Group, Rollout
from headway.records.task import Task
from headway.records.tokens import decoder, encoder


@pytest.mark.parametrize(
    ("limits", "options", "code", "says"),
    [
        ({"context_tokens": 20}, {}, "context_length_exceeded", "This model's maximum context length is 20 tokens."),
        ({"choices": 2}, {"choices": 3}, "invalid_request_error", "n = 3: valid: 1 to 2"),
        ({}, {"choices": 0}, "invalid_request_error", "n = 0"),
        ({}, {"max_tokens": 0}, "invalid_request_error", "max_tokens = 0"),
        ({"calls": 0}, {}, "rollout_limit_exceeded", "0 calls"),
        ({"open_calls": 0}, {}, "rollout_busy", "0 calls open"),
        ({"sampled_tokens": 0}, {}, "rollout_limit_exceeded", "0 sampled tokens"),
    ],
)
def test_limits_are_refused_in_the_apis_words(limits: Any, options: Any, code: str, says: str) -> None:
    record = recorder(**limits)
    with pytest.raises(RequestRefused) as refused:
        record.begin(request(USER, **options))
    assert refused.value.code == code
    assert says in str(refused.value)
    cut = code in ("context_length_exceeded", "rollout_limit_exceeded")
    assert record.close() == RecordedConversation(cut=cut)


def test_an_answer_that_its_client_cut_is_no_truncated_rollout() -> None:
    for most, truncated in ((3, False), (None, True)):
        record = recorder(context_tokens=40)
        call = record.begin(request(USER, max_tokens=most))
        committed(record, call, [result(spelled("x" * call.max_tokens, ended=False), "length")])
        assert [turn.finish_reason for turn in record.turns] == ["length"]
        assert rollout_from(record.close(), GROUP, 0, now=1.0).truncated == truncated


def test_a_rollout_whose_last_request_was_too_long_is_truncated() -> None:
    record = recorder(context_tokens=60)
    said(record, "3", USER)
    long = {"role": "user", "content": "x" * 60}
    with pytest.raises(RequestRefused, match="maximum context length is 60"):
        record.begin(request(USER, {"role": "assistant", "content": "3"}, long))
    assert rollout_from(record.close(), GROUP, 0, now=1.0).truncated
    record = recorder(context_tokens=60)
    with pytest.raises(RequestRefused):
        record.begin(request(long))
    said(record, "3", USER)  # and the agent went on
    assert not rollout_from(record.close(), GROUP, 0, now=1.0).truncated


def test_a_response_has_what_the_context_and_the_rollout_leave() -> None:
    record = recorder(context_tokens=40, sampled_tokens=10)
    call = record.begin(request(USER))
    assert call.max_tokens == min(40 - len(call.prompt_ids), 10)
    committed(record, call, [result(spelled("123"))])
    assert record.begin(request(USER)).max_tokens == min(40 - len(call.prompt_ids), 6)


def test_results_that_are_not_token_exact_are_refused_and_nothing_is_kept() -> None:
    record = recorder()
    call = record.begin(request(USER, max_tokens=3, choices=2))
    good = result(spelled("3"))
    short = msgspec.structs.replace(good, response=msgspec.structs.replace(good.response, logprobs=(-1.0,)))
    for results, says in (([good], "1 results"), ([good, short], "1 log-prob"), ([good, result([5] * 4)], "4 tokens")):
        with pytest.raises(ValueError, match=says):
            committed(record, call, results)
    assert not record.turns
    committed(record, call, [good, good])
    with pytest.raises(ValueError, match="answered already"):
        committed(record, call, [good, good])
    late = record.begin(request(USER))
    record.close()
    committed(record, late, [good])
    assert (late.state, late.turns, len(record.turns)) == ("abandoned", (), 2)


def test_an_answer_without_a_token_is_none() -> None:
    record = recorder()
    call = record.begin(request(USER, choices=2), "a")
    committed(record, call, [result([]), result(spelled("3"))])
    assert [turn is None for turn in call.turns] == [True, False]
    assert record.earlier("a") is None
    assert record.close().turns == 1


def test_a_closed_recorder_takes_no_call_and_counts_open_ones() -> None:
    record = recorder()
    record.begin(request(USER))
    assert record.close().abandoned_calls == 1
    with pytest.raises(RequestRefused) as refused:
        record.begin(request(USER))
    assert refused.value.code == "rollout_closed"


def test_messages_that_the_template_refuses_are_the_callers_to_mend() -> None:
    with pytest.raises(RequestRefused, match="roles must alternate"):
        recorder("mistral").begin(request(USER, USER))


GROUP = Group(
    index=7,
    task=Task(task_id="t", prompt="1+2?", answer="3", verifier="exact"),
    prompt_ids=(5,),
    size=2,
    admitted_version=3,
    admitted_s=10.0,
)


def test_a_conversation_as_a_rollout() -> None:
    record = recorder()
    for number, (text, extra) in enumerate([("no", []), ("3", [{"role": "user", "content": "format error"}])]):
        call = record.begin(request(USER, *extra))
        committed(record, call, [result(spelled(text), version=4 - number, first_token_s=12.0 + number)])
    rollout = rollout_from(record.close(), GROUP, 1, now=20.0)
    assert (rollout.rollout_id, rollout.turns, rollout.calls) == ("7-1", 2, 2)
    assert (rollout.first_version, rollout.last_version) == (3, 4)
    assert (rollout.opened_s, rollout.first_token_s, rollout.generated_s, rollout.finished_s) == (10.0, 12.0, 20.0, 0.0)
    assert (rollout.response_tokens, len(rollout.response_ids)) == (5, 2)
    prompts = len(rollout.prompt_ids) + len(rollout.branches[0].prompt_ids)
    assert rollout.all_tokens == prompts + 5
    assert decoder(Rollout).decode(encoder().encode(rollout)) == rollout


def test_a_conversation_without_an_answer_is_a_failed_rollout() -> None:
    rollout = rollout_from(recorder().close(), GROUP, 0, now=20.0)
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.prompt_ids, rollout.first_version) == ("environment", (5,), -1)
    why = Failure(boundary="sandbox", cause="gone", infrastructure=True)
    assert rollout_from(recorder().close(), GROUP, 0, now=20.0, failure=why).failure == why


def test_rollouts_stored_before_there_were_branches_are_read() -> None:
    old = msgspec.msgpack.encode({"group": 1, "member": 0, "prompt_ids": [1], "response_ids": [2]})
    rollout = decoder(Rollout).decode(old)
    assert (rollout.branches, rollout.calls, rollout.response_tokens, rollout.all_tokens) == ((), 0, 1, 2)
