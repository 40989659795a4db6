"""What a run's tokenizer makes of conversations: arguments and date of the template, weights of messages, turn ends."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main as cli
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.models.loading import copy_tokenizer
from headway.records.errors import ConfigurationError
from headway.runtime.run_directory import RunDirectory
from headway.tasks.sft_data import read_sft_tokens
from headway.tokens.conversation import encode_conversation, encode_pair
from headway.tokens.tokenizer import Tokenizer
from tests.golden import chat_templates as templates

TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
SWITCHED = templates.CHATML.replace(
    "'<|im_start|>assistant\\n' }}",
    "'<|im_start|>assistant\\n' }}{%- if enable_thinking == false %}{{- 'quick' }}{%- endif %}",
)
DATED = "{{- strftime_now('%d %b %Y') }}" + templates.CHATML
WORDS = (
    "{%- for m in messages %}{{- '\\n### ' + m.role + ':\\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\n### assistant:\\n' }}{%- endif %}"
)
# a call ends with a mark of its own, which isn't the turn's; the result's mark ends the turn
CALLING = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}"
    "{%- for c in m.tool_calls or [] %}{{- '[INST]' + c.function.name + c.function.arguments | tojson + '[/INST]' }}"
    "{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
).replace("'<|' + m.role + '|>'", "'<|end|>' if m.role == 'tool' else '<|' + m.role + '|>'")


def experiment(folder: Path, **sections: Any) -> Experiment:
    raw: dict[str, Any] = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": str(folder / "model"), "template": "chat"},
        "tasks": {"train": {"path": str(folder / "tasks.jsonl")}},
        "sft": {"data": {"path": str(folder / "rows.jsonl")}},
    }
    for name, keys in sections.items():
        raw[name] = {**raw.get(name, {}), **keys}
    return validate_experiment(raw, "test")


def load(folder: Path, template: str = templates.CHATML, ends: tuple[str, ...] = ("<|im_end|>",)) -> Tokenizer:
    return Tokenizer.load(templates.write_tokenizer(folder / "model", template, list(ends)))


def taught(tokenizer: Tokenizer, messages: list[Any], train_on: Any = "assistant") -> str:
    made = encode_conversation(tokenizer, messages, None, train_on)
    assert made is not None
    ids = [i for i, wanted in zip(made.ids, made.learned, strict=True) if wanted]
    return tokenizer.decode(ids, keep_special=True)


def test_the_templates_arguments_are_the_experiments(tmp_path: Path) -> None:
    load(tmp_path, SWITCHED)
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "quick 2"}]}\n'
    )
    for given, learned in ({}, "quick 2<|im_end|>"), ({"enable_thinking": False}, " 2<|im_end|>"):
        configured = experiment(tmp_path, model={"chat_template_kwargs": given})
        data, tokenizer = read_sft_tokens(configured), Tokenizer.of(configured)
        assert tokenizer.decode(data.token_ids_n[data.learned_n].tolist(), keep_special=True) == learned
        assert tokenizer.decode(list(tokenizer.render("?", "chat"))).endswith("quick") == bool(given)
    for name in ("messages", "add_generation_prompt", "not a name"):
        with pytest.raises(ConfigurationError, match=rf"model\.chat_template_kwargs|chat_template_kwargs\.{name}"):
            experiment(tmp_path, model={"chat_template_kwargs": {name: 1}})


def test_a_resumed_run_renders_the_date_at_which_it_started(tmp_path: Path) -> None:
    load(tmp_path, DATED)
    configured = experiment(tmp_path)
    with RunDirectory(configured.run.directory) as first:
        first.begin(configured, resume=False)
        started = first.started()
        assert abs((datetime.now() - started).total_seconds()) < 60
    first.start.write_text("2025-02-03T10:00:00\n")
    (tmp_path / "run" / "buffer.db").touch()
    with RunDirectory(configured.run.directory) as again:
        again.begin(configured, resume=True)
        text = Tokenizer.of(configured, again.started()).render_messages(TALK[:1])
    assert text.startswith("03 Feb 2025<|im_start|>")
    first.start.write_text("yesterday\n")
    with pytest.raises(ConfigurationError, match="started is damaged"):
        first.started()


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"weight": "0"}, {"loss": 2}, {"trainable": "no"}, {"loss": [1]}])
def test_a_weight_that_is_neither_is_refused(tmp_path: Path, mark: dict[str, Any]) -> None:
    [(key, _)] = mark.items()
    with pytest.raises(ConfigurationError, match=rf"messages\[1\]\.{key} = .*valid: true, false, 1, 0"):
        taught(load(tmp_path), [TALK[0], {**TALK[1], **mark}])


def test_weights_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    with pytest.raises(ConfigurationError, match="contradict"):
        taught(tokenizer, [TALK[0], {**TALK[1], "weight": 0, "loss": True}])
    with pytest.raises(ConfigurationError, match=r"messages\[0\] \(role 'user'\) is to be learned"):
        taught(tokenizer, [{**TALK[0], "weight": 1}, TALK[1]])


def test_weights_count_where_every_token_is_learned(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    whole = "im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert taught(tokenizer, TALK[:2], "all") == whole.removeprefix("im_start|>")
    said = taught(tokenizer, [{**TALK[0], "loss": False}, TALK[1], TALK[2], {**TALK[3], "weight": 0}], "all")
    assert said == "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_saved_model_keeps_all_its_templates(tmp_path: Path) -> None:
    load(tmp_path)
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("TOOLS")
    (tmp_path / "saved").mkdir()
    copy_tokenizer(tmp_path / "model", tmp_path / "saved")
    saved = Tokenizer.load(tmp_path / "saved")
    assert saved.render_messages(TALK, tools=[{"name": "add"}]) == "TOOLS"
    assert saved.render_messages(TALK).startswith("<|im_start|>user")


def test_turns_of_text_and_of_calls_end_at_their_own_marks(tmp_path: Path) -> None:
    load(tmp_path, CALLING, ("</s>",))
    tokenizer = Tokenizer.load(tmp_path / "model", chat=True)
    assert tokenizer.added_stops == ("<|user|>", "<|end|>")  # [/INST] closes a call, and another may follow
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    assert taught(tokenizer, [TALK[0], {**TALK[1], "tool_calls": [call]}]) == '2[INST]f{"a": 1}[/INST]<|end|>'
    made = encode_pair(tokenizer, "1+1?", "2", "chat", "assistant")
    assert made is not None
    assert tokenizer.decode(made.ids, keep_special=True).endswith("<|assistant|>2<|user|>")


def test_a_raw_run_stops_as_before(tmp_path: Path) -> None:
    load(tmp_path, ends=("<|endoftext|>",))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    raw, chat = (Tokenizer.of(experiment(tmp_path, model={"template": one})) for one in ("raw", "chat"))
    assert (raw.added_stops, chat.added_stops) == ((), ("<|im_end|>",))


@pytest.mark.parametrize("command", ["check", "train", "eval", "sft", "serve"])
def test_every_command_refuses_turns_that_never_end(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = load(tmp_path, WORDS, ("</s>",)).vocabulary_size
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": vocabulary, "max_position_embeddings": 4096}
    config = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, **sizes, **more}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")  # no tensors
    for name in ("tasks", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"{name} 1+1=", "answer": "2"}) + "\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "solution": "2"}) + "\n")
    file = tmp_path / "e.toml"
    file.write_text(
        f'[run]\ndirectory = "{tmp_path}/run"\n[model]\npath = "{tmp_path}/model"\ntemplate = "chat"\n'
        f'[tasks.train]\npath = "{tmp_path}/tasks.jsonl"\n[tasks.test]\npath = "{tmp_path}/test.jsonl"\n'
        f'[sft]\ndata = "{tmp_path}/rows.jsonl"\noutput = "{tmp_path}/out"\n'
    )
    arguments = [str(tmp_path / "model"), "--address=127.0.0.1:0"] if command == "serve" else [str(file)]
    code = cli.main([command, *arguments, *(["--no-calibrate"] if command == "check" else [])])
    said = " ".join("".join(capsys.readouterr()).split())
    assert code == 2, said
    assert "ends the assistant's turn with '### user:" in said
