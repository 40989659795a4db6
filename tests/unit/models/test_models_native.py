"""The C++ kernels agree with the plain torch they stand in for; without them, nothing is missing."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headway.generator.engines.sampling import KeptRows, RowSampling, counter_uniform, sample_tokens
from headway.generator.engines.torch import model_runner
from headway.generator.engines.torch.engine import TorchEngine
from headway.generator.service import GeneratorService
from headway.models import kernels
from headway.models.cpu import native
from headway.models.decoder import Decoder
from headway.models.initialise import initialise_model
from headway.models.loading import copy_weights, load_for_generation, load_model, save_model, weights_of
from headway.runtime.devices import cpu_multiplies_bfloat16, parse_device
from headway.trainer.service import TrainerService
from tests.conformance.engine import Session, model_of, request
from tests.conformance.reference import FAMILIES, random_model
from tests.support.tiny_trainer import Context, make_model

torch.set_num_threads(1)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 0.02}  # of values of order 1


def kernels_of(dtype: torch.dtype) -> native.Kernels:
    found = native.kernels_for(dtype, torch.device("cpu"))
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


def close(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 96), (3, 33)])
def test_native_elementwise_kernels_match_torch(dtype, rows, width):
    fast = kernels_of(dtype)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    gate_up = (torch.randn(rows, 2 * width, generator=generator) * 5).to(dtype)
    with torch.no_grad():
        plain = kernels.rms_norm(x, weight, 1e-6), kernels.gated_silu(gate_up)
        with native.using(fast):
            got = kernels.rms_norm(x, weight, 1e-6), kernels.gated_silu(gate_up)
    assert close(got[0], plain[0], dtype)
    assert close(got[1], plain[1], dtype)
    assert native.active(x) is None
    with native.using(fast):
        assert native.active(x, weight) is fast
        assert native.active(x, weight.double()) is None


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 16, 8), (7, 40, 32), (13, 5, 1100), (96, 33, 512), (97, 16, 513), (200, 7, 3)]
)
def test_native_products_match_torch(rows, columns, depth):
    """Edges of tiles, panels and blocks; bias; the residual stream as what is added and what is written; new values."""
    fast = kernels_of(torch.float32)
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, depth, generator=generator), torch.randn(columns, depth, generator=generator)
    bias, add = torch.randn(columns, generator=generator), torch.randn(rows, columns, generator=generator)
    fast.pack([weight])
    exact = (x.double() @ weight.double().t()).float()
    scale = depth**0.5

    def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
        return torch.allclose(got / scale, expected / scale, atol=3e-6)

    with torch.no_grad(), native.using(fast):
        assert near(kernels.linear(x, weight), exact)
        assert near(kernels.linear(x, weight, bias), exact + bias)
        assert near(kernels.linear(x, weight, None, add), exact + add)
        assert near(kernels.linear(x, weight, bias, add), exact + bias + add)
        alone = kernels.linear(x[rows // 2 : rows // 2 + 1], weight)
        assert torch.equal(alone[0], kernels.linear(x, weight)[rows // 2])  # whatever its neighbours
        weight.mul_(2)
        fast.pack([weight.t().contiguous().t()])
        assert not fast.packs(weight)
        fast.pack([weight])
        assert near(kernels.linear(x, weight), 2 * exact)
        assert near(kernels.linear(x.t().contiguous().t(), weight, None, add.t().contiguous().t()), 2 * exact + add)


@DTYPES
def test_unsupported_inputs_fall_back_to_torch(dtype):
    """Three axes, and rows that don't lie one after the other: shapes the C++ would misread."""
    fast = kernels_of(dtype)
    weight, x = torch.ones(8, dtype=dtype), torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    with native.using(fast):
        for strange in (x, x[0].t().contiguous().t(), x[0, :, ::2]):
            assert native.active(strange) is None
        assert native.active(x[0], torch.ones(16, dtype=dtype)[::2]) is None
        assert native.active(x[0]) is fast
        assert close(
            kernels.rms_norm(x[0, :, ::2], weight, 1e-6), kernels.rms_norm(x[0, :, ::2].clone(), weight, 1e-6), dtype
        )
        assert kernels.gated_silu(x).shape == (2, 5, 8)


def test_kernel_choice_is_thread_local():
    """The ranks of a test, say, that enter and leave in any order."""
    fast, x = kernels_of(torch.float32), torch.zeros(1)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with native.using(fast):
            entered.set()
            leave.wait(10)

    with native.using(fast):
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(10)
    assert native.active(x) is None
    leave.set()
    thread.join()
    assert native.active(x) is None


