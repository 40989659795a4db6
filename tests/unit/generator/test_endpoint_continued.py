"""A final message of the assistant: continued where the request says so, else refused; it carries no loss."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint_server import USER, Served, play, recorded
from openai import AsyncOpenAI

BEGUN = {"role": "assistant", "content": "The sum is"}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "last", "further"),
    [
        (MESSAGES, BEGUN, {}),
        (CHAT, BEGUN, {"continue_final_message": True, "add_generation_prompt": False}),
        (CHAT, {**BEGUN, "prefix": True}, {}),
    ],
)
def test_a_begun_answer_is_continued_and_recorded_without_loss_on_its_beginning(
    path: str, last: Any, further: Any
) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        async def ask(messages: Any, **more: Any) -> None:
            body = {"model": "headway", "max_tokens": 50, "messages": messages, **more}
            status, _, answer = await server.post(path, body)
            assert status == 200, answer

        await ask([USER, last], **further)
        tokenizer = server.engine.chat.tokenizer
        prompt = tokenizer.decode(server.engine.asked[0].prompt_ids, keep_special=True)
        assert prompt.endswith("<|im_start|>assistant\nThe sum is")
        await ask([USER, {"role": "assistant", "content": "The sum is 3."}, USER])
        [branch] = recorded(server).branches
        learned = [i for i, mask in zip(branch.response_ids, branch.response_mask, strict=True) if mask]
        assert tokenizer.decode(learned).replace("<|im_end|>", "") == " 3. 3."
        assert tokenizer.decode(branch.prompt_ids, keep_special=True) == prompt

    play(test, " 3.")


@pytest.mark.parametrize("begun", ["The sum is ", "```json\n", "  a\n\n"])
def test_a_begun_answer_may_end_in_white_space(begun: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        for content in (begun, f"{begun}3."):
            last = [{"role": "assistant", "content": content}, USER][: 1 + (content != begun)]
            body = {"model": "headway", "messages": [USER, *last], "continue_final_message": content == begun}
            status, _, answer = await server.post(CHAT, body)
            assert status == 200, answer
        [branch] = recorded(server).branches
        assert server.engine.chat.tokenizer.decode(branch.prompt_ids, keep_special=True).endswith(f"assistant\n{begun}")
        assert len(branch.turn_ends) == 2

    play(test, "3.")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [USER, BEGUN]}, "messages[1]"),
        (CHAT, {"messages": [USER], "continue_final_message": True}, "messages[0]"),
        (
            CHAT,
            {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        (CHAT, {"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        (CHAT, {"messages": [USER, {**BEGUN, "prefix": True}, USER]}, "messages[1]"),
        (
            CHAT,
            {"messages": [USER, {**BEGUN, "prefix": True}], "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (CHAT, {"messages": [USER, {**BEGUN, "prefix": True, "content": " "}]}, "messages[1]"),
        (CHAT, {"messages": [USER, {**BEGUN, "prefix": True, "content": "<think>\nhm"}]}, "messages[1]"),
        ("/v1/responses", {"input": [USER, BEGUN], "instructions": "x"}, "input[1]"),
        (
            "/v1/responses",
            {"input": [USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]},
            "input[1]",
        ),
        (
            MESSAGES,
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                ]
            },
            "messages[1]",
        ),
    ],
)
def test_other_final_messages_of_the_assistant_are_refused(path: str, body: dict[str, Any], named: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        status, _, answer = await server.post(path, {"model": "headway", "max_tokens": 50, **body})
        assert status == 400, answer
        assert answer["error"]["message"].startswith(named), answer
        assert not server.engine.asked

    play(test)
