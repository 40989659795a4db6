"""One way from messages to tokens: what a row says reaches the model as it was meant, or the row is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from single_turn_play import Engine, answer, group

from headway.cli import main as cli
from headway.config import schema
from headway.config.load import validate_experiment
from headway.config.sources import TaskSource
from headway.orchestrator.jobs.sft_data import read_sft_tokens
from headway.records.errors import ConfigurationError
from headway.records.generation import PartialResponse, VersionSpan
from headway.rollout.makers.custom import KEY, Attempt, CustomRollouts
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.hooks import Hook
from headway.tasks.sources import load_tasks
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.training import CHAT_TEMPLATE
from tests.golden import chat_templates as templates
from tests.support import real_tokenizers

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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


# --- what a template drops --------------------------------------------------------------------------------

CALLED = {"role": "assistant", "content": "", "tool_calls": [call({"a": 2})]}
TOLD = {"role": "tool", "content": "the tool says 5", "name": "add"}
DROPPED = {
    "a call": ([USER, CALLED], "call"),
    "a call without content": ([USER, {**CALLED, "content": None}], "call"),
    "a call beside content": ([USER, {**CALLED, "content": "I add."}], "call"),
    "a call before the answer": ([USER, CALLED, TOLD, ANSWER], "call"),
    "one of two turns' calls": ([USER, ANSWER, USER, CALLED], "call"),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "two and three"}], "reason"),
    "reasoning in another field": ([USER, {**ANSWER, "reasoning": "two and three"}], "reason"),
    "reasoning and a call": ([USER, {**CALLED, "reasoning_content": "I need a tool"}], "call|reason"),
}


@pytest.mark.parametrize("case", DROPPED)
@pytest.mark.parametrize("template", [templates.CHATML, CHAT_TEMPLATE, templates.LLAMA3, templates.GEMMA_MARKED])
def test_turns_that_the_template_does_not_render_are_refused(tmp_path: Path, template: str, case: str) -> None:
    messages, dropped = DROPPED[case]
    model(tmp_path, template)
    with pytest.raises(ConfigurationError) as caught:
        learn(tmp_path, {"messages": [USER, ANSWER]}, {"messages": messages})
    assert "rows.jsonl:2" in str(caught.value)
    assert re.search(dropped, str(caught.value))


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
def test_a_dropped_call_is_refused_whatever_carries_loss(tmp_path: Path, train_on: str) -> None:
    model(tmp_path, templates.CHATML)
    with pytest.raises(ConfigurationError, match=r"rows\.jsonl:1"):
        learn(tmp_path, {"messages": [USER, CALLED]}, train_on=train_on)


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (templates.LLAMA3, {"messages": [USER, ANSWER], "tools": [tool("add", a={"type": "integer"})]}),
        (THREE_ROLES, {"messages": [USER, ANSWER], "tools": [tool("look", place={"type": "string"})]}),
        (THREE_ROLES, {"messages": [USER, TOLD, ANSWER]}),
        (THREE_ROLES, {"messages": [USER, ANSWER, {"role": "tool", "content": "seven"}, ANSWER]}),
        (
            THREE_ROLES.replace("message.role == 'system'", "false"),
            {"messages": [{**USER, "role": "system"}, USER, ANSWER]},
        ),
        (
            templates.CHATML.replace("message.content +", "(message.content if loop.last else '') +"),
            {"messages": [USER, ANSWER]},
        ),
    ],
    ids=[
        "tools",
        "tools of another template",
        "a tool's answer",
        "a later tool's answer",
        "the system message",
        "the user's",
    ],
)
def test_what_the_template_drops_around_the_turns_is_refused(
    tmp_path: Path, template: str, row: dict[str, Any]
) -> None:
    model(tmp_path, template, [ENDS.get(template, templates.ENDS.get(template, ["<|im_end|>"]))[0]])
    with pytest.raises(ConfigurationError, match=r"rows\.jsonl:1"):
        learn(tmp_path, row)


def test_roles_that_change_nothing_are_refused(tmp_path: Path) -> None:
    model(tmp_path, "{%- for m in messages %}{{- m.content + '<|im_end|>' }}{%- endfor %}", ["<|im_end|>"])
    with pytest.raises(ConfigurationError, match=r"rows\.jsonl:1"):
        learn(tmp_path, {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]})


def test_what_is_rendered_is_learned(tmp_path: Path) -> None:
    model(tmp_path, SPEAKING)
    thinking = {**CALLED, "reasoning_content": "I need a tool"}
    rows = [
        [USER, ANSWER],
        [USER, CALLED, TOLD, ANSWER],
        [USER, thinking],
        [{"role": "system", "content": "Be brief."}, USER, ANSWER],
    ]
    made = learn(tmp_path, *({"messages": row, "tools": [tool("add", a={"type": "integer"})]} for row in rows))
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert made.taught == [
        "It is 5.<|im_end|>",
        f"{said}It is 5.<|im_end|>",
        f"<think>\nI need a tool\n</think>\n\n{said}",
        "It is 5.<|im_end|>",
    ]


EMPTY = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "messages",
    [
        [USER, EMPTY, USER, ANSWER],
        [USER, ANSWER, USER, EMPTY],
        [USER, ANSWER, EMPTY],
        [USER, EMPTY, USER, EMPTY],
        [USER, {**EMPTY, "tool_calls": []}, USER, ANSWER],
    ],
    ids=["first", "last", "second in a row", "all", "with an empty list of calls"],
)
@pytest.mark.parametrize("template", [templates.CHATML, SPEAKING])
def test_an_empty_turn_is_not_learned(tmp_path: Path, template: str, messages: list[dict[str, Any]]) -> None:
    model(tmp_path, template)
    made = learn(tmp_path, {"messages": [USER, ANSWER]}, {"messages": messages})
    assert {part for text in made.taught for part in re.split(r"(?<=>)", text) if part} == {"It is 5.<|im_end|>"}


# --- developer --------------------------------------------------------------------------------------------

INSTRUCTION = "Answer in French."
PLACES = {
    "first": [{"role": "ROLE", "content": INSTRUCTION}, USER, ANSWER],
    "in the middle": [USER, ANSWER, {"role": "ROLE", "content": INSTRUCTION}, USER, ANSWER],
    "after a system message": [
        {"role": "system", "content": "Be brief."},
        {"role": "ROLE", "content": INSTRUCTION},
        USER,
        ANSWER,
    ],
}


def as_role(messages: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [{**message, "role": message["role"].replace("ROLE", role)} for message in messages]


@pytest.mark.parametrize("place", PLACES)
def test_a_developers_message_is_the_systems_or_refused(tmp_path: Path, place: str) -> None:
    model(tmp_path, THREE_ROLES)
    wanted = learn(tmp_path, {"messages": as_role(PLACES[place], "system")})
    made = learned_or_refused(tmp_path, {"messages": as_role(PLACES[place], "developer")}, "developer")
    if made is not None:
        assert INSTRUCTION in made.texts[0]
        assert (made.ids, made.masks) == (wanted.ids, wanted.masks)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("template", [THREE_ROLES, templates.MISTRAL])
def test_a_developers_message_in_tasks_is_the_systems_or_refused(tmp_path: Path, template: str, place: str) -> None:
    tokenizer = Tokenizer.load(model(tmp_path, template))
    ids = {}
    for role in ("system", "developer"):
        messages = as_role(PLACES[place], role)[:-1]
        (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": messages, "answer": "5"}) + "\n")
        try:
            [task] = load_tasks(TaskSource(path=str(tmp_path / "tasks.jsonl")))
            ids[role] = list(tokenizer.render(task.messages, "chat"))
        except ConfigurationError as error:
            ids[role] = str(error)
    if isinstance(ids["developer"], list):
        assert ids["developer"] == ids["system"]


# --- Arrow's nulls, arguments as text ---------------------------------------------------------------------

TWO_TOOLS = [
    tool("add", a={"type": "integer"}, b={"type": "integer"}),
    tool(
        "look",
        place={"type": "string", "enum": ["here", "there"]},
        deep={"type": "object", "properties": {"x": {"type": "number"}}},
    ),
]
ARROW = {
    "two calls": [call({"a": 2, "b": 3}), call({"place": "here"}, "look")],
    "nested": [call({"where": {"x": 1}}), call({"where": {"y": [1, 2]}}, "look")],
    "lists of objects": [call({"points": [{"x": 1}, {"y": 2, "z": {"w": 1}}]}), call({"points": [{"z": {"v": "a"}}]})],
    "one with an id": [{**call({"a": 1}), "id": "c1"}, call({"b": 1})],
}


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", ARROW)
def test_nulls_that_arrow_adds_are_dropped_in_calls(tmp_path: Path, case: str) -> None:
    model(tmp_path, SPEAKING)
    rows = [{"messages": [USER, {"role": "assistant", "content": "", "tool_calls": ARROW[case]}]}]
    rows.append({"messages": [USER, ANSWER]})
    made, wanted = learn_parquet(tmp_path, *rows), learn(tmp_path, *rows)
    assert all("null" not in text for text in made.texts)
    assert [sorted(text) for text in made.texts] == [sorted(text) for text in wanted.texts]  # fields may be reordered


@pytest.mark.parametrize(
    "tools",
    [
        TWO_TOOLS,
        [tool("a", x={"type": "array", "items": {"type": "string"}}), tool("b", y={"type": "integer", "minimum": 1})],
        [tool("a", x={"type": "string", "default": "q"}), tool("b", x={"anyOf": [{"type": "string"}, {"const": "1"}]})],
    ],
    ids=["names", "items", "alternatives"],
)
def test_nulls_that_arrow_adds_are_dropped_in_tools(tmp_path: Path, tools: list[Any]) -> None:
    model(tmp_path, SPEAKING)
    row = {"messages": [USER, ANSWER], "tools": tools}
    made, wanted = learn_parquet(tmp_path, row), learn(tmp_path, row)
    assert "null" not in made.texts[0]
    assert sorted(made.texts[0]) == sorted(wanted.texts[0])


def test_a_null_that_was_written_stays(tmp_path: Path) -> None:
    model(tmp_path, SPEAKING)
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call({"a": None, "b": [None, 1]})]}]}
    assert '"arguments": {"a": null, "b": [null, 1]}' in learn(tmp_path, row).texts[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 2}', {"a": 2}),
        ('{"a":2,"b":[1,2]}', {"a": 2, "b": [1, 2]}),
        ('{"where": {"x": {"y": "é"}}}', {"where": {"x": {"y": "é"}}}),
        ('{ "q" : "say \\"hi\\"" }', {"q": 'say "hi"'}),
        ('{"n": null, "t": true, "f": 1.5}', {"n": None, "t": True, "f": 1.5}),
        ("{}", {}),
    ],
)
@pytest.mark.parametrize("template", [SPEAKING, ITEMS, GUARDED], ids=["tojson", "items", "guarded"])
def test_arguments_as_text_are_those_as_an_object(tmp_path: Path, template: str, text: str, value: Any) -> None:
    model(tmp_path, template)
    rows = [[USER, {"role": "assistant", "content": "", "tool_calls": [call(form)]}] for form in (text, value)]
    texts, objects = (learn(tmp_path, {"messages": row}) for row in rows)
    assert (texts.ids, texts.masks) == (objects.ids, objects.masks)


def test_arguments_as_text_in_parquet(tmp_path: Path) -> None:
    model(tmp_path, SPEAKING)
    calls = [call('{"a": 2}'), call('{"place": "here"}', "look")]
    made = learn_parquet(tmp_path, {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}]})
    assert '"arguments": {"a": 2}' in made.texts[0]
    assert '"arguments": {"place": "here"}' in made.texts[0]


# --- weights of messages ----------------------------------------------------------------------------------

SECOND = {"role": "assistant", "content": "Still 5."}


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"trainable": False}, {"loss": 0}])
@pytest.mark.parametrize("template", [templates.CHATML, SPEAKING, templates.LLAMA3, templates.GEMMA_MARKED])
def test_a_turn_that_is_not_to_be_learned(tmp_path: Path, template: str, mark: dict[str, Any]) -> None:
    model(tmp_path, template)
    end = Tokenizer.load(tmp_path / "model").token(Tokenizer.load(tmp_path / "model").eos_id)
    rows = [[USER, {**ANSWER, **mark}, USER, SECOND], [USER, ANSWER, USER, {**SECOND, **mark}]]
    made = learn(tmp_path, *({"messages": row} for row in rows))
    assert made.taught == [f"Still 5.{end}", f"It is 5.{end}"]
    assert all(str(value) not in text for text in made.texts for value in mark)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"loss": False}, {"trainable": False}])
def test_the_last_turn_alone_is_not_to_be_learned(tmp_path: Path, mark: dict[str, Any]) -> None:
    model(tmp_path, templates.CHATML)
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER, USER, {**SECOND, **mark}]}]
    made = learn(tmp_path, *rows, train_on="last_assistant")
    assert "Still 5." not in "".join(made.taught)


@pytest.mark.parametrize(
    "mark", [{"weight": 1}, {"weight": 1.0}, {"loss": True}, {"trainable": True}, {"weight": None}]
)
def test_a_turn_that_is_to_be_learned(tmp_path: Path, mark: dict[str, Any]) -> None:
    model(tmp_path, templates.CHATML)
    assert learn(tmp_path, {"messages": [USER, {**ANSWER, **mark}]}).taught == ["It is 5.<|im_end|>"]


def test_a_row_of_which_nothing_is_to_be_learned_is_left_out(tmp_path: Path) -> None:
    model(tmp_path, templates.CHATML)
    made = learn(tmp_path, {"messages": [USER, ANSWER]}, {"messages": [USER, {**ANSWER, "weight": 0}]})
    assert len(made.ids) == made.counts["kept"] == 1


# --- named templates --------------------------------------------------------------------------------------

TOOL_USE = SPEAKING.replace("'<|im_start|>system\\n'", "'<|im_start|>system\\nTOOL USE\\n'")
NAMED = {
    "default first": [{"name": "default", "template": THREE_ROLES}, {"name": "tool_use", "template": TOOL_USE}],
    "tool_use first": [{"name": "tool_use", "template": TOOL_USE}, {"name": "default", "template": THREE_ROLES}],
    "among others": [
        {"name": "default", "template": THREE_ROLES},
        {"name": "rag", "template": "{{ 1 }}"},
        {"name": "tool_use", "template": TOOL_USE},
    ],
}


def name_templates(folder: Path, named: list[dict[str, str]], where: str) -> None:
    model(folder, SPEAKING)
    place = folder / "model"
    (place / "chat_template.jinja").unlink()
    if where == "list":
        settings = json.loads((place / "tokenizer_config.json").read_text())
        (place / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
        return
    (place / "additional_chat_templates").mkdir()
    for entry in named:
        file = (
            "chat_template.jinja" if entry["name"] == "default" else f"additional_chat_templates/{entry['name']}.jinja"
        )
        (place / file).write_text(entry["template"])


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("where", ["list", "files"])
def test_tools_are_rendered_by_the_template_for_them(tmp_path: Path, named: list[dict[str, str]], where: str) -> None:
    name_templates(tmp_path, named, where)
    rows = [{"messages": [USER, CALLED], "tools": TWO_TOOLS}, {"messages": [USER, ANSWER]}]
    made = learn(tmp_path, *rows)
    assert "TOOL USE" in made.texts[0]
    assert '"name": "look"' in made.texts[0]
    assert "TOOL USE" not in made.texts[1]
    assert made.taught[1] == "It is 5.<|im_end|>"


@pytest.mark.parametrize("where", ["list", "files"])
def test_named_templates_give_what_transformers_gives(tmp_path: Path, where: str) -> None:
    from transformers import AutoTokenizer

    name_templates(tmp_path, NAMED["default first"], where)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = Tokenizer.load(tmp_path / "model")
    for tools in (None, TWO_TOOLS):
        expected = theirs.apply_chat_template([USER], tools=tools, tokenize=False, add_generation_prompt=True)
        assert ours.render_messages([USER], tools=tools) == expected


# --- pairs ------------------------------------------------------------------------------------------------

OPENING = templates.CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
UNBROKEN = OPENING.replace("<think>\\n' }}", "<think>' }}")
CLOSED = OPENING.replace("<think>\\n' }}", "<think>\\n\\n</think>\\n\\n' }}")


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (templates.CLOSING, ["<|endoftext|>", "<|end|>"]),
        (templates.CHATML, ["<|endoftext|>", "<|im_end|>"]),
        (templates.LLAMA3, ["</s>", "<|eot_id|>"]),
        (templates.GEMMA_MARKED, ["<eos>", "<end_of_turn>"]),
        (templates.CHATML, ["<|im_end|>", "<|endoftext|>"]),
        (templates.MISTRAL, ["</s>"]),
    ],
    ids=["phi3", "qwen base", "llama3", "gemma", "qwen chat", "mistral"],
)
def test_a_pair_ends_as_a_conversation_does(tmp_path: Path, template: str, ends: list[str]) -> None:
    model(tmp_path, template, ends)
    talk = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "five"}]
    made = learn(tmp_path, {"prompt": "2+3=", "solution": "five"}, {"messages": talk})
    assert made.taught[0] == made.taught[1]
    last = len(made.masks[1]) - made.masks[1][::-1].index(True)
    assert made.ids[0][:last] == made.ids[1][:last]


@pytest.mark.parametrize(
    ("template", "solution"),
    [
        (OPENING, "<think>\nadd\n</think>\n\n5"),
        (OPENING, "<think>add</think>5"),
        (UNBROKEN, "<think>add</think>5"),
        (UNBROKEN, "<think>\nadd\n</think>\n\n5"),
        (OPENING, "\n<think>\nadd\n</think>\n\n5"),
        (CLOSED, "<think>\n\n</think>\n\n5"),
    ],
)
def test_a_thought_begins_once(tmp_path: Path, template: str, solution: str) -> None:
    model(tmp_path, template, ["<|im_end|>"])
    made = learned_or_refused(tmp_path, {"prompt": "2+3=", "solution": solution}, "rows.jsonl:1")
    if made is not None:
        assert made.texts[0].count("<think>") == 1
        assert made.texts[0].count("</think>") == 1


def test_a_solution_behind_an_open_thought_stays(tmp_path: Path) -> None:
    model(tmp_path, OPENING, ["<|im_end|>"])
    made = learn(tmp_path, {"prompt": "2+3=", "solution": "add\n</think>\n\n5"})
    assert made.texts[0].endswith("<think>\nadd\n</think>\n\n5<|im_end|>")


def real(folder: Path, kind: str) -> Tokenizer:
    """The tokenizer of this kind; "always": SentencePiece's that puts a blank before every piece of text."""
    if kind != "always":
        return Tokenizer.load(real_tokenizers.write(kind, folder / "model"))
    file = real_tokenizers.write("metaspace", folder / "model") / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["pre_tokenizer"]["prepend_scheme"] = "always"
    file.write_text(json.dumps(raw))
    return Tokenizer.load(folder / "model")


