"""The matrices of a decoder that an adapter can be put beside, under Hugging Face's names; torch-free."""

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
# Keys of a LoraConfig that change what is computed, with the value that means they don't.
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
# Values of init_lora_weights with which PEFT changes the base too, when it begins and again when it loads.
_CHANGED_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
_NO_LAYER = ("embed_tokens", "lm_head")  # modules that PEFT has adapters of, too


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix, or the matrices of all experts of a layer in one parameter."""

    layer: int
    module: str  # in the layer: self_attn.q_proj
    product: str  # the decoder's product that it is a part of: qkv, output, gate_up, down, router
    first: int  # its first row in that product's matrix
    rows: int  # output features
    columns: int  # input features
    rotary_dim: int | None = None  # head dimension, where rotary pairs are neighbours here: see `layout.py`
    experts: int = 0  # 0: no parameter of a mixture

    @property
    def name(self) -> str:
        """Such as model.layers.0.self_attn.q_proj."""
        return f"model.layers.{self.layer}.{self.module}"

    @property
    def parts(self) -> int:
        """How many matrices it holds."""
        return max(1, self.experts)


@dataclass(frozen=True, kw_only=True)
class AdaptedTarget:
    """A target with the adapter's rank and alpha there: its product gains scale * B A x."""

    target: AdapterTarget
    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) by ``rslora`` (Kalajdzievski 2023, Eq. 7)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def size(self) -> int:
        """Count of the adapter's weights there."""
        return self.target.parts * self.rank * (self.target.rows + self.target.columns)


def targets_of(config: DecoderConfig) -> Iterator[AdapterTarget]:
    """Every target of a decoder, layer by layer."""
    query, key, width = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.width
    rotary, names = config.head_dim, config.family.experts
    for layer in range(config.layers):
        target = partial(AdapterTarget, layer)
        yield target("self_attn.q_proj", "qkv", 0, query, width, rotary_dim=rotary)
        yield target("self_attn.k_proj", "qkv", query, key, width, rotary_dim=rotary)
        yield target("self_attn.v_proj", "qkv", query + key, key, width)
        yield target("self_attn.o_proj", "output", 0, width, query)
        mixture = config.mixture if config.layer(layer).sparse else None
        if mixture is None or names is None:
            yield target("mlp.gate_proj", "gate_up", 0, config.intermediate, width)
            yield target("mlp.up_proj", "gate_up", config.intermediate, config.intermediate, width)
            yield target("mlp.down_proj", "down", 0, width, config.intermediate)
        else:
            inner, experts = mixture.intermediate, mixture.experts
            yield target(names.fused_router.removesuffix(".weight"), "router", 0, experts, width)
            yield target(names.fused_gate_up, "gate_up", 0, 2 * inner, width, experts=experts)
            yield target(names.fused_down, "down", 0, width, inner, experts=experts)


def chosen_targets(
    config: DecoderConfig, targets: Sequence[str] | str, target_parameters: Sequence[str] = (), file: Path | None = None
) -> list[AdapterTarget]:
    """The targets that PEFT would choose: names that equal one of ``targets`` or end with ``.`` and it, those that
    match it wholly where it is one regular expression, or ``all-linear``, which leaves out mixtures (their routers and
    experts; PEFT 0.21 takes them in for some models); by ``target_parameters`` the experts' parameters, and matrices
    as ``NAME.weight``.

    Raises ConfigurationError for an entry that no layer has, with the nearest names. ``file``: PEFT's that has the
    names, where one may be of no layer if others are: PEFT reads lists for several architectures so.
    """
    known = list(targets_of(config))
    matrices = {one.name: one for one in known if not one.experts}
    parameters = {one.name if one.experts else f"{one.name}.weight": one for one in known}
    keys = ("model.adapter.targets", "model.adapter.target_parameters")
    if file is not None:
        keys = (f"{file}: target_modules", f"{file}: target_parameters")
    found = _found(matrices, targets, keys[0], file is not None)
    found |= _found(parameters, target_parameters, keys[1], file is not None)
    return [one for one in known if one.name in found]


