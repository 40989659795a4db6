"""Tokenizers: nothing is unknown, digits stay single, transformers agrees, stop strings are found as text grows."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from headway.records.errors import ConfigurationError
from headway.tokens.tokenizer import IncrementalDecoder, Tokenizer
from headway.tokens.tokenizer_training import (
    MINIMUM_SIZE,
    RESERVED_TOKENS,
    SPECIAL_TOKENS,
    train_byte_fallback_tokenizer,
)

CORPUS = ["the answer to 12+34 is 46.\nthe other answer is 7*8=56", "so the answer is that, é and 你好"] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_byte_fallback_tokenizer(CORPUS, 400, path)
    return path


@pytest.fixture(scope="module")
def trained(folder) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    """The other common kind (GPT-2, Qwen, Llama 3): bytes drawn as printable characters."""
    path = tmp_path_factory.mktemp("byte_level")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return Tokenizer.load(path)


@settings(deadline=None, max_examples=300)
@given(st.text() | st.text(alphabet="<0x41>|eos_im\n 12+é你", max_size=40))
def test_any_text_round_trips(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids, keep_special=True) == text
    assert all(0 <= i < trained.vocabulary_size for i in ids)


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet="0123456789+-*/=().,", max_size=60))
def test_digits_and_symbols_are_single_tokens(trained, text):
    """Those of the corpus are characters of the vocabulary, all others are bytes; they never merge."""
    assert len(trained.encode(text)) == len(text)
    assert [trained.token(i) for i in trained.encode("12+34=46")] == list("12+34=46")


def test_vocabulary_holds_specials_bytes_and_characters(trained, folder):
    assert trained.vocabulary_size <= 400
    assert trained.token_id(" answer") is not None  # words are merged
    ids = [trained.token_id(token) for token in (*SPECIAL_TOKENS, *RESERVED_TOKENS)]
    assert ids == list(range(len(ids)))
    for token in (*SPECIAL_TOKENS, *RESERVED_TOKENS):
        assert trained.encode(token) == [trained.token_id(token)]
    assert trained.decode(trained.encode("<think>4</think><|eos|>")) == "<think>4</think>"
    assert trained.eos_id == trained.token_id("<|eos|>")
    assert trained.pad_id == trained.token_id("<|pad|>")
    again = folder.parent / "again"
    train_byte_fallback_tokenizer(CORPUS[::-1], 400, again)
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_character_level_has_no_merges(tmp_path):
    tokenizer = train_byte_fallback_tokenizer(["12+34=46", "the sum"], 1000, tmp_path, character_level=True)
    assert tokenizer.vocabulary_size == MINIMUM_SIZE + len(set("12+34=46the sum"))
    assert [tokenizer.token(i) for i in tokenizer.encode("the 46")] == list("the 46")
    bytes_only = train_byte_fallback_tokenizer(["abc"], MINIMUM_SIZE, tmp_path)
    assert bytes_only.decode(bytes_only.encode("abc é")) == "abc é"
    frequent = train_byte_fallback_tokenizer(["aaab"], MINIMUM_SIZE + 1, tmp_path)
    assert frequent.token_id("a") == MINIMUM_SIZE
    assert frequent.token_id("b") is None
    with pytest.raises(ConfigurationError, match="at least 267"):
        train_byte_fallback_tokenizer(["abc"], 266, tmp_path)


def test_transformers_reads_the_folder_and_agrees(trained, folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for text in (*CORPUS, "  two  spaces\n\n<think>é\x00😀 <|im_end|> 한", "<0x41>", ""):
        assert theirs(text)["input_ids"] == trained.encode(text)
        assert theirs(text)["input_ids"] == list(trained.render(text))
        ids = trained.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == trained.decode(ids)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (trained.eos_id, trained.pad_id)
    messages = [{"role": "user", "content": "1+2="}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == trained.render_messages(messages)
    assert rendered == trained.render_messages(messages, variables={"self": 1, "marks": 2})
    ids = theirs(rendered, add_special_tokens=False)["input_ids"]
    assert trained.render("1+2=", "chat") == tuple(ids)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n    {%- if m.role == 'user' %}U:{{ m.content | trim }}\n{% endif %}\n"
    "{% endfor %}{{ '[' + eos_token + ']' if add_generation_prompt }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% if tools %}{{ tools | tojson }}{% else %}none {{ messages | tojson(indent=1) }}{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_render_as_in_transformers(trained, folder, tmp_path, template):
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": " a <b> é "}, {"role": "assistant", "content": "c"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    for tools in (None, [{"name": "f", "description": "a & b"}]):
        expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        assert ours.render_messages(messages, tools=tools) == expected


def rewrite(folder: Path, source: Path, **changes: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    settings_ = {**json.loads((source / "tokenizer_config.json").read_text()), **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))


def test_eos_is_read_from_every_config_file(folder, tmp_path):
    rewrite(tmp_path, folder, eos_token=None)
    with pytest.raises(ConfigurationError, match="no end-of-sequence token; set eos_token"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert Tokenizer.load(tmp_path).stop_ids == (4,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert Tokenizer.load(tmp_path).stop_ids == (3, 4)
    rewrite(tmp_path, folder, eos_token={"content": "<|eos|>", "special": True}, pad_token=None)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.stop_ids == (2, 3, 4)
    assert tokenizer.eos_id == tokenizer.pad_id == 2
    rewrite(tmp_path, folder, eos_token="<end>")
    with pytest.raises(ConfigurationError, match="'<end>', which is not in the vocabulary"):
        Tokenizer.load(tmp_path)
    rewrite(tmp_path, folder)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ConfigurationError, match="eos_token_id = 'x'"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9999}))
    with pytest.raises(ConfigurationError, match="9999 is outside the vocabulary"):
        Tokenizer.load(tmp_path)


def test_errors_name_bad_folders_and_templates(folder, tmp_path):
    with pytest.raises(ConfigurationError, match="no such folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"no such file: .*tokenizer\.json$"):
        Tokenizer.load(tmp_path)
    (tmp_path / "rl/best").mkdir(parents=True)
    (tmp_path / "rl/best/tokenizer.json").touch()
    with pytest.raises(ConfigurationError, match=r"rl is a run's folder, its model is .*/rl/best$"):
        Tokenizer.load(tmp_path / "rl")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path)
    rewrite(tmp_path, folder, chat_template=None)
    with pytest.raises(ConfigurationError, match="no chat template"):
        Tokenizer.load(tmp_path).render("x", "chat")
    for template in ("{% for %}", "{{ raise_exception('only pairs') }}", "{{ messages.append(1) }}", "{{ none + 1 }}"):
        rewrite(tmp_path, folder, chat_template=template)
        with pytest.raises(ConfigurationError, match="chat template fails"):
            Tokenizer.load(tmp_path).render("x", "chat")
    rewrite(
        tmp_path, folder, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    )
    assert Tokenizer.load(tmp_path).render_messages([]) == "D"
    with pytest.raises(ConfigurationError, match="valid: 'raw' and 'chat'"):
        Tokenizer.load(tmp_path).render("x", "cooked")  # type: ignore[arg-type]


def test_templates_tell_the_date_at_which_the_run_started(folder, tmp_path):
    rewrite(tmp_path, folder, chat_template="{{ strftime_now('%d %b %Y') }}")
    started = datetime(2025, 2, 3)
    for _ in range(2):  # as a resumed run does, on another day
        assert Tokenizer.load(tmp_path, started=started).render_messages([]) == "03 Feb 2025"
    assert Tokenizer.load(tmp_path).render_messages([]) == f"{datetime.now():%d %b %Y}"


STOPS = st.lists(st.sampled_from(["4", "\n", "ans", "is 4", "é", "你好", "<|", "er i", "��"]), max_size=3)


def watch(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> None:
    """After every token: the text is the full decode's, and a stop is reported exactly once it is in there."""
    decoder = IncrementalDecoder(tokenizer, stop)
    for i, token_id in enumerate(ids):
        stopped = decoder.push(token_id)
        full = tokenizer.decode(ids[: i + 1])
        assert decoder.text == full
        expected = any(text in full for text in stop)
        assert stopped >= expected
        if stopped and not expected:  # it was there before a later byte changed the text
            assert any(text in tokenizer.decode(ids[: j + 1]) for j in range(i) for text in stop)
        if stopped:
            assert decoder.stopped in stop


