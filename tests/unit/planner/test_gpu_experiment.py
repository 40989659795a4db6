"""`headway new --template gpu`: what it writes fits by check's memory model, or it says what doesn't, with numbers."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from docs.gpu_table import POOLS, QWEN3, described, tables, write_config
from headway.cli import main as cli
from headway.config.auto import Machine
from headway.config.load import validate_experiment
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.capacity import memory_findings, memory_places
from headway.orchestrator.preflight.devices import device_findings
from headway.orchestrator.preflight.memory import memory_uses
from headway.planner.gpu_experiment import fitted_experiment
from headway.records.errors import ConfigurationError
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer

WHOLE = {("1 x 24 GB", "0.6B"), ("1 x 80 GB", "0.6B"), ("1 x 80 GB", "4B"), ("8 x 80 GB", "0.6B"), ("8 x 80 GB", "4B"),
         ("8 x 80 GB", "8B"),
         ("8 x 192 GB", "0.6B"), ("8 x 192 GB", "4B"), ("8 x 192 GB", "8B"), ("8 x 192 GB", "32B")}  # fmt: skip
ADAPTERS = {
    ("1 x 24 GB", "4B"),
    ("1 x 80 GB", "8B"),
    ("8 x 80 GB", "32B"),
    ("no GPU, 24 GB", "0.6B"),
}


@pytest.mark.parametrize("size", QWEN3)
@pytest.mark.parametrize("pool", POOLS)
def test_every_machine_and_model(pool: str, size: str, tmp_path: Path) -> None:
    machine, folder = described(pool, tmp_path), str(write_config(size, tmp_path / size))
    if (pool, size) not in WHOLE | ADAPTERS:
        with pytest.raises(ConfigurationError, match=r"the whole model: .* need [\d.]+ GiB of 90% of [\d.]+ GiB"):
            fitted_experiment(machine, folder, folder, tables(tmp_path))
        return
    text = fitted_experiment(machine, folder, folder, tables(tmp_path))
    raw = tomllib.loads(text)
    assert ("adapter" in raw["model"]) is ((pool, size) in ADAPTERS)
    experiment = validate_experiment(raw, "written")
    uses = memory_uses(experiment, sizes_of(folder))
    found = memory_findings(uses, memory_places(uses, machine=machine)) + device_findings(experiment, machine)
    assert [finding for finding in found if finding.level != "info"] == []
    of_gpus = [f"cuda:{n}" for n in range(len(machine.gpus))]
    ranks = experiment.generator.engine_arguments.get("tensor_parallel_size", 1)  # of a replica, which names its first
    firsts = [of_gpus.index(name) for name in experiment.generator.devices if of_gpus]
    of_replicas = [of_gpus[first + rank] for first in firsts for rank in range(ranks)]
    assert sorted({*of_replicas, *experiment.trainer.devices}) == (of_gpus or ["cpu:1"])
    keys = "devices|shards|slots|dtype|max_response_tokens|learning_rate|micro_batch_tokens"
    chosen = re.findall(rf"^({keys}) = [^#\n]+(#?)",
                        text.partition("[tasks.")[0] + text.partition("[rollout]")[2], re.MULTILINE)  # fmt: skip
    assert {key for key, mark in chosen if not mark} == set()  # each value has its reason


def test_replicas_of_several_gpus_where_one_is_too_small(tmp_path: Path) -> None:
    """Of 8 GPUs with 40 GB none holds the weights of an 8B twice over, which loading needs: vLLM divides them, and four
    trainer ranks the rest."""
    pool = tmp_path / "p.toml"
    (tmp_path / "c.toml").write_text("")
    machine = described("8 x 80 GB", tmp_path)
    small = [
        type(gpu)(index=gpu.index, name="A100", memory_bytes=42 << 30, free_bytes=42 << 30) for gpu in machine.gpus
    ]
    machine = type(machine)(gpus=tuple(small), torch_cuda="any", vllm="0.32.0", described=str(pool))
    folder = str(write_config("8B", tmp_path / "m"))
    raw = tomllib.loads(fitted_experiment(machine, folder, folder, tables(tmp_path)))
    assert "adapter" not in raw["model"]
    assert raw["trainer"]["shards"] == len(raw["trainer"]["devices"]) == 4
    if raw["generator"]["engine"] == "vllm":
        assert raw["generator"]["engine_arguments"]["tensor_parallel_size"] > 1


def test_main_memory_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides that take turns on one GPU are offloaded to it."""
    folder = str(write_config("4B", tmp_path / "m"))
    machine = replace(described("1 x 80 GB", tmp_path), memory_bytes=1000 << 30)
    assert "adapter" not in tomllib.loads(fitted_experiment(machine, folder, folder, tables(tmp_path)))["model"]
    small = replace(machine, memory_bytes=60 << 30)
    assert "adapter" in tomllib.loads(fitted_experiment(small, folder, folder, tables(tmp_path)))["model"]
    with pytest.raises(ConfigurationError, match=r"makes memory need [\d.]+ GiB of 90% of 8\.00 GiB"):
        fitted_experiment(replace(machine, memory_bytes=8 << 30), folder, folder, tables(tmp_path))


