"""Keys that are "auto": a pure function of the machine's facts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.auto import AUTO_KEYS, Gpu, Machine, resolve
from headway.config.load import require_resumable, validate_experiment
from headway.records.errors import ConfigurationError

BARE: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t"}}}
SPELT: dict[str, Any] = BARE | {
    "model": {"path": "m", "dtype": "auto"},
    "generator": {"devices": "auto", "engine": "auto", "dtype": "auto"},
    "trainer": {"devices": "auto", "dtype": "auto"},
}
BEFORE = {  # the defaults before there was "auto"
    "generator": {"devices": ["cpu:0"], "engine": "torch", "dtype": "float32"},
    "trainer": {"devices": ["cpu:1"], "dtype": "float32"},
}


def gpu(index: int, **facts: Any) -> Gpu:
    fields: dict[str, Any] = {"name": "H100", "memory_bytes": 80 << 30, "free_bytes": 80 << 30, "uuid": f"GPU-{index}"}
    return Gpu(index=index, **fields | facts)


def machine(count: int, **facts: Any) -> Machine:
    return Machine(**{"gpus": tuple(map(gpu, range(count))), "torch_cuda": "13.0", "driver": "580.1"} | facts)


def resolved(raw: dict[str, Any], facts: Machine, **options: Any) -> dict[str, Any]:
    experiment = validate_experiment(resolve(raw, facts, **options), "test")
    return json.loads(experiment.model_dump_json())


NONE = [
    Machine(),
    Machine(vllm="0.32.0"),
    machine(8, torch_cuda=""),  # torch's build for CPUs
    machine(8, visible=""),
    machine(8, visible="-1"),
]


@pytest.mark.parametrize("facts", NONE)
@pytest.mark.parametrize("raw", [BARE, SPELT])
def test_without_gpus_auto_is_the_schemas_defaults_byte_for_byte(facts: Machine, raw: dict[str, Any]) -> None:
    direct = validate_experiment(BARE, "test").model_dump_json()
    for transformers in (False, True):
        experiment = validate_experiment(resolve(raw, facts, in_transformers=transformers), "test")
        assert experiment.model_dump_json() == direct == validate_experiment(SPELT, "test").model_dump_json()
    written = json.loads(direct)
    assert {side: {key: written[side][key] for key in keys} for side, keys in BEFORE.items()} == BEFORE
    assert written["run"]["offload"] is False


def test_one_gpu_is_shared_by_turns() -> None:
    config = resolved(SPELT, machine(1))
    assert config["generator"]["devices"] == config["trainer"]["devices"] == ["cuda:0"]
    assert config["run"]["offload"] is True
    assert config["generator"]["dtype"] == config["trainer"]["dtype"] == "bfloat16"
    assert config["generator"]["engine"] == "torch"
    kept_loaded = resolved(BARE | {"run": {"directory": "r", "offload": False}}, machine(1))
    assert kept_loaded["run"]["offload"] is False


@pytest.mark.parametrize(("count", "generators"), [(2, 1), (3, 2), (4, 3), (8, 6), (16, 12)])
def test_a_quarter_of_several_gpus_trains(count: int, generators: int) -> None:
    config = resolved(BARE, machine(count))
    assert config["generator"]["devices"] == [f"cuda:{n}" for n in range(generators)]
    assert config["trainer"]["devices"] == [f"cuda:{n}" for n in range(generators, count)]
    assert config["run"]["offload"] is False


def test_gpus_in_use_by_others_are_left_out_unless_all_are() -> None:
    busy = tuple(gpu(n, users="process 7 of alice" if n < 6 else "") for n in range(8))
    config = resolved(BARE, machine(8, gpus=busy))
    assert (config["generator"]["devices"], config["trainer"]["devices"]) == (["cuda:6"], ["cuda:7"])
    all_busy = tuple(gpu(n, users="process 7") for n in range(2))
    assert resolved(BARE, machine(2, gpus=all_busy))["trainer"]["devices"] == ["cuda:1"]


@pytest.mark.parametrize(
    ("facts", "usable", "first"),
    [
        ({"visible": "3,1"}, (0, 1), 3),
        ({"visible": "GPU-2,GPU-0"}, (0, 1), 2),
        ({"visible": "2,9,1"}, (0,), 2),  # CUDA stops at an invalid entry
        ({"visible": "1,1"}, (0,), 1),
        ({"slurm": "2,3"}, (2, 3), 0),
        ({"slurm": "1-3"}, (1, 2, 3), 0),
        ({"slurm": "4,5,6,7"}, (0, 1, 2, 3), 0),  # in the job's cgroup its GPUs are counted from 0
        ({"slurm": "6,7"}, (0, 1, 2, 3), 0),
        ({"slurm": "0,1", "visible": "3"}, (0,), 3),
    ],
)
def test_visible_gpus_and_slurms_share(facts: dict[str, str], usable: tuple[int, ...], first: int) -> None:
    four = machine(4, **facts)
    assert four.usable == usable
    assert four.cuda[0].index == first


def test_bfloat16_only_where_every_card_of_the_run_has_it() -> None:
    mixed = machine(4, gpus=tuple(gpu(n, bfloat16=n != 3) for n in range(4)))
    assert {resolved(BARE, mixed)[side]["dtype"] for side in ("generator", "trainer")} == {"float32"}
    without_it = BARE | {"generator": {"devices": ["cuda:0"]}, "trainer": {"devices": ["cuda:1"]}}
    assert resolved(without_it, mixed)["trainer"]["dtype"] == "bfloat16"
    asked = resolved(BARE | {"model": {"path": "m", "dtype": "bfloat16"}, "trainer": {"dtype": "float32"}}, mixed)
    assert (asked["generator"]["dtype"], asked["trainer"]["dtype"]) == ("bfloat16", "float32")
    over_auto = resolved(SPELT | {"model": {"path": "m", "dtype": "float32"}}, machine(1))
    assert over_auto["generator"]["dtype"] == over_auto["trainer"]["dtype"] == "float32"


@pytest.mark.parametrize(("generator", "trainer"), [
    (["n1/cuda:0"], ["cuda:0"]), (["cuda:1"], ["n1/cuda:0"]), (["cuda:0", "4*cuda"], ["cuda:1"]),
])  # fmt: skip
def test_both_sides_compute_in_float32_where_one_is_on_a_node(generator: list[str], trainer: list[str]) -> None:
    raw = BARE | {"generator": {"devices": generator}, "trainer": {"devices": trainer}}
    chosen = resolve(raw, machine(2))
    assert {chosen[side].get("dtype", "float32") for side in ("generator", "trainer")} == {"float32"}


def test_a_replica_of_several_gpus_takes_those_that_are_idle() -> None:
    """Of four GPUs one is in use: the two beside each other are the replica's."""
    arguments = BARE | {"generator": {"engine_arguments": {"tensor_parallel_size": 2}}}
    for busy, first, rank in ((1, "cuda:2", "cuda:0"), (2, "cuda:0", "cuda:3")):
        gpus = tuple(gpu(n, users="process 7" if n == busy else "") for n in range(4))
        config = resolved(arguments, machine(4, gpus=gpus))
        assert (config["generator"]["devices"], config["trainer"]["devices"]) == ([first], [rank])