def _found(known: Mapping[str, AdapterTarget], wanted: Sequence[str] | str, key: str, lenient: bool) -> set[str]:
    """Names of the targets that ``wanted`` means; ``known``: by the names that it may use."""
    if isinstance(wanted, str) and wanted != ALL_LINEAR:
        found = {one.name for name, one in known.items() if re.fullmatch(wanted, name)}
        if not found:
            raise ConfigurationError(f"{key} = {wanted!r} matches no layer of the model")
        return found
    found, absent = set[str](), list[str]()
    for entry in (wanted,) if isinstance(wanted, str) else wanted:
        if entry == ALL_LINEAR:
            found |= {one.name for one in known.values() if one.product != "router"}
            continue
        matching = {one.name for name, one in known.items() if name == entry or name.endswith("." + entry)}
        found |= matching
        absent += () if matching else (entry,)
    for entry in absent:
        if not (lenient and found) or entry.endswith(_NO_LAYER):
            ends = sorted({name.partition("layers.")[2].partition(".")[2] for name in known})
            ends += sorted({end.rpartition(".")[2] for end in ends})
            nearest = get_close_matches(entry, ends, 3, 0.3) or ends[-7:]
            raise ConfigurationError(f"{key}: no layer has {entry!r}; nearest: {', '.join(nearest)}")
    return found


def adapted_targets(config: DecoderConfig, settings: AdapterConfig) -> tuple[AdaptedTarget, ...]:
    """The targets of a run's adapter, new or that of ``settings.path``, with their rank and scale. Raises
    ConfigurationError as `chosen_targets` and `stored_targets`."""
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
    ConfigurationError, naming file and key, for what isn't supported."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigurationError(f"{folder}: no {CONFIG_FILE}: not an adapter in PEFT's format")
    given = read_json(file)
    if given.get("peft_type") != "LORA":
        raise ConfigurationError(f"{file}: peft_type = {given.get('peft_type')!r}: valid: 'LORA'")
    for key, plain in _PLAIN.items():
        if given.get(key) and given[key] != plain:
            raise ConfigurationError(f"{file}: {key} = {given[key]!r} is not supported; valid: {plain!r}")
    if (began := str(given.get("init_lora_weights"))).startswith(_CHANGED_BASE):
        raise ConfigurationError(
            f"{file}: init_lora_weights = {began!r}: the adapter belongs to a base that PEFT has changed; convert it "
            "with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    wanted, parameters = given.get("target_modules") or (), tuple(given.get("target_parameters") or ())
    found: list[AdaptedTarget] = []
    for target in chosen_targets(config, wanted if isinstance(wanted, str) else tuple(wanted), parameters, file):
        rank = int(_by_pattern(file, given, "r", "rank_pattern", target.name))
        alpha = _by_pattern(file, given, "lora_alpha", "alpha_pattern", target.name)
        found.append(AdaptedTarget(target=target, rank=rank, alpha=alpha, rslora=bool(given.get("use_rslora"))))
    return tuple(found)


def stored_metadata(folder: Path, model: str | Path) -> dict[str, Any]:
    """The metadata of the adapter's weights in ``folder``. Raises ConfigurationError for a file that can't be read,
    where it says that they were trained on another base than the folder ``model``, and for NaN in them."""
    file = folder / WEIGHTS_FILE
    try:
        with safe_open(file, framework="np") as content:
            metadata: dict[str, Any] = content.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"{file}: not a readable safetensors file: {error}") from None
    if metadata.get(BASE, "") not in ("", base_digest(model)):
        raise ConfigurationError(f"{file}: an adapter of another base than {model}: their files differ")
    require_finite(file)
    return metadata


def base_digest(model: str | Path) -> str:
    """Digest that tells a model folder's weights from others: of its config.json and of sizes, headers and samples of
    its *.safetensors. What else lies there, a generation_config.json say, may change."""
    found = file_digests(Path(model))
    return folder_digest(
        {name: one for name, one in found.items() if re.fullmatch(r"config\.json|[^/]+\.safetensors", name)}
    )


def _by_pattern(file: Path, given: Mapping[str, Any], key: str, patterns: str, name: str) -> float:
    """The value of ``key`` for a target: that of the first of ``patterns`` that its name ends with, as PEFT reads them.
    Raises ConfigurationError."""
    own = next((one for one in given.get(patterns) or () if re.match(rf"(.*\.)?({one})$", name)), None)
    where, value = (key, given.get(key)) if own is None else (f"{patterns}[{own!r}]", given[patterns][own])
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigurationError(f"{file}: {where} = {value!r}: valid: a number above 0")
    return value
