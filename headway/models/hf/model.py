"""Architectures of transformers, with the interface of a model under training.

Shape suffixes: n packed tokens of all documents, d width, v vocabulary, b documents of a bucket, l its padded length.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging as transformers_logging

from headway.config.schema import Checkpointing
from headway.models.attention_plan import AttentionPlan
from headway.models.configuration import read_json
from headway.models.families import FAMILIES
from headway.models.hf.attention import PACKED, packing
from headway.models.hf.configuration import HfConfig, ropes_by_length
from headway.models.hf.pixels import Pixels
from headway.models.kernels import UnpadDocuments
from headway.models.loading import copy_tokenizer, parse_dtype, require_finite_tensors
from headway.models.packed_model import PackedModel
from headway.models.parallel.division import Division
from headway.models.parallel.divisors import require_divisible, require_heads
from headway.models.weight_files import weight_files
from headway.records.errors import ConfigurationError

__all__ = ["HfConfig", "HfModel", "load_hf"]

_log = logging.getLogger(__name__)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Largest difference of hidden states, over their largest value, between packed and separate documents.
_MAX_DIFFERENCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_MAX_DIFFERENCE_HALF = 3e-2  # bfloat16 and float16: eight bits, over some layers
_PROBE_TOKENS = (7, 3, 12, 5)
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")  # keys of a configuration
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # 1 where a picture is
_BATCHED_PICTURES = ("gemma3", "llava", "qwen2_5_vl")  # whose pixel arrays of several prompts may be concatenated
_EXCLUDED_LOGIT = -1e4  # of tokens that aren't sampled: a probability of 0 in float32, up to temperatures of 50


class HfModel(PackedModel):
    """A causal language model of transformers.

    Documents are packed if that gives each the hidden states that it has alone (`_packing_obstacle`). Otherwise each
    document is a row of a batch, padded on the right to the longest of similar ones. Such models have layers that carry
    a state from token to token, or don't call a registered attention function.
    """

    shares_prefixes = False

    def __init__(self, module: PreTrainedModel, config: HfConfig) -> None:
        super().__init__()
        self.module = module
        self.config: HfConfig = config
        # The module that computes the hidden states for the head; some architectures misname it to transformers.
        body = module.base_model if _is_multimodal(module.config) else module.get_decoder()
        body = getattr(module, "model", None) if body is module else body
        if body is None:
            raise ConfigurationError(f"{type(module).__name__} has no body separate from its head: not supported")
        self._body = (body,)  # in a tuple: its parameters are the module's
        self._body_takes = frozenset(inspect.signature(body.forward).parameters)
        self._image_token = getattr(module.config, _PLACEHOLDERS[0], None) if _is_multimodal(module.config) else None
        self.takes_pictures = self._image_token is not None
        self.placeholders = placeholders_of(module.config, config.vocabulary_size)
        self.rope_by_length = bool(ropes_by_length(module.config.get_text_config().to_dict()))
        self._router_logits = getattr(module.config, "output_router_logits", False)  # the folder's setting
        if self._router_logits:
            module.config.output_router_logits = False
        self.packs = False
        self._checkpointing: Checkpointing = "none"
        self._padding_logged = False

    @property
    def layers(self) -> nn.ModuleList:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The decoder's layers: the first module list with as many modules as the configuration has layers."""
        module_lists = (child for child in self.module.get_decoder().modules() if isinstance(child, nn.ModuleList))
        return next((child for child in module_lists if len(child) == self.config.layers), nn.ModuleList())

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def checkpointing(self) -> Checkpointing:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Which activations the backward computes again; never "selective"."""
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, chosen: Checkpointing) -> None:
        layers = [layer for layer in self.module.modules() if isinstance(layer, GradientCheckpointingLayer)]
        valid = ("none", "full") if layers else ("none",)
        if chosen not in valid:
            raise ConfigurationError(
                f"trainer.gradient_checkpointing = {chosen!r}: transformers' {self.config.model_type} can't; "
                f"valid: {' or '.join(map(repr, valid))}"
            )
        for layer in layers:  # transformers' own switch asks for training mode, and so for dropout
            vars(layer).pop("forward", None)
            if chosen == "full":
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        self._checkpointing = chosen

    def divide(self, division: Division) -> None:
        context, text = division.context, self.module.config.get_text_config()
        require_divisible(self.config, experts=1 if division.experts is None else division.experts.ranks.size)
        if context is not None:
            names = [name for name, _ in self.module.named_parameters() if name.endswith("sinks")]
            reasons = {
                "documents aren't packed": not self.packs,
                "rows with pictures aren't packed": self.takes_pictures,
                f"attention sinks ({', '.join(names[:1])}) are of all heads": bool(names),
                "rotary embeddings change with the longest row": self.rope_by_length,
            }
            if reason := next((reason for reason, is_met in reasons.items() if is_met), ""):
                raise ConfigurationError(
                    f"trainer.context_parallel = {context.ranks.size}: not supported for transformers' "
                    f"{self.config.model_type}: {reason}; valid: 1, or an architecture without that, such as "
                    f"{', '.join(FAMILIES)}"
                )
            heads = text.num_attention_heads
            # A layer's module repeats key/value heads by the number of query heads for each, which copies would change.
            kv_heads = getattr(text, "num_key_value_heads", None) or heads
            require_heads(heads, kv_heads, context.ranks.size, copied=False)
        super().divide(division)

    def forward_packed(
        self, ids_n: Tensor, lengths: list[int], continues: list[int] | None = None, pictures: Sequence[Pixels] = ()
    ) -> Tensor:
        """Hidden states [N, d] of concatenated documents after the last norm. ``pictures``: each document's pixel
        arrays, empty for a document without pictures. Raises ValueError if lengths don't add up, for documents that
        share a prefix, and for a document that would change the rotary embeddings of the others."""
        if continues is not None and any(prefix >= 0 for prefix in continues):
            raise ValueError("a model of transformers computes whole documents: none may continue another")
        if (context := self.division.context) is not None:
            ids_n, lengths = context.padded(ids_n, lengths)
        plan = AttentionPlan.build(lengths, self.device)
        if plan.tokens != ids_n.shape[0]:
            raise ValueError(f"lengths add up to {plan.tokens} tokens, but {ids_n.shape[0]} ids were given")
        if self.rope_by_length and plan.longest > self.config.max_positions:
            raise ValueError(
                f"a document of {plan.longest} tokens is beyond the context of {self.config.max_positions}"
            )
        packs = self.packs and not any(pictures)
        rows = [] if packs else self._rows(ids_n, plan, pictures)
        most_calls = calls = 1 if packs else len(rows)
        if not self.packs or self.takes_pictures:
            most_calls = self.most_calls(calls)  # before the first of them, since it is a collective too
        hidden_nd = self._packed(ids_n, plan) if packs else self._by_rows(rows, plan)
        for _ in range(calls, most_calls):
            ids_11 = torch.full((1, 1), int(self._image_token == 0), device=ids_n.device)
            hidden_nd = hidden_nd + self._hidden(ids_11)[0, :, :0].sum()  # 0, with gradients of 0
        return hidden_nd

    def _packed(self, ids_n: Tensor, plan: AttentionPlan) -> Tensor:
        context = self.division.context
        rows = slice(None) if context is None else context.rows(plan.tokens)
        ids_n, positions_n = ids_n[rows], plan.positions_n[rows]
        # A mask of ones keeps transformers from searching for borders of documents, which the plan has.
        ones_mask = torch.ones_like(ids_n)[None]
        with packing(plan, context):
            return self._hidden(ids_n[None], position_ids=positions_n[None], attention_mask=ones_mask)[0]

    def _by_rows(self, rows: list[tuple[Tensor, list[Pixels]]], plan: AttentionPlan) -> Tensor:
        if not self._padding_logged:
            self._padding_logged = True
            padding_share = 1 - plan.tokens / sum(bucket.documents * bucket.length for bucket in plan.buckets)
            _log.warning("%s: %.0f %% of the first micro-batch is padding", self.config.model_type, 100 * padding_share)
        outputs: list[Tensor] = []
        for ids_bl, pixels in rows:
            more = self.picture_arguments(ids_bl, pixels, self._body_takes) if any(pixels) else {}
            outputs.append(self._hidden(ids_bl, **more).flatten(0, 1))
        return UnpadDocuments.apply(plan.scatter_n, *outputs)  # pyright: ignore[reportReturnType]

    def _rows(
        self, ids_n: Tensor, plan: AttentionPlan, pictures: Sequence[Pixels]
    ) -> list[tuple[Tensor, list[Pixels]]]:
        """The rows of token ids of each call, and their pictures. Rows are computed one by one if shapes differ, or if
        it isn't known that an architecture's arrays may be concatenated: some hold positions within one prompt."""
        pixels_by_start = dict(zip(itertools.accumulate(plan.lengths, initial=0), pictures, strict=False))
        calls: list[tuple[Tensor, list[Pixels]]] = []
        for bucket in plan.buckets:
            index_bl = bucket.gather_bl.view(bucket.documents, bucket.length)
            ids_bl = ids_n[index_bl]
            if self._image_token is not None:  # padding must not contain the image token
                ids_bl[:, 1:].masked_fill_(index_bl.diff() == 0, int(self._image_token == 0))
            starts = index_bl[:, 0].tolist() if pictures else []
            pixels: list[Pixels] = [pixels_by_start[start] for start in starts] or [{}]
            shapes = {tuple((name, array.shape[1:]) for name, array in of_row.items()) for of_row in pixels}
            if len(pixels) > 1 and (len(shapes) > 1 or self.config.model_type not in _BATCHED_PICTURES) and any(pixels):
                calls += [(ids_1l, [of_row]) for ids_1l, of_row in zip(ids_bl[:, None], pixels, strict=True)]
            else:
                calls.append((ids_bl, pixels))
        return calls

    def picture_arguments(self, ids_bl: Tensor, pictures: Sequence[Pixels], taken: Container[str]) -> dict[str, Tensor]:
        """Further arguments of a forward() over rows of ids, for each row's pictures. ``taken``: names it accepts."""
        arrays = {name: torch.cat([torch.tensor(p[name]) for p in pictures]).to(self.device) for name in pictures[0]}
        arrays = {name: array.to(self.dtype) if array.is_floating_point() else array for name, array in arrays.items()}
        types_bl = (ids_bl == self._image_token).long()
        return arrays | {name: types_bl for name in _TOKEN_TYPES if name in taken}

    @property
    def position_shift(self) -> int:
        """The offset of positions from token indices after the pictures of the row computed last."""
        deltas = getattr(self._body[0], "rope_deltas", None)
        return 0 if deltas is None else int(deltas.flatten()[0])

    def sampled(self, logits: Tensor) -> Tensor:
        """The logits for sampling, which exclude tokens that stand for pictures."""
        if not self.placeholders:
            return logits
        return logits.index_fill(-1, torch.tensor(self.placeholders, device=logits.device), _EXCLUDED_LOGIT)

    def _hidden(self, ids_bl: Tensor, **more: Tensor) -> Tensor:
        """Hidden states [b, l, d] of rows of token ids. Each row is a document, with padding on the right."""
        return self._body[0](input_ids=ids_bl, use_cache=False, **more)[0]

    def head(self, x_nd: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, d] as the architecture computes them, including scales and soft caps."""
        ids = torch.zeros(1, len(x_nd), dtype=torch.int64, device=x_nd.device)
        with _with_hidden(self._body[0], x_nd[None]):
            return self.sampled(self.module(input_ids=ids, use_cache=False).logits[0])

    def tensors_in_files(self) -> dict[str, Tensor]:
        """The tensors that `save` writes, by their names in the loaded folder; a tied tensor occurs once."""
        return revert_weight_conversion(self.module, stored_parts(self.module))

    def save(self, path: str | Path, source: str | Path | None = None, *, by_rows: bool = False) -> None:
        """Write the folder ``path`` so that transformers and `load_hf` can read it. Not atomic: callers write into a
        scratch folder and rename it. ``source``: a model folder whose tokenizer and code are copied too. ``by_rows``:
        without the weights, which will be float32."""
        folder, config = Path(path), self.module.config
        folder.mkdir(parents=True, exist_ok=True)
        if self._router_logits:
            config.output_router_logits = True
        try:
            if by_rows:
                (written_config := copy.deepcopy(config)).dtype = torch.float32
                written_config.save_pretrained(folder)
            else:
                self.module.save_pretrained(folder)
        finally:
            if self._router_logits:
                config.output_router_logits = False
        if source is not None:
            code_files = sorted(file.name for file in Path(source).glob("*.py"))
            copy_tokenizer(Path(source), folder, (*_PROCESSOR_FILES, *code_files))


def stored_parts(module: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters and buffers that the module's files have; a tied tensor occurs once."""
    named_tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor for name, tensor in module.state_dict().items() if name in named_tensors}


