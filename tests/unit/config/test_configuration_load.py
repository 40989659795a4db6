"""Reading an experiment: errors name key, value and what would be valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from headway.algorithms import advantages, aggregation
from headway.config import schema
from headway.config.load import is_resumable, load_experiment, require_resumable, validate_experiment
from headway.config.removed import REMOVED
from headway.config.sandbox import SandboxConfig
from headway.records.errors import ConfigurationError
from headway.trainer import kl, losses


def refusal(**sections: dict[str, Any]) -> str:
    raw: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t.jsonl"}}}
    with pytest.raises(ConfigurationError) as caught:
        validate_experiment({**raw, **sections}, "test")
    return str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "experiment.toml"
    loop.symlink_to(loop)  # an error that root gets too, unlike a missing permission
    with pytest.raises(ConfigurationError, match=f"{loop} can't be read: Too many levels of symbolic links"):
        load_experiment(loop)


def test_a_file_that_is_elsewhere_is_looked_for_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as alone:
        load_experiment("experiment.toml")
    here = f"no such configuration file: experiment.toml, searched in {tmp_path}; cd "
    assert str(alone.value) == f"{here}to the folder that has it first"
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "experiment.toml").write_text("")
    with pytest.raises(ConfigurationError) as below:
        load_experiment("experiment.toml")
    assert str(below.value) == f"{here}letters first"


def test_advantages_and_losses_match_implementations() -> None:
    assert set(schema.ADVANTAGES) == {
        *advantages.ADVANTAGES,
        *advantages.CONTEXT_ADVANTAGES,
        *advantages.BATCH_ADVANTAGES,
    }
    assert not advantages.ADVANTAGES.keys() & advantages.BATCH_ADVANTAGES.keys()
    assert set(schema.LOSSES) == set(losses.LOSSES)
    for names, owner in ((schema.ADVANTAGES, advantages), (schema.LOSSES, losses)):
        assert len(set(names)) == len(names)
        assert all(callable(owner.resolve(name)) for name in names)
    wrong = refusal(algorithm={"advantage": "ppo_clip", "loss": "group_mean"})
    assert f"algorithm.advantage = 'ppo_clip': valid: {', '.join(schema.ADVANTAGES)} or mod" in wrong
    assert f"algorithm.loss = 'group_mean': valid: {', '.join(schema.LOSSES)} or module:function" in wrong


def test_aggregations_and_estimators_match_implementations() -> None:
    fields = schema.AlgorithmConfig.model_fields
    assert get_args(fields["aggregation"].annotation) == get_args(aggregation.Aggregation)
    assert get_args(fields["kl_estimator"].annotation) == get_args(kl.KlEstimator)


def test_sections_that_contradict_each_other_are_named_with_their_values() -> None:
    assert "rollout.top_p = 0.9 with rollout.top_k = 0 gives" in refusal(rollout={"top_p": 0.9})
    allowed = {"allow_truncated_sampling": True}
    raw = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t.jsonl"}}}
    assert validate_experiment({**raw, "rollout": {"top_k": 9}, "algorithm": allowed}, "test").kept_sets == 1024
    assert validate_experiment(raw, "test").kept_sets == 0
    vllm = refusal(generator={"engine": "vllm"}, algorithm=allowed)
    assert "generator.engine = 'vllm' doesn't return the ids that a token was sampled among; valid: false, or" in vllm
    tiny = refusal(rollout={"group_size": 1}, queue={"groups_per_step": 1})
    assert "queue.groups_per_step = 1 times rollout.group_size = 1 must be at least 2" in tiny


def test_a_key_that_went_is_named_with_what_stands_in_its_place(tmp_path: Path) -> None:
    kept = {"train": {"path": "t.jsonl"}}
    generated = {"source": "reasoning-gym", "name": "chain_sum", "size": 7}
    for tasks, key in (({"train": generated}, "train"), ({**kept, "test": [generated, generated]}, "test.0")):
        wrong = refusal(tasks=tasks)
        assert f"the key 'tasks.{key}.size' was removed: set parameters.size of the same source" in wrong
    named = refusal(tasks={"train": {"path": "t.jsonl", "verifier": {"name": "math"}}})
    assert "valid: a verifier's name; one with parameters is a [verifiers.NAME]" in named
    file = tmp_path / "experiment.toml"
    file.write_text('[run]\ndirectory = "r"\n[model]\npath = "m"\n[tasks.train]\npath = "t"\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"the key 'run.worker_start_timeout_s' was removed: it is 600 s, and"):
        load_experiment(file, ["--run.worker-start-timeout-s=1200"])


def test_keys_that_went_are_no_keys() -> None:
    """Each sentence of the table is of a key that a file with it is refused for."""
    kept: dict[str, Any] = {"tasks": {"train": {"path": "t.jsonl"}}}
    for section, keys in REMOVED.items():
        for key in keys:
            parts = key.replace("*", "train" if section == "tasks" else "x").split(".")
            raw: Any = {"path": "t.jsonl"} if section == "tasks" else {}
            inside: Any = raw
            for part in parts[section == "tasks" : -1]:
                inside[part] = [{"kind": "repetition"}] if part == "pruners" else [{}] if part == "mcp" else {}
                inside = inside[part][0] if isinstance(inside[part], list) else inside[part]
            inside[parts[-1]] = 1
            given = kept | {section: {"train": raw} if section == "tasks" else raw}
            assert "was removed: " in refusal(**given), f"{section}.{key}"


@pytest.mark.parametrize(("key", "value"), [("size", 0), ("size", "7"), ("seed", 1.5)])
def test_generator_seed_and_size_are_checked(key: str, value: object) -> None:
    generated = {"source": "reasoning-gym", "name": "chain_sum", "parameters": {key: value}}
    assert f"tasks.train: parameters.{key} = {value!r}: valid: " in refusal(tasks={"train": generated})


def test_dashes_are_the_users_in_names_and_underscores_in_keys(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    text = (
        '[run]\ndirectory = "r"\n[model]\npath = "m"\n[[tasks.train]]\nsource = "reasoning-gym"\nname = "chain_sum"\n'
    )
    file.write_text(text + '[verifiers.my-boxed]\nname = "math"\n', encoding="utf-8")
    given = [
        "--verifiers.my-boxed.timeout-s=3",
        "--verifiers.my-boxed.parameters.a-b.c-d=4",
        "--verifiers.an-other.name=exact",
        "--tasks.train.0.parameters.min-terms=2",
        "--rollout.group-size=4",
        "--verifier.parameters.x-y=5",
    ]
    found = load_experiment(file, given)
    assert set(found.verifiers) == {"my-boxed", "an-other"}
    boxed = found.verifiers["my-boxed"]
    assert (boxed.name, boxed.timeout_s, boxed.parameters) == ("math", 3, {"a-b": {"c-d": 4}})
    assert found.tasks.train[0].parameters == {"min-terms": 2}
    assert (found.rollout.group_size, found.verifier.parameters) == (4, {"x-y": 5})
    with pytest.raises(ConfigurationError, match=r"unknown key 'rollout.group_sise'; did you mean 'group_size'\?"):
        load_experiment(file, ["--rollout.group-sise=4"])


def test_a_time_limit_may_change_on_resume_but_no_parameter_of_that_name(tmp_path: Path) -> None:
    assert is_resumable("verifiers.x.timeout_s")
    assert not is_resumable("verifiers.x.parameters.timeout_s")
    assert not is_resumable("verifiers.timeout_s")
    file = tmp_path / "experiment.toml"
    text = '[run]\ndirectory = "r"\n[model]\npath = "m"\n[tasks.train]\npath = "t"\n'
    file.write_text(text + '[verifiers.x]\nname = "my:own"\nparameters = { timeout_s = 1 }\n', encoding="utf-8")
    stored = load_experiment(file)
    require_resumable(stored, load_experiment(file, ["--verifiers.x.timeout_s=3"]))
    with pytest.raises(ConfigurationError, match=r"resumed: verifiers\.x\.parameters\.timeout_s: 1 -> 3$"):
        require_resumable(stored, load_experiment(file, ["--verifiers.x.parameters.timeout_s=3"]))


def test_where_sandboxes_and_fixed_models_are_may_change_on_resume_but_not_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    text = '[run]\ndirectory = "r"\n[model]\npath = "m"\n[tasks.train]\npath = "t"\n[environment]\nname = "dialogue"\n'
    text += '[environment.models.user]\naddress = "http://one/v1"\nmodel = "small"\n'
    file.write_text(text, encoding="utf-8")
    stored = load_experiment(file)
    given = ["--environment.models.user.address=http://two/v1", "--sandbox.live=8", "--environment.workers=2"]
    require_resumable(stored, load_experiment(file, given))
    for given in ("--environment.models.user.model=large", "--sandbox.limits.memory_bytes=1000000000"):
        with pytest.raises(ConfigurationError, match=given[2:].partition("=")[0]):
            require_resumable(stored, load_experiment(file, [given]))


def test_a_start_of_a_sandbox_has_less_time_where_nothing_is_fetched() -> None:
    assert [SandboxConfig(backend=backend).start_limit_s for backend in ("local", "docker", "modal")] == [30, 300, 300]
    assert SandboxConfig(backend="docker", start_timeout_s=7).start_limit_s == 7
