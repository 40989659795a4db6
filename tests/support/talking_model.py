"""A model of a hundred thousand weights that answers a handful of requests as users of chat clients expect: with a
text, a tool call, the answer to a tool's result, or JSON.

Its attention reaches back a few dozen tokens, so it answers a known request behind any instructions that a client
writes before it. Whatever else it is asked, it writes nonsense.
"""

from __future__ import annotations

import json
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_run import write_experiment

from headway.models.initialise import initialise_model

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}"
    " ({{ tool.function.parameters.properties | list | join(', ') }})\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PERSON = '{"name": "Ada", "age": 36}'
SUM = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SAVE = '<tool_call>\n{"name": "Person", "arguments": {"name": "Ada", "age": 36}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "5"}}\n</tool_call>'
# (role, what it says, the answer)
KNOWN = (
    ("user", "Say hello.", "Hello there."),
    ("user", "And again.", "Hello again."),
    ("user", "Add 2 and 3.", SUM),
    ("tool", "5", "The sum is 5."),
    ("user", "Who is Ada?", PERSON),
    ("user", "Save Ada.", SAVE),
    # a task and a tool's result as smolagents writes them
    ("user", "New task:\nAdd 2 and 3.", SUM),
    ("user", "Observation:\n5", FINAL),
    # how instructor ends its request for JSON, and pydantic what was wrong with it
    ("user", "For further information visit https://errors.pydantic.dev/2.14/v/value_error", PERSON),
    (
        "user",
        "Return the correct JSON response within a ```json codeblock. not the JSON_SCHEMA",
        f"```json\n{PERSON}\n```",
    ),
)
_COPIES, _WINDOW, _STEPS = 48, 16, 250  # each answer has a probability of 0.999 or more, behind any instructions
_LETTERS = string.ascii_letters + string.digits + string.punctuation


def _instructions(chance: random.Random) -> str:
    """Any text: words of any letters, in lines."""
    words = ("".join(chance.choices(_LETTERS, k=chance.randrange(1, 8))) for _ in range(chance.randrange(1, 14)))
    return chance.choice((" ", " ", "\n", ". ")).join(words) + chance.choice(("", ".", ".\n", ")"))


def _prefix(chance: random.Random) -> list[dict[str, str]]:
    """What may stand before a request: instructions, or other turns."""
    if chance.random() < 0.3:
        role, said, answer = chance.choice(KNOWN)
        return [{"role": role, "content": said}, {"role": "assistant", "content": answer}]
    roles = chance.choice(("", "system", "system", "user", "user assistant")).split()
    return [{"role": role, "content": _instructions(chance)} for role in roles]


def write_talking_model(folder: Path) -> Path:
    """Teach the model with `headway sft`; returns its folder."""
    chance = random.Random(5)
    talks: list[list[dict[str, str]]] = []
    for role, said, answer in KNOWN * _COPIES:
        talk = [*_prefix(chance), {"role": role, "content": said}, {"role": "assistant", "content": answer}]
        talks.append(talk)
    texts = [message["content"] for talk in talks for message in talk] + ["system\nuser\nassistant\ntool\n"] * 50
    raw = folder / "raw"
    shape: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "intermediate": 128}
    initialise_model(raw, texts, 640, family="mistral", window=_WINDOW, max_positions=16384, **shape)
    (raw / "chat_template.jinja").write_text(TEMPLATE)
    rows = [json.dumps({"messages": talk}) for talk in talks]
    (folder / "talks.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "tasks.jsonl").write_text('{"prompt": "2", "answer": "1"}\n')
    sft = {"data": str(folder / "talks.jsonl"), "output": str(folder / "model"), "train_on": "last_assistant"}
    config = write_experiment(
        folder,
        model={"path": str(raw), "template": "chat"},
        sft={**sft, "steps": _STEPS, "batch_sequences": 16, "learning_rate": 5e-3, "max_tokens": 512},
    )
    command = [sys.executable, "-m", "headway.cli.main", "sft", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "model"