class _HiddenOutput(BaseModelOutputWithPast):
    """The output of a model's body that holds only hidden states; every other part is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _with_hidden(body: Any, hidden: Tensor) -> Iterator[None]:
    """Make ``body`` return ``hidden``, so that the module around it computes only its head."""
    output = _HiddenOutput(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]
    original_forward, calls = vars(body).get("forward"), list[None]()
    body.forward = lambda *args, **kwargs: calls.append(None) or output
    try:
        yield
    finally:
        del body.forward
        if original_forward is not None:
            body.forward = original_forward
    if not calls:
        raise ConfigurationError(f"logits aren't made of what {type(body).__name__} computes: not supported")


def _is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether the language model is one part of a multimodal model."""
    return config.get_text_config() is not config


def placeholders_of(config: PreTrainedConfig, vocabulary: int) -> list[int]:
    """The ids of tokens that stand for pictures and other media, which are never sampled."""
    token_ids = [getattr(config, name, None) for name in _PLACEHOLDERS] if _is_multimodal(config) else []
    return [token_id for token_id in token_ids if token_id is not None and token_id < vocabulary]


def load_hf(
    path: str | Path, dtype: str | torch.dtype, device: str | torch.device, trust_remote_code: bool = False
) -> HfModel:
    """Load the model in folder ``path`` with transformers, never from the network, and choose whether it packs
    documents.

    Raises ConfigurationError for models that `HfConfig.from_pretrained` refuses, missing files or tensors, and errors
    of transformers.
    """
    folder, parsed = Path(path), parse_dtype(dtype)
    config = HfConfig.from_pretrained(folder, trust_remote_code)
    weight_files(folder)  # or their error, which names more than transformers' would
    module = _load(folder, parsed, trust_remote_code).to(torch.device(device))  # pyright: ignore[reportArgumentType]
    for tensor in (*module.parameters(), *module.buffers()):  # a mapped file has any alignment, which changes bits
        tensor.data = tensor.data.clone()
    require_finite_tensors(str(folder), dict(module.named_parameters()))
    model = with_interface(module, config, folder)
    choose_packing(model)
    return model