@pytest.mark.parametrize("kind", [*real_tokenizers.KINDS, "always"])
@pytest.mark.parametrize(
    ("prompt", "solution"),
    [("2+2=", "4"), ("Say nope:", "nope"), ("The answer is", "(46)"), ("x", "é"), ("x", "\n46"), ("The", " answer")],
)
def test_a_pair_reads_as_the_joint_text(tmp_path: Path, kind: str, prompt: str, solution: str) -> None:
    tokenizer = real(tmp_path, kind)
    made = learn(tmp_path, {"prompt": prompt, "solution": solution}, template="raw")
    assert tokenizer.decode(made.ids[0]) == prompt + solution
    asked = list(tokenizer.render(prompt, "raw"))
    assert made.ids[0][: len(asked)] == asked  # as a generator is asked


LINES = (
    "{%- for m in messages %}{{- 'Q:\\n' + m.content if m.role == 'user' else 'A:\\n' + m.content + eos_token }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- 'A:\\n' }}{%- endif %}"
)


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "always"])
@pytest.mark.parametrize("content", ["\n46", "nope:", " 46", "\n\nThe answer"])
def test_a_conversations_turns_have_no_stray_blanks(tmp_path: Path, kind: str, content: str) -> None:
    real(tmp_path, kind)
    (tmp_path / "model" / "chat_template.jinja").write_text(LINES)
    tokenizer = Tokenizer.load(tmp_path / "model")
    made = learn(tmp_path, {"messages": [USER, {"role": "assistant", "content": content}]})
    assert tokenizer.decode(made.ids[0]) == f"Q:\nWhat is 2+3?A:\n{content}"
    prompt = list(tokenizer.render([USER], "chat"))
    assert made.ids[0][: len(prompt)] == prompt


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "always", "gemma", "llama3", "qwen"])
@pytest.mark.parametrize("said", ["nope:", "\n", " no", "é", "(46)", "The answer"])
def test_what_is_observed_reads_as_the_joint_text(tmp_path: Path, kind: str, said: str) -> None:
    tokenizer = real(tmp_path, kind)
    four = tokenizer.token_id("4")
    assert four is not None

    async def function(attempt: Attempt) -> None:
        await attempt.generate(max_tokens=1)
        attempt.observe(said)
        await attempt.generate(max_tokens=1)

    def reply(request: Any) -> Any:
        spans = (VersionSpan(version=7, tokens=1),)
        return answer(request, "length", PartialResponse(ids=(four,), logprobs=(-0.5,), versions=spans))

    async def main(clock: Clock) -> Any:
        engine = Engine(clock, reply, reply)
        settings = schema.RolloutConfig(max_prompt_tokens=40, max_response_tokens=40)
        sampler = TurnSampler(engine.generate, tokenizer, settings, clock, run_seed=3)
        rollouts = CustomRollouts(Hook(key=KEY, name="mine:rollout", function=function), sampler)
        asked = msgspec.structs.replace(group(), prompt_ids=tuple(tokenizer.render("2+2=", "raw")))
        return await rollouts.generate_member(asked, 1)

    rollout = run_virtual(main)
    assert rollout.failure is None
    assert tokenizer.decode([*rollout.prompt_ids, *rollout.response_ids]) == f"2+2=4{said}4"


