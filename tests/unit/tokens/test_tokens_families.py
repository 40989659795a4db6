"""Tokenizers of the published kinds: transformers agrees on ids, text and chat; characters grow out of their bytes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.records.errors import ConfigurationError
from headway.tokens.tokenizer import IncrementalDecoder, Tokenizer
from tests.support.real_tokenizers import KINDS, write

TEXTS = [
    "The answer is 46.",
    "  two  spaces\n\n é\x00😀 한 ",
    "",
    " lead",
    "don't 12345 e\u0301",
    "a<s>b",
    "x <|im_end|> y<think>z</think>",
    "<end_of_turn>\nfoo<0x41>",
]
CHAT = [
    {"role": "user", "content": " 1+2= <b> é "},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "你好"},
]
EACH = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def _folder(root: Path, kind: str) -> Path:
    return write(kind, root / kind)


@pytest.fixture
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory.getbasetemp(), kind)


@EACH
def test_transformers_agrees_on_ids_and_text(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == list(ours.render(text))
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
        assert theirs.decode(ids) == ours.decode(ids, keep_special=True)
    assert (theirs.eos_token_id, theirs.vocab_size <= ours.vocabulary_size) == (ours.eos_id, True)


@EACH
def test_transformers_agrees_on_chats(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    if theirs.chat_template is None:
        with pytest.raises(ConfigurationError, match="no chat template"):
            ours.render_messages(CHAT)
        return
    for messages, prompt in ((CHAT, True), (CHAT[:2], False)):
        rendered = ours.render_messages(messages, add_generation_prompt=prompt)
        assert rendered == theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    ids = theirs.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert ours.render(CHAT[0]["content"], "chat") == tuple(ids)
    begins = ours.encode("", add_special_tokens=True)
    assert list(ids).count(begins[0] if begins else -1) == len(begins)  # the template's bos is not doubled


@EACH
def test_encoded_text_decodes_to_itself(folder: Path) -> None:
    """Text without special tokens survives, but for the space SentencePiece's kinds put before it and NFC."""
    tokenizer = Tokenizer.load(folder)
    for text in ("The answer is 46.", "é 你好 😀\n\n x", "def f(x):\n    return x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_fixture_tokenizers_have_declared_kinds(tmp_path: Path) -> None:
    tokenizers = {kind: Tokenizer.load(write(kind, tmp_path / kind)) for kind in KINDS}
    pieces = {kind: [one.token(i) for i in one.render("é is 12345")] for kind, one in tokenizers.items()}
    assert pieces["gpt2"][:2] == ["Ã©", "Ġis"]
    assert pieces["qwen"][-5:] == list("12345")  # one digit a token
    assert pieces["llama3"][0] == "<|begin_of_text|>"
    assert not set(pieces["llama3"]) & {"1234", "12345"}  # three digits at most
    assert pieces["llama2"][:4] == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces["gemma"][:3] == ["<bos>", "<0xC3>", "<0xA9>"]


def watch(tokenizer: Tokenizer, ids: list[int]) -> None:
    decoder = IncrementalDecoder(tokenizer)
    for count, token_id in enumerate(ids, 1):
        decoder.push(token_id)
        assert decoder.text == tokenizer.decode(ids[:count])


@EACH
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_text_grows_token_by_token_as_the_whole_decodes(folder: Path, data: Any) -> None:
    """Characters split over tokens, special tokens between their bytes, leading spaces: any ids at all."""
    tokenizer = _load(folder)
    watch(tokenizer, data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=30)))
    watch(tokenizer, tokenizer.encode(data.draw(st.text(alphabet=" the answer is46.\n你好é😀한", max_size=40))))


_load = functools.cache(Tokenizer.load)


def test_roles_out_of_turn_are_the_templates_own_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write("llama2", tmp_path))
    with pytest.raises(ConfigurationError, match="Conversation roles must alternate"):
        tokenizer.render_messages(CHAT[1:])
    parts = [{"type": "text", "text": " hi "}]
    gemma = Tokenizer.load(write("gemma", tmp_path / "gemma"))
    assert "<start_of_turn>user\nhi<end_of_turn>" in gemma.render_messages([{"role": "user", "content": parts}])


def test_tokens_that_only_the_settings_know_are_added(tmp_path: Path) -> None:
    write("qwen", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    size = Tokenizer.load(tmp_path).vocabulary_size
    raw = json.loads(file.read_text())
    added = {str(size): {"content": "<call>", "special": True}, str(size + 1): {"content": "<note>"}}
    file.write_text(json.dumps({**raw, "added_tokens_decoder": added}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<call><note>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<note>"
    file.write_text(json.dumps({**raw, "added_tokens_decoder": {str(size + 5): {"content": "<far>"}}}))
    with pytest.raises(ConfigurationError, match=f"'<far>' the id {size + 5}, but tokenizer.json leaves it {size}"):
        Tokenizer.load(tmp_path)


def test_older_tokenizer_layouts_are_read(tmp_path: Path) -> None:
    write("gemma", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    raw = json.loads(file.read_text())
    template = raw.pop("chat_template")
    named = {name: raw.pop(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    file.write_text(json.dumps(raw))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id == tokenizer.token_id("<eos>")
    assert tokenizer.pad_id == tokenizer.token_id("<pad>")
    assert tokenizer.render_messages(CHAT[:1]).startswith("<bos><start_of_turn>user\n")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ConfigurationError, match=r"tokenizer.json; tokenizer.model alone is not read: transformers'"):
        Tokenizer.load(tmp_path)


@EACH
def test_vocabulary_bytes_are_what_is_decoded(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(kind, tmp_path))
    vocabulary = tokenizer.vocabulary_bytes()
    for text in ("The answer is 46.\n", "é and 你好", "def f(x):\n    return x", "  two 🙂 ", "<0x41>▁"):
        ids = [*tokenizer.encode(text), tokenizer.eos_id]
        joined = b"".join(vocabulary[i] for i in ids).decode()
        assert joined.lstrip(" ") == tokenizer.decode(ids, keep_special=True).lstrip(" ")
