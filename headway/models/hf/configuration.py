"""The choice of the implementation that runs a model folder, and the sizes of transformers models. Imports neither
torch nor transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.config.adapter import AdapterConfig
from headway.config.model import Implementation, ModelConfig
from headway.models.adapter_targets import ALL_LINEAR, WEIGHTS_FILE
from headway.models.configuration import DecoderConfig, attended_pairs, read_json
from headway.models.families import FAMILIES
from headway.models.sizes import ModelSizes, sizes_of
from headway.models.weight_files import require_tied, stored_tensors, tensor_shapes, weight_files
from headway.records.errors import ConfigurationError

_OTHER_MODALITIES = ("audio_config", "audio_encoder", "speech_config", "vq_config")
_BY_LENGTH = ("dynamic", "longrope", "su")  # rotary embeddings that change with the longest row of a call

_NOT_LINEAR = re.compile(r"embed|lm_head|\bwte\b|\bwpe\b|visual|vision")  # matrices that "all-linear" leaves out


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """The sizes of a model that transformers runs, under the names of `DecoderConfig`."""

    sizes: ModelSizes

    @property
    def model_type(self) -> str:
        return self.sizes.model_type

    @property
    def vocabulary_size(self) -> int:
        return self.sizes.vocabulary_size

    @property
    def width(self) -> int:
        return self.sizes.width

    @property
    def layers(self) -> int:
        return len(self.sizes.layers)

    @property
    def tied(self) -> bool:
        return self.sizes.tied

    @property
    def kv_heads(self) -> int:
        return self.sizes.kv_heads

    @property
    def cached_values(self) -> int:
        """The number of values cached per token in all layers; 0 if some layers keep a state instead."""
        keeps_states = any(layer.state or not layer.cached for layer in self.sizes.layers)
        return 0 if keeps_states else self.sizes.cached_values

    @property
    def max_positions(self) -> int:
        return self.sizes.max_positions

    @property
    def has_experts(self) -> bool:
        """Whether tokens use only some of a layer's parameters."""
        return any(layer.idle for layer in self.sizes.layers)

    @classmethod
    def from_pretrained(cls, path: str | Path, trust_remote_code: bool = False) -> HfConfig:
        """Read ``path/config.json`` and the shapes of the folder's tensors. Raises ConfigurationError for models that
        the installed transformers can't run as a language model, for untrusted code in the folder, and for missing
        sizes. The context ends where rotary embeddings would begin to depend on the longest document of a call."""
        folder = Path(path)
        raw = read_json(folder / "config.json")
        require_runnable(folder, raw, trust_remote_code)
        sizes, text_config = sizes_of(folder), {**raw, **(raw.get("text_config") or {})}
        ropes = (rope | text_config for rope in ropes_by_length(text_config))  # default: the complete context
        limits = filter(None, (rope.get("original_max_position_embeddings") for rope in ropes))
        return cls(sizes=replace(sizes, max_positions=min([sizes.max_positions, *limits])))

    def flops(self, lengths: list[int], head_tokens: int | None = None, continues: list[int] | None = None) -> float:
        """Model FLOP of one forward pass over documents of ``lengths`` tokens, as `DecoderConfig.flops` counts them,
        without the recurrence of linear layers. ``continues`` isn't supported."""
        tokens = sum(lengths)
        score_flops = sum(
            4 * layer.output * attended_pairs(length, layer.window)
            for layer in self.sizes.layers
            if layer.cached
            for length in lengths
        )
        return float(score_flops + self.product_flops(tokens, tokens if head_tokens is None else head_tokens))

    def product_flops(self, tokens: int, head_tokens: int) -> int:
        """The part of `flops` in products with weights, which the weights' gradients cost again."""
        active_parameters = sum(layer.parameters - layer.idle for layer in self.sizes.layers)
        return 2 * active_parameters * tokens + 2 * self.vocabulary_size * self.width * head_tokens


