"""The SDK's protobuf messages, by descriptors of our own: requests decoded to passes, outcomes encoded.

Dimensions: N tokens of a datum, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.records.errors import ConfigurationError
from headway.records.tenants.protocols import (
    BaseDescription,
    PassOutcome,
    TenantRefused,
    TenantSampleOutcome,
    TopTokens,
    TrainingDatum,
    TrainingPass,
)

PROTOBUF = b"application/x-protobuf"
_PACKAGE = "tinker_public"
_MAX_ELEMENTS = 1 << 24  # of a tensor: a few bytes of CSR may stand for any number of zeros

# A message a line, a field each: name, number and type; * repeated, ? optional, | of the message's oneof, {} a map from
# strings. Messages are referred to by name.
_MESSAGES = """
SampleResponse: sequences 1 *SampledSequence, prompt_logprobs 2 ?bytes, topk_prompt_logprobs 3 ?TopkLogprobs,
  prompt_cache_hit_tokens 4 int32, target_prompt_logprobs 5 ?Tensor, prompt_alt_tokens 6 ?PromptAltTokens
PromptAltTokens: tokens 1 Tensor, logprobs 2 Tensor
SampledSequence: stop_reason 1 StopReason, tokens 2 bytes, logprobs 3 ?bytes, topk_sampled_logprobs 4 ?TopkLogprobs
TopkLogprobs: token_ids 1 bytes, logprobs 2 bytes, k 3 uint32, length 4 uint32
SparseCsr: values 1 bytes, crow_indices 2 bytes, col_indices 3 bytes
Tensor: dense 1 |bytes, sparse_csr 2 |SparseCsr, dtype 3 DType, shape 4 *int64
BatchedTensor: data 1 bytes, offsets 2 bytes, dtype 3 DType, trailing_shape 4 *int64
ArrayRecord: type_tag 1 string, fields 2 {}BatchedTensor, num_datums 3 int64
ForwardBackwardOutput: loss_fn_output_type 1 string, loss_fn_outputs 2 *ArrayRecord, metrics 3 {}double
ForwardBackwardRequest: model_id 1 string, seq_id 2 int32, data 3 *Datum, loss_fn 4 string,
  loss_fn_config 5 {}double, forward_only 6 bool, loss_fn_config_v2 7 {}LossConfigValue
LossConfigValue: number 1 |double, text 2 |string
Datum: model_input 1 *Chunk, loss_fn_inputs 2 {}Tensor, model_input_spans 3 *ProvenanceSpan,
  loss_fn_input_spans 4 *ProvenanceSpan
ProvenanceSpan: prompt_tokens 1 |PromptProvenanceSpan, sampled_tokens 2 |SampledProvenanceSpan
PromptProvenanceSpan: sequence_id 1 string, offset 2 int64, length 3 int64
SampledProvenanceSpan: sequence_id 1 string, offset 2 int64, length 3 int64
Chunk: encoded_text 1 |EncodedTextChunk, image 2 |ImageChunk, dmel 3 |DmelChunk
EncodedTextChunk: tokens 1 bytes
ImageChunk: data 1 bytes, format 2 string, expected_tokens 3 ?int32, override_dimensions 4 ?ImageDimensions
ImageDimensions: width 1 uint32, height 2 uint32
DmelChunk: dmel 1 bytes
"""
_ONEOFS = {"Tensor": "encoding", "LossConfigValue": "value", "ProvenanceSpan": "span", "Chunk": "chunk"}
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
_STOP, _LENGTH = 0, 1
_NO_LOGPROB = -99999.0  # beside token 0, where there is none
_FLOAT32, _INT64 = 1, 2
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}


class LossForm(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a loss beside its targets, its settings, and whether a token may have several targets."""

    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    several_targets: bool = False


_CLIPS = ("clip_low_threshold", "clip_high_threshold")
LOSSES = {
    "cross_entropy": LossForm(inputs=("weights",), several_targets=True),
    "importance_sampling": LossForm(inputs=("logprobs", "advantages")),
    "ppo": LossForm(inputs=("logprobs", "advantages"), settings=_CLIPS),
    "cispo": LossForm(inputs=("logprobs", "advantages"), settings=_CLIPS),
    "dro": LossForm(inputs=("logprobs", "advantages"), settings=("beta",)),
    "gspo": LossForm(inputs=("logprobs", "advantages"), optional=("sequence_ratio_mask",), settings=_CLIPS),
}


