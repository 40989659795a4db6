"""An agent as anyone would write it: it knows the `openai` client and nothing of Headway.

It has a sum worked out one step at a time. The model rewrites what remains, "19+8-3=" -> "27-3", until a number is
left; each step is a call of its own, and the conversation goes on from all steps before.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

STEPS = 14  # calls before it gives up


def solve(task: dict[str, Any]) -> None:
    """Called once for each rollout, in a process of its own. The verifier judges its last answer."""
    with OpenAI() as client:  # OPENAI_BASE_URL and OPENAI_API_KEY are set
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        for _ in range(STEPS):
            answer = client.chat.completions.create(model="headway", messages=messages, stop="=", max_tokens=40)
            text = answer.choices[0].message.content or ""
            if text.isdigit() or not text:
                return
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "="}]
