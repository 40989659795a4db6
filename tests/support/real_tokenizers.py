"""Tokenizers with the pipelines of published models, trained on a few lines. What differs between families is the
pipeline (pre-tokenizer, normalizer, decoder, post-processor): here as their files have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The answer to 12+34 is 46.\nThe other answer isn't 7*8=56",
    "so the answer is that, é and 你好, 12345 times",
    "def f(x):\n    return x  # done\n\n",
] * 5

QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PIECES = QWEN_PIECES.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3_CHAT = (
    "{{- bos_token }}\n"
    "{%- if not date_string is defined %}\n"
    "    {%- if strftime_now is defined and false %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n'
    "    {%- else %}\n"
    '        {%- set date_string = "26 Jul 2024" %}\n'
    "    {%- endif %}\n"
    "{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n"
    '    {%- set system_message = "" %}\n'
    "{%- endif %}\n"
    '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n'
    '{{- "Today Date: " + date_string + "\\n\\n" }}\n'
    '{{- system_message }}\n{{- "<|eot_id|>" }}\n'
    "{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim"
    " + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    "{%- endif %}\n"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}\n"
    "{%- set ns = namespace(first=true) -%}\n"
    "{%- for message in messages -%}\n"
    "    {%- if message['role'] == 'tool' -%}{%- continue -%}{%- endif -%}\n"
    "    {%- if (message['role'] == 'assistant') -%}{%- set role = \"model\" -%}\n"
    "    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}\n"
    "    {{ '<start_of_turn>' + role + '\n' }}\n"
    "    {%- if message['content'] is string -%}{{ message['content'] | trim }}\n"
    "    {%- elif message['content'] is iterable -%}\n"
    "        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}\n"
    '    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}\n'
    "    {{ '<end_of_turn>\n' }}{%- set ns.first = false -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}\n"
)


def _byte_level(pieces: str | None, size: int = 330) -> Tokenizer:
    backend = Tokenizer(models.BPE(ignore_merges=pieces is not None))
    if pieces is None:  # GPT-2: its own expression is built in
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])  # type: ignore[list-item]
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _begins_with(backend: Tokenizer, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )


def _special(backend: Tokenizer, *tokens: str) -> None:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


def gpt2() -> tuple[Tokenizer, dict[str, Any]]:
    backend = _byte_level(None)
    _special(backend, "<|endoftext|>")
    return backend, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


def qwen() -> tuple[Tokenizer, dict[str, Any]]:
    backend = _byte_level(QWEN_PIECES)
    backend.normalizer = normalizers.NFC()
    _special(backend, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}


def llama3() -> tuple[Tokenizer, dict[str, Any]]:
    backend = _byte_level(LLAMA3_PIECES)
    _special(backend, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    begins = _begins_with(backend, "<|begin_of_text|>")
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begins])  # type: ignore[list-item]
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3_CHAT}
    return backend, settings


def _sentencepiece(specials: list[str], normalizer: Any, pre_tokenizer: Any, strip: bool) -> Tokenizer:
    """BPE over characters, bytes where one is missing, as the converters write SentencePiece models."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁\n]+|▁+|\n+"), behavior="isolated")
    learner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=150, show_progress=False))  # type: ignore[call-arg]
    learned = json.loads(learner.to_str())["model"]
    dropped = {"é", "你", "好"}  # so that bytes are met
    pieces = [piece for piece in sorted(learned["vocab"], key=learned["vocab"].get) if not dropped & set(piece)]
    ordered = [*specials, *(f"<0x{value:02X}>" for value in range(256)), *pieces]
    merges = [tuple(pair) for pair in learned["merges"] if not dropped & set("".join(pair))]
    vocabulary = {piece: index for index, piece in enumerate(ordered)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # type: ignore[arg-type]
    )
    backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    _special(backend, *specials)
    return backend


def llama2() -> tuple[Tokenizer, dict[str, Any]]:
    """Also Mistral's."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend = _sentencepiece(["<unk>", "<s>", "</s>"], normalizer, None, strip=True)
    backend.post_processor = _begins_with(backend, "<s>")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": MISTRAL_CHAT}
    return backend, settings


def metaspace() -> tuple[Tokenizer, dict[str, Any]]:
    """Llama 2's without the legacy prefix: a space is put before the first piece only."""
    pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend = _sentencepiece(["<unk>", "<s>", "</s>"], None, pre_tokenizer, strip=True)
    backend.post_processor = _begins_with(backend, "<s>")
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": MISTRAL_CHAT}


def gemma() -> tuple[Tokenizer, dict[str, Any]]:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend = _sentencepiece(specials, normalizers.Replace(" ", "▁"), pre_tokenizer, strip=False)
    backend.post_processor = _begins_with(backend, "<bos>")
    settings = {
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True, "lstrip": False},
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": GEMMA_CHAT,
    }
    return backend, settings


KINDS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "gpt2": gpt2,
    "qwen": qwen,
    "llama3": llama3,
    "llama2": llama2,
    "metaspace": metaspace,
    "gemma": gemma,
}


def write(kind: str, folder: Path) -> Path:
    """The tokenizer files of a model folder."""
    backend, settings = KINDS[kind]()
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))
    return folder
