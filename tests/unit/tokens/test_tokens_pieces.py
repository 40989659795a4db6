"""A prompt in pieces has the tokens that it has as a whole, whatever its tokenizer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_agent import KINDS, WORDS, chat_of
from scratch_folders import scratch_folder
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from headway.tokens.continuation import Chat
from headway.tokens.piece_cache import PieceEncoder
from headway.tokens.tokenizer import Tokenizer

chat = cache(lambda kind: chat_of(kind, scratch_folder("pieces")))


def specials(chat: Chat) -> list[str]:
    return [text for i in sorted(chat.tokenizer.special_ids) if (text := chat.tokenizer.token(i))]


@settings(deadline=None, max_examples=40)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_encode_as_the_whole_text(kind: str, data: st.DataObject) -> None:
    parts = st.sampled_from([*WORDS, *specials(chat(kind)), " ", "  ", "\n", "a" * 70, "the answer " * 9])
    text = "".join(data.draw(st.lists(parts, max_size=40)))
    for _ in range(2):  # what is kept is the same
        assert chat(kind).encode(text) == chat(kind).tokenizer.encode(text)


def test_a_system_message_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, encoded = chat_of("chatml", scratch_folder("pieces")), list[str]()
    plain = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **kw: encoded.append(text) or plain(self, text, **kw))
    for number in range(3):
        ids = chat.encode(f"<|im_start|>system\n{'be brief ' * 20}<|im_end|>\n<|im_start|>user\n{number}<|im_end|>\n")
        assert len(ids) > 20
    assert sum("be brief" in text for text in encoded) == 1


def test_context_sensitive_tokens_begin_no_piece() -> None:
    backend = Backend(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("<l>", lstrip=True), AddedToken("<w>", single_word=True)]
    )
    backend.add_tokens([AddedToken("<s>more", normalized=False)])  # longer: it wins over <s>
    tokenizer = Tokenizer(backend, [backend.token_to_id("<s>")])
    pieces = PieceEncoder(tokenizer)
    for text in ("a <l> b<w>b<s>a <l>" * 9, "a<s>more b<s> mor" * 9, "<w>a" * 30, "b <l>" * 30):
        assert pieces.encode(text) == tokenizer.encode(text)