# --- messages -------------------------------------------------------------------------------------------------------


@cache
def message_classes() -> Mapping[str, Any]:
    """Return the protobuf classes by name, from a descriptor pool that is shared with no one. Raises
    ConfigurationError if the package protobuf is missing."""
    try:
        from google.protobuf import descriptor_pool, message_factory
    except ModuleNotFoundError:
        raise ConfigurationError("serve-tinker needs the package protobuf: pip install 'headway[tinker]'") from None
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file_descriptor())
    names = [line.partition(":")[0] for line in _MESSAGES.splitlines() if line and not line.startswith(" ")]
    descriptors = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in names}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in descriptors.items()}


def file_descriptor() -> Any:
    """Return the descriptor of all messages, a FileDescriptorProto."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file_proto = FileDescriptorProto(name="headway_tinker.proto", package=_PACKAGE, syntax="proto3")
    for line in _MESSAGES.replace("\n ", " ").strip().splitlines():
        name, _, field_texts = line.partition(":")
        message = file_proto.message_type.add(name=name)
        for field_text in field_texts.split(","):
            _add_field(message, *field_text.split())
    for name, value_names in _ENUMS.items():
        enum = file_proto.enum_type.add(name=name)
        for number, value_name in enumerate(value_names):
            enum.value.add(name=value_name, number=number)
    return file_proto


def _add_field(message: Any, name: str, number: str, kind: str) -> None:
    """Add a field to a DescriptorProto; for a map the entry's message as well."""
    field = message.field.add(name=name, number=int(number), label="LABEL_OPTIONAL")
    if kind.startswith("{}"):
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, "key", "1", "string")
        _add_field(entry, "value", "2", kind[2:])
        kind, field.label = f"{message.name}.{entry_name}", "LABEL_REPEATED"
    elif kind.startswith("*"):
        kind, field.label = kind[1:], "LABEL_REPEATED"
    elif kind.startswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name=_ONEOFS[message.name])
        kind, field.oneof_index = kind[1:], 0
    elif kind.startswith("?"):
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
        kind, field.proto3_optional = kind[1:], True
    if kind[0].islower():
        field.type = f"TYPE_{kind.upper()}"
    else:
        field.type = "TYPE_ENUM" if kind in _ENUMS else "TYPE_MESSAGE"
        field.type_name = f".{_PACKAGE}.{kind}"


def decompressed(body: bytes, most_bytes: int) -> bytes:
    """Decompress a zstd frame that states its size, as the SDK's do. Raises TenantRefused for a damaged frame, and one
    without its size or larger than ``most_bytes`` (before anything is allocated)."""
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ConfigurationError("zstd needs the package zstandard: pip install 'headway[tinker]'") from None
    try:
        size_bytes = zstandard.frame_content_size(body)
        if not 0 <= size_bytes <= most_bytes:
            size_text = f"{size_bytes} bytes" if size_bytes >= 0 else "unknown"
            raise TenantRefused(f"the zstd frame's size is {size_text}: valid: stated, at most {most_bytes} bytes")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=size_bytes)
    except zstandard.ZstdError as error:
        raise TenantRefused(f"the body is no valid zstd frame: {error}") from None


def parsed_request(body: bytes) -> Any:
    """Parse a ForwardBackwardRequest. Raises TenantRefused if it is truncated or no such message."""
    from google.protobuf.message import DecodeError

    message = message_classes()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise TenantRefused(f"the body is no valid ForwardBackwardRequest: {error}") from None
    return message


# --- passes ---------------------------------------------------------------------------------------------------------


def training_pass(message: Any, base: BaseDescription, substitutes: Mapping[str, str]) -> TrainingPass:
    """Convert a ForwardBackwardRequest to a pass.

    ``substitutes``: loss -> the loss that is computed instead. Raises TenantRefused that names the field: an unknown
    loss or setting, chunks that aren't text, inputs that are missing, misshapen or not finite, tokens outside the
    vocabulary, contexts that are too long, no data.
    """
    loss = substitutes.get(message.loss_fn, message.loss_fn)
    form = LOSSES.get(loss)
    if form is None:
        raise TenantRefused(f"loss_fn = {loss!r}: valid: {', '.join(LOSSES)}")
    if not message.data:
        raise TenantRefused("data is empty: valid: a datum or more")
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    settings |= {name: getattr(entry, entry.WhichOneof("value")) for name, entry in message.loss_fn_config_v2.items()
                 if entry.WhichOneof("value")}  # fmt: skip
    for name, setting in settings.items():
        if loss == message.loss_fn and (
            name not in form.settings or isinstance(setting, str) or not np.isfinite(setting)
        ):
            valid_names = ", ".join(form.settings) or "none"
            raise TenantRefused(f"loss_fn_config.{name} = {setting!r}: valid for {loss}: numbers, {valid_names}")
    data = tuple(_datum(datum, f"data[{index}]", form, loss, base) for index, datum in enumerate(message.data))
    settings = {name: settings[name] for name in form.settings if name in settings}
    return TrainingPass(data=data, loss=loss, settings=settings, forward_only=message.forward_only)