BEGINS = {"llama2": "<s>", "metaspace": "<s>", "llama3": "<|begin_of_text|>", "gemma": "<bos>"}


@pytest.mark.parametrize("kind", BEGINS)
@pytest.mark.parametrize("prompt", ["2+2=", "[INST] 2+2= [/INST]"])
def test_a_prompt_begins_once(tmp_path: Path, kind: str, prompt: str) -> None:
    tokenizer = real(tmp_path, kind)
    bos = tokenizer.token_id(BEGINS[kind])
    assert bos is not None
    ids = list(tokenizer.render(BEGINS[kind] + prompt, "raw"))
    assert (ids.count(bos), ids[0]) == (1, bos)
    assert list(tokenizer.render(prompt, "raw")).count(bos) == 1
    made = learn(tmp_path, {"prompt": BEGINS[kind] + prompt, "solution": "4"}, template="raw")
    assert made.ids[0].count(bos) == 1


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("llama2", "</s>"),
        ("gpt2", "<|endoftext|>"),
        ("llama3", "<|eot_id|>"),
        ("gemma", "<eos>"),
        ("qwen", "<|im_end|>"),
    ],
)
def test_a_solution_ends_once(tmp_path: Path, kind: str, end: str) -> None:
    tokenizer = real(tmp_path, kind)
    made = learn(
        tmp_path, {"prompt": "2+2=", "solution": f"4{end}"}, {"prompt": "2+2=", "solution": "4"}, template="raw"
    )
    assert made.ids[0] == made.ids[1]
    assert made.ids[0].count(tokenizer.token_id(end)) == (2 if made.ids[0][0] == tokenizer.token_id(end) else 1)


