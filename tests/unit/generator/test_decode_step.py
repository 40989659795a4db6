"""The decoding step that a GPU replays, by a stand-in for CUDA graphs, equals the engine that waits for each step."""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.generator.engines.torch import decode_step
from headway.generator.engines.torch.block_pool import BLOCK_TOKENS, PADDING
from headway.generator.engines.torch.decode_step import DecodeStep, Launch
from headway.generator.engines.torch.engine import TorchEngine
from headway.generator.engines.torch.model_runner import ModelRunner
from headway.models import decoder as decoder_module
from headway.models.configuration import DecoderConfig
from headway.models.loading import build, weights_of
from headway.records.generation import GenerationRequest, SamplingParameters
from tests.conformance import engine as conformance
from tests.conformance.engine import Session, model_of, request
from tests.conformance.reference import FAMILIES, random_model

torch.set_num_threads(1)
BLOCKS = conformance.Capabilities(kv_block_tokens=BLOCK_TOKENS)


class PoisonedReplays:
    """In place of CUDA graphs: calls the captured function, after filling with NaN what padding rows read and write."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.engine: TorchEngine | None = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        function()  # the warm-up

        def replay() -> None:
            assert self.engine is not None
            self.replayed += 1
            self.engine._runner.cache.all[:, :, PADDING] = torch.nan
            function()

        return replay


def make_engine(*, slots: int = 4, max_context_tokens: int = 96, model: Any = None, **options: Any) -> TorchEngine:
    replays, model = PoisonedReplays(), copy.deepcopy(model_of(0)) if model is None else model
    engine = TorchEngine(model, slots=slots, max_context_tokens=max_context_tokens, capture=replays, **options)
    replays.engine = engine
    return engine


def make_deterministic(**options: Any) -> TorchEngine:
    return make_engine(deterministic=True, **options)


def replays_of(engine: TorchEngine) -> PoisonedReplays:
    assert engine._decoder is not None
    return engine._decoder._capture  # type: ignore[return-value]


MAKERS = pytest.mark.parametrize("make", [make_engine, make_deterministic])


@MAKERS
@pytest.mark.parametrize("seed", range(3))
def test_steps_ahead_are_teacher_forced_at_every_composition(make, seed):
    conformance.check_logprobs_at_every_composition(make, seed)


@MAKERS
def test_steps_ahead_do_not_depend_on_neighbours(make):
    conformance.check_tokens_do_not_depend_on_neighbours(make, 0)


@MAKERS
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_updates_between_steps_ahead(make, mode):
    conformance.check_updates_in_flight(make, mode, 0)


def test_requests_come_and_go_beside_steps_ahead():
    conformance.check_prefix_is_not_shared_across_versions(make_engine)
    conformance.check_abort_update_parks_and_resumes(make_engine)
    conformance.check_resume_equals_uninterrupted(make_engine, 0)
    conformance.check_abort(make_engine)
    conformance.check_priorities(make_engine)
    conformance.check_one_bad_request_is_its_own_error(make_engine)
    conformance.check_context_limit(make_engine)
    conformance.check_preemption(make_engine, 0, BLOCKS)


def responses(engine: TorchEngine, long: int = 0) -> dict[str, Any]:
    """Groups and loners, greedy ones too; ``long``: tokens of one more prompt."""
    session = Session(engine)
    prompts = [[1 + i // 3, 2, 3] * (4 + i % 3) for i in range(12)] + [[5] * long] * bool(long)
    session.submit(
        *(
            request(f"r{i}", prompt, max_tokens=1 + 3 * i, temperature=[1.0, 0.6, 0.0][i % 3], seed=i - 4)
            for i, prompt in enumerate(prompts)
        )
    )
    session.run()
    assert engine._pool.used == 0
    return {name: result.response for name, result in session.results.items()}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_samples_the_same_tokens(family):
    """Windows, soft caps, mixtures; prompts as rows of the step, and one that is too long for that."""
    model = random_model(3, vocabulary=conformance.VOCABULARY, family=family)
    waiting = TorchEngine(copy.deepcopy(model), slots=5, max_context_tokens=640, native_kernels=False)
    ahead = make_engine(slots=5, max_context_tokens=640, model=copy.deepcopy(model))
    expected, actual = responses(waiting, long=540), responses(ahead, long=540)
    for name, response in expected.items():
        assert actual[name].ids == response.ids
        assert np.allclose(actual[name].logprobs, response.logprobs, atol=2e-5)
    if ahead._decoder is not None:
        sizes = set(ahead._decoder._replays)
        assert {n for n, _ in sizes} <= {1, 2, 4, 5}
        assert {rows for _, rows in sizes} == {0, 64, 512} - ({64} if not sizes & {(5, 64), (4, 64)} else set())
        assert replays_of(ahead).captured == len(sizes) < replays_of(ahead).replayed


def test_a_step_is_launched_before_the_last_one_is_read(monkeypatch):
    events: list[str] = []
    launch, read = DecodeStep.launch, Launch.read
    monkeypatch.setattr(DecodeStep, "launch", lambda *args: events.append("launch") or launch(*args))
    monkeypatch.setattr(Launch, "read", lambda one: events.append("read") or read(one))
    session = Session(make_engine())
    session.submit(request("a", max_tokens=4))
    session.run()
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]  # none after the last


def test_a_stop_is_known_a_step_late_and_its_extra_token_dropped():
    free = Session(make_engine())
    free.submit(request("a", max_tokens=12))
    ids = free.run()["a"].response.ids
    stop = next(token for token in ids if ids.index(token) >= 4)
    stopped = Session(make_engine(slots=2))
    stopped.submit(
        request("a", max_tokens=12, stop_token_ids=(stop,)),
        *(request(f"r{i}", [9, i], max_tokens=9, seed=i) for i in range(4)),
    )
    results = stopped.run()
    assert results["a"].response.ids == ids[: ids.index(stop) + 1]
    for i in range(4):
        alone = Session(make_engine())
        alone.submit(request(f"r{i}", [9, i], max_tokens=9, seed=i))
        assert alone.run()[f"r{i}"].response.ids == results[f"r{i}"].response.ids


def test_replays_see_weights_that_change_in_place_and_are_captured_again_after_offloading():
    engine = make_engine()
    replays, session = replays_of(engine), Session(engine)
    session.submit(request("a", max_tokens=30))
    session.step(5)
    captured = replays.captured
    session.update(1, "recompute")
    session.step(5)
    assert replays.captured == captured
    assert engine.memory is not None
    engine.memory.offload()
    engine.memory.onload()
    session.step(3)
    assert replays.captured == captured + 1
    result = session.run()["a"]
    other = Session(TorchEngine(copy.deepcopy(model_of(0)), slots=4, max_context_tokens=96))
    other.submit(request("a", max_tokens=30))
    other.step(5)  # the update took the token that was launched
    other.update(1, "recompute")
    assert other.run()["a"].response.ids == result.response.ids


def test_restricted_requests_are_sampled_beside_the_replays_by_name(caplog):
    caplog.set_level(logging.INFO)
    engine = make_engine()
    session, plain = Session(engine), Session(TorchEngine(copy.deepcopy(model_of(0)), slots=4, max_context_tokens=96))
    how = SamplingParameters(max_tokens=6, top_p=0.5, seed=3)
    for one in (session, plain):
        one.submit(request("a", max_tokens=20), request("b", [4], max_tokens=20))
        one.step(3)
        one.submit(GenerationRequest(request_id="narrow", prompt_ids=(5, 6), sampling=how))
        one.run()
        assert one.results["narrow"].response.ids
    assert "beside request narrow: top-p, top-k or a grammar" in caplog.text
    assert {n: r.response.ids for n, r in session.results.items()} == {
        n: r.response.ids for n, r in plain.results.items()
    }
    assert engine._restricted == 0
    replayed = replays_of(engine).replayed
    session.submit(request("c"))
    session.run()
    assert replays_of(engine).replayed > replayed


def test_what_no_graph_can_compute_is_named(caplog):
    caplog.set_level(logging.INFO)
    mixture = random_model(1, vocabulary=conformance.VOCABULARY, family="qwen3_moe")
    assert make_engine(model=copy.deepcopy(mixture), return_experts=True)._decoder is None
    assert "the experts of every token are kept" in caplog.text
    assert make_engine(model=mixture, deterministic=True)._decoder is None
    assert "the products of its mixture wait for the host" in caplog.text


class Operators(TorchDispatchMode):
    """Counts operators that launch a kernel, and names those that cross between devices."""

    views = frozenset(("t", "view", "transpose", "unsqueeze", "select", "slice", "expand", "unbind", "alias", "detach"))

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()
        self.crossings: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).split(".")[-1]
        tensors = [x for x in tree_leaves((args, outputs)) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors}) > 1 or name in ("_local_scalar_dense", "nonzero"):
            self.crossings.append(str(func))
        if name not in self.views and not name.startswith("split"):
            self.counts[name] += 1
        return outputs


def test_a_step_at_a_real_models_sizes_launches_few_kernels_and_never_crosses_to_the_host(monkeypatch):
    """On the meta device. Norms, rotation and gate count as one kernel each: their fused ones are the trainer's too."""
    library = torch.library.Library("decode_step_test", "DEF")
    library.define("fused(Tensor x, int columns) -> Tensor")
    library.impl("fused", lambda x, columns: x.new_empty(len(x), columns), "Meta")
    fused = torch.ops.decode_step_test.fused
    monkeypatch.setattr(decoder_module, "rms_norm", lambda x, *_: fused(x, x.shape[1]))
    monkeypatch.setattr(decoder_module, "norm_rotate", lambda qkv, *_: fused(qkv, qkv.shape[1]))
    monkeypatch.setitem(decoder_module.GATED, "silu", lambda x: fused(x, x.shape[1] // 2))
    config = DecoderConfig(
        layers=28, width=1024, heads=16, kv_heads=8, intermediate=3072, head_dim=128, vocabulary_size=151936,
        max_positions=8192, rope_theta=1e6, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.no_grad():
        runner = ModelRunner(build(config, "bfloat16", "meta"), 64, 2048, False)
        step = DecodeStep(runner, 64, lambda function: function)
        for n, rows in ((64, 64), (64, 64 + 512)):
            inputs = torch.zeros(rows, step._shape[1], dtype=torch.int64, device="meta")
            with Operators() as operators:
                step.compute(inputs, n)
            launches = sum(operators.counts.values())
            assert operators.crossings == []
            assert launches <= 10 * config.layers + 24, operators.counts
            assert operators.counts["store_kv"] == operators.counts["paged_attention"] == config.layers


def test_the_hosts_random_numbers_are_the_devices():
    from headway.generator.engines.sampling import counter_uniform
    from headway.generator.engines.torch.operators import uniform

    random = np.random.default_rng(0)
    seeds, index = random.integers(-(2**63), 2**63, 5000), random.integers(0, 2**40, 5000)
    device = uniform(torch.from_numpy(seeds), torch.from_numpy(index)).numpy()
    assert np.array_equal(device, counter_uniform(seeds.view(np.uint64), index))


def test_prompts_beyond_the_rows_of_a_step_are_computed_before_it():
    assert max(decode_step._PROMPT_SIZES) == decode_step.PROMPT_ROWS
    engine = make_engine(slots=8, max_context_tokens=320)
    session = Session(engine)
    session.submit(*(request(f"r{i}", [i + 1] * 300, max_tokens=5, seed=i) for i in range(4)))
    session.run()
    assert {rows for _, rows in engine._decoder._replays} == {0}  # type: ignore[union-attr]
    assert weights_of(engine._model)
