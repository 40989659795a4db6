"""`check` finds, before the start, what would stop or spoil a run."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bare_model import write_bare_model
from safetensors.numpy import save_file

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.config.sources import TaskSource
from headway.models.adapter_targets import base_digest
from headway.orchestrator.actors.environments import open_multi_turn_host
from headway.orchestrator.preflight import capacity, devices, memory
from headway.orchestrator.preflight import check as checking
from headway.orchestrator.preflight.check import check
from headway.records.check_report import Finding
from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord
from headway.records.task import Task
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import RunDirectory
from headway.runtime.workers import LocalLauncher
from headway.tasks.sources import TaskSet

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without torch: `check` never reads the weights themselves."""
    return write_bare_model(tmp_path_factory.mktemp("model") / "m")


class Setup:
    """An experiment that is in order, and changes to it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        shutil.copytree(model, self.model)
        for name, first in (("train", 0), ("validation", 1000), ("test", 2000)):
            self.write_tasks(name, [f"{first + i}+1=" for i in range(20)])

    def write_tasks(self, name: str, prompts: list[str]) -> None:
        lines = [json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts]
        (self.folder / f"{name}.jsonl").write_text("".join(lines))

    def experiment(self, **changes: dict[str, Any]) -> Experiment:
        raw: dict[str, dict[str, Any]] = {
            "run": {"directory": str(self.folder / "run")},
            "model": {"path": str(self.model)},
            "tasks": {name: {"path": str(self.folder / f"{name}.jsonl")} for name in ("train", "validation", "test")},
            "generator": {"devices": ["cpu:0"]},
            "trainer": {"devices": ["cuda:0"]},  # a machine with one core has no second CPU device
            "evaluation": {"every_steps": 10},
        }
        for section, values in changes.items():
            raw[section] = {**raw.get(section, {}), **values}
        return validate_experiment(raw, "test")

    def find(self, resume: bool = False, **changes: dict[str, Any]) -> list[Finding]:
        return check(self.experiment(**changes), resume=resume, smoke_test=False)

    def messages(self, level: str = "error", resume: bool = False, **changes: dict[str, Any]) -> dict[str, str]:
        return {f.key: f.message for f in self.find(resume, **changes) if f.level == level}


@pytest.fixture
def setup(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr("headway.runtime.devices.cuda_device_count", lambda: 1)
    return Setup(tmp_path, model)


def test_nothing_is_found_in_an_experiment_that_is_in_order(setup: Setup) -> None:
    assert setup.find() == []
    assert not (setup.folder / "run").exists()


# --- model and tokenizer ---------------------------------------------------------------------------------


def test_a_missing_model_folder(setup: Setup) -> None:
    assert "no such folder" in setup.messages(model={"path": str(setup.folder / "nowhere")})["model.path"]


def test_an_unsupported_architecture(setup: Setup) -> None:
    config = json.loads((setup.model / "config.json").read_text())
    (setup.model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM" in setup.messages()["model.path"]


def test_a_model_that_transformers_runs(setup: Setup) -> None:
    file = setup.model / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}))
    assert setup.find() == []
    longer = setup.messages(rollout={"max_response_tokens": 5000})
    assert "beyond the model's context of 1024 tokens" in longer["rollout.max_response_tokens"]
    adapted = setup.messages(model={"path": str(setup.model), "adapter": {"rank": 4, "alpha": 8}})
    assert "no matrix in" in adapted["model.adapter"]  # whose size is by the file's tensors
    file.write_text(json.dumps({**config, "architectures": ["Quux"], "model_type": "quux"}))
    assert "model_type = 'quux' is unknown to transformers" in setup.messages()["model.path"]


def test_a_reference_model_that_does_not_fit(setup: Setup) -> None:
    penalty = {"kl_coefficient": 0.1}
    assert setup.find(model={"reference": str(setup.model)}, algorithm=penalty) == []
    assert "no effect" in setup.messages("warning", model={"reference": str(setup.model)})["model.reference"]
    nowhere = {"reference": str(setup.folder / "nowhere")}
    assert "no such folder" in setup.messages(model=nowhere, algorithm=penalty)["model.reference"]
    other = setup.folder / "other"
    shutil.copytree(setup.model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    found = setup.messages(model={"reference": str(other)}, algorithm=penalty)
    assert "has a vocabulary of 7, the model one of" in found["model.reference"]


ADAPTER = {"rank": 4, "alpha": 8.0}


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({**ADAPTER, "targets": ["q_prj"]}, "no layer has 'q_prj'; nearest: q_proj"),
        ({**ADAPTER, "target_parameters": ["mlp.experts.down_proj"]}, "no layer has 'mlp.experts.down_proj'"),
        ({"path": "/nowhere"}, "/nowhere: no adapter_config.json"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model(setup: Setup, adapter: dict[str, Any], words: str) -> None:
    found = setup.messages(model={"adapter": adapter}, trainer={"learning_rate": 1e-4, "devices": ["cuda:0"]})
    assert words in found["model.adapter"]


def test_an_adapter_of_another_base(setup: Setup, tmp_path: Path) -> None:
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.parent.mkdir()
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (file.parent / "adapter_config.json").write_text(json.dumps(given))

    def said() -> str:
        return setup.messages(model={"adapter": {"path": str(file.parent)}}).get("model.adapter", "")

    assert "not a readable safetensors file" in said()
    for digest, words in (("another", f"of another base than {setup.model}"), (base_digest(setup.model), "")):
        save_file({"x": np.zeros(1)}, file, {"base_digest": digest})
        assert words in said()
    assert said() == ""


def test_an_adapters_dropout_is_for_supervised_training(setup: Setup) -> None:
    given = {"adapter": {**ADAPTER, "dropout": 0.1}}
    assert "no ratio would be 1" in setup.messages(model=given)["model.adapter.dropout"]


def test_an_adapter_run_with_a_whole_models_learning_rate(setup: Setup) -> None:
    def warned(rate: float, **model: Any) -> bool:
        trainer = {"devices": ["cuda:0"], "learning_rate": rate}
        return "trainer.learning_rate" in setup.messages("warning", model=model, trainer=trainer)

    default = setup.experiment().trainer.learning_rate
    assert [warned(rate, adapter=ADAPTER) for rate in (default, 2e-5, 5e-5, 1e-4, 0.0)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not warned(default)


def test_missing_weights(setup: Setup) -> None:
    (setup.model / "model.safetensors").unlink()
    assert "safetensors" in setup.messages()["model.path"]


def test_a_tokenizer_without_eos(setup: Setup) -> None:
    settings = json.loads((setup.model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (setup.model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "end-of-sequence" in setup.messages()["model.path"]


def test_a_missing_tokenizer(setup: Setup) -> None:
    (setup.model / "tokenizer.json").unlink()
    assert "tokenizer.json" in setup.messages()["model.path"]


def test_a_tokenizer_larger_than_the_vocabulary(setup: Setup) -> None:
    config = json.loads((setup.model / "config.json").read_text())
    (setup.model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    assert "the model only 100" in setup.messages()["model.path"]


def test_sequences_beyond_the_context(setup: Setup) -> None:
    found = setup.messages(rollout={"max_prompt_tokens": 24, "max_response_tokens": 1001})
    assert "1025 is beyond the model's context of 1024" in found["rollout.max_response_tokens"]
    assert setup.messages(rollout={"max_prompt_tokens": 24, "max_response_tokens": 1000}) == {}


def without_template(setup: Setup) -> None:
    settings = json.loads((setup.model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (setup.model / "tokenizer_config.json").write_text(json.dumps(settings))
    (setup.model / "chat_template.jinja").unlink(missing_ok=True)


def test_chat_without_a_template(setup: Setup) -> None:
    assert setup.messages(model={"template": "chat"}) == {}
    without_template(setup)
    assert "no" in setup.messages(model={"template": "chat"})["model.template"]


def test_an_environments_methods_are_async(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "from headway.api import Environment\nclass Pay(Environment):\n    def reply(self, episode, answer): pass\n"
    (setup.folder / "plain_coins.py").write_text(body)
    monkeypatch.syspath_prepend(str(setup.folder))
    found = setup.messages(environment={"name": "plain_coins:Pay"})
    assert "plain_coins:Pay.reply must be `async def`" in found["environment.name"]


def test_an_environment_that_replies_needs_a_chat_template(setup: Setup) -> None:
    played = {"name": "gym", "parameters": {"env": "FrozenLake-v1"}}
    assert "environment.name" not in setup.messages(environment=played)
    without_template(setup)
    assert "add chat_template.jinja" in setup.messages(environment=played)["environment.name"]
    agent = {"name": "agent", "agent": ["true"]}
    assert "environment.name" not in setup.messages(environment=agent)
    assert "/v1/completions" in setup.messages("warning", environment=agent)["environment.name"]


def test_a_stop_string_that_is_a_special_token(setup: Setup) -> None:
    assert setup.messages(rollout={"stop": ["\n", "</think>"]}) == {}
    found = setup.messages(rollout={"stop": ["\n", "<|im_end|>\n"]})["rollout.stop"]
    assert "'<|im_end|>\\n' holds the special token <|im_end|>" in found


# --- tasks -----------------------------------------------------------------------------------------------


def test_prompts_that_are_too_long_are_counted_over_all_splits(setup: Setup) -> None:
    setup.write_tasks("validation", ["1+1=", "1+" * 30, "2+" * 40])
    found = setup.messages(rollout={"max_prompt_tokens": 40})
    assert found["rollout.max_prompt_tokens"].startswith("2 of 3 prompts of tasks.validation are longer than 40 tokens")


def test_splits_that_share_prompts(setup: Setup) -> None:
    setup.write_tasks("test", ["5+1=", "6+1=", "777+1="])
    assert "shares 2 prompts with tasks.train" in setup.messages()["tasks.test"]


def test_generated_training_tasks_make_room_for_held_out_ones(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checking.read_tasks

    def generate(sources: Sequence[TaskSource], seed: int) -> TaskSet:
        if sources[0].source == "jsonl":
            return read(sources, seed)
        made = tuple(
            Task(task_id=p, prompt=p, source=s.display_name)
            for s, part in zip(sources, parts(), strict=False)
            for p in part
        )
        return TaskSet(name="made", tasks=made)

    def parts() -> tuple[list[str], ...]:
        return (prompts, emptied)

    emptied: list[str] = []
    monkeypatch.setattr(checking, "read_tasks", generate)
    generated = {"tasks": {"train": {"source": "reasoning-gym", "name": "made"}}}
    prompts = [f"{i}+1=" for i in range(1990, 2010)]
    assert setup.messages(**generated) == {}
    assert setup.messages("info", **generated)["tasks.train"].startswith("10 tasks are left out")
    prompts, emptied = ["1990+1="], ["2000+1="]
    both = [{"source": "reasoning-gym", "name": "made"}, {"source": "reasoning-gym", "name": "small"}]
    assert "small: all its tasks are in a held-out set" in setup.messages(tasks={"train": both})["tasks.train"]
    prompts = ["2000+1=", "1000+1="]
    assert "none remains" in setup.messages(**generated)["tasks.train"]


def test_missing_and_empty_task_files(setup: Setup) -> None:
    (setup.folder / "train.jsonl").unlink()
    (setup.folder / "test.jsonl").write_text("")
    found = setup.messages()
    assert "no such file" in found["tasks.train"]
    assert "no tasks" in found["tasks.test"]


def test_evaluation_without_tasks(setup: Setup) -> None:
    train_only = {"tasks": {"validation": None, "test": None}, "evaluation": {"stop_at_solve_rate": 0.9}}
    warnings = setup.messages("warning", **train_only)
    assert "no validation tasks" in warnings["tasks.validation"]
    assert "no effect" in warnings["evaluation.stop_at_solve_rate"]
    assert "tasks.test" in setup.messages("info", **train_only)


# --- queue, batch, functions -----------------------------------------------------------------------------


def test_settings_that_would_wait_for_ever(setup: Setup) -> None:
    assert (
        "can't hold one rollout"
        in setup.messages(generator={"kv_capacity_tokens": 100})["generator.kv_capacity_tokens"]
    )
    assert "so all would be 0" in setup.messages(rollout={"group_size": 1})["rollout.group_size"]
    assert setup.messages(rollout={"group_size": 1}, algorithm={"preset": "reinforce++"}) == {}


def test_slots_that_stay_empty(setup: Setup) -> None:
    warning = setup.messages("warning", queue={"groups_per_step": 2, "budget": 1}, generator={"slots": 64})
    assert "32 of 64 slots will stay empty" in warning["generator.slots"]
    assert setup.messages("warning", queue={"groups_per_step": 2, "budget": 0}) == {}


def test_a_curriculum_over_tasks_that_are_seen_once(setup: Setup) -> None:
    adaptive = {"curriculum": {"mode": "adaptive"}}
    few = setup.messages("warning", **adaptive, run={"steps": 1}, queue={"groups_per_step": 1})
    assert "1 groups are trained of" in few["curriculum.mode"]
    assert "curriculum.mode" not in setup.messages("warning", **adaptive, run={"steps": 1000})
    assert "curriculum.mode" not in setup.messages("warning", run={"steps": 1}, queue={"groups_per_step": 1})


def test_odd_batches(setup: Setup) -> None:
    parts = {"trainer": {"optimizer_steps_per_batch": 3}}
    assert "equal parts" in setup.messages("warning", **parts)["trainer.optimizer_steps_per_batch"]
    parts = {"trainer": {"optimizer_steps_per_batch": 9}}
    assert "can't share 8 groups" in setup.messages(**parts)["trainer.optimizer_steps_per_batch"]
    small = setup.messages("warning", trainer={"micro_batch_tokens": 100})
    assert "a micro-batch of its own" in small["trainer.micro_batch_tokens"]


def test_functions_that_are_not_there(setup: Setup) -> None:
    found = setup.messages(algorithm={"advantage": "nosuch.module:f", "loss": "json:"})
    assert "nosuch.module can't be imported: ModuleNotFoundError" in found["algorithm.advantage"]
    assert found["algorithm.loss"].startswith("algorithm.loss = 'json:': expected module:function")
    found = setup.messages(algorithm={"advantage": "json:laods", "loss": "nosuch.module:f"})
    assert "json has no 'laods'; did you mean 'loads'?" in found["algorithm.advantage"]
    assert "there is no module 'nosuch.module'" in found["algorithm.loss"]
    assert "raised TypeError" in setup.messages(algorithm={"advantage": "json:loads"})["algorithm.advantage"]
    assert setup.messages(algorithm={"advantage": "numpy:negative"}) == {}


def test_a_users_functions_are_found_in_the_working_directory_and_a_loss_is_not_imported(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (setup.folder / "my_advantage.py").write_text("def ranked(rewards_g):\n    return rewards_g\n")
    (setup.folder / "my_loss.py").write_text("raise RuntimeError('imported where torch must not be')\n")
    (setup.folder / "my_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(setup.folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert setup.messages(algorithm={"advantage": "my_advantage:ranked", "loss": "my_loss:f"}) == {}
    broken = setup.messages(algorithm={"advantage": "my_broken:f"})["algorithm.advantage"]
    assert "my_broken can't be imported: ZeroDivisionError" in broken
    (setup.folder / "my_filter.py").write_text(
        "def keep(group, rollout):\n    return group.task.prompt != '' and rollout.reward <= 1.0\n"
        "def count(group, rollout):\n    return 1\n"
        "def one(group):\n    return True\n"
    )
    assert setup.messages(hooks={"filter_item": "my_filter:keep"}) == {}
    found = setup.messages(hooks={"filter_item": "my_filter:count", "is_valid_group": "my_filter:one"})
    assert "returned 1: valid: True, False or (True or False, reason)" in found["hooks.filter_item"]
    assert "is called as one(group, rollouts), and takes (group)" in found["hooks.is_valid_group"]


# --- devices, space, directory ---------------------------------------------------------------------------


def test_devices_that_do_not_exist_or_overlap(setup: Setup) -> None:
    assert "512" in setup.messages(trainer={"devices": ["cpu:512"]})["trainer.devices"]
    assert "1 GPU(s)" in setup.messages(trainer={"devices": ["cuda:1"]})["trainer.devices"]
    assert "not a device" in setup.messages(generator={"devices": ["gpu0"]})["generator.devices"]
    assert "at least one" in setup.messages(generator={"devices": []})["generator.devices"]
    for side in ("generator", "trainer"):
        shared = setup.messages("warning", **{side: {"devices": ["cpu:0", "cpu:0"]}})
        assert f"cpu:0 shares cores with cpu:0 of {side}.devices" in shared[f"{side}.devices"]


def test_generator_and_trainer_may_take_turns_on_the_same_cores(setup: Setup) -> None:
    assert setup.find(generator={"devices": ["cpu:0"]}, trainer={"devices": ["cpu:0"]}) == []


@pytest.mark.parametrize(
    ("fast", "dtype", "warned"), [(False, "bfloat16", True), (True, "bfloat16", False), (False, "float32", False)]
)
def test_bfloat16_without_instructions_for_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, fast: bool, dtype: str, warned: bool
) -> None:
    monkeypatch.setattr(devices, "cpu_multiplies_bfloat16", lambda: fast)
    assert ("trainer.dtype" in setup.messages("warning", trainer={"devices": ["cpu:0"], "dtype": dtype})) is warned


def test_ranks_that_cannot_work_together(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.devices.cuda_device_count", lambda: 2)
    mixed = setup.messages(trainer={"devices": ["cuda:0", "cpu:0"]})
    assert "cuda:0, cpu:0: ranks sum their gradients" in mixed["trainer.devices"]
    twice = setup.messages(trainer={"devices": ["cuda:1", "cuda:1"]})
    assert "cuda:1 twice" in twice["trainer.devices"]
    assert setup.messages(trainer={"devices": ["cuda:0", "cuda:1"]}) == {}
    shared = setup.find(generator={"devices": ["cuda:0"]})  # a generator and a rank may share one, with a warning
    assert [f.level for f in shared] == ["warning"]


@pytest.mark.parametrize(("free", "level"), [(10_000, "error"), (1_400_000, "warning")])
def test_disk_space(setup: Setup, monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: Usage(10**12, 0, free))
    assert "checkpoints" in setup.messages(level)["run.directory"]


def test_shared_memory(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (capacity, memory):
        monkeypatch.setattr(module, "SHARED_MEMORY", setup.folder / "nowhere")
    assert "temporary folder" in setup.messages("warning")["weights"]


def test_a_directory_that_holds_a_run_or_is_in_use(setup: Setup) -> None:
    assert "no run to resume" in setup.messages(resume=True)["run.directory"]
    with RunDirectory(setup.folder / "run") as run:
        run.begin(setup.experiment(), resume=False)
        assert "in use by process" in setup.messages(resume=True)["run.directory"]
    assert "already holds a run" in setup.messages()["run.directory"]
    assert setup.messages(resume=True) == {}
    data = {"tasks": 380, "tasks_digest": "of others"}
    (setup.folder / "run/ledger.jsonl").write_bytes(msgspec.json.encode(EventRecord(event="start", data=data)) + b"\n")
    assert "tasks, were 380): make clean" in setup.messages("warning", resume=True)["tasks.train"]
    assert "run.seed" in setup.messages(resume=True, run={"seed": 5})["run.directory"]
    (setup.folder / "file").write_text("")
    assert "is a file" in setup.messages(run={"directory": str(setup.folder / "file")})["run.directory"]


def test_a_resume_with_other_demonstrations(setup: Setup) -> None:
    (setup.folder / "rows.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n')
    keys = {"demonstrations": {"data": str(setup.folder / "rows.jsonl")}}
    with RunDirectory(setup.folder / "run") as run:
        run.begin(setup.experiment(**keys), resume=False)
    data = {"demonstrations": 3, "demonstrations_digest": "of others"}
    (setup.folder / "run/ledger.jsonl").write_bytes(msgspec.json.encode(EventRecord(event="start", data=data)) + b"\n")
    assert "(1 demonstrations, were 3)" in setup.messages("warning", resume=True, **keys)["demonstrations.data"]


def test_what_another_step_will_make_is_no_error_ahead_of_the_run(setup: Setup) -> None:
    nowhere = str(setup.folder / "sft")

    def found(level: str, **changes: dict[str, Any]) -> dict[str, str]:
        looked = check(setup.experiment(**changes), smoke_test=False, ahead=True)
        return {finding.key: finding.message for finding in looked if finding.level == level}

    coming = {"model": {"path": nowhere}, "sft": {"data": "sft.jsonl", "output": nowhere}}
    assert "make run) writes it" in found("warning", **coming)["model.path"]
    assert found("error", **coming) == {}
    assert "no such folder" in found("error", model={"path": nowhere})["model.path"]
    with RunDirectory(setup.folder / "run") as run:
        run.begin(setup.experiment(), resume=False)
        assert "in use by process" in found("error")["run.directory"]
    assert "--resume, in a project make run, continues" in found("warning")["run.directory"]
    assert found("error") == {}
    assert "run.seed" in found("error", run={"seed": 5})["run.directory"]


def test_errors_come_first(setup: Setup) -> None:
    found = setup.find(rollout={"group_size": 1}, trainer={"micro_batch_tokens": 100}, tasks={"test": None})
    assert [f.level for f in found] == sorted([f.level for f in found], key=["error", "warning", "info"].index)
    assert {"error", "warning", "info"} == {f.level for f in found}


# --- calls of tools ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tools_of_an_environment_need_a_chat_template_that_writes_calls(setup: Setup) -> None:
    asks = "{%- if add_generation_prompt %}A:{% endif %}"
    said = "{%- for m in messages %}{{- m.role + ': ' + m.content + eos_token }}{% endfor %}" + asks
    calls = "{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function | tojson + '</call>' }}{% endfor %}"
    template, tools = setup.model / "chat_template.jinja", {"name": "python_tool"}
    template.write_text(said)
    message = setup.messages(environment=tools)["endpoint.tools"]
    assert "environment.name = 'python_tool' has tools, and the model's chat template writes tool calls" in message

    async def start() -> None:
        experiment = setup.experiment(environment=tools)
        async with open_multi_turn_host(experiment, LocalLauncher(RealClock()), RealClock(), lambda *event: None):
            pass

    with pytest.raises(ConfigurationError, match="'python_tool' has tools"):
        asyncio.run(start())
    assert "endpoint.tools" not in setup.messages(environment=tools, endpoint={"tools": "none"})
    assert "endpoint.tools" not in setup.messages(environment=tools, endpoint={"tools": "hermes"})
    template.write_text(said.replace("+ eos_token }}", "}}" + calls + "{{- eos_token }}"))
    assert "endpoint.tools" not in setup.messages(environment=tools)
