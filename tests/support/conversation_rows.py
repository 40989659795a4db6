"""Chat templates, rows of conversations, and what is learned of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config.load import validate_experiment
from headway.records.errors import ConfigurationError
from headway.tasks.sft_data import read_sft_tokens
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import CHAT_TEMPLATE
from tests.golden import chat_templates as templates

# calls in Hermes' manner, reasoning in the field of Qwen3
SPEAKING = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
ITEMS = SPEAKING.replace(
    "{{- call.function.arguments | tojson }}",
    "{%- for key, value in call.function.arguments.items() %}{{- key + '=' + value | tojson + ';' }}{%- endfor %}",
)
GUARDED = SPEAKING.replace(
    "{{- call.function.arguments | tojson }}",
    "{%- if call.function.arguments is string %}{{- call.function.arguments }}"
    "{%- else %}{{- call.function.arguments | tojson }}{%- endif %}",
)
# only three roles, as many published templates have them
THREE_ROLES = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
USER = {"role": "user", "content": "What is 2+3?"}
ANSWER = {"role": "assistant", "content": "It is 5."}
ENDS = {template: ["<|im_end|>"] for template in (SPEAKING, ITEMS, GUARDED, THREE_ROLES, CHAT_TEMPLATE)}


def model(folder: Path, template: str, ends: list[str] | None = None) -> Path:
    return templates.write_tokenizer(folder / "model", template, ends or ENDS.get(template))


class Learned:
    """What `headway sft` learns from rows: the texts of the sequences, and of what carries loss in each."""

    def __init__(self, folder: Path, data: dict[str, Any], template: str = "chat", train_on: str = "assistant") -> None:
        raw: dict[str, Any] = {
            "run": {"directory": str(folder / "run")},
            "model": {"path": str(folder / "model"), "template": template},
            "tasks": {"train": {"path": str(folder / "tasks.jsonl")}},
            "sft": {"data": data, "train_on": train_on, "max_tokens": 4096},
        }
        read = read_sft_tokens(validate_experiment(raw, "test"))
        self.tokenizer = Tokenizer.load(folder / "model")
        edges = np.cumsum(read.lengths_s)[:-1]
        self.ids = [part.tolist() for part in np.split(read.token_ids_n, edges)]
        self.masks = [part.tolist() for part in np.split(read.learned_n, edges)]
        self.counts = read.counts

    @property
    def texts(self) -> list[str]:
        return [self.tokenizer.decode(ids, keep_special=True) for ids in self.ids]

    @property
    def taught(self) -> list[str]:
        return [
            self.tokenizer.decode([i for i, wanted in zip(ids, mask, strict=True) if wanted], keep_special=True)
            for ids, mask in zip(self.ids, self.masks, strict=True)
        ]


def learn(folder: Path, *rows: dict[str, Any], template: str = "chat", train_on: str = "assistant") -> Learned:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Learned(folder, {"path": str(folder / "rows.jsonl")}, template, train_on)


def learned_or_refused(folder: Path, row: dict[str, Any], named: str) -> Learned | None:
    """What is learned from the row; None where it is refused, and the error has ``named``."""
    try:
        return learn(folder, row)
    except ConfigurationError as error:
        if named not in str(error):
            raise
        return None


def learn_parquet(folder: Path, *rows: dict[str, Any]) -> Learned:
    datasets: Any = pytest.importorskip("datasets")
    datasets.Dataset.from_list(list(rows)).to_parquet(folder / "rows.parquet")
    return Learned(folder, {"source": "datasets", "path": str(folder / "rows.parquet")})


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


CALLED = {"role": "assistant", "content": "", "tool_calls": [call({"a": 2})]}
TWO_TOOLS = [
    tool("add", a={"type": "integer"}, b={"type": "integer"}),
    tool(
        "look",
        place={"type": "string", "enum": ["here", "there"]},
        deep={"type": "object", "properties": {"x": {"type": "number"}}},
    ),
]
