"""Rate models: each term at its limits, and the refusals."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.rates.generation import GenerationRecipe, ReplicaRates
from headway.control.rates.specs import (
    DeviceFigures,
    Efficiencies,
    ModelFigures,
    Parallelism,
    RatedDevice,
    all_reduce_s,
)
from headway.control.rates.training import Simulator, TrainerRates, TrainingRecipe, publish_s
from headway.records.errors import ConfigurationError

REACHED = Efficiencies(matmul=0.5, memory=0.5, link=0.5, usable_memory=1.0, layer_s=0.0)
FIGURES = DeviceFigures(
    memory_bytes=100e9,
    memory_bytes_per_s=2e12,
    flops_per_s={"bfloat16": 1e15, "float8": 2e15},
    link_bytes_per_s=4e11,
    host_bytes_per_s=5e10,
)
DEVICE = RatedDevice(name="A", figures=FIGURES, per_node=8, network_bytes_per_s=5e10, reached=REACHED)
DENSE = ModelFigures(
    parameters=8e9,
    active=8e9,
    layers=32,
    width=4096,
    vocabulary=128_000,
    kv_heads=8,
    attended=32 * 4096,
    cached=((32 * 2 * 8 * 128, None),),
    kept=2e6,
    kept_again=5e5,
)
EXPERTS = msgspec.structs.replace(
    DENSE, parameters=40e9, active=8e9, expert_parameters=36e9, active_experts=1 / 9, experts_per_token=2
)


def replica(model: ModelFigures = DENSE, device: RatedDevice = DEVICE, **recipe: object) -> ReplicaRates:
    return ReplicaRates(model=model, device=device, recipe=msgspec.convert(recipe, GenerationRecipe))


def training(
    model: ModelFigures = DENSE, device: RatedDevice = DEVICE, devices: int = 8, **recipe: object
) -> TrainerRates:
    return TrainerRates(model=model, device=device, devices=devices, recipe=msgspec.convert(recipe, TrainingRecipe))


def with_figures(**changes: object) -> RatedDevice:
    return msgspec.structs.replace(DEVICE, figures=msgspec.structs.replace(FIGURES, **changes))


# --- decode steps ----------------------------------------------------------------------------------------


def test_a_pipeline_reads_its_weights_for_every_micro_batch():
    piped = replica(parallelism={"pipeline": 2})
    assert piped.step_s(1, 1) == pytest.approx(replica().step_s(1, 1), rel=0.01)
    assert piped.weight_bytes() == pytest.approx(replica().weight_bytes() / 2)


def test_a_decode_step_of_few_requests_reads_the_weights_and_of_many_computes() -> None:
    assert replica().step_s(1, 0) == pytest.approx(8e9 * 2 / 1e12)
    assert replica().step_s(4000, 0) == pytest.approx(4000 * 2 * 8e9 / 0.5e15)


def test_the_cache_is_read_in_addition() -> None:
    more = replica().step_s(10, 5000) - replica().step_s(10, 0)
    assert more == pytest.approx(10 * 5000 * 32 * 2 * 8 * 128 * 2 / 1e12)


def test_a_window_bounds_the_cache() -> None:
    windowed = msgspec.structs.replace(DENSE, cached=((65536, 1024),))
    assert windowed.kv_bytes(100_000, 2) == 1024 * 65536 * 2
    assert replica(windowed).step_s(10, 100_000) == replica(windowed).step_s(10, 1024)


def test_one_expert_is_a_dense_model() -> None:
    one = msgspec.structs.replace(DENSE, expert_parameters=7e9, active_experts=1.0, experts_per_token=1)
    for requests in (1, 7, 500):
        assert replica(one).step_s(requests, 100) == replica().step_s(requests, 100)


def test_few_tokens_touch_few_experts_and_many_all() -> None:
    assert EXPERTS.touched(1) == pytest.approx(4e9 + 36e9 / 9)
    assert EXPERTS.touched(1e4) == pytest.approx(40e9)


def test_even_experts_cost_no_imbalance_and_uneven_ones_their_share() -> None:
    spread = Parallelism(expert=8)
    even = replica(EXPERTS, parallelism=spread).step_s(8000, 0)
    uneven = replica(EXPERTS, parallelism=spread, expert_imbalance=2.0).step_s(8000, 0)
    products = 2 * 8000 * 8e9 / 8 / 0.5e15
    assert uneven - even == pytest.approx(products * 36 / 40)


def test_nothing_accepted_is_the_base_rate_and_all_accepted_the_limit() -> None:
    base = replica().step_s(4, 1000)
    assert replica(draft_tokens=4, draft_acceptance=0.0).step_s(4, 1000) == base
    assert replica(draft_tokens=4, draft_acceptance=1.0, draft_cost=0.0).step_s(4, 1000) == pytest.approx(base / 5)
    # verified tokens cost: with many requests a step computes, and drafting ahead doesn't pay
    busy = replica().step_s(5000, 10)
    assert replica(draft_tokens=4, draft_acceptance=0.3).step_s(5000, 10) == busy


def test_an_infinitely_fast_host_makes_an_offloaded_cache_free() -> None:
    small = with_figures(memory_bytes=20e9)
    fast = with_figures(memory_bytes=20e9, host_bytes_per_s=math.inf)
    requests, context = 100, 3000  # 39 GB of cache
    plain = replica().step_s(requests, context)
    assert replica(device=fast, offload_bytes=1e12).step_s(requests, context) == pytest.approx(plain)
    assert replica(device=small, offload_bytes=1e12).step_s(requests, context) > 2 * plain
    assert replica(device=small, offload_bytes=1e12).concurrency(context) > 10 * replica(device=small).concurrency(
        context
    )


def test_smaller_numbers_take_less_time_and_memory() -> None:
    assert replica(dtype="float8").step_s(1, 0) == pytest.approx(replica().step_s(1, 0) / 2)
    twice = replica(kv_dtype="float8").concurrency(1000) / replica().concurrency(1000)
    assert twice == pytest.approx(2, rel=1e-3)


def test_more_devices_than_heads_hold_a_head_several_times() -> None:
    eight, sixteen = (replica(parallelism=Parallelism(tensor=count)) for count in (8, 16))
    assert sixteen.step_s(1, 1000) > 0
    room = (sixteen.cache_bytes() / eight.cache_bytes()) * eight.concurrency(1000)
    assert sixteen.concurrency(1000) == pytest.approx(room / 2, rel=1e-3)


def test_one_device_sums_nothing_up_and_infinite_links_take_no_time() -> None:
    assert all_reduce_s(1e9, 1, DEVICE) == 0
    free = with_figures(link_bytes_per_s=math.inf)
    assert replica(device=free, parallelism=Parallelism(tensor=4)).step_s(1, 0) == pytest.approx(8e9 * 2 / 1e12 / 4)
    assert all_reduce_s(1e9, 16, DEVICE) > all_reduce_s(1e9, 8, DEVICE) * 3  # out of the node


# --- a step's generation ---------------------------------------------------------------------------------


def test_samples_of_one_length_take_that_many_steps() -> None:
    one = replica(slots=16)
    assert one.batch_s(16, 0, [100.0]) == pytest.approx(100 * one.step_s(16, 50))
    assert one.batch_s(32, 0, [100.0]) == pytest.approx(2 * one.batch_s(16, 0, [100.0]), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(1, 5000), min_size=1, max_size=20), st.integers(1, 300))
def test_a_batch_takes_at_least_its_longest_response_and_no_less_with_more_samples(
    lengths: list[float], items: int
) -> None:
    ordered = sorted(lengths)
    one = replica(slots=64)
    seconds = one.batch_s(items, 100, ordered)
    assert seconds >= ordered[-1] * one.step_s(1, 0) * (1 - 1e-9)
    assert one.batch_s(items + 1, 100, ordered) >= seconds * (1 - 1e-9)


def test_prefills_on_devices_of_their_own_cost_decoding_nothing() -> None:
    split = replica(prefill_devices=8)
    assert split.rate(1000, 500, 32) == pytest.approx(32 / (500 * split.step_s(32, 1250)))
    assert replica().rate(1000, 500, 32) < split.rate(1000, 500, 32)
    assert replica().rate(0, 500, 32) == pytest.approx(32 / (500 * replica().step_s(32, 250)))


# --- training --------------------------------------------------------------------------------------------


def test_a_step_takes_six_flop_a_weight_and_token_and_eight_with_recomputation() -> None:
    plain, again = (training(devices=1, recompute=recompute).step_s(1e6, 1) for recompute in (False, True))
    optimiser = 8e9 * 32 / 1e12
    attention = 2.0 * DENSE.attended  # of one token and its one key
    assert plain == pytest.approx(1e6 * 3 * (2 * 8e9 + attention) / 0.5e15 + optimiser)
    assert (again - optimiser) / (plain - optimiser) == pytest.approx(4 / 3)


def test_scoring_is_a_forward() -> None:
    assert training(devices=1).step_s(1e6, 1, scoring=True) == pytest.approx(1e6 * 2 * 8e9 / 0.5e15, rel=1e-3)


def test_bubbles_vanish_with_many_micro_batches() -> None:
    piped = training(parallelism=Parallelism(pipeline=4), devices=4, micro_batch_tokens=1000)
    assert piped.step_s(1e3, 1) > 3 * 1e3 * 8 * 8e9 / 4 / 0.5e15
    many = 1e6 * 4 * (2 * 8e9 + 2 * DENSE.attended) / 4 / 0.5e15 * (1 + 3 / 1000)
    assert piped.step_s(1e6, 1) == pytest.approx(many + 8e9 * 32 / 4 / 1e12, rel=1e-6)


def test_infinite_links_make_sharding_free() -> None:
    free = with_figures(link_bytes_per_s=math.inf)
    one, eight = training(devices=1).step_s(1e6, 1), training(device=free, devices=8).step_s(1e6, 1)
    assert eight == pytest.approx(one / 8, rel=1e-6)
    assert training(devices=8, micro_batch_tokens=256).step_s(1e5, 1) > 2 * training(
        device=free, devices=8, micro_batch_tokens=256
    ).step_s(1e5, 1)


def test_an_offloaded_optimiser_frees_memory_and_takes_the_hosts_link() -> None:
    here, away = training(), training(offloaded_bytes=12.0)
    assert here.memory(1).states - away.memory(1).states == pytest.approx(8e9 * 12 / 8)
    assert away.step_s(1e5, 1) > here.step_s(1e5, 1)
    free = with_figures(host_bytes_per_s=math.inf)
    assert training(device=free, offloaded_bytes=12.0).step_s(1e5, 1) <= here.step_s(1e5, 1)


def test_offloaded_activations_leave_two_layers() -> None:
    here, away = training(), training(offload_activations=True)
    assert away.memory(32768).activations == pytest.approx(here.memory(32768).activations * 2 / 32)


def test_an_adapter_trains_a_few_weights() -> None:
    adapter = training(trained_share=0.01)
    assert adapter.memory(1).states < 0.2 * training().memory(1).states
    assert training(recompute=False).step_s(1e6, 1) / training(recompute=False, trained_share=1e-6).step_s(1e6, 1) > 1.2


def test_what_does_not_fit_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigurationError, match=r"most of it weights, gradients and optimiser .* 2 devices suffice"):
        training(devices=1, micro_batch_tokens=1024, logit_tokens=256).require_memory(1024)
    with pytest.raises(ConfigurationError, match=r"most of it logits .* more devices don't help"):
        training(devices=64).require_memory(100_000)
    with pytest.raises(ConfigurationError, match=r"can't be divided into copies of tensor 3"):
        training(devices=8, parallelism=Parallelism(tensor=3)).step_s(1e5, 1)
    with pytest.raises(ConfigurationError, match=r"generate: 80.0 GB of weights"):
        replica(EXPERTS, device=with_figures(memory_bytes=80e9)).concurrency(10)
    with pytest.raises(ConfigurationError, match=r"the cache of one request of 1,000,000 tokens"):
        replica(DENSE).concurrency(1e6)


def test_figures_that_are_not_known_are_refused_by_key() -> None:
    with pytest.raises(ConfigurationError, match=r"devices\.A\.flops_per_s\.float16 is not known"):
        replica(dtype="float16").step_s(1, 1)
    with pytest.raises(ConfigurationError, match=r"devices\.A\.host_bytes_per_s is not known"):
        training(device=with_figures(host_bytes_per_s=None), offloaded_bytes=12.0).step_s(1e5, 1)
    alone = msgspec.structs.replace(DEVICE, network_bytes_per_s=None)
    with pytest.raises(ConfigurationError, match=r"16 devices of A are more than one node has \(8\)"):
        training(device=alone, devices=16).step_s(1e5, 1)


# --- the other stages ------------------------------------------------------------------------------------


def test_simulators_verifiers_and_transports() -> None:
    assert Simulator(fixed_s=0.5, item_s=0.1).step_s(17, 8) == pytest.approx(0.5 + 0.3)
    speeds = {"storage": 1e9, "nccl": 1e10, "tcp": 1e9}
    assert publish_s(1e10, "nccl", speeds, 24) == pytest.approx(1.0)
    assert publish_s(1e10, "storage", speeds, 4) == pytest.approx(50.0)
    assert publish_s(1e7, "tcp", speeds, 4) == pytest.approx(0.04)  # an adapter alone
    with pytest.raises(ConfigurationError, match="bandwidth of shared_memory not given"):
        publish_s(1.0, "shared_memory", speeds)
