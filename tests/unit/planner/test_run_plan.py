"""`headway plan CONFIG --pool`: what it chooses, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.cli.main import main as headway
from headway.config.load import changed_experiment, load_experiment
from headway.models.sizes import sizes_of
from headway.planner.catalogue.read import Catalogue
from headway.planner.plan_files import read_plan
from headway.planner.pool_file import read_pool
from headway.planner.run_plan import digest, planned_settings
from headway.planner.stage_curves import RooflineCurves
from headway.records.errors import ConfigurationError
from headway.report.plans.run_plan import draw_plan

QWEN = {
    "model_type": "qwen2", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768,
}  # fmt: skip
EXPERIMENT = """
[run]
directory = "runs/planned"
[model]
path = "{model}"
[tasks.train]
path = "tasks.jsonl"
[verifier]
name = "numeric"
[rollout]
group_size = 8
max_prompt_tokens = 512
max_response_tokens = 8192
[generator]
devices = ["cuda:0"]
slots = 256
dtype = "bfloat16"
[queue]
groups_per_step = 16
budget = 2
[trainer]
devices = ["cuda:1"]
dtype = "bfloat16"
micro_batch_tokens = 16384
gradient_checkpointing = "full"
"""
POOL = """
[[devices]]
machine = "H200x8"
price = "owned.H200"
[workload]
prompt_tokens = 200
response_tokens = { kind = "lognormal", median = 1000, p99 = 6000 }
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(model=model))
    (tmp_path / "pool.toml").write_text(POOL)
    return str(tmp_path / "experiment.toml"), str(tmp_path / "pool.toml")


