"""Training a byte-fallback tokenizer: no text is ever unknown, and digits and symbols stay single tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from headway.records.errors import ConfigurationError
from headway.tokens.tokenizer import Tokenizer

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, "<|im_start|>", "<|im_end|>")
# Reserved for reasoning and tools; they are single tokens, but part of the visible text.
RESERVED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
MINIMUM_SIZE = len(SPECIAL_TOKENS) + len(RESERVED_TOKENS) + len(BYTES)

# Words keep their leading space; every digit and every symbol is a piece; runs of white space stay together.
_PIECES = r" ?\p{L}+|\p{N}|[^\p{L}\p{N}\s]|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1_000_000,
    "chat_template": CHAT_TEMPLATE,
}


def train_byte_fallback_tokenizer(
    texts: Iterable[str], size: int, path: str | Path, *, character_level: bool = False
) -> Tokenizer:
    """Train BPE with byte fallback on ``texts`` and write tokenizer.json and tokenizer_config.json into ``path``.

    The vocabulary, at most ``size``: special and reserved tokens, 256 bytes, the characters of ``texts`` (most
    frequent first where they don't all fit), then merges. ``character_level``: no merges at all, one token per
    character. Deterministic: equal texts, in any order, give equal files.
    Raises ConfigurationError when ``size`` is too small.
    """
    if size < MINIMUM_SIZE:
        raise ConfigurationError(
            f"vocabulary size = {size}: at least {MINIMUM_SIZE} are needed ({len(BYTES)} bytes and "
            f"{MINIMUM_SIZE - len(BYTES)} special tokens)"
        )
    corpus = list(texts)
    free_ids = size - MINIMUM_SIZE
    character_counts = Counter(character for text in corpus for character in text)
    common_characters = sorted(character_counts, key=lambda c: (-character_counts[c], c))[:free_ids]
    tokens, merges = sorted(common_characters), []
    if not character_level and len(tokens) < free_ids:
        tokens, merges = _learn_merges(corpus, sorted(common_characters), free_ids)
    ordered_tokens = [*SPECIAL_TOKENS, *RESERVED_TOKENS, *BYTES, *tokens]
    backend = _assemble({token: index for index, token in enumerate(dict.fromkeys(ordered_tokens))}, merges)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings_text = json.dumps(_SETTINGS, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(settings_text + "\n", encoding="utf-8")
    return Tokenizer.load(folder)


def _learn_merges(corpus: list[str], alphabet: list[str], size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Learn BPE merges; return characters and merged tokens, at most ``size`` of them, and the list of merges."""
    learner = Backend(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=alphabet, limit_alphabet=len(alphabet), min_frequency=2
    )
    learner.train_from_iterator(corpus, trainer)
    learned_model: dict[str, Any] = json.loads(learner.to_str())["model"]
    reserved_tokens = {*SPECIAL_TOKENS, *RESERVED_TOKENS, *BYTES}
    merges = [(pair[0], pair[1]) for pair in learned_model["merges"] if pair[0] + pair[1] not in reserved_tokens]
    tokens = [token for token, _ in sorted(learned_model["vocab"].items(), key=lambda item: item[1])]
    return [token for token in tokens if token not in reserved_tokens], merges


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")


def _assemble(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = _pre_tokenizer()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in RESERVED_TOKENS])
    return backend
