"""Named templates, pairs, observed texts and ends of turns: the same tokens as a conversation's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conversation_rows import (
    ANSWER,
    CALLED,
    SPEAKING,
    THREE_ROLES,
    TWO_TOOLS,
    USER,
    learn,
    learned_or_refused,
    model,
)
from single_turn_play import Engine, answer, group

from headway.cli import main as cli
from headway.config import schema
from headway.records.errors import ConfigurationError
from headway.records.generation import PartialResponse, VersionSpan
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.makers.user_function import KEY, Attempt, CustomRollouts
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.hooks import Hook
from headway.tokens.tokenizer import Tokenizer
from tests.golden import chat_templates as templates
from tests.support import real_tokenizers

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
