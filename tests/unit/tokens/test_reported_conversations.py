"""One way from messages to tokens: what a row says reaches the model as it was meant, or the row is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conversation_rows import (
    ANSWER,
    CALLED,
    ENDS,
    GUARDED,
    ITEMS,
    SPEAKING,
    THREE_ROLES,
    TWO_TOOLS,
    USER,
    call,
    learn,
    learn_parquet,
    learned_or_refused,
    model,
    tool,
)

from headway.config.sources import TaskSource
from headway.records.errors import ConfigurationError
from headway.tasks.sources import load_tasks
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import CHAT_TEMPLATE
from tests.golden import chat_templates as templates


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


# --- what a template drops --------------------------------------------------------------------------------

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