def _datum(message: Any, name: str, form: LossForm, loss: str, base: BaseDescription) -> TrainingDatum:
    """Convert a Datum. Raises TenantRefused with ``name`` in front."""
    chunks: list[NDArray[Any]] = []
    for chunk in message.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise TenantRefused(f"{name}.model_input: a chunk of kind {kind}: valid: encoded_text")
        chunks.append(_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"{name}.model_input"))
    token_ids_n = np.concatenate(chunks) if chunks else np.empty(0, np.int32)
    if not 0 < len(token_ids_n) <= base.max_context_tokens:
        raise TenantRefused(f"{name}.model_input has {len(token_ids_n)} tokens: valid: 1 to {base.max_context_tokens}")
    require_tokens(token_ids_n, base, f"{name}.model_input")
    valid_names = ("target_tokens", *form.inputs, *form.optional)
    if unknown := sorted(set(message.loss_fn_inputs) - set(valid_names)):
        raise TenantRefused(f"{name}.loss_fn_inputs.{unknown[0]}: valid for {loss}: {', '.join(valid_names)}")
    if missing := [key for key in valid_names if key not in message.loss_fn_inputs and key not in form.optional]:
        raise TenantRefused(f"{name}.loss_fn_inputs.{missing[0]} is missing: {loss} needs {', '.join(valid_names)}")
    inputs: dict[str, NDArray[Any]] = {}
    targets_shape: tuple[int, ...] = ()
    for key in (key for key in valid_names if key in message.loss_fn_inputs):
        path = f"{name}.loss_fn_inputs.{key}"
        array = tensor_array(message.loss_fn_inputs[key], path)
        if key == "target_tokens":
            require_tokens(array, base, path)
            array = array.astype(np.int64)
            targets_shape = array.shape
            if array.shape[:1] != token_ids_n.shape or array.ndim > 1 + form.several_targets:
                shapes = f"[{len(token_ids_n)}]" + f" or [{len(token_ids_n)}, K]" * form.several_targets
                raise TenantRefused(f"{path} has shape {list(array.shape)}: valid for {loss}: {shapes}")
        elif array.shape != targets_shape:
            raise TenantRefused(f"{path} has shape {list(array.shape)}: valid: the targets', {list(targets_shape)}")
        elif not np.isfinite(array := array.astype(np.float32)).all():
            position = np.argwhere(~np.isfinite(array))[0].tolist()
            raise TenantRefused(f"{path}{position} is {array[tuple(position)]}: valid: finite numbers")
        inputs[key] = array
    return TrainingDatum(token_ids_n=token_ids_n, inputs=inputs)


def require_tokens(token_ids: NDArray[Any], base: BaseDescription, name: str) -> None:
    """Raise TenantRefused for ids outside the vocabulary, or that are no integers."""
    if token_ids.dtype.kind != "i":
        raise TenantRefused(f"{name} is {token_ids.dtype}: valid: int64")
    outside = token_ids[(token_ids < 0) | (token_ids >= base.vocabulary)]
    if outside.size:
        raise TenantRefused(f"{name} has token {outside[0]}: valid: 0 to {base.vocabulary - 1}")