def plan(files: tuple[str, str], capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert headway(["plan", files[0], "--pool", files[1], "--no-simulate", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def refused(files: tuple[str, str], capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert headway(["plan", files[0], "--pool", files[1], "--no-simulate", *options]) == 2
    return capsys.readouterr().err


def test_a_plan_gives_each_side_devices_and_no_placement_is_faster_than_its_bound(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
):
    found = plan(files, capsys)
    generate, train = found["stages"]
    assert found["mode"] in ("spatial", "temporal", "hybrid")
    assert set(generate["names"]) | set(train["names"]) <= {f"cuda:{index}" for index in range(8)}
    if found["mode"] == "spatial":
        assert not set(generate["names"]) & set(train["names"])
    assert found["samples_per_s"] <= found["bound_samples_per_s"] * 1.02  # the simulation's sampling
    assert found["samples_per_s_range"][0] < found["samples_per_s"] < found["samples_per_s_range"][1]
    assert found["others"].keys() | {found["mode"]} == {"spatial", "temporal", "hybrid"}
    assert all(other["value"] <= found["samples_per_s"] for other in found["others"].values())
    assert json.loads(found["settings"]["trainer.devices"]) == train["names"]
    room = int(found["settings"].get("generator.kv_capacity_tokens", 1 << 60))
    assert room >= generate["slots"] * 1000  # the caches of as many samples of the mean length fit


@pytest.mark.slow
def test_a_cheaper_plan_is_not_a_faster_one(files: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    fast, cheap = plan(files, capsys), plan(files, capsys, "--objective", "cost")
    assert cheap["usd_per_mtok"] <= fast["usd_per_mtok"] * 1.0001
    assert cheap["samples_per_s"] <= fast["samples_per_s"] * 1.0001
    assert cheap["usd_per_hour"] < fast["usd_per_hour"]


@pytest.mark.slow
@pytest.mark.long
def test_the_real_orchestrator_confirms_the_rate_in_virtual_time(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
):
    assert headway(["plan", files[0], "--pool", files[1], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated_samples_per_s"] == pytest.approx(found["samples_per_s"], rel=0.15)


def test_what_a_plan_writes_can_be_read_loaded_and_drawn(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    written, whole, picture = (str(tmp_path / name) for name in ("plan.json", "planned.toml", "plan.svg"))
    options = ("--output", written, "--write", whole, "--picture", picture)
    found = plan(files, capsys, *options)
    read = read_plan(written)
    assert json.loads(msgspec.json.encode(read)) == found
    experiment = load_experiment(whole)
    assert list(experiment.trainer.devices) == found["stages"][1]["names"]
    assert experiment.generator.slots == found["stages"][0]["slots"]
    assert Path(picture).read_text().count("<svg") == 1
    assert draw_plan(read) == draw_plan(read)
    assert "--output" in refused(files, capsys, *options)  # nothing is written over
    assert "--picture" in refused(files, capsys, "--picture", str(tmp_path / "no" / "plan.svg"))
    same = str(tmp_path / "same")
    assert "two outputs have the same name" in refused(files, capsys, "--output", same, "--write", same)
    assert not Path(same).exists()
    assert "there is no folder" in refused(files, capsys, "--output", str(tmp_path / "no" / "plan.json"))
    assert planned_settings(load_experiment(files[0]), read, written) == found["settings"]
    assert headway(["plan", "--compare", written, written]) == 0
    assert "1.000 times" in capsys.readouterr().out


def test_a_plan_for_another_configuration_is_refused(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    written = str(tmp_path / "plan.json")
    plan(files, capsys, "--output", written)
    read, experiment = read_plan(written), load_experiment(files[0])
    for key, value in {"generator.slots": "7", "run.seed": "5", "trainer.devices": '["cuda:4"]'}.items():
        assert digest(changed_experiment(experiment, {key: value})) == read.made_for
    with pytest.raises(ConfigurationError, match="was made for another configuration"):
        planned_settings(changed_experiment(experiment, {"queue.budget": "5"}), read, written)
    assert headway(["train", files[0], "--plan", written, "--queue.budget=5"]) == 2
    assert "was made for another configuration" in capsys.readouterr().err
    assert headway(["train", files[0], "--plan", files[1]]) == 2
    assert "is not a plan of headway plan" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_configuration_cannot_say_is_planned_but_not_run(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    parallelism = "[train]\nparallelism = { tensor = 2, pipeline = 2 }\n"
    Path(files[1]).write_text(POOL + f"{parallelism}[generate]\ndraft_tokens = 3\ndraft_acceptance = 0.7\n")
    written = str(tmp_path / "plan.json")
    found = plan(files, capsys, "--output", written)
    assert any("tensor 2, pipeline 2: the trainer has no tensor" in reason for reason in found["refused"])
    assert any("draft_tokens" in reason for reason in found["refused"])
    with pytest.raises(ConfigurationError, match="can't be run"):
        planned_settings(load_experiment(files[0]), read_plan(written), written)
    assert "no tensor and no pipeline parallelism" in refused(files, capsys, "--write", str(tmp_path / "whole.toml"))
    assert not (tmp_path / "whole.toml").exists()


LARGE = QWEN | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}


def test_a_model_that_no_device_holds_is_divided_by_keys(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """7 G weights on 8 GPUs of 141 GB: two ranks hold a copy, one doesn't."""
    (Path(files[0]).parent / "model" / "config.json").write_text(json.dumps(LARGE))
    whole = str(tmp_path / "planned.toml")
    planned = plan(files, capsys, "--write", whole)
    train = planned["stages"][1]
    assert planned["refused"] == []
    shards = int(planned["settings"]["trainer.shards"])
    assert shards > 1
    assert train["spread"] == f"shards {shards}"
    assert len(train["names"]) % shards == 0
    experiment = load_experiment(whole)
    assert experiment.trainer.shards == shards
    other = changed_experiment(
        load_experiment(files[0]), {"trainer.devices": '["cuda:2", "cuda:3"]', "trainer.shards": "2"}
    )
    assert digest(other) == planned["made_for"]


def test_a_pool_of_its_own_shards_and_context(files: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    Path(files[1]).write_text(POOL + "[train]\nshards = 4\nparallelism = { context = 2 }\n")
    planned = plan(files, capsys)
    assert planned["refused"] == []
    assert planned["settings"]["trainer.shards"] == planned["settings"]["trainer.context_parallel"] == "2"
    assert planned["stages"][1]["spread"] == "shards 2, context 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ("[train]\noffloaded_bytes = 12.0\n", ["train: offloaded_bytes"]),
        ("[train]\nmicro_batch_tokens = 64\n", ["train: micro_batch_tokens"]),
        (
            "[generate]\nparallelism = { pipeline = 2 }\n",
            ["pipeline 2: generator.engine", "by tensor parallelism alone"],
        ),
        ("[generate]\nexpert_imbalance = 1.5\n", []),  # describes the load
        ("[train]\nrecompute = true\n", []),  # as the configuration has it
    ],
)
def test_a_plan_is_refused_for_options_that_the_run_would_not_have(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], options: str, reasons: list[str]
):
    Path(files[1]).write_text(POOL + options)
    found = plan(files, capsys)["refused"]
    assert len(found) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, found, strict=True))


def test_a_plan_of_one_device_a_replica_takes_tensor_parallelism_away(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
):
    Path(files[1]).write_text(POOL.replace('machine = "H200x8"', 'device = "H200"'))
    engine = ("--generator.engine=vllm", "--generator.update_mode=recompute")
    found = plan(files, capsys, *engine, "--generator.engine_arguments.tensor_parallel_size=2")
    assert found["stages"][0]["spread"] == "1 device"
    assert json.loads(found["settings"]["generator.engine_arguments"]) == {"tensor_parallel_size": 1}


@pytest.mark.slow
def test_a_limit_on_concurrent_rollouts_holds_in_the_plan(files: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    limited = ("--queue.max_concurrent_rollouts=16",)
    assert plan(files, capsys, *limited)["samples_per_s"] < 0.5 * plan(files, capsys)["samples_per_s"]


def test_on_several_machines_no_plan_is_faster_than_its_bound(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
):
    Path(files[1]).write_text(POOL.replace("price =", 'machines = 3\nnodes = ["a", "b", "c"]\nprice ='))
    found = plan(files, capsys)
    assert found["samples_per_s"] <= found["bound_samples_per_s"]


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            POOL.replace("machine =", "machin ="),
            "unknown key 'devices.0.machin'; did you mean 'machine'?",
        ),
        (POOL.replace('machine = "H200x8"', ""), "give machine (with machines) or device (with count)"),
        (POOL.replace("H200x8", "H200x9"), "machines.H200x9: unknown; known: H200x8"),
        (POOL.partition("[workload]")[0], "[workload] is missing"),
        (POOL + "[train]\nshard = true\n", "pool: [train]"),
        (POOL.replace("owned.H200", "-2"), "-2"),
        ("[[devices]", "is not valid TOML"),
        (POOL + '[generate]\nkv_dtype = "fp8"\n', "kv_dtype = 'fp8'; valid: float32"),
        (POOL + '[train]\ndtype = "float12"\n', "dtype = 'float12'; valid: float32"),
        (POOL.replace("machine =", "count = 3\nmachine ="), "count = 3 has no effect here; valid: machines"),
        (POOL.replace("price =", 'machines = 2\nnodes = ["a", "a"]\nprice ='), "nodes: a is listed twice"),
        (POOL.replace("prompt_tokens = 200", "prompt_tokens = -200"), "prompt_tokens: a median of -200"),
        (POOL.partition("response_tokens")[0] + "response_tokens = 0\n", "response_tokens: a median of 0"),
    ],
)
def test_bad_pools_are_refused_by_key(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], pool: str, message: str
):
    Path(files[1]).write_text(pool)
    assert message in refused(files, capsys)


def test_a_plan_by_cost_needs_prices_and_a_model_that_fits_nowhere_says_what_would_do(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
):
    Path(files[1]).write_text(POOL.replace('price = "owned.H200"', ""))
    assert "price is missing" in refused(files, capsys, "--objective", "cost")
    model = Path(files[0]).parent / "model" / "config.json"
    model.write_text(json.dumps(QWEN | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}))
    assert "weights, gradients and optimiser" in refused(files, capsys)


def test_ways_to_ask_that_make_no_sense(files: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    for arguments in (["plan"], ["plan", files[0]], ["plan", files[0], "--pool", files[1], "--graph", "x.json"]):
        assert headway(arguments) == 2
        assert "give one of CONFIG with --pool or --profile, --graph, --compare" in capsys.readouterr().err
    assert headway(["plan", files[0], "--profile", "--output", "no/profile.json"]) == 2  # before anything is measured
    assert "--output no/profile.json: valid: a file in a folder that exists" in capsys.readouterr().err
    assert headway(["plan", files[0], "--pool", "nowhere.toml"]) == 2
    assert "no such configuration file: nowhere.toml" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_is_planned_as_the_page_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    page = " ".join((root / "docs" / "planning.md").read_text(encoding="utf-8").split())
    arguments = ["plan", "examples/planning/experiment.toml", "--pool", "examples/planning/pool.toml"]
    for options in (["--no-simulate"], ["--objective", "cost", "--no-simulate"]):
        assert headway([*arguments, *options]) == 0
        assert " ".join(capsys.readouterr().out.split()) in page


TEACHER = """
[algorithm]
teacher = "big"
[teachers.big]
path = "{model}"
top_k = 20
{place}
"""


def with_teacher(files: tuple[str, str], place: str) -> None:
    model = Path(files[0]).parent / "model"
    with open(files[0], "a") as file:
        file.write(TEACHER.format(model=model, place=place))


def stage_of(plan: dict[str, Any]) -> dict[str, Any]:
    (stage,) = [stage for stage in plan["stages"] if stage["name"] == "teacher big"]
    return stage


def test_a_teacher_with_devices_is_a_stage_of_its_prefill_rate(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    free = plan(files, capsys)
    with_teacher(files, 'devices = ["cuda:8", "cuda:9"]')
    taught = plan(files, capsys)
    stage = stage_of(taught)
    assert (stage["device"], stage["copies"], stage["names"]) == ("H200", 2, ["cuda:8", "cuda:9"])
    tokens, layers = 200 + 1000 * 1.35, 16 * (1024 * 1024 * 2.5 + 3 * 1024 * 4096)  # of a rollout; parameters
    assert 0.02 < stage["samples_per_s"] * tokens * 2 * layers / 2 / 989e12 < 1.0  # FLOP/s of a device over its peak
    assert stage["samples_per_s"] > taught["samples_per_s"] == pytest.approx(free["samples_per_s"], rel=0.02)
    assert stage["bytes_per_device"] > 2 * layers
    assert not taught["refused"]


def test_a_teacher_by_address_limits_the_plan_by_the_described_time(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with_teacher(files, 'address = { url = "http://gpu7:8000", concurrency = 4 }')
    assert stage_of(plan(files, capsys))["samples_per_s"] == 0, "not known"
    with open(files[1], "a") as file:
        file.write("teacher_s = 2.0\n")
    taught = plan(files, capsys)
    assert stage_of(taught)["samples_per_s"] == 2.0
    assert taught["samples_per_s"] == pytest.approx(2.0, rel=0.05)
    assert taught["trainer_wait"] > 0.5
    assert any("teachers = 8 rollouts at once" in change for change in taught["changes"]) or taught["changes"] == []


def step_s(files: tuple[str, str], *settings: str) -> float:
    """The predicted seconds of a step on one device."""
    experiment = load_experiment(files[0], list(settings))
    curves = RooflineCurves(experiment, sizes_of(experiment.model.path), read_pool(files[1], Catalogue.read()))
    curve = curves.training(0, 1)
    assert curve is not None
    return curve.fixed_s + curve.token_s * curves.samples * (curves.prompt_tokens + curves.lengths.mean_tokens)


def test_a_step_takes_longer_by_its_passes_and_its_critic(files: tuple[str, str]) -> None:
    """Four forward passes of an update at full checkpointing, one for values, and those of the critic's network, none
    of which computes logits."""
    model, critic = Path(files[0]).parent / "model", "--algorithm.preset=ppo"
    (smaller := model.with_name("critic")).mkdir()
    (smaller / "config.json").write_text(json.dumps(QWEN | {"num_hidden_layers": 8}))
    once, twice, values = step_s(files), step_s(files, "--trainer.passes=2"), step_s(files, critic) - step_s(files)
    assert twice / once == pytest.approx(2, rel=0.01)
    assert 0.85 / 4 < values / once < 1 / 4
    for folder, share in ((model, 1.0), (smaller, 0.5)):
        path = f"--critic.path={folder}"
        assert step_s(files, critic, path) == pytest.approx(once + 5 * share * values, rel=0.02)
        assert step_s(files, critic, path, "--trainer.passes=2") == pytest.approx(twice + 9 * share * values, rel=0.02)


def test_a_plan_that_uses_a_teachers_device_is_refused(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with_teacher(files, 'devices = ["cuda:0"]')
    reason = "teacher big: the plan uses its cuda:0; valid: other devices, or a pool without them"
    assert reason in plan(files, capsys)["refused"]
