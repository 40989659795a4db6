"""What `headway check` and the start refuse of teachers: other tokenizers, templates, contexts, too short a context."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_run

from headway.config.load import validate_experiment
from headway.models.initialise import initialise_model
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.memory import memory_uses
from headway.orchestrator.teachers.checks import require_teachers
from headway.orchestrator.teachers.replicas import teacher_experiment
from headway.orchestrator.teachers.start import start_teachers
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tokens.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")
    tiny_run.write_inputs(folder)
    initialise_model(
        folder / "other", ["αβγ δ", *PROMPTS], layers=1, width=32, heads=2, kv_heads=1, character_level=True
    )
    return folder


def changed_model(folder: Path, name: str, file: str = "", content: Any = None) -> str:
    """A copy of the model's folder with one file changed."""
    path = folder / name
    shutil.copytree(folder / "model", path, dirs_exist_ok=True)
    if isinstance(content, dict):
        content = json.dumps(json.loads((path / file).read_text()) | content)
    if file:
        (path / file).write_text(content)
    return str(path)


def check(
    folder: Path,
    path: str,
    task: dict[str, Any] | None = None,
    model: str = "",
    generator: dict[str, Any] | None = None,
    **teacher: Any,
) -> None:
    raw = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": model or str(folder / "model"), "template": "chat" if model else "raw"},
        "tasks": {"train": [{"path": "tasks.jsonl"}]},
        "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 12},
        "generator": generator or {},
        "algorithm": {"teacher": "big"},
        "teachers": {"big": {"path": path} | teacher},
    }
    experiment = validate_experiment(raw, "test")
    tasks = [Task(**{"task_id": "t", "prompt": "1+2=", "answer": "3", "source": "tasks.jsonl"} | (task or {}))]
    require_teachers(experiment, Tokenizer.of(experiment), tasks)


def test_teachers_that_read_as_the_model_does_pass(folder: Path) -> None:
    check(folder, "self")
    check(folder, changed_model(folder, "same"))
    check(folder, str(folder / "model"), context="{answer}")


def test_another_tokenizer_is_refused_by_an_ids_text(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"teachers.big.path = '.*' has another tokenizer: id \d+ is"):
        check(folder, str(folder / "other"))


def test_a_folder_without_a_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"valid: the folder of a model, or 'self'"):
        check(folder, str(folder / "nothing"))


def test_a_critic_of_another_tokenizer_is_refused_at_the_start_too(folder: Path) -> None:
    def start(path: str, **task: Any) -> None:
        raw = {
            "run": {"directory": str(folder / "run")},
            "model": {"path": str(folder / "model")},
            "tasks": {"train": [{"path": "tasks.jsonl"}]},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 12},
            "algorithm": {"preset": "ppo"},
            "critic": {"path": path},
        }
        experiment, unused = validate_experiment(raw, "test"), cast("Any", None)
        tasks = [Task(task_id="t", prompt="1+2=", **task)]
        tokenizer = Tokenizer.of(experiment)
        asyncio.run(start_teachers(experiment, tokenizer, tasks, unused, unused, unused, unused, AsyncExitStack()))

    pictured = ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]},)
    start(changed_model(folder, "same"))
    start(str(folder / "model"), messages=pictured)
    with pytest.raises(ConfigurationError, match=r"critic.path = '.*' has another tokenizer: id \d+ is"):
        start(str(folder / "other"))
    with pytest.raises(ConfigurationError, match=r"critic.path = '.*': task t has pictures.*; valid: 'trunk'"):
        start(changed_model(folder, "same"), messages=pictured)


def test_another_template_is_refused_by_what_it_renders(folder: Path) -> None:
    model = changed_model(folder, "chat", "chat_template.jinja", TEMPLATE)
    check(folder, changed_model(folder, "chat-same", "chat_template.jinja", TEMPLATE), model=model)
    other = changed_model(folder, "chat-other", "chat_template.jinja", TEMPLATE.replace("<|im_end|>", "<|im_end|> "))
    with pytest.raises(ConfigurationError, match=r"has another template: '.*' of the model is '.*' there"):
        check(folder, other, model=model)
    plain = changed_model(folder, "plain", "tokenizer_config.json", {"chat_template": None})
    with pytest.raises(ConfigurationError, match="has no chat template, which the model's prompts have"):
        check(folder, plain, model=model)