def tensor_array(message: Any, name: str) -> NDArray[Any]:
    """Convert a Tensor, dense or CSR (what isn't listed is 0), to an array of its shape. Raises TenantRefused for
    types, shapes and indices that don't fit."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise TenantRefused(f"{name}: dtype {message.dtype}: valid: DTYPE_FLOAT32, DTYPE_INT64")
    encoding = message.WhichOneof("encoding")
    if encoding != "sparse_csr":
        array = _numbers(message.dense, dtype, name)
        shape = tuple(message.shape) or array.shape
        _require_shape(shape, name)
        if int(np.prod(shape)) != array.size:
            raise TenantRefused(f"{name} has {array.size} values for shape {list(shape)}")
        return array.reshape(shape)
    shape = tuple(message.shape)
    _require_shape(shape, name)
    if len(shape) != 2:
        raise TenantRefused(f"{name}: a CSR tensor of shape {list(shape)}: valid: [N, K]")
    values = _numbers(message.sparse_csr.values, dtype, name)
    rows = _numbers(message.sparse_csr.crow_indices, np.dtype("<i8"), f"{name}.crow_indices")
    columns = _numbers(message.sparse_csr.col_indices, np.dtype("<i8"), f"{name}.col_indices")
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != len(columns) or (np.diff(rows) < 0).any():
        raise TenantRefused(f"{name}.crow_indices: valid: {shape[0] + 1} numbers from 0 to {len(columns)}, ascending")
    if len(values) != len(columns) or ((columns < 0) | (columns >= shape[1])).any():
        raise TenantRefused(f"{name}.col_indices: valid: {len(values)} numbers, 0 to {shape[1] - 1}")
    array = np.zeros(shape, dtype)
    array[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return array


def _require_shape(shape: Sequence[int], name: str) -> None:
    if any(length < 0 for length in shape) or np.prod([float(length) for length in shape]) > _MAX_ELEMENTS:
        raise TenantRefused(f"{name} has shape {list(shape)}: valid: at most {_MAX_ELEMENTS} values")


def _numbers(raw: bytes, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """View little-endian bytes as numbers. Raises TenantRefused for a part of one."""
    if len(raw) % dtype.itemsize:
        raise TenantRefused(f"{name}: {len(raw)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(raw, dtype)


# --- outcomes -------------------------------------------------------------------------------------------------------


def encoded_pass(outcome: PassOutcome) -> bytes:
    """Encode a ForwardBackwardOutput: a record for each run of data with the same K."""
    message = message_classes()["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    message.metrics.update(outcome.metrics)
    for trailing_shape, arrays in _runs(outcome.logprobs):
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.dtype = _FLOAT32
        field.trailing_shape.extend(trailing_shape)
        field.data = b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(4 * array.size for array in arrays)], dtype="<i8").tobytes()
    return message.SerializeToString()


def _runs(arrays: Iterable[NDArray[Any]]) -> list[tuple[tuple[int, ...], list[NDArray[Any]]]]:
    runs: list[tuple[tuple[int, ...], list[NDArray[Any]]]] = []
    for array in arrays:
        if not runs or runs[-1][0] != array.shape[1:]:
            runs.append((array.shape[1:], []))
        runs[-1][1].append(array)
    return runs


def encoded_sample(outcome: TenantSampleOutcome) -> bytes:
    """Encode a SampleResponse."""
    message = message_classes()["SampleResponse"](prompt_cache_hit_tokens=outcome.cached_tokens)
    for sample in outcome.samples:
        sequence = message.sequences.add(stop_reason=_STOP if sample.stopped else _LENGTH)
        sequence.tokens = np.ascontiguousarray(sample.token_ids, "<i4").tobytes()
        sequence.logprobs = np.ascontiguousarray(sample.logprobs, "<f4").tobytes()
        if sample.top is not None:
            _fill_top(sequence.topk_sampled_logprobs, sample.top)
    if outcome.prompt_logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(outcome.prompt_logprobs, "<f4").tobytes()
    if outcome.prompt_top is not None:
        _fill_top(message.topk_prompt_logprobs, outcome.prompt_top)
    if outcome.target_prompt_logprobs is not None:
        targets = message.target_prompt_logprobs
        targets.dtype, targets.dense = _FLOAT32, np.ascontiguousarray(outcome.target_prompt_logprobs, "<f4").tobytes()
        targets.shape.extend(outcome.target_prompt_logprobs.shape)
    return message.SerializeToString()


def _fill_top(message: Any, top: TopTokens) -> None:
    message.length, message.k = top.token_ids.shape
    message.token_ids = np.ascontiguousarray(np.maximum(top.token_ids, 0), "<i4").tobytes()
    message.logprobs = np.ascontiguousarray(np.nan_to_num(top.logprobs, nan=_NO_LOGPROB), "<f4").tobytes()
