"""Whose tokens a conversation teaches, template by template: the expected text is written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest

from headway.records.errors import ConfigurationError
from headway.tokens.conversation import TrainOn, encode_conversation, encode_pair
from headway.tokens.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "Hi é"},
    {"role": "assistant", "content": "Hello 😀!"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]


def load(folder: Path, template: str, ends: list[str] | None = None) -> Tokenizer:
    return Tokenizer.load(templates.write_tokenizer(folder, template, ends))


def learned(tokenizer: Tokenizer, messages: list[Any], train_on: TrainOn = "assistant", tools: Any = None) -> str:
    """What is learned, and a | wherever something that isn't lies between."""
    made = encode_conversation(tokenizer, messages, tools, train_on)
    assert made is not None
    assert not made.learned[0]
    parts: list[list[int]] = []
    for place, (token, wanted) in enumerate(zip(made.ids, made.learned, strict=True)):
        if wanted and not made.learned[place - 1]:
            parts.append([])
        if wanted:
            parts[-1].append(token)
    return "|".join(tokenizer.decode(part, keep_special=True) for part in parts)


@pytest.mark.parametrize(
    ("template", "every", "last"),
    [
        (templates.CHATML, "Hello 😀!<|im_end|>|2<|im_end|>", "2<|im_end|>"),
        (templates.LLAMA3, "Hello 😀!<|eot_id|>|2<|eot_id|>", "2<|eot_id|>"),
        (templates.MISTRAL, " Hello 😀!</s>| 2</s>", " 2</s>"),
        (templates.GEMMA_MARKED, "Hello 😀!<end_of_turn>|2<end_of_turn>", "2<end_of_turn>"),
        (templates.CLOSING, "Hello 😀!<|end|>|2<|end|>", "2<|end|>"),
    ],
    ids=["chatml", "llama3", "mistral", "gemma-marked", "phi3"],
)
def test_what_each_template_teaches(tmp_path: Path, template: str, every: str, last: str) -> None:
    tokenizer = load(tmp_path, template)
    for messages in (TALK, [SYSTEM, *TALK], [*TALK, {"role": "user", "content": "unanswered"}]):
        assert learned(tokenizer, messages) == every
        assert learned(tokenizer, messages, "last_assistant") == last
    made = encode_conversation(tokenizer, [SYSTEM, *TALK], None, "all")
    text = tokenizer.render_messages([SYSTEM, *TALK], add_generation_prompt=False)
    assert made is not None
    assert made.ids == tokenizer.encode(text)
    assert made.learned == [False] + [True] * (len(made.ids) - 1)


@pytest.mark.parametrize("template", [templates.CHATML, templates.LLAMA3, templates.MISTRAL])
def test_a_turn_begins_where_a_generators_prompt_ends(tmp_path: Path, template: str) -> None:
    tokenizer = load(tmp_path, template)
    made = encode_conversation(tokenizer, TALK, None, "last_assistant")
    assert made is not None
    prompt = list(tokenizer.render(TALK[:3], "chat"))
    assert made.ids[: len(prompt)] == prompt
    assert made.learned.index(True) == len(prompt)


def test_marks_agree_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = load(tmp_path, templates.GEMMA_MARKED)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    # a token across a turn's border is theirs to learn, and cut here: so none
    talk = [{**message, "content": message["content"].lower()} for message in TALK]
    for messages in (talk, [SYSTEM, *talk], talk[:2]):
        expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        made = encode_conversation(ours, messages, None, "assistant")
        assert made is not None
        assert made.ids == expected["input_ids"]
        assert made.learned == [bool(mask) for mask in expected["assistant_masks"]]


def test_marks_inside_macros_and_several_in_a_turn(tmp_path: Path) -> None:
    template = (
        "{% macro said(m) %}{% for part in m.content.split('/') %}{% generation %}{{ part }}{% endgeneration %}, "
        "{% endfor %}<|im_end|>{% endmacro %}"
        "{% for m in messages %}{{ m.role }}:{{ said(m) if m.role == 'assistant' else m.content }};{% endfor %}"
    )
    tokenizer = load(tmp_path, template.replace(", {% endfor %}", "{% endfor %}"), ["<|im_end|>"])
    talk = [TALK[0], {"role": "assistant", "content": "a/b"}, TALK[2], {"role": "assistant", "content": "c/d"}]
    assert learned(tokenizer, talk) == "ab<|im_end|>|cd<|im_end|>"
    assert learned(tokenizer, talk, "last_assistant") == "cd<|im_end|>"


