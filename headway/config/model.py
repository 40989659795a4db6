"""`[model]`: the model that is trained, and its implementation."""

from __future__ import annotations

import re
from typing import Any, Literal, cast

from pydantic import model_validator

from headway.config.adapter import AdapterConfig, Quantization
from headway.config.section import Section

Implementation = Literal["headway", "transformers"]


class ModelConfig(Section):
    path: str  # folder with config.json, *.safetensors and the tokenizer (Hugging Face layout)
    # Tune: "chat" for models that were tuned on conversations, and for tools; "raw" for base models
    template: Literal["raw", "chat"] = "raw"  # how a task's prompt becomes tokens
    chat_template_kwargs: dict[str, Any] = {}  # further arguments of the chat template, say enable_thinking = false
    # Tune: "bfloat16" on GPUs: half the memory, faster; float32 where engine and trainer must agree to rounding
    dtype: Literal["float32", "bfloat16"] | None = None  # of generator and trainer, unless set there; docs/gpus.md
    reference: str = ""  # folder of the KL penalty's reference model; default: path
    # Tune: set it where AdamW's memory doesn't fit, or one base serves many tasks; with ten times the learning rate
    adapter: AdapterConfig | None = None  # trained beside the model's weights, which then stay as they are
    quantization: Quantization | None = None  # type of the weights beside an adapter: NF4 or a dynamic 8-bit type
    # Tune: leave it unset; "transformers" for a family whose config.json has options that Headway doesn't compute
    implementation: Implementation | None = None  # unset: Headway's own where it has the family: docs/models.md
    trust_remote_code: bool = False  # with transformers: run the code in the model's folder, with your rights

    @model_validator(mode="after")
    def _require_template_names(self) -> ModelConfig:
        for name in self.chat_template_kwargs:
            if name in ("messages", "tools", "documents", "add_generation_prompt") or not name.isidentifier():
                valid_names = "valid: names that only the template knows, say enable_thinking"
                raise ValueError(f"chat_template_kwargs.{name}: {valid_names}")
        return self

    @model_validator(mode="after")
    def _frozen_if_quantized(self) -> ModelConfig:
        if self.quantization is not None and self.adapter is None:
            raise ValueError(f"quantization = {self.quantization!r} without model.adapter: codes can't be trained")
        return self

    @model_validator(mode="after")
    def _require_implementation(self) -> ModelConfig:
        if self.quantization is not None and self.implementation == "transformers":
            raise ValueError(
                f"quantization = {self.quantization!r} with implementation = 'transformers': not supported"
            )
        if self.trust_remote_code and self.implementation == "headway":
            raise ValueError("trust_remote_code with implementation = 'headway', which runs no code of a folder's")
        return self


def hf_name(folder: str) -> str:
    """The name of a model in Hugging Face's cache, ``Qwen/Qwen3-4B@COMMIT``; any other folder as it is."""
    match = re.search(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$", folder)
    return f"{match[1]}/{match[2]}@{match[3]}" if match else folder


def apply_dtype(raw: Any) -> Any:
    """Return the mapping ``raw`` of an experiment file with ``model.dtype`` for generator and trainer where they set no
    dtype. Invalid parts are returned as they are, for validation to report."""
    model = cast("dict[str, Any]", raw).get("model") if isinstance(raw, dict) else None
    dtype = cast("dict[str, Any]", model).get("dtype") if isinstance(model, dict) else None
    if dtype not in ("float32", "bfloat16"):
        return cast("Any", raw)
    sections = dict(cast("dict[str, Any]", raw))
    for side in ("generator", "trainer"):
        section = sections.get(side, {})
        if isinstance(section, dict):
            sections[side] = {"dtype": dtype} | cast("dict[str, Any]", section)
    return sections