@DTYPES
@pytest.mark.parametrize("normed", [True, False])
def test_native_norm_rotate_matches_torch(dtype, normed):
    fast = kernels_of(dtype)
    heads, kv_heads, dim = 3, 1, 8
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    angles = torch.randn(5, 1, dim // 2, generator=torch.Generator().manual_seed(2))
    weights = [torch.rand(dim).to(dtype) + 0.5 if normed else None for _ in range(2)]
    sizes = (heads, kv_heads, dim, 1e-6)
    with torch.no_grad():
        plain = kernels.norm_rotate(qkv.clone(), weights[0], weights[1], angles.cos(), angles.sin(), sizes)
        with native.using(fast):
            got = kernels.norm_rotate(qkv.clone(), weights[0], weights[1], angles.cos(), angles.sin(), sizes)
    assert close(got, plain, dtype)
    assert torch.equal(got[:, -kv_heads * dim :], qkv[:, -kv_heads * dim :])


@DTYPES
@pytest.mark.parametrize(
    ("group", "dim", "window"), [(1, 8, None), (3, 32, None), (4, 64, 5), (8, 24, 2), (2, 256, None)]
)
def test_native_attention_matches_torch(dtype, group, dim, window):
    """Rows of several lengths and blocks, in one projection, against a softmax written out."""
    fast = kernels_of(dtype)
    kv_heads, blocks, tokens, rows = 2, 20, 8, 4
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(rows, (group * kv_heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((group * kv_heads, kv_heads, kv_heads), dim=1)
    keys, values = (torch.randn(blocks, kv_heads, tokens, dim, generator=generator).to(dtype) for _ in range(2))
    table = torch.randperm(blocks, generator=generator).view(5, 4)[:, :3].to(torch.int32).contiguous()
    slot, position = torch.tensor([4, 0, 3, 1]), torch.tensor([0, 19, 7, 8])
    out = fast.attention(q, k, v, keys, values, table, slot, position, dim**-0.5, True, window)
    for row in range(rows):
        own = table[slot[row]].long()
        mine, read = (part[own].transpose(0, 1).flatten(1, 2) for part in (keys, values))
        end = int(position[row]) + 1
        assert torch.equal(mine[:, end - 1], k[row])
        assert torch.equal(read[:, end - 1], v[row])
        first = max(0, end - window) if window else 0
        grouped = q[row].float().view(kv_heads, group, dim)
        scores = grouped @ mine[:, first:end].float().transpose(1, 2) * dim**-0.5
        expected = torch.softmax(scores, -1) @ read[:, first:end].float()
        assert close(out[row], expected.flatten(), dtype)


@DTYPES
@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
def test_native_sampling_matches_torch(dtype, vocabulary):
    """The same tokens but where a uniform number falls between two roundings; masked tokens never; NaN shows."""
    fast = kernels_of(dtype)
    n = 400
    logits = (torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    logits[:, 1] = -math.inf
    uniform = counter_uniform(np.arange(n, dtype=np.uint64), np.arange(n))
    uniform[:2] = 0.5 * 2.0**-32, 1 - 0.5 * 2.0**-32  # the two ends
    temperature = torch.linspace(0.5, 1.5, n)
    kept = KeptRows(
        torch.tensor([7, 8, 9]),
        torch.tensor([True, False, False]),
        torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64),
        torch.tensor([vocabulary, vocabulary, 2]),
        torch.tensor([0, 0, 9]),
    )
    rows = RowSampling(torch.from_numpy(uniform), temperature, kept)
    plain = sample_tokens(logits, rows).tokens
    with native.using(fast):
        got = sample_tokens(logits, rows).tokens
    same = got[0] == plain[0]
    assert same.float().mean() > 0.99
    assert torch.allclose(got[1, same], plain[1, same], atol=2e-5)
    assert not (got[0] == 1).any()
    logits[0, 2], logits[1] = math.nan, math.nan
    with native.using(fast):
        assert torch.isnan(sample_tokens(logits, rows).tokens[1, :2]).all()


def test_engine_output_is_equal_without_native_kernels(monkeypatch):
    """No compiler: plain torch, the same tokens. Two threads or an unknown dtype: likewise plain."""
    kernels_of(torch.float32)
    results = []
    for native_kernels in (True, False):
        session = Session(
            TorchEngine(copy.deepcopy(model_of(0)), slots=4, max_context_tokens=96, native_kernels=native_kernels)
        )
        session.submit(*(request(f"r{i}", [2, 3, 4, i], max_tokens=20, seed=i) for i in range(4)))
        results.append([result.response for result in session.run().values()])
    assert [one.ids for one in results[0]] == [one.ids for one in results[1]]
    assert results[0] != results[1]  # other roundings: the kernels were in use
    native._library.cache_clear()
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DOTHER"))  # not the library that is there already
    assert native.kernels_for(torch.float32, torch.device("cpu")) is None
    native._library.cache_clear()
    assert native.kernels_for(torch.float64, torch.device("cpu")) is None


@pytest.mark.parametrize("family", list(FAMILIES))
def test_native_gradients_are_as_exact_as_torch(family):
    """Against float64, of every parameter; more rows than are summed in single precision; layers computed again."""
    fast = kernels_of(torch.float32)
    model = random_model(3, family=family)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1.0, 0.2, generator=generator)
    ids, lengths = torch.randint(0, 40, (300,), generator=generator), [200, 1, 99]

    def gradients(of: Decoder, using: native.Kernels | None, again: bool = False) -> dict[str, torch.Tensor]:
        of.zero_grad()
        of.checkpointing = "full" if again else "none"
        with native.using(using):
            (of(ids, lengths).log_softmax(-1).gather(-1, ids[:, None]).mean()).backward()
        return {name: one.grad.clone() for name, one in of.named_parameters() if one.grad is not None}

    exact = gradients(copy.deepcopy(model).double(), None)
    plain, got, again = gradients(model, None), gradients(model, fast), gradients(model, fast, again=True)
    assert any(not torch.equal(plain[name], got[name]) for name in got)  # the kernels were in use
    for name, right in exact.items():
        largest = right.abs().max()
        error, bound = ((one[name] - right).abs().max() / largest for one in (got, plain))
        assert error <= 3 * bound + 1e-6, name
        assert torch.equal(got[name], again[name]), name


@pytest.mark.parametrize("family", list(FAMILIES))
def test_native_decode_matches_layer_by_layer(monkeypatch, family):
    """Where the kernels can do all that a family's layers do, one call gives what the layers one by one give, and an
    update of the weights reaches it."""
    kernels_of(torch.float32)
    runs = []
    for whole in (True, False):
        if not whole:
            monkeypatch.setattr(model_runner, "can_decode", lambda *_: False)
        model = random_model(7, family=family)
        engine = TorchEngine(model, slots=4, max_context_tokens=64)
        assert (engine._runner._native_decode is not None) == (
            whole and family in ("llama", "qwen3", "mistral", "qwen2")
        )
        session = Session(engine)
        session.submit(*(request(f"r{i}", [2, 3 + i, 4], max_tokens=20, seed=i) for i in range(4)))
        for _ in range(8):
            engine.step()
        engine.update_weights(weights_of(random_model(8, family=family)), 1, "keep")
        runs.append([result.response for result in session.run().values()])
    for one, other in zip(*runs, strict=True):
        assert one.ids == other.ids
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.fixture
def built_anew(monkeypatch, tmp_path):
    """Nothing compiled so far is found; and what this test makes of it is forgotten."""
    monkeypatch.setattr(native, "_folders", lambda: (tmp_path / "built",))
    native._library.cache_clear()
    yield tmp_path
    native._library.cache_clear()


@pytest.mark.usefixtures("built_anew")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no compiler", r"no C\+\+ compiler \(CXX is not set"),
        ("compiler not there", "No such file or directory: 'nowhere-c"),
        ("compiler fails", r"the compiler '.*/compiler' ended with 3: fatal error: no room$"),
        ("compiler is silent", "the compiler 'false' ended with 1: it printed no error"),
        ("cores", "they use one core, but torch has 2 threads here"),
        ("dtype", "they are for float32 and bfloat16, not for torch.float16"),
        ("folder", "Permission denied|Not a directory|File exists"),
    ],
)
def test_missing_kernels_give_a_reason(monkeypatch, tmp_path, kind, reason):
    dtype = torch.float16 if kind == "dtype" else torch.float32
    compiler = {"compiler not there": "nowhere-c++", "compiler is silent": "false"}.get(kind, "true")
    if kind == "compiler fails":
        compiler = str(tmp_path / "compiler")
        Path(compiler).write_text("#!/bin/sh\nprintf 'native.cpp: looking\\nfatal error: no room\\n\\n' >&2\nexit 3\n")
        Path(compiler).chmod(0o700)
    monkeypatch.setenv("CXX", compiler)
    if kind == "no compiler":
        monkeypatch.delenv("CXX")
        monkeypatch.setattr(native.shutil, "which", lambda _: None)
    if kind == "cores":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    if kind == "folder":
        (tmp_path / "built").touch()
    assert native.kernels_for(dtype, torch.device("cpu")) is None
    assert re.search(reason, native.missing_reason(dtype, torch.device("cpu")))
    assert native.missing_reason(dtype, torch.device("cuda")) == ""


@pytest.mark.usefixtures("built_anew")
@pytest.mark.parametrize("native_kernels", [True, False])
def test_replica_warns_once_about_missing_kernels(monkeypatch, tmp_path, caplog, native_kernels):
    initialise_model(tmp_path / "m", ["8+3=11"], vocabulary_size=280, width=16, layers=1, heads=2, kv_heads=1)
    monkeypatch.setenv("CXX", "false")
    context: Any = SimpleNamespace(device=parse_device("cpu:0"), log=logging.getLogger("generator-0"))
    GeneratorService(
        context,
        model_path=str(tmp_path / "m"),
        dtype="float32",
        slots=2,
        max_context_tokens=32,
        native_kernels=native_kernels,
    )
    said = [record.getMessage() for record in caplog.records if record.name == "generator-0"]
    if native_kernels:
        (line,) = said
        assert line.startswith("decoding without the native kernels")
        assert "'false' ended with 1" in line
    else:  # nobody asked for them
        assert said == []


@pytest.mark.usefixtures("built_anew")
@pytest.mark.parametrize("wanted", [True, False])
def test_trainer_warns_about_missing_kernels(monkeypatch, tmp_path, caplog, wanted):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("HEADWAY_NATIVE_KERNELS", "1" if wanted else "0")
    experiment = {
        "run": {"directory": str(tmp_path / "run")},
        "model": {"path": make_model(tmp_path / "m")},
        "tasks": {"train": {"path": "unused.jsonl"}},
    }
    context: Any = SimpleNamespace(device=Context.device, log=logging.getLogger("trainer-0"))
    trainer = TrainerService(context, experiment=experiment, run_id="none")
    assert trainer.learner._kernels is None
    said = [record.getMessage() for record in caplog.records if record.name == "trainer-0"]
    assert [line.startswith("training without the native kernels") for line in said] == [True] * wanted
    trainer.close()


def test_no_warning_with_kernels():
    kernels_of(torch.float32)
    assert native.missing_reason(torch.float32, torch.device("cpu")) == ""


def test_bfloat16_engine_agrees_with_and_without_kernels():
    model = random_model(4).to(torch.bfloat16)
    logprobs = []
    for native_kernels in (True, False):
        session = Session(
            TorchEngine(copy.deepcopy(model), slots=2, max_context_tokens=64, native_kernels=native_kernels)
        )
        session.submit(request("a", [2, 3, 4], max_tokens=10))
        logprobs.append(session.run()["a"].response)
    assert abs(logprobs[0].logprobs[0] - logprobs[1].logprobs[0]) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_model_loaded_for_generation_has_equal_weights(tmp_path, dtype, tied):
    """bfloat16 is widened where the CPU lacks it: equal weights, outputs, and updates in place."""
    save_model(random_model(5, tied=tied), tmp_path / "model")
    plain = load_model(tmp_path / "model", dtype)
    laid_out = load_for_generation(tmp_path / "model", dtype, "cpu")
    wide = dtype == "float32" or not cpu_multiplies_bfloat16()
    assert laid_out.dtype == (torch.float32 if wide else torch.bfloat16)
    ids = torch.arange(7)
    for source in (plain, random_model(6, tied=tied).to(plain.dtype)):
        copy_weights(laid_out, weights_of(source))
        for name, parameter in source.named_parameters():
            assert torch.equal(laid_out.get_parameter(name), parameter.to(laid_out.dtype)), name
        with torch.no_grad():
            expected = copy.deepcopy(source).to(laid_out.dtype)(ids, [7])
            assert torch.allclose(laid_out(ids, [7]), expected, atol=1e-4 if wide else 0.1)


def test_the_benchmark_updates_from_rows_as_a_trainer_publishes_them(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    monkeypatch.delitem(sys.modules, "engine", raising=False)
    benchmark = importlib.import_module("engine")
    monkeypatch.delitem(sys.modules, "engine")
    save_model(random_model(5), tmp_path / "model")
    ours, published = benchmark.Ours(tmp_path / "model", "float32", 1), {}
    update = TorchEngine.update_weights

    def watched(engine, tensors, version, mode):
        published.update(tensors)
        return update(engine, tensors, version, mode)

    monkeypatch.setattr(TorchEngine, "update_weights", watched)
    ours.updates("keep")
    assert published.keys() == weights_of(ours.model).keys()
    assert all(tensor.is_contiguous() for tensor in published.values())