@pytest.mark.parametrize(("facts", "message"), [
    ({"torch_cuda": ""}, "torch is a build for CPUs here"),
    ({"torch_cuda": "13.0", "visible": "MIG-7f3a"}, "slices of a GPU (MIG)"),
])  # fmt: skip
def test_gpus_that_torch_cannot_use_are_refused(
    facts: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_config("0.6B", tmp_path / "m")
    machine = Machine(gpus=described("1 x 80 GB", tmp_path).gpus, **facts)
    monkeypatch.setattr("headway.runtime.nodes.gpus.read_machine", lambda: machine)
    assert cli.main(["new", "mine", "--template", "gpu", "--model", "m"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("mine").exists()


def test_odd_names_and_machines_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    pool = tmp_path / "a b" / "pool.toml"
    pool.write_text('[[devices]]\ndevice = "cpu"\n')
    write_config("0.6B", tmp_path / "m\U0001f4a5")
    words = ["new", "mine", "--template", "gpu", "--model", "m\U0001f4a5", "--machine", str(pool)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "on CPU cores, for want of a GPU" in printed
    assert f"make check MACHINE='{pool}'" in printed
    assert tomllib.loads(Path("mine/experiment.toml").read_text())["model"]["path"] == str(tmp_path / "m\U0001f4a5")
    command = ["make", "-n", "-o", "tasks", "check", f"MACHINE={pool}"]
    planned = subprocess.run(command, cwd="mine", capture_output=True, text=True, check=True)
    assert planned.stdout.strip().endswith(f"--machine '{pool}'")
    pool.write_text('[[devices]]\nmachine = "H200x8"\nnodes = ["n1"]\n')
    assert cli.main(["new", "other", *words[2:]]) == 2
    assert "all its devices are of nodes; valid: an entry without" in capsys.readouterr().err


def test_the_command_writes_a_project_that_check_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_config("8B", tmp_path / "model")
    train_byte_fallback_tokenizer(["1+2=3", "40+50=90"], 300, model)
    Path("pool.toml").write_text('[[devices]]\ndevice = "H100"\ncount = 8\n')
    assert cli.main(["new", "mine", "--template", "gpu", "--model", "model", "--machine", "pool.toml"]) == 0
    assert {file.name for file in Path("mine").iterdir()} == {
        "Makefile", "README.md", "experiment.toml", "make_tasks.py", "mine.py", "test_mine.py"}  # fmt: skip
    monkeypatch.chdir("mine")
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": "1"}) for n in range(100)]
    Path("tasks").mkdir()
    for number, name in enumerate(("train", "validation", "test")):
        Path(f"tasks/{name}.jsonl").write_text("\n".join(rows[number * 33 : number * 33 + 33]) + "\n")
    capsys.readouterr()
    Path("make_tasks.py").touch()  # as a clone does: rows of one's own are kept
    planned = subprocess.run(
        ["make", "-n", "check", "MACHINE=../pool.toml"], capture_output=True, text=True, check=True
    )
    assert planned.stdout.strip().endswith("check experiment.toml --machine '../pool.toml'")
    assert "make_tasks" not in planned.stdout
    checked = cli.main(["check", "experiment.toml", "--machine", "../pool.toml"])
    printed = capsys.readouterr()
    assert checked == 0, printed
    assert "cuda:7" in printed.out
    assert printed.out.rstrip().endswith("weights, disk and rates are checked there (../pool.toml).")
    assert cli.main(["train", "experiment.toml", "--machine", "../pool.toml"]) == 2
    assert "train runs on this one" in capsys.readouterr().err
    assert cli.main(["train", "experiment.toml"]) == 2
    assert "this machine shows no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["--template", "gpu"], "needs --model"),
    (["--template", "math", "--model", "m"], "valid with --template gpu"),
    (["--template", "gp"], "did you mean gpu"),
    (["--template", "gpu", "--model", "none/there"], "can't be reached"),
])  # fmt: skip
def test_what_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["new", "mine", *words]) == 2
    assert message in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