@pytest.mark.parametrize("tail", ["<|im_end|>", "<|im_end|>\n"])
def test_a_chat_solution_ends_once(tmp_path: Path, tail: str) -> None:
    model(tmp_path, templates.CHATML)
    made = learn(
        tmp_path, {"prompt": "2+2=", "solution": f"4{tail}"}, {"messages": [USER, {**ANSWER, "content": f"4{tail}"}]}
    )
    assert made.taught == ["4<|im_end|>", "4<|im_end|>"]


@pytest.mark.parametrize("kind", ["llama2", "llama3", "gemma"])
def test_an_end_that_the_tokenizer_adds_is_not_in_a_prompt(tmp_path: Path, kind: str) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors

    tokenizer = real(tmp_path, kind)
    begin, end = BEGINS[kind], str(tokenizer.token(tokenizer.eos_id))
    file = tmp_path / "model" / "tokenizer.json"
    backend = Backend.from_file(str(file))
    marks = [(text, backend.token_to_id(text)) for text in (begin, end)]
    backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=marks)
    backend.save(str(file))
    ids = list(Tokenizer.load(tmp_path / "model").render("2+2=", "raw"))
    assert tokenizer.eos_id not in ids
    made = learn(tmp_path, {"prompt": "2+2=", "solution": "4"}, template="raw")
    assert (made.ids[0].count(tokenizer.eos_id), made.ids[0][-1]) == (1, tokenizer.eos_id)