def test_vllm_samples_what_runs_in_transformers() -> None:
    have = machine(2, vllm="0.32.0")
    assert resolved(BARE, have)["generator"]["engine"] == "torch"
    assert resolved(BARE, have, in_transformers=True)["generator"]["engine"] == "vllm"
    assert resolved(BARE, machine(2, vllm="0.26.0"), in_transformers=True)["generator"]["engine"] == "torch"
    for excluding in ({"run": {"directory": "r", "deterministic": True}, "queue": {"budget": 0}},
                      {"algorithm": {"allow_truncated_sampling": True}},
                      {"rollout": {"temperature": 3.0}},
                      {"evaluation": {"temperature": 0.001}},
                      {"model": {"path": "m", "adapter": {"rank": 8}}}):  # fmt: skip
        assert resolve(BARE | excluding, have, in_transformers=True)["generator"]["engine"] == "torch"
    arguments = BARE | {"generator": {"engine_arguments": {"tensor_parallel_size": 2}}}
    config = resolved(arguments, machine(8))
    assert config["generator"]["engine"] == "vllm"
    assert config["generator"]["devices"] == ["cuda:0", "cuda:2", "cuda:4"]
    assert config["trainer"]["devices"] == ["cuda:6", "cuda:7"]


@pytest.mark.parametrize(
    ("side", "devices", "other"),
    [
        ("trainer", ["cpu:1"], ["cpu:0"]),  # the other kind of hardware wasn't asked for
        ("trainer", ["cuda:0", "cuda:2"], ["cuda:1", "cuda:3"]),
        ("trainer", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("generator", ["cuda:1"], ["cuda:0", "cuda:2", "cuda:3"]),
        ("generator", ["n1/cuda:1"], ["cpu:1"]),
        ("generator", ["http://h:1"], ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ],
)
def test_beside_a_side_that_is_given(side: str, devices: list[str], other: list[str]) -> None:
    engine = {"engine": "vllm-server"} if "http" in devices[0] else {}
    config = resolved(BARE | {side: {"devices": devices} | engine}, machine(4))
    assert config[side]["devices"] == devices
    assert config["trainer" if side == "generator" else "generator"]["devices"] == other
    assert config["run"]["offload"] is (set(devices) == set(other))


def test_a_resumed_run_keeps_engine_and_dtypes_and_may_move() -> None:
    begun = validate_experiment(resolve(BARE, machine(1)), "test")
    kept = json.loads(begun.model_dump_json())
    for facts in (machine(8, vllm="0.32.0"), machine(2, gpus=tuple(gpu(n, bfloat16=False) for n in range(2)))):
        later = validate_experiment(resolve(SPELT, facts, in_transformers=True, kept=kept), "test")
        require_resumable(begun, later)
        assert (later.generator.engine, later.generator.dtype, later.trainer.dtype) == ("torch", *["bfloat16"] * 2)
        assert len({*later.generator.devices, *later.trainer.devices}) == len(facts.gpus)
        assert later.run.offload is False
    changed = SPELT | {"model": {"path": "m", "dtype": "float32"}}
    with pytest.raises(ConfigurationError, match=r"generator\.dtype: 'bfloat16' -> 'float32'"):
        require_resumable(begun, validate_experiment(resolve(changed, machine(8), kept=kept), "test"))


def test_errors_name_auto_beside_the_other_values() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.dtype = 'float16'.*valid: float32, bfloat16 or auto"):
        validate_experiment(BARE | {"trainer": {"dtype": "float16"}}, "test")
    with pytest.raises(ConfigurationError, match=r"generator\.devices = 'gpu'.*valid: a list of devices or auto"):
        validate_experiment(BARE | {"generator": {"devices": "gpu"}}, "test")
    for damaged in (
        {"generator": 3},
        {"rollout": 1},
        {"rollout": {"temperature": "hot"}},
        {"trainer": [1]},
        {"generator": {"devices": 4}},
        {"model": "m"},
    ):
        with pytest.raises(ConfigurationError):
            validate_experiment(resolve(BARE | damaged, machine(4)), "test")


GPUS = st.lists(
    st.builds(
        lambda busy, able: {"users": "process 1" if busy else "", "bfloat16": able}, st.booleans(), st.booleans()
    ),
    max_size=9,
)


@given(
    GPUS,
    st.none() | st.lists(st.integers(-1, 9), max_size=9),
    st.none() | st.lists(st.integers(0, 9), max_size=5),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([None, "generator", "trainer"]),
    st.booleans(),
)
def test_devices_exist_are_idle_and_are_shared_only_by_turns(
    facts: list[dict[str, Any]], visible: list[int] | None, share: list[int] | None, ranks: int, side: str | None,
    transformers: bool,
) -> None:  # fmt: skip
    described = Machine(
        gpus=tuple(gpu(n, **each) for n, each in enumerate(facts)),
        visible=None if visible is None else ",".join(map(str, visible)),
        slurm=None if share is None else ",".join(map(str, share)),
        torch_cuda="13.0",
        vllm="0.32.0",
    )
    arguments = {"engine_arguments": {"tensor_parallel_size": ranks}} if ranks > 1 else {}
    raw = BARE | {"generator": arguments}
    if side:
        raw |= {side: {**raw.get(side, {}), "devices": ["cuda:0"]}}
    twice = [resolve(raw, described, in_transformers=transformers) for _ in range(2)]
    assert twice[0] == twice[1]  # deterministic, and the raw mapping is unchanged
    chosen = twice[0]
    for name in ("generator", "trainer"):
        devices = chosen.get(name, {}).get("devices", [])
        assert len(set(devices)) == len(devices)
        if name == side or not devices:
            continue
        numbers = [int(device.removeprefix("cuda:")) for device in devices]
        assert set(numbers) <= {*described.usable} | ({0} if side else set())  # it exists, in the share, idle if any is
        if share is None and not side and any(not card.users for card in described.cuda):
            assert not any(described.cuda[n].users for n in numbers)
    generators = [int(device[5:]) for device in chosen["generator"].get("devices", []) if device.startswith("cuda:")]
    trainers = [int(device[5:]) for device in chosen.get("trainer", {}).get("devices", [])]
    occupied = [n for first in generators for n in range(first, first + ranks)]
    if len(described.usable) > ranks and side is None:
        assert len(set(occupied)) == len(occupied)
        assert not {*occupied} & {*trainers}
        assert {*occupied, *trainers} == {*described.usable} or ranks > 1
    assert bool(chosen["run"].get("offload")) == bool({*generators} & {*trainers})
    used = [described.cuda[n] for n in (*generators, *trainers) if n < len(described.cuda)]
    for name in ("generator", "trainer"):
        if chosen.get(name, {}).get("dtype") == "bfloat16":
            assert all(card.bfloat16 for card in used)
    assert all(chosen.get(section, {}).get(key) != "auto" for section, key in AUTO_KEYS)
