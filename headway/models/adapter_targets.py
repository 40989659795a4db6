"""The matrices of a decoder that an adapter can adapt, under Hugging Face's names; torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headway.config.adapter import AdapterConfig
from headway.models.configuration import DecoderConfig, read_json
from headway.models.weight_files import require_finite
from headway.records.errors import ConfigurationError
from headway.runtime.nodes.files import file_digests, folder_digest

ALL_LINEAR = "all-linear"
CONFIG_FILE = "adapter_config.json"  # of an adapter's folder
WEIGHTS_FILE = "adapter_model.safetensors"
BASE = "base_digest"  # of the base's files, in the metadata of the weights' file
# Keys of a LoraConfig that change the computation, with the value at which they don't.
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layer_replication": None,
    "exclude_modules": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "use_bdlora": None,
    "use_qalora": False,
    "velora_config": None,
}
# Values of init_lora_weights with which PEFT changes the base too, at the start of training and at each load.
_CHANGED_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
_NOT_ADAPTED = ("embed_tokens", "lm_head")  # modules that PEFT can adapt, and Headway can't


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix, or one parameter that holds the matrices of all experts of a layer."""

    layer: int
    module: str  # in the layer: self_attn.q_proj
    product: str  # the decoder's product that contains it: qkv, output, gate_up, down, router
    first: int  # its first row in that product's matrix
    rows: int  # output features
    columns: int  # input features
    rotary_dim: int | None = None  # head dimension, where rotary pairs are neighbours here: see `layout.py`
    experts: int = 0  # 0: no parameter of a mixture

    @property
    def name(self) -> str:
        """The target's name, such as model.layers.0.self_attn.q_proj."""
        return f"model.layers.{self.layer}.{self.module}"

    @property
    def parts(self) -> int:
        """The number of matrices that it holds."""
        return max(1, self.experts)


@dataclass(frozen=True, kw_only=True)
class AdaptedTarget:
    """A target with its adapter's rank and alpha: scale * B A x is added to its product."""

    target: AdapterTarget
    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) with ``rslora`` (Kalajdzievski 2023, Eq. 7)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def size(self) -> int:
        """The number of the adapter's weights for this target."""
        return self.target.parts * self.rank * (self.target.rows + self.target.columns)


def targets_of(config: DecoderConfig) -> Iterator[AdapterTarget]:
    """Yield every target of a decoder, layer by layer."""
    query_rows, key_rows, width = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.width
    rotary_dim, expert_names = config.head_dim, config.family.experts
    for layer in range(config.layers):
        make_target = partial(AdapterTarget, layer)
        yield make_target("self_attn.q_proj", "qkv", 0, query_rows, width, rotary_dim=rotary_dim)
        yield make_target("self_attn.k_proj", "qkv", query_rows, key_rows, width, rotary_dim=rotary_dim)
        yield make_target("self_attn.v_proj", "qkv", query_rows + key_rows, key_rows, width)
        yield make_target("self_attn.o_proj", "output", 0, width, query_rows)
        mixture = config.mixture if config.layer(layer).sparse else None
        if mixture is None or expert_names is None:
            yield make_target("mlp.gate_proj", "gate_up", 0, config.intermediate, width)
            yield make_target("mlp.up_proj", "gate_up", config.intermediate, config.intermediate, width)
            yield make_target("mlp.down_proj", "down", 0, width, config.intermediate)
        else:
            inner_width, experts = mixture.intermediate, mixture.experts
            yield make_target(expert_names.fused_router.removesuffix(".weight"), "router", 0, experts, width)
            yield make_target(expert_names.fused_gate_up, "gate_up", 0, 2 * inner_width, width, experts=experts)
            yield make_target(expert_names.fused_down, "down", 0, width, inner_width, experts=experts)


def chosen_targets(
    config: DecoderConfig, targets: Sequence[str] | str, target_parameters: Sequence[str] = (), file: Path | None = None
) -> list[AdapterTarget]:
    """The targets that PEFT would choose. A list ``targets`` selects names that equal an entry or end with ``.`` and
    the entry; a string selects names that it matches completely as a regular expression; ``all-linear`` selects all
    but mixtures (routers and experts, which PEFT 0.21 includes for some models). ``target_parameters`` selects the
    experts' parameters, and matrices as ``NAME.weight``.

    Raises ConfigurationError for an entry that no layer has, with the nearest names. ``file``: PEFT's file with the
    names; an entry in it may have no layer if others do, because PEFT reads lists for several architectures.
    """
    all_targets = list(targets_of(config))
    target_by_matrix = {target.name: target for target in all_targets if not target.experts}
    target_by_parameter = {target.name if target.experts else f"{target.name}.weight": target for target in all_targets}
    key_names = ("model.adapter.targets", "model.adapter.target_parameters")
    if file is not None:
        key_names = (f"{file}: target_modules", f"{file}: target_parameters")
    chosen_names = _matches(target_by_matrix, targets, key_names[0], file is not None)
    chosen_names |= _matches(target_by_parameter, target_parameters, key_names[1], file is not None)
    return [target for target in all_targets if target.name in chosen_names]


