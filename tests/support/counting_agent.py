"""An agent that calls the endpoint three times, and goes on from the second of two choices each time."""

from __future__ import annotations

from typing import Any

from openai import OpenAI


def solve(task: dict[str, Any]) -> float:
    with OpenAI() as client:
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        for _ in range(3):
            answer = client.chat.completions.create(model="headway", messages=messages, max_tokens=6, n=2)
            messages += [answer.choices[1].message.model_dump(), {"role": "user", "content": "?"}]
    return float(len(answer.choices[0].message.content or "") % 2)