# --- what ends a turn -------------------------------------------------------------------------------------

NEXT_ROLE = (
    "{%- for m in messages %}{{- '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{- m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
WORDS = (
    "{%- for m in messages %}{{- '\\n### ' + m.role + ':\\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\n### assistant:\\n' }}{%- endif %}"
)
UNENDED = {
    "chatml": (templates.CHATML, "<|im_end|>"),
    "llama3": (templates.LLAMA3, "<|eot_id|>"),
    "gemma": (templates.GEMMA_MARKED, "<end_of_turn>"),
    "phi3": (templates.CLOSING, "<|end|>"),
    "the next role": (NEXT_ROLE, "<|user|>"),
    "words": (WORDS, ""),
}


@pytest.mark.parametrize("case", UNENDED)
def test_a_turns_end_ends_a_response_or_every_command_refuses(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    template, end = UNENDED[case]
    tokenizer = Tokenizer.load(model(tmp_path, template, ["</s>"]))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": tokenizer.vocabulary_size,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")  # no tensors
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "2+3=", "answer": "5"}) + "\n")
    (tmp_path / "e.toml").write_text(
        f'[run]\ndirectory = "{tmp_path / "run"}"\n[model]\npath = "{tmp_path / "model"}"\ntemplate = "chat"\n'
        f'[tasks.train]\npath = "{tmp_path / "tasks.jsonl"}"\n[trainer]\nlearning_rate = 1e-4\n'
    )
    code = cli.main(["check", str(tmp_path / "e.toml"), "--no-calibrate"])
    said = "".join(capsys.readouterr())
    if code == 0:
        assert end
        assert end in said  # said once
        made = learn(tmp_path, {"messages": [USER, ANSWER]}, {"prompt": "What is 2+3?", "solution": "It is 5."})
        assert made.taught[1].endswith(f"5.{end}")
        # the mark of the next role isn't in a conversation that ends before it
        assert made.taught[0].endswith((f"5.{end}", "5.") if case == "the next role" else f"5.{end}")
    else:
        assert code == 2
        with pytest.raises(ConfigurationError):
            learn(tmp_path, {"messages": [USER, ANSWER]})