def ropes_by_length(text: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rotary embeddings of a language model's configuration that change with the longest row of a call if it
    exceeds their original length."""
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    ropes = [rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict)]
    return [rope for rope in ropes if (rope.get("rope_type") or rope.get("type")) in _BY_LENGTH]


def implementation_of(path: str | Path, requested: Implementation | None) -> Implementation:
    """The implementation of the model in folder ``path``: ``requested``, or by default the project's if it has the
    architecture, or if config.json names no type that transformers could know. Raises ConfigurationError for a folder
    without a readable config.json."""
    if requested is not None:
        return requested
    raw = read_json(Path(path) / "config.json")
    model_type, named = raw.get("model_type"), raw.get("architectures") or ()
    ours = any(row.architecture in named or (not named and row.model_type == model_type) for row in FAMILIES.values())
    return "headway" if ours or model_type is None else "transformers"


def read_config(chosen: ModelConfig, path: str | Path | None = None) -> DecoderConfig | HfConfig:
    """The sizes of the model in ``path`` (default: that of ``chosen``) in the run's implementation. Raises
    ConfigurationError for a model that it can't run, and for ambiguous files of weights."""
    config = _read_config(chosen, path or chosen.path)
    if any((folder := Path(path or chosen.path)).glob("*.safetensors")):
        stored_by_name, raw = stored_tensors(weight_files(folder)), read_json(folder / "config.json")
        if config.tied or (raw | (raw.get("text_config") or {})).get("tie_word_embeddings"):
            require_tied(folder, stored_by_name)
    return config


def _read_config(chosen: ModelConfig, path: str | Path) -> DecoderConfig | HfConfig:
    if implementation_of(path, chosen.implementation) == "transformers":
        return HfConfig.from_pretrained(path, chosen.trust_remote_code)
    try:
        return DecoderConfig.from_pretrained(path)
    except ConfigurationError as error:
        if chosen.implementation is None and "supported" in str(error):
            raise ConfigurationError(f"{error}; model.implementation = 'transformers' may run it") from None
        raise


def adapter_size(folder: str | Path, settings: AdapterConfig) -> int:
    """The number of weights of a run's adapter of the model in ``folder``, which runs in transformers: those in
    ``settings.path``, or an estimate by the files' matrices that PEFT will adapt. Raises ConfigurationError for
    unreadable files, for targets that no matrix has, and without PEFT."""
    if find_spec("peft") is None:
        raise ConfigurationError(
            "an adapter beside a model that runs in transformers is PEFT's, which isn't installed: "
            "pip install 'headway[transformers]'"
        )
    if settings.path:
        return sum(math.prod(shape) for shape in tensor_shapes([Path(settings.path) / WEIGHTS_FILE]).values())
    all_linear, weight_count = settings.targets == (ALL_LINEAR,), 0
    name_ends = tuple(f".{target}.weight" for target in settings.targets)
    for name, shape in tensor_shapes(weight_files(Path(folder))).items():
        if len(shape) < 2 or name.endswith("bias") or _NOT_LINEAR.search(name):
            continue
        *stack_shape, rows, columns = shape
        if ".experts." in name:  # PEFT: one matrix for gate and up, of twice the rank
            is_adapted, rows = all_linear or bool(settings.target_parameters), rows * (1 + ("down" not in name))
        else:
            is_adapted = name.endswith(".weight") if all_linear else f".{name}".endswith(name_ends)
        weight_count += math.prod(stack_shape) * (settings.rank or 0) * (rows + columns) if is_adapted else 0
    if not weight_count:
        raise ConfigurationError(f"targets = {list(settings.targets)}: no matrix in {folder} has such a name")
    return weight_count


def require_runnable(folder: Path, raw: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raise ConfigurationError unless the installed transformers can run the model of ``folder/config.json`` as a
    language model."""
    file, name = folder / "config.json", raw.get("model_type")
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            f"{file}: model_type = {name!r} runs in transformers, which isn't installed: "
            "pip install 'headway[transformers]'"
        )
    if not isinstance(name, str):
        raise ConfigurationError(f"{file}: model_type = {name!r}: transformers needs its name")
    if raw.get("quantization_config"):
        raise ConfigurationError(
            f"{file}: quantization_config: quantised weights can't be trained; valid: float weights"
        )
    if media := next((key for key in _OTHER_MODALITIES if raw.get(key)), None):
        raise ConfigurationError(f"{file}: {media}: models of sound or that make images aren't supported; valid: text")
    if raw.get("is_encoder_decoder"):
        raise ConfigurationError(f"{file}: is_encoder_decoder = true isn't supported; valid: models that decode alone")
    if raw.get("auto_map") and trust_remote_code:
        return
    auto_folder = Path(spec.origin).parent / "models" / "auto"
    known_types = _model_types(auto_folder / "auto_mappings.py", "CONFIG_MAPPING_NAMES")
    if name not in known_types and known_types and raw.get("auto_map"):
        raise ConfigurationError(
            f"{file}: auto_map: {name!r} needs Python code that lies in the folder. It would run with your rights in "
            "the trainer and the generator: read it, then set model.trust_remote_code = true"
        )
    if name not in known_types and known_types:
        writer = raw.get("transformers_version")
        hint = f"; the folder was written by {writer}, and that or a newer one may know it" if writer else ""
        raise ConfigurationError(
            f"{file}: model_type = {name!r} is unknown to transformers {version('transformers')}{hint}"
        )
    models_file = auto_folder / "modeling_auto.py"
    runnable_types = _model_types(models_file, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    runnable_types |= _model_types(models_file, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
    if name not in runnable_types and runnable_types:
        raise ConfigurationError(
            f"{file}: model_type = {name!r}: transformers has no language model of it (AutoModelForCausalLM, "
            "AutoModelForImageTextToText)"
        )


def _model_types(file: Path, table: str) -> set[str]:
    """The model types in one of transformers' tables, read as text; empty if there is no table of that name."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return set()
    table_match = re.search(rf"^{table} = OrderedDict\(\n    \[(.*?)^    \]", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r'^\s+\(\s*"([^"]+)"', table_match[1], re.MULTILINE)) if table_match else set()