def with_interface(module: PreTrainedModel, config: HfConfig, folder: Path) -> HfModel:
    """The model of a module, loaded from ``folder`` or to be filled from it. Raises ConfigurationError for a module
    that can't be trained."""
    module.eval()  # without dropout: the policy that is trained is the one that sampled
    if getattr(module.config, "vision_config", None) and module.get_decoder() in (module, module.base_model):
        raise ConfigurationError(
            f"{folder}: transformers' {type(module).__name__} has no decoder apart from what sees, which would be "
            "trained as well: not supported"
        )
    if _is_multimodal(module.config):  # the language model is trained
        module.requires_grad_(False)
        for trained_module in filter(None, (module.get_decoder(), module.get_output_embeddings())):
            trained_module.requires_grad_(True)
    model = HfModel(module, config)
    if model.rope_by_length:
        _log.warning(
            "%s: beyond %d tokens rotary embeddings depend on the longest document of a call, so that is the longest "
            "context",
            config.model_type,
            config.max_positions,
        )
    return model


def auto_class_of(folder: Path) -> Any:
    """transformers' class that makes the module of a model folder: of a text model, or of one that takes pictures."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as texts

    raw = read_json(folder / "config.json")
    is_text_model = raw["model_type"] in texts or "AutoModelForCausalLM" in (raw.get("auto_map") or {})
    return AutoModelForCausalLM if is_text_model else AutoModelForImageTextToText


def _load(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Load the module. Raises ConfigurationError with transformers' reason."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # hides its table of tensors: the error below names them
    transformers_logging.disable_progress_bar()
    load_options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code, "dtype": dtype}
    try:
        module, report = auto_class_of(folder).from_pretrained(folder, output_loading_info=True, **load_options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, AttributeError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        error_lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(f"{folder}: transformers can't load it: {' '.join(error_lines[:4])}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    for key in ("missing_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, report.get(key) or ())):
            raise ConfigurationError(f"{folder}: {key.replace('_', ' ')}: {', '.join(names[:4])} ({len(names)} in all)")
    source_by_tied = module.get_expanded_tied_weights_keys(all_submodels=True)
    if untied_names := sorted(source_by_tied.keys() - module.all_tied_weights_keys.keys()):
        reason = f"{untied_names[0]} in the files is another matrix than {source_by_tied[untied_names[0]]}"
        raise ConfigurationError(f"{folder}: {reason}; valid: tie_word_embeddings = false, or files without it")
    if unused_names := sorted(report.get("unexpected_keys") or ()):
        _log.warning("%s: %d tensors aren't used by the model, %s first", folder, len(unused_names), unused_names[0])
    return module


@torch.no_grad()
def choose_packing(model: HfModel) -> None:
    """Make ``model`` pack documents if that gives each the hidden states that it has alone, else log the reason. All
    ranks that divide it must call this."""
    reason = model.compute(partial(_packing_obstacle, model))
    model.packs = not reason
    if reason:
        _log.warning(
            "%s: %s; each document is a row of its own, padded by up to a quarter of its length",
            model.config.model_type,
            reason,
        )


def shift_obstacle(module: PreTrainedModel) -> str:
    """The reason why each document must begin at index 0 of its row; "": it needn't."""
    config = module.config.get_text_config()
    key = "log_scaling_n_floor" if config.model_type == "inkling_text" else "attn_temperature_tuning"
    return f"{key} depends on a token's index in its row, not on its position" if getattr(config, key, None) else ""