def _matches(known: Mapping[str, AdapterTarget], requested: Sequence[str] | str, key: str, lenient: bool) -> set[str]:
    """Names of the targets that ``requested`` selects. ``known``: the targets by the names that entries may use."""
    if isinstance(requested, str) and requested != ALL_LINEAR:
        names = {target.name for name, target in known.items() if re.fullmatch(requested, name)}
        if not names:
            raise ConfigurationError(f"{key} = {requested!r} matches no layer of the model")
        return names
    names, absent_entries = set[str](), list[str]()
    for entry in (requested,) if isinstance(requested, str) else requested:
        if entry == ALL_LINEAR:
            names |= {target.name for target in known.values() if target.product != "router"}
            continue
        matching = {target.name for name, target in known.items() if name == entry or name.endswith("." + entry)}
        names |= matching
        absent_entries += () if matching else (entry,)
    for entry in absent_entries:
        if not (lenient and names) or entry.endswith(_NOT_ADAPTED):
            layer_ends = sorted({name.partition("layers.")[2].partition(".")[2] for name in known})
            layer_ends += sorted({layer_end.rpartition(".")[2] for layer_end in layer_ends})
            nearest = get_close_matches(entry, layer_ends, 3, 0.3) or layer_ends[-7:]
            raise ConfigurationError(f"{key}: no layer has {entry!r}; nearest: {', '.join(nearest)}")
    return names


def adapted_targets(config: DecoderConfig, settings: AdapterConfig) -> tuple[AdaptedTarget, ...]:
    """The targets of a run's adapter, new or in ``settings.path``, with rank and scale. Raises ConfigurationError as
    `chosen_targets` and `stored_targets` do."""
    if settings.path:
        stored = stored_targets(Path(settings.path), config)
        if settings.dropout and any(adapted.target.experts for adapted in stored):
            raise ConfigurationError(
                f"model.adapter.dropout = {settings.dropout:g} and experts in {settings.path}: all experts share an "
                "input; valid: 0"
            )
        return stored
    assert settings.rank is not None
    assert settings.alpha is not None
    return tuple(
        AdaptedTarget(target=target, rank=settings.rank, alpha=settings.alpha, rslora=settings.rslora)
        for target in chosen_targets(config, settings.targets, settings.target_parameters)
    )


def stored_targets(folder: Path, config: DecoderConfig) -> tuple[AdaptedTarget, ...]:
    """The targets of the adapter in ``folder``, with rank and scale, from its ``adapter_config.json``. Raises
    ConfigurationError, which names file and key, for unsupported settings."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigurationError(f"{folder}: no {CONFIG_FILE}: not an adapter in PEFT's format")
    raw = read_json(file)
    if raw.get("peft_type") != "LORA":
        raise ConfigurationError(f"{file}: peft_type = {raw.get('peft_type')!r}: valid: 'LORA'")
    for key, supported in _PLAIN.items():
        if raw.get(key) and raw[key] != supported:
            raise ConfigurationError(f"{file}: {key} = {raw[key]!r} is not supported; valid: {supported!r}")
    if (method := str(raw.get("init_lora_weights"))).startswith(_CHANGED_BASE):
        raise ConfigurationError(
            f"{file}: init_lora_weights = {method!r}: the adapter belongs to a base that PEFT has changed; convert it "
            "with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    modules, parameters = raw.get("target_modules") or (), tuple(raw.get("target_parameters") or ())
    targets: list[AdaptedTarget] = []
    for target in chosen_targets(config, modules if isinstance(modules, str) else tuple(modules), parameters, file):
        rank = int(_by_pattern(file, raw, "r", "rank_pattern", target.name))
        alpha = _by_pattern(file, raw, "lora_alpha", "alpha_pattern", target.name)
        targets.append(AdaptedTarget(target=target, rank=rank, alpha=alpha, rslora=bool(raw.get("use_rslora"))))
    return tuple(targets)


def stored_metadata(folder: Path, model: str | Path) -> dict[str, Any]:
    """The metadata of the adapter's weights in ``folder``. Raises ConfigurationError for an unreadable file, weights
    that were trained on another base than the folder ``model``, and weights that aren't finite."""
    weights_file = folder / WEIGHTS_FILE
    try:
        with safe_open(weights_file, framework="np") as weights_reader:
            metadata: dict[str, Any] = weights_reader.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"{weights_file}: not a readable safetensors file: {error}") from None
    if metadata.get(BASE, "") not in ("", base_digest(model)):
        raise ConfigurationError(f"{weights_file}: an adapter of another base than {model}: their files differ")
    require_finite(weights_file)
    return metadata


def base_digest(model: str | Path) -> str:
    """A digest that identifies a model folder's weights: of its config.json, and of sizes, headers and samples of its
    *.safetensors. Other files, such as generation_config.json, may change."""
    digests = file_digests(Path(model))
    return folder_digest(
        {name: digest for name, digest in digests.items() if re.fullmatch(r"config\.json|[^/]+\.safetensors", name)}
    )


def _by_pattern(file: Path, raw: Mapping[str, Any], key: str, patterns: str, name: str) -> float:
    """The value of ``key`` for a target: that of the first of ``patterns`` that matches the end of its name, as in
    PEFT. Raises ConfigurationError."""
    matched = next((pattern for pattern in raw.get(patterns) or () if re.match(rf"(.*\.)?({pattern})$", name)), None)
    location, value = (key, raw.get(key)) if matched is None else (f"{patterns}[{matched!r}]", raw[patterns][matched])
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigurationError(f"{file}: {location} = {value!r}: valid: a number above 0")
    return value