def test_a_teacher_that_reads_too_few_tokens_is_refused(folder: Path) -> None:
    short = changed_model(folder, "short", "config.json", {"max_position_embeddings": 20})
    with pytest.raises(ConfigurationError, match="reads 20 tokens, and rollouts have up to 28"):
        check(folder, short)


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_teachers_that_vllm_cannot_compute_are_refused(folder: Path, engine: str) -> None:
    replica: dict[str, Any] = {"devices": ["cpu:0"], "top_k": 4, "generator": {"engine": engine}}
    with pytest.raises(
        ConfigurationError, match=rf"big.devices .*engine = '{engine}' on a CPU can't compute heads of 16"
    ):
        check(folder, str(folder / "model"), **replica)
    short = changed_model(folder, "short", "config.json", {"max_position_embeddings": 28, "head_dim": 32})
    with pytest.raises(ConfigurationError, match=r"reads 28 tokens, .* up to 28 \(.*\), and one more for vLLM"):
        check(folder, short, **replica)
    check(folder, short, **replica | {"generator": {}})


def test_replicas_of_a_teacher_run_what_the_generators_start(folder: Path) -> None:
    def replicas(devices: str, teacher: dict[str, Any] | None = None, **generator: Any) -> Any:
        raw = {
            "run": {"directory": str(folder / "run")},
            "model": {"path": str(folder / "model")},
            "tasks": {"train": [{"path": "tasks.jsonl"}]},
            "generator": {"devices": [devices], "slots": 9} | generator,
            "algorithm": {"teacher": "big"},
            "teachers": {"big": {"path": str(folder / "other"), "top_k": 50, "devices": ["cpu:0"]} | (teacher or {})},
        }
        experiment = validate_experiment(raw, "test")
        made = teacher_experiment(experiment, experiment.teachers["big"])
        assert made.generator.slots == 1
        assert made.max_sequence_tokens - experiment.max_sequence_tokens == (made.generator.engine != "torch")
        return made.generator

    assert replicas("cpu:0").engine == "torch"
    arguments = {"kv_cache_memory_bytes": 1 << 30, "tensor_parallel_size": 2}
    served = replicas("http://127.0.0.1:8000", engine="vllm-server")
    assert (served.engine, served.engine_arguments) == ("torch", {})
    for engine in ("vllm", "vllm-server"):
        on_cpu = replicas("cuda:0", engine=engine, engine_arguments=arguments)
        assert (on_cpu.engine, on_cpu.engine_arguments) == (engine, {"max_logprobs": 50})
        on_gpu = replicas("cuda:0", {"devices": ["cuda:2"], "top_k": 4}, engine=engine, engine_arguments=arguments)
        assert on_gpu.engine_arguments == {"max_logprobs": 20, "tensor_parallel_size": 2}


@pytest.mark.parametrize("keys", [{}, {"devices": ["cpu:0"]}])
def test_more_likeliest_tokens_than_a_teacher_has_are_refused(folder: Path, keys: dict[str, Any]) -> None:
    path = changed_model(folder, "same")
    ids = sizes_of(path).vocabulary_size
    check(folder, path, top_k=ids, **keys)
    with pytest.raises(ConfigurationError, match=rf"teachers.big.top_k = {ids + 1}; valid: 1 to {ids}, all ids of"):
        check(folder, path, top_k=ids + 1, **keys)
    with pytest.raises(ConfigurationError, match=rf"teachers.big.top_k = {ids + 1}; valid: 1 to {ids}, all ids of"):
        check(folder, "self", top_k=ids + 1)


@pytest.mark.parametrize(
    ("context", "task", "message"),
    [
        ("{hint}", {}, r"teachers.big.context: task t: context has \{hint\}, which the task lacks"),
        ("1" * 17, {}, "teachers.big.context: context of 17 tokens of task t; valid: 1 to 16"),
    ],
)
def test_contexts_are_tried_on_every_task(folder: Path, context: str, task: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check(folder, "self", task, context=context)


def test_memory_counts_teachers_in_the_trainer_and_in_replicas(folder: Path) -> None:
    def parts(engine: str = "torch", **teacher: Any) -> dict[str, dict[str, int]]:
        raw = {
            "run": {"directory": str(folder / "run")},
            "model": {"path": str(folder / "model")},
            "tasks": {"train": [{"path": "tasks.jsonl"}]},
            "generator": {"engine": engine},
            "algorithm": {"teacher": "big"},
            "teachers": {"big": {"path": str(folder / "other"), "top_k": 4} | teacher},
        }
        uses = memory_uses(validate_experiment(raw, "test"), sizes_of(folder / "model"))
        return {use.name: dict(use.parts) for use in uses}

    size = sizes_of(folder / "other").parameters
    assert parts()["trainer-0"]["teacher big"] == 4 * size
    assert parts(path="self")["trainer-0"]["teacher big"] == 0
    replicas = parts(devices=["cpu:0", "cpu:1"])
    assert "teacher big" not in replicas["trainer-0"]
    assert replicas["teacher-big-0"]["weights"] == replicas["teacher-big-1"]["weights"] == 4 * size
    assert parts(devices=["cpu:0"], engine="vllm")["teacher-big-0"]["weights"] == 4 * size
