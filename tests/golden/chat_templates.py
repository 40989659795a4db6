"""Chat templates in the manner of well-known models, and a byte tokenizer with their special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Qwen3: reasoning is dropped from all but the last turn
THINKING = CHATML.replace(
    "message.content +",
    "(message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' and not loop.last "
    "else message.content) +",
)

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# no generation prompt of its own; the system message goes into the first user turn
MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""

# assistant is called model; the marks of transformers say what it wrote
GEMMA_MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' }}
        {%- generation %}{{- message.content | trim + '<end_of_turn>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}{{- '<start_of_turn>' + message.role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Phi-3: the whole text, and only that, ends with the end of the text
CLOSING = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""

# template -> the tokens that end a response with it
ENDS = {
    CHATML: ["<|im_end|>"],
    THINKING: ["<|im_end|>"],
    LLAMA3: ["<|eot_id|>"],
    MISTRAL: ["</s>"],
    GEMMA_MARKED: ["<end_of_turn>", "<eos>"],
    CLOSING: ["<|endoftext|>", "<|end|>"],
}
_SPECIAL = ["<s>", "</s>", "<eos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
            "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|end|>",
            "<|user|>", "<|assistant|>", "<|system|>"]  # fmt: skip


def write_tokenizer(folder: Path, template: str, ends: list[str] | None = None) -> Path:
    """A folder with ``template``; a token a byte, but two line breaks, and a line break with an H, are one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ċ", "H")]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    first, *others = ENDS[template] if ends is None else ends
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": first}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stop_ids = [backend.token_to_id(token) for token in (first, *others)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
