"""The agent: a program that calls a model over HTTP, and knows nothing of training. The experiment names it as
``myproject:solve``.

It has a sum worked out one step at a time. The model rewrites what remains, "19+8-3=" -> "27-3", until a number is
left; each step is a call of its own. With `pip install openai` it could as well use that client, which reads the same
two environment variables.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

STEPS = 8  # calls before it gives up


def solve(task: dict[str, Any]) -> None:
    """Called once for each rollout, in a process of its own. The experiment's verifier judges the last answer."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(STEPS):
        text = ask(messages)
        if text.isdigit() or not text:
            return
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "="}]


def ask(messages: list[dict[str, str]]) -> str:
    """Call the model once: a step, up to the next "="."""
    body = {"model": "headway", "messages": messages, "stop": "=", "max_tokens": 24}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""
