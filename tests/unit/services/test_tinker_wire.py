"""The SDK's messages: our descriptors are its own, and what doesn't fit is refused by the field's name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import cookbook
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_service import BASE

from headway.records.tenants.protocols import PassOutcome, TenantRefused, TenantSample, TenantSampleOutcome, TopTokens
from headway.services.tinker import requests
from headway.services.tinker.wire import (
    LOSSES,
    decompressed,
    encoded_pass,
    encoded_sample,
    file_descriptor,
    message_classes,
    parsed_request,
    tensor_array,
    training_pass,
)

CSR = {"crow": [0, 1, 1, 3], "columns": [1, 0, 2]}


def tensor(numbers: Any, shape: list[int] | None = None, csr: dict[str, list[int]] | None = None) -> Any:
    array = np.asarray(numbers)
    message = message_classes()["Tensor"](dtype=2 if array.dtype.kind == "i" else 1)
    message.shape.extend(array.shape if shape is None else shape)
    raw = array.astype("<i8" if array.dtype.kind == "i" else "<f4").tobytes()
    if csr is None:
        message.dense = raw
    else:
        message.sparse_csr.values = raw
        message.sparse_csr.crow_indices = np.array(csr["crow"], "<i8").tobytes()
        message.sparse_csr.col_indices = np.array(csr["columns"], "<i8").tobytes()
    return message


def request(loss: str = "cross_entropy", change: Callable[[Any], object] = bool, **inputs: Any) -> Any:
    message = message_classes()["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    datum.model_input.add().encoded_text.tokens = np.array([3], "<i4").tobytes()
    form = LOSSES.get(loss, LOSSES["ppo"])
    defaults: dict[str, Any] = {"target_tokens": [2, 3, 4], **{key: [0.5, -1.0, 2.0] for key in form.inputs}}
    for name, numbers in (defaults | inputs).items():
        datum.loss_fn_inputs[name].CopyFrom(numbers if hasattr(numbers, "shape") else tensor(numbers))
    change(message)
    return message


@pytest.mark.skipif(not cookbook.SDK.is_file(), reason="no tinker SDK: make install-clients, or install-cookbook")
def test_descriptors_are_the_sdks_field_by_field() -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    path = cookbook.site_of(cookbook.SDK) / "tinker/proto/tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("sdk_messages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(theirs)
    ours = file_descriptor()
    their_messages = {message.name: message for message in theirs.message_type}
    for message in ours.message_type:
        assert fields_of(message) == fields_of(their_messages[message.name]), message.name
    # Requests in protobuf beside forward_backward don't exist yet: these two messages aren't sent by anyone.
    assert set(their_messages) - {message.name for message in ours.message_type} <= {
        "SamplingParams", "StopStrings", "StopTokens"}  # fmt: skip
    assert {enum.name: [value.name for value in enum.value] for enum in ours.enum_type} == {
        enum.name: [value.name for value in enum.value] for enum in theirs.enum_type
    }


def fields_of(message: Any) -> Any:
    fields = [
        (field.name, field.number, field.type, field.label, field.type_name, field.proto3_optional,
         message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None)
        for field in message.field
    ]  # fmt: skip
    return fields, [(entry.name, entry.options.map_entry, fields_of(entry)) for entry in message.nested_type]


def test_a_request_becomes_a_pass() -> None:
    weights = tensor([1.0, 2.0, 3.0], [3, 4], CSR)
    targets = tensor([5, 6, 7], [3, 4], CSR)
    message = request(target_tokens=targets, weights=weights)
    message.loss_fn_config["beta"] = 1.0
    message.loss_fn_config.clear()
    decoded = training_pass(parsed_request(message.SerializeToString()), BASE, {})
    datum = decoded.data[0]
    assert datum.token_ids_n.tolist() == [1, 2, 3]
    assert datum.inputs["target_tokens"].tolist() == [[0, 5, 0, 0], [0, 0, 0, 0], [6, 0, 7, 0]]
    assert datum.inputs["weights"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [2, 0, 3, 0]]
    assert (decoded.loss, decoded.settings, decoded.forward_only) == ("cross_entropy", {}, False)


def test_settings_of_the_second_version_win_and_a_loss_may_stand_for_another() -> None:
    message = request("ppo")
    message.loss_fn_config.update({"clip_low_threshold": 0.5, "clip_high_threshold": 1.5})
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.7
    assert training_pass(message, BASE, {}).settings == {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5}
    message = request("stable_reinforce")
    message.loss_fn_config_v2["alpha"].number = 0.7
    with pytest.raises(TenantRefused, match="loss_fn = 'stable_reinforce': valid: cross_entropy, importance_sampling"):
        training_pass(message, BASE, {})
    substituted = training_pass(message, BASE, {"stable_reinforce": "ppo"})
    assert (substituted.loss, substituted.settings) == ("ppo", {})


def image(message: Any) -> None:
    message.data[0].model_input.add().image.data = b"x"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (request(change=lambda m: m.ClearField("data")), "data is empty"),
        (request(change=lambda m: m.data[0].ClearField("model_input")), r"data\[0\].model_input has 0 tokens: valid"),
        (request(change=image), "a chunk of kind image: valid: encoded_text"),
        (request(target_tokens=[2, 3, 100]), "target_tokens has token 100: valid: 0 to 99"),
        (request(target_tokens=[2, 3]), r"target_tokens has shape \[2\]: valid for cross_entropy: \[3\] or \[3, K\]"),
        (request(target_tokens=[2.0, 3.0, 4.0]), "target_tokens is float32: valid: int64"),
        (request(weights=[1.0, 2.0]), r"weights has shape \[2\]: valid: the targets', \[3\]"),
        (request(weights=[1.0, np.nan, 2.0]), r"weights\[1\] is nan: valid: finite"),
        (request(extra=[1.0, 1.0, 1.0]), "loss_fn_inputs.extra: valid for cross_entropy: target_tokens, weights"),
        (request(change=lambda m: m.data[0].loss_fn_inputs.pop("weights")), "weights is missing: cross_entropy needs"),
        (request("ppo", target_tokens=[[1], [2], [3]]), r"shape \[3, 1\]: valid for ppo: \[3\]"),
        (request("ppo", lambda m: m.loss_fn_config.update({"beta": 1.0})), "loss_fn_config.beta = 1.0: valid for ppo"),
        (request("ppo", lambda m: setattr(m.loss_fn_config_v2["clip_low_threshold"], "text", "x")), "= 'x': valid"),
        (request(weights=tensor([1.0], [2, 2])), r"weights has 1 values for shape \[2, 2\]"),
        (request(weights=tensor([1.0], [1 << 40, 1 << 40], CSR)), "valid: at most 16777216 values"),
        (request(weights=tensor([1.0], [-1])), r"shape \[-1\]: valid"),
        (request(weights=tensor([1.0] * 3, [3], CSR)), r"a CSR tensor of shape \[3\]: valid: \[N, K\]"),
        (request(weights=tensor([1.0] * 3, [3, 2], CSR)), "weights.col_indices: valid: 3 numbers, 0 to 1"),
        (request(weights=tensor([1.0] * 2, [3, 4], CSR)), "weights.col_indices: valid: 2 numbers"),
        (request(weights=tensor([1.0] * 3, [2, 4], CSR)), "weights.crow_indices: valid: 3 numbers from 0 to 3"),
        (request(weights=tensor([1.0] * 3, [3, 4], {**CSR, "crow": [0, 2, 1, 3]})), "crow_indices: valid"),
        (request(change=lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"abc")), "3 bytes are no"),
        (request(change=lambda m: setattr(m.data[0].loss_fn_inputs["weights"], "dtype", 4)), "dtype 4: valid"),
        (
            request(change=lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"\0" * 400)),
            "has 101 tokens: valid: 1 to 64",
        ),
    ],
)
def test_a_pass_that_does_not_fit_is_refused_by_name(message: Any, reason: str) -> None:
    with pytest.raises(TenantRefused, match=reason):
        training_pass(parsed_request(message.SerializeToString()), BASE, {})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_requests_are_refused_or_passes(data: st.DataObject) -> None:
    raw = bytearray(request("ppo").SerializeToString())
    for position in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=6)):
        raw[position] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        decoded = training_pass(parsed_request(bytes(raw)), BASE, {})
    except TenantRefused:
        return
    for datum in decoded.data:
        assert all(array.shape[0] == len(datum.token_ids_n) for array in datum.inputs.values())


def test_zstd_frames_have_a_limit_before_anything_is_allocated() -> None:
    zstandard = pytest.importorskip("zstandard")
    body = b"x" * 1000
    frame = zstandard.ZstdCompressor().compress(body)
    assert decompressed(frame, 1000) == body
    with pytest.raises(TenantRefused, match="size is 1000 bytes: valid: stated, at most 999 bytes"):
        decompressed(frame, 999)
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (1 << 28))
    with pytest.raises(TenantRefused, match="at most 1000 bytes"):
        decompressed(bomb, 1000)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    with pytest.raises(TenantRefused, match="size is unknown"):
        decompressed(unsized, 10_000)
    for damaged in (frame[:-3], b"", b"abc", frame[:4] + b"\xff" * 20):
        with pytest.raises(TenantRefused):
            decompressed(damaged, 10_000)


def test_outcomes_of_several_targets_come_in_runs_of_equal_width() -> None:
    logprobs = tuple(np.arange(n, dtype="f4").reshape(shape) for n, shape in ((2, 2), (3, 3), (4, (2, 2)), (1, 1)))
    message = message_classes()["ForwardBackwardOutput"].FromString(
        encoded_pass(PassOutcome(logprobs=logprobs, metrics={"loss:sum": 2.5}))
    )
    assert dict(message.metrics) == {"loss:sum": 2.5}
    records = [
        (record.num_datums, list(record.fields["logprobs"].trailing_shape),
         np.frombuffer(record.fields["logprobs"].offsets, "<i8").tolist()) for record in message.loss_fn_outputs
    ]  # fmt: skip
    assert records == [(2, [], [0, 8, 20]), (1, [2], [0, 16]), (1, [], [0, 4])]


def test_samples_are_encoded_with_what_was_asked_for() -> None:
    top = TopTokens(token_ids=np.array([[1, 2]]), logprobs=np.array([[-1.0, -2.0]]))
    sample = TenantSample(token_ids=np.array([4]), logprobs=np.array([-0.5]), stopped=True, top=top)
    outcome = TenantSampleOutcome(
        samples=(sample,), prompt_logprobs=np.array([np.nan, -1.0]), target_prompt_logprobs=np.array([[-3.0, np.nan]])
    )
    message = message_classes()["SampleResponse"].FromString(encoded_sample(outcome))
    assert (message.sequences[0].stop_reason, message.sequences[0].topk_sampled_logprobs.k) == (0, 2)
    assert list(message.target_prompt_logprobs.shape) == [1, 2]
    assert not message.HasField("topk_prompt_logprobs")


def test_tensors_without_a_shape_are_rows() -> None:
    assert tensor_array(tensor([1.0, 2.0], []), "x").tolist() == [1.0, 2.0]


SAMPLE = {
    "sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {},
}  # fmt: skip


def sampled(**fields: Any) -> Any:
    body = requests.parsed({**SAMPLE, **fields}, requests.SampleBody)
    return requests.sample_request(body, "r", BASE, 9, stability=False)


def test_a_sample_request_has_the_sdks_defaults() -> None:
    request = sampled()
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.top_k) == (61, 9, 0)
    assert not request.ignores_end
    request = sampled(sampling_params={"stop": [], "top_k": -1, "seed": -3})
    assert request.ignores_end
    assert 0 <= request.sampling.seed < 1 << 62
    assert sampled(sampling_params={"stop": "a"}).sampling.stop == ("a",)
    assert sampled(sampling_params={"stop": [5]}).sampling.stop_token_ids == (5,)
    targets = {"data": [7, 8], "dtype": "int64", "shape": [2, 3], "sparse_crow_indices": [0, 1, 2],
               "sparse_col_indices": [2, 0]}  # fmt: skip
    assert sampled(target_prompt_logprobs=targets).target_prompt_ids.tolist() == [[-1, -1, 7], [8, -1, -1]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": {"chunks": []}}, "prompt has 0 tokens: valid: 1 to 63"),
        ({"prompt": {"chunks": [{"tokens": [1, 100]}]}}, "prompt has token 100"),
        ({"prompt": {"chunks": [{"tokens": [1 << 63]}]}}, "prompt has a number beyond 64 bits"),
        ({"prompt": {"chunks": [{"type": "image", "tokens": []}]}}, "Invalid enum value 'image'"),
        ({"sampling_params": {"max_tokens": 62}}, "max_tokens = 62: valid after 3 tokens: at most 61"),
        ({"sampling_params": {"temperature": -1}}, r"\$.sampling_params.temperature"),
        ({"sampling_params": {"penalty": 1.5}}, "sampling_params.penalty = 1.5: this service has no such field"),
        ({"prompt_alt_tokens_k": 3}, "prompt_alt_tokens_k = 3: this service has no such field"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n = 2: valid: with prompt_logprobs"),
        ({"record_stability_info": True}, "stable_reinforce isn't served here"),
        ({"num_samples": 0}, r"\$.num_samples"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, r"valid: \[2, K\]"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1]}}, "has 1 values for shape"),
    ],
)
def test_a_sample_that_can_not_be_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(TenantRefused, match=reason):
        sampled(**fields)


def test_empty_values_of_unknown_fields_are_accepted() -> None:
    assert sampled(prompt_alt_tokens_k=0, newest=None, other=[]).samples == 1


@pytest.mark.parametrize("version", ["0.24.9", "", "x"])
def test_older_clients_get_a_sentence(version: str) -> None:
    with pytest.raises(TenantRefused, match=r"valid: 0.25 and later \(pip install -U tinker\)"):
        requests.require_sdk(version)
    requests.require_sdk("0.25.0")
    requests.require_sdk("1.0")


@pytest.mark.parametrize(
    "path",
    [
        "tinker://a/weights/../b",
        "tinker://../weights/b",
        "a/weights/b",
        "tinker://a/w/b",
        "tinker://a/weights/.b",
        "tinker://a/weights/b\n",
        "tinker://a/weights/",
    ],
)
def test_paths_that_leave_the_store_are_refused(path: str) -> None:
    with pytest.raises(TenantRefused, match="path = "):
        requests.checkpoint_path(path)


def test_settings_of_a_step() -> None:
    body = {"model_id": "m", "seq_id": 1, "adam_params": {}}
    optimiser = requests.parsed(body, requests.OptimStepBody).adam_params.optimiser()
    assert (optimiser.max_grad_norm, optimiser.epsilon, optimiser.beta2) == (float("inf"), 1e-12, 0.95)
    for name, number in (("beta1", 1.0), ("learning_rate", -1.0), ("grad_clip_norm", -1.0)):
        with pytest.raises(TenantRefused, match=name):
            requests.parsed({**body, "adam_params": {name: number}}, requests.OptimStepBody)
    lora = msgspec.convert({"rank": 65}, requests.LoraSettings)
    with pytest.raises(TenantRefused, match=r"lora_config\.rank = 65: valid: 1 to 64"):
        requests.adapter_of(lora, 64, 0)
    with pytest.raises(TenantRefused, match="train_mlp or train_attn"):
        requests.adapter_of(requests.LoraSettings(rank=1, train_mlp=False, train_attn=False), 64, 0)