def _packing_obstacle(model: HfModel) -> str:
    """The reason why documents can't be packed; "": they can. Raises ConfigurationError for a model that fails to
    compute, and, in float32, for a model that isn't causal."""
    module, vocabulary, name = model.module, model.config.vocabulary_size, type(model.module).__name__
    attention_name = module.config.get_text_config()._attn_implementation
    generator = torch.Generator().manual_seed(0)
    lengths = [min(tokens, model.config.max_positions) for tokens in _PROBE_TOKENS]
    ids_n = torch.randint(vocabulary, (sum(lengths),), generator=generator).to(model.device)
    documents = list(ids_n.split(lengths))
    try:
        alone_nd = torch.cat([model._hidden(ids[None])[0] for ids in documents])
        model.head(alone_nd[:1])
        other_nd = model._hidden(torch.cat([documents[0][:-1], (documents[0][-1:] + 1) % vocabulary])[None])[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()[:200]}"
        raise ConfigurationError(f"transformers' {name} computes nothing from this folder: {reason}") from error
    if _relative_difference(other_nd[:-1], alone_nd[: lengths[0] - 1]) > _MAX_DIFFERENCE.get(model.dtype, 1.0):
        raise ConfigurationError(
            f"transformers' {name} isn't causal: its tokens attend to later tokens, which it would have to predict; "
            "valid: models whose tokens see what is before them alone"
        )
    if reason := shift_obstacle(module):
        return reason
    if attention_name not in PACKED or not module._can_set_attn_implementation():
        return f"its attention ({attention_name}) can't be replaced"
    try:
        module.set_attn_implementation(PACKED[attention_name])
        packed_nd = model._packed(ids_n, AttentionPlan.build(lengths, model.device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of the architecture's code for a row of documents
        reason = f"it doesn't take packed documents ({type(error).__name__}: {str(error).strip()[:80]})"
    else:
        difference = _relative_difference(packed_nd, alone_nd)
        if difference <= _MAX_DIFFERENCE.get(model.dtype, _MAX_DIFFERENCE_HALF):
            return ""
        reason = f"packed documents attend to each other (hidden states differ by {difference:.1g} of the largest)"
    module.set_attn_implementation(attention_name)
    return reason


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