@settings(deadline=None, max_examples=150)
@given(data=st.data(), stop=STOPS)
def test_incremental_text_equals_the_full_decode_for_any_ids(trained, data, stop):
    watch(trained, data.draw(st.lists(st.integers(0, trained.vocabulary_size - 1), max_size=30)), stop)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), stop=STOPS)
def test_incremental_text_equals_the_full_decode_at_byte_level(byte_level, data, stop):
    watch(byte_level, data.draw(st.lists(st.integers(0, byte_level.vocabulary_size - 1), max_size=30)), stop)


@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet="the answer is 46.\n你好é😀", max_size=50), stop=STOPS)
def test_incremental_text_equals_the_full_decode_of_real_text(trained, byte_level, text, stop):
    watch(trained, trained.encode(text), stop)
    watch(byte_level, byte_level.encode(text), stop)


def test_a_special_token_does_not_close_a_run_of_bytes(trained):
    """Skipped when decoding, it lets later bytes join, and spoil, the character before it."""
    first, second = (trained.token_id(f"<0x{byte:02X}>") for byte in "ß".encode())
    assert first is not None
    assert second is not None
    watch(trained, [first, second, trained.eos_id, first, trained.eos_id, second], ["ß"])


def test_a_stop_string_is_found_across_tokens(trained):
    decoder = IncrementalDecoder(trained, ["is 46", "er i"])
    reports = [(trained.token(i), decoder.push(i)) for i in trained.encode("the answer is 46")]
    assert [token for token, stopped in reports if stopped] == [" is", " ", "4", "6"]
    assert decoder.stopped == "er i"


def test_a_leading_space_dropped_by_the_decoder_stays_dropped_only_at_the_start(tmp_path):
    """Llama 2's decoder strips the first space of what it is given: the tail must be decoded in context."""
    backend = Backend(models.BPE(vocab={"▁a": 0, "▁b": 1, "</s>": 2}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(backend, [2])
    watch(tokenizer, [0, 1, 1, 2, 0, 1], ["b a"])
    assert tokenizer.decode([0, 1]) == "a b"


def test_decoding_cost_does_not_grow_with_the_response(trained):
    decoder = IncrementalDecoder(trained, ["never"])
    longest = 0
    for token_id in trained.encode("the answer is 46\n" * 50):
        decoder.push(token_id)
        longest = max(longest, len(decoder._tail))
    assert longest <= 3


def test_tokens_imports_neither_torch_nor_transformers():
    code = (
        "import sys, headway.tokens.tokenizer, headway.tokens.tokenizer_training;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