def test_a_token_across_the_border_is_cut_as_a_generators_prompt_would_be(tmp_path: Path) -> None:
    for template in (templates.CHATML, templates.GEMMA_MARKED.replace("message.content | trim", "message.content")):
        ends = ["<|im_end|>"] if template == templates.CHATML else ["<end_of_turn>"]
        tokenizer = load(tmp_path, template, ends)
        for content in ("\nHello", "Hello"):  # "\n\n" and "\nH" are one token each
            talk = [TALK[0], {"role": "assistant", "content": content}]
            assert learned(tokenizer, talk) == content + ends[0]
            made = encode_conversation(tokenizer, talk, None, "assistant")
            assert made is not None
            prompt = tokenizer.render(talk[:1], "chat")
            assert tuple(made.ids[: len(prompt)]) == prompt


def test_tools_reach_the_template_and_carry_no_loss(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, templates.CHATML)
    tools = [{"name": "add"}]
    made = encode_conversation(tokenizer, TALK[:2], tools, "assistant")
    assert made is not None
    assert 'Tools: [{"name": "add"}]' in tokenizer.decode(made.ids)
    assert learned(tokenizer, TALK[:2], tools=tools) == "Hello 😀!<|im_end|>"


def test_a_template_that_rewrites_history_is_refused_unless_the_last_turn_is_enough(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, templates.THINKING)
    thought = {"role": "assistant", "content": "<think>one</think>\nHello"}
    talk = [TALK[0], thought, TALK[2], {"role": "assistant", "content": "<think>two</think>\n2"}]
    with pytest.raises(
        ConfigurationError, match=r"renders message 1 .* differently once others follow.*last_assistant"
    ):
        encode_conversation(tokenizer, talk, None, "assistant")
    assert learned(tokenizer, talk, "last_assistant") == "<think>two</think>\n2<|im_end|>"
    assert "one" not in tokenizer.decode(encode_conversation(tokenizer, talk, None, "last_assistant").ids)  # type: ignore[union-attr]
    assert learned(tokenizer, talk[:2]) == "<think>one</think>\nHello<|im_end|>"
    assert (
        learned(tokenizer, TALK) == "Hello 😀!<|im_end|>|2<|im_end|>"
    )  # without reasoning there is nothing to rewrite


def test_a_generation_prompt_that_is_not_how_turns_begin_is_refused(tmp_path: Path) -> None:
    forced = templates.CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>' }}")
    tokenizer = load(tmp_path, forced, ["<|im_end|>"])
    with pytest.raises(ConfigurationError, match=r"asks for the assistant's turn with .*<think>.*renders that turn as"):
        encode_conversation(tokenizer, TALK[:2], None, "assistant")


def test_a_turn_that_generation_would_not_end_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, templates.CHATML, ["<|endoftext|>"])
    with pytest.raises(ConfigurationError, match=r"generation stops only at '<\|endoftext\|>': add the id"):
        encode_conversation(tokenizer, TALK, None, "assistant")


def test_conversations_that_teach_nothing(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, templates.CHATML)
    with pytest.raises(ConfigurationError, match="no message is the assistant's"):
        encode_conversation(tokenizer, TALK[:1], None, "assistant")
    assert encode_conversation(tokenizer, [TALK[0], {"role": "assistant", "content": ""}], None, "assistant") is None


def test_marks_that_a_filter_moved_are_refused(tmp_path: Path) -> None:
    template = "{% macro said(m) %}{% generation %}  {{ m.content }}{% endgeneration %}{% endmacro %}"
    template += "{% for m in messages %}{{ said(m) | trim }}{% endfor %}"
    tokenizer = load(tmp_path, template, ["<|im_end|>"])
    with pytest.raises(ConfigurationError, match="put the filter inside"):
        encode_conversation(tokenizer, TALK, None, "assistant")


def test_pairs(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, templates.CHATML)
    made = encode_pair(tokenizer, "1+1=", "2", "chat", "assistant")
    as_talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    conversation = encode_conversation(tokenizer, as_talk, None, "assistant")
    assert made is not None
    assert conversation is not None
    assert made.ids == conversation.ids[: len(made.ids)]  # less the line break behind the turn
    assert made.learned == conversation.learned[: len(made.ids)]
    plain = encode_pair(tokenizer, "ab", "c", "raw", "assistant")
    whole = encode_pair(tokenizer, "ab", "c", "raw", "all")
    assert plain is not None
    assert whole is not None
    assert (plain.learned, whole.learned) == ([False, False, True, True], [False, True, True, True])
    assert encode_pair(tokenizer, "", "c", "raw", "assistant") is encode_pair(tokenizer, "a", "", "raw", "all") is None
