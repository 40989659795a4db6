"""Tiny random models that see, with processors and tokenizers of their own, and pictures of dots to count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tiny_hub import randomise
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<eos>", "<user>", "<model>", "<boi>", "<img>", "<eoi>", "<vid>", "<unk>")
TOKENS = (*SPECIAL, "\n", "?", "1", "2", "3", "4")
IMAGE, VIDEO, EOS = TOKENS.index("<img>"), TOKENS.index("<vid>"), TOKENS.index("<eos>")
SIDE = 16  # of a picture that needs no resizing
_TEXT: dict[str, Any] = dict(
    vocab_size=len(TOKENS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=EOS,
)  # fmt: skip
_PIXELS = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, do_resize=True, do_rescale=True, do_normalize=True)
# Kind of model -> what its chat template writes for a picture, before the processor expands it.
PLACEHOLDERS = {"Gemma3": "<boi>", "Qwen2_5_VL": "<boi><img><eoi>", "Llava": "<img>"}


def dots(count: int, number: int = 0, side: int = SIDE) -> Image.Image:
    """A dark picture with ``count`` bright dots in its quarters; ``number``: which quarters, and how bright."""
    random = np.random.default_rng(number)
    pixels = random.integers(0, 20, (side, side, 3), dtype=np.uint8)
    half = side // 2
    for quarter in random.permutation(4)[:count]:
        top, left = half * (int(quarter) // 2), half * (int(quarter) % 2)
        pixels[top + 1 : top + half - 1, left + 1 : left + half - 1] = random.integers(200, 255)
    return Image.fromarray(pixels)


def write_tasks(file: Path, count: int, first: int = 0) -> None:
    """A JSONL file of ``count`` pictures to count dots in; the pictures lie beside it."""
    (file.parent / "dots").mkdir(exist_ok=True)
    rows: list[str] = []
    for number in range(first, first + count):
        name, answer = f"dots/{number}.png", 1 + number % 4
        dots(answer, number).save(file.parent / name)
        parts = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": "?"}]
        rows.append(json.dumps({"prompt": [{"role": "user", "content": parts}], "answer": str(answer)}))
    file.write_text("\n".join(rows) + "\n")


def make_model_that_sees(folder: Path, kind: str = "Gemma3", std: float = 0.2, **text: Any) -> Path:
    """Write a random model of this kind, its tokenizer and its processor."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_config(kind, {**_TEXT, **text}))
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    randomise(model, std).save_pretrained(folder)
    _write_tokenizer(folder, PLACEHOLDERS[kind])
    processor, picture, own = _PROCESSORS[kind]
    (folder / "preprocessor_config.json").write_text(json.dumps({**_PIXELS, **picture}))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor, **own}))
    return folder


def _config(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    seeing: dict[str, Any] = dict(num_attention_heads=2, hidden_size=16, intermediate_size=16, patch_size=4)
    if kind == "Gemma3":
        vision = {**seeing, "num_hidden_layers": 2, "image_size": SIDE}
        own = dict(head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
        return dict(text_config=text | own, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE)
    if kind == "Llava":
        vision = {**seeing, "num_hidden_layers": 2, "image_size": SIDE, "model_type": "clip_vision_model"}
        return dict(
            text_config={**text, "model_type": "llama"}, vision_config=vision, image_token_index=IMAGE,
            vision_feature_layer=-1, vision_feature_select_strategy="default",
        )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32, patch_size=4,
        spatial_merge_size=2, temporal_patch_size=2, window_size=16, fullatt_block_indexes=[1],
    )  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    return dict(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=TOKENS.index("<boi>"), vision_end_token_id=TOKENS.index("<eoi>"),
    )  # fmt: skip


_SQUARE = {"height": SIDE, "width": SIDE}
_PROCESSORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        "Gemma3Processor", {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE}, {"image_seq_length": 4}
    ),
    "Llava": (
        "LlavaProcessor",
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE}, "crop_size": _SQUARE},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "Qwen2_5_VL": (
        "Qwen2_5_VLProcessor",
        {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
            "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024},
        },
        {},
    ),
}  # fmt: skip


def _write_tokenizer(folder: Path, placeholder: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>", "video_token": "<vid>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    settings |= {"unk_token": "<unk>", "extra_special_tokens": named, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    part = f"{{{{ '{placeholder}' if part.type == 'image' else part.text }}}}"
    said = f"{{% for part in message.content %}}{part}{{% endfor %}}"
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ 'user' if message.role == 'user' else 'model' }}>"
        f"{said}{{% endfor %}}{{% if add_generation_prompt %}}<model>{{% endif %}}"
    )
