"""Models by name: the real huggingface_hub against a server of its protocol, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bare_model import write_bare_model
from hf_server import Hub, serving

ROOT = Path(__file__).parents[3]
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folders = {commit: write_bare_model(tmp_path / commit) for commit in (OLD, NEW)}
    for folder in folders.values():
        (folder / "original").mkdir()
        (folder / "original" / "params.json").write_text("{}")
        (folder / "pytorch_model.bin").write_bytes(b"0")
    with serving(Hub({"org/tiny": folders, "org/gated": folders}, gated=("org/gated",))) as served:
        yield served


def command(folder: Path, address: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": "1"}) + "\n" for n in range(20))
    )
    (folder / "experiment.toml").write_text(
        '[run]\ndirectory = "runs/rl"\nsteps = 1\n[model]\npath = "org/tiny"\n[tasks.train]\npath = "tasks.jsonl"\n'
        '[trainer]\ndevices = ["cpu:0"]\n'
    )
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"} | variables
    environment = {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}
    words = [sys.executable, "-m", "headway.cli.main", *arguments]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


CHECK = ("check", "experiment.toml", "--no-calibrate")
CODE = """
import sys
from headway.api import load_experiment
from headway.runtime.run_directory import RunDirectory
experiment = load_experiment("experiment.toml", sys.argv[2:], resume=sys.argv[1] == "resume")
with RunDirectory(experiment.run.directory) as run:
    run.begin(experiment, resume=sys.argv[1] == "resume")
print(experiment.model.path)
"""


def begin(folder: Path, address: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)} | variables
    words = [sys.executable, "-c", CODE, *arguments]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_model_by_name_and_its_commit_in_the_run(hub: Hub, tmp_path: Path) -> None:
    checked = command(tmp_path, hub.address, *CHECK)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not [path for path in hub.requests if path.endswith(("params.json", ".bin"))]  # nothing that isn't read
    first = begin(tmp_path, hub.address, "start")
    assert first.returncode == 0, first.stderr
    stored = json.loads((tmp_path / "runs/rl/config.json").read_text())["model"]["path"]
    assert stored == first.stdout.strip()
    assert stored.endswith(f"models--org--tiny/snapshots/{NEW}")
    hub.repositories["org/tiny"] = {NEW: hub.repositories["org/tiny"][NEW], OLD: hub.repositories["org/tiny"][OLD]}
    resumed = begin(tmp_path, hub.address, "resume")  # main is another commit now
    assert (resumed.returncode, resumed.stdout.strip()) == (0, stored), resumed.stderr
    elsewhere = begin(tmp_path, hub.address, "resume", HF_HOME=str(tmp_path / "another"))
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert elsewhere.stdout.strip() == stored.replace("/cache/", "/another/")
    branch = begin(tmp_path, hub.address, "resume", "model.path=org/tiny@main")
    assert (branch.returncode, branch.stdout.strip()) == (0, stored), branch.stderr
    other = begin(tmp_path, hub.address, "resume", f"model.path=org/tiny@{OLD}")
    assert f"model.path: 'org/tiny@{NEW}' -> 'org/tiny@{OLD}'" in other.stderr


@pytest.mark.slow
def test_a_cached_model_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    assert command(tmp_path, hub.address, *CHECK, f"--model.path=org/tiny@{OLD}").returncode == 0
    alone = command(tmp_path, "http://127.0.0.1:9", *CHECK, f"--model.path=org/tiny@{OLD}")
    assert alone.returncode == 0, alone.stderr
    offline = command(tmp_path, hub.address, *CHECK, "--model.path=org/tiny@main", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2
    assert "can't be reached" in offline.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/tiny@nine", "has no revision 'nine'; valid: a branch, a tag or a commit"),
        ("org/gated", "org/gated is gated: accept its terms there, then log in"),
        ("org/none", "has no such model, or it is private and wants a token (HF_TOKEN)"),
    ],
)
def test_what_the_server_has_not_ends_with_2(name: str, message: str, hub: Hub, tmp_path: Path) -> None:
    ended = command(tmp_path, hub.address, *CHECK, f"--model.path={name}")
    assert ended.returncode == 2
    assert f"model.path = '{name}': " in ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_network_is_named_with_a_remedy(tmp_path: Path) -> None:
    ended = command(tmp_path, "http://127.0.0.1:9", *CHECK)
    assert ended.returncode == 2
    assert "http://127.0.0.1:9 can't be reached" in ended.stderr
    assert "valid: the folder of a model, or HF_ENDPOINT" in ended.stderr


@pytest.mark.slow
def test_a_folder_is_the_folder(hub: Hub, tmp_path: Path) -> None:
    write_bare_model(tmp_path / "org" / "tiny")
    here = command(tmp_path, hub.address, *CHECK)
    assert here.returncode == 0, here.stderr
    missing = command(tmp_path, hub.address, *CHECK, "--model.path=org/none")  # beside a folder that is here
    assert "no such folder" in missing.stderr + missing.stdout
    assert hub.requests == []
