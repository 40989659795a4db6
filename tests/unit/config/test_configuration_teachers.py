"""[teachers.NAME] and the rules that name teachers: refused combinations, by key, value and what would be valid."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config.external_models import TeacherConfig
from headway.config.load import require_resumable, validate_experiment
from headway.config.objective.rules import stream_rules
from headway.records.errors import ConfigurationError

FOLDER = {"path": "models/big"}


def experiment(teacher: dict[str, Any] | None = None, rule: dict[str, Any] | None = None, **sections: Any) -> Any:
    raw: dict[str, Any] = {
        "run": {"directory": "run"},
        "model": {"path": "models/small"},
        "tasks": {"train": [{"path": "tasks.jsonl"}]},
        "algorithm": {"teacher": "big"} | (rule or {}),
        "teachers": {"big": FOLDER if teacher is None else {"path": "models/big"} | teacher},
    }
    for name, values in sections.items():
        raw[name] = (raw.get(name, {}) | values) if values else {}
    return validate_experiment(raw, "test")


SERVED = {"address": "http://gpu7:8000", "top_k": 20}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two places": ({"devices": ["cpu:0"], **SERVED}, {}, "a teacher computes in one place"),
    "self elsewhere": ({"path": "self", "devices": ["cpu:0"]}, {}, "path = 'self' with devices = ['cpu:0']"),
    "self at an address": ({"path": "self", **SERVED}, {}, "path = 'self' with address = 'http://gpu7:8000'"),
    "all tokens of a server": ({"address": "http://gpu7:8000"}, {}, "outside of the trainer needs top_k"),
    "too many of a server": (SERVED | {"top_k": 50}, {}, "top_k = 50 by address; valid: 1 to 20"),
    "top_k of sampled tokens": ({"divergence": "sampled", "top_k": 3}, {}, "compares sampled tokens alone"),
    "an address among devices": ({"devices": ["http://gpu7:8000"]}, {}, "set teachers.NAME.address"),
    "no address": ({"address": "gpu7:8000", "top_k": 2}, {}, "valid: http://... or https://..."),
    "an unknown key of an address": ({"address": {"url": "http://a", "retry": 1}, "top_k": 2}, {}, "address"),
    "temperature": (SERVED, {"rollout": {"temperature": 0.7}}, "big with address answers for the whole vocabulary at"),
    "temperature of a replica": (
        {"devices": ["cpu:0"], "top_k": 4},
        {"rollout": {"temperature": 0.7}, "generator": {"engine": "vllm"}},
        "teachers.big with devices, of generator.engine = 'vllm', answers for the whole vocabulary at temperature 1, "
        "not for rollout.temperature = 0.7; valid: a teacher without devices and address",
    ),
    "top_p": (
        SERVED,
        {"rollout": {"top_p": 0.9}, "algorithm": {"teacher": "big", "allow_truncated_sampling": True}},
        "not for rollout.top_p = 0.9, top_k = 0",
    ),
    "grammars": (
        {"devices": ["cpu:0"], "top_k": 4},
        {"algorithm": {"teacher": "big", "allow_truncated_sampling": True}},
        "not for algorithm.allow_truncated_sampling = true",
    ),
    "deterministic": (SERVED, {"run": {"deterministic": True, "directory": "run"}, "queue": {"budget": 0}}, "excludes"),
    "changing weights": (
        {"path": "self"},
        {"trainer": {"optimizer_steps_per_batch": 2}},
        "trainer.optimizer_steps_per_batch = 2; valid: 1",
    ),
    "weights of a pass": ({"path": "self"}, {"trainer": {"passes": 3}}, "trainer.passes = 3; valid: 1"),
    "entropy of no policy": (
        {},
        {"algorithm": {"teacher": "big", "policy_coefficient": 0.0, "entropy_coefficient": 0.1}},
        "algorithm.entropy_coefficient = 0.1 is of the policy's loss, which algorithm.policy_coefficient = 0 leaves",
    ),
    "ratios of no policy": (
        {},
        {
            "algorithm": {"teacher": "big", "policy_coefficient": 0.0, "early_stop_kl": 0.5},
            "trainer": {"passes": 2},
        },
        "algorithm.early_stop_kl = 0.5 is of the policy's loss",
    ),
    "trees with a context": (
        {"context": "{answer}"},
        {"environment": {"name": "agents:solve"}, "model": {"path": "models/small", "template": "chat"}},
        "takes the place of a single turn's prompt",
    ),
    "a password": (
        {"address": "http://me:hunter2@gpu7:8000", "top_k": 2},
        {},
        "teachers.big.address = 'http://...@gpu7:8000': url: it has a user or password; valid: the address alone",
    ),
    "a password in a table": (
        {"address": {"url": "http://me:hunter2@gpu7"}, "top_k": 2},
        {},
        "teachers.big.address: url: it has a user or password",
    ),
    "a coefficient of no teacher": (
        {},
        {"algorithm": {"teacher": "", "teacher_coefficient": 0.5}, "teachers": {}},
        "algorithm.teacher_coefficient = 0.5 weighs a teacher, and none is named; valid: with teacher",
    ),
    "a source's coefficient of no teacher": (
        {},
        {"tasks": {"train": [{"path": "a.jsonl", "algorithm": {"teacher": "", "teacher_coefficient": 0.5}}]}},
        "tasks.train 'a.jsonl': algorithm.teacher_coefficient = 0.5 weighs a teacher, and none is named",
    ),
    "no such teacher": ({}, {"algorithm": {"teacher": "bigger"}}, "there is no [teachers.bigger]; valid: big"),
    "a teacher without pupils": ({}, {"algorithm": {"teacher": ""}}, "teachers.big teaches nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_combinations_that_mean_nothing_are_refused(name: str) -> None:
    teacher, sections, message = REFUSED[name]
    with pytest.raises(ConfigurationError) as caught:
        experiment(teacher, **sections)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_an_address_is_a_text_or_a_table() -> None:
    short, long = experiment(SERVED), experiment(SERVED | {"address": {"url": "http://gpu7:8000", "retries": 5}})
    assert short.teachers["big"].server.url == long.teachers["big"].server.url == "http://gpu7:8000"
    assert (short.teachers["big"].server.retries, long.teachers["big"].server.retries) == (2, 5)
    assert validate_experiment(long.model_dump(mode="json"), "test") == long


def test_sampled_tokens_are_of_the_policy_stream() -> None:
    def streams(**teacher: Any) -> list[tuple[str, float]]:
        made = experiment(teacher, {"policy_coefficient": 0.0, "teacher_coefficient": 0.5})
        return [(part.stream, part.coefficient) for part in stream_rules(made.rules, made.demonstrations)]

    assert streams(divergence="sampled") == [("policy", 1.0)]
    assert streams(divergence="reverse") == [("teacher", 0.5)]


def test_entropy_and_averages_are_of_the_sources_that_have_a_policy_and_a_penalty() -> None:
    sources = [
        {"path": "a.jsonl", "algorithm": {"policy_coefficient": 0.0}},
        {"path": "b.jsonl", "algorithm": {"kl_coefficient": 0.1}},
    ]
    common = {"entropy_threshold": 0.5, "reference_decay": 0.9}
    assert experiment({}, common, tasks={"train": sources}).rules.of("b.jsonl").entropy_threshold == 0.5
    with pytest.raises(ConfigurationError, match=r"reference_decay = 0\.9 .* set algorithm\.kl_coefficient above 0"):
        experiment({}, common, tasks={"train": sources[:1]})
    with pytest.raises(ConfigurationError, match=r"algorithm\.entropy_threshold is common to all sources"):
        experiment({}, tasks={"train": [{"path": "a.jsonl", "algorithm": {"entropy_threshold": 0.5}}]})


def test_a_source_may_have_a_teacher_of_its_own() -> None:
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", "algorithm": {"teacher": "big"}}]
    made = experiment({}, {"teacher": ""}, tasks={"train": sources})
    assert [made.rules.of(name).teacher for name in ("a.jsonl", "b.jsonl")] == ["", "big"]
    assert list(made.used_teachers) == ["big"]


def test_a_coefficient_is_of_the_sources_that_name_a_teacher() -> None:
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", "algorithm": {"teacher": "big"}}]
    made = experiment({}, {"teacher": "", "teacher_coefficient": 0.5}, tasks={"train": sources})
    assert made.rules.of("b.jsonl").teacher_coefficient == 0.5
    assert validate_experiment(made.model_dump(mode="json"), "test") == made


def test_a_rule_that_is_written_like_the_preset_is_the_presets() -> None:
    rules = [{}, {"loss": "ppo_clip", "clip_high": 0.28}, {"clip_high": 0.3}]
    sources = [{"path": f"{number}.jsonl", "algorithm": rule} for number, rule in enumerate(rules)]
    made = experiment({}, {"preset": "dapo"}, tasks={"train": sources})
    assert made.rules.rule_by_source == {"0.jsonl": 0, "1.jsonl": 0, "2.jsonl": 1}


def test_a_rule_keeps_the_parameters_that_its_loss_and_advantage_take() -> None:
    def parameters(rule: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
        sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", "algorithm": source}]
        made = experiment({}, rule, tasks={"train": sources}, rollout={"group_size": 8})
        algorithm = made.rules.of("b.jsonl")
        return algorithm.parameters.taken_by(algorithm.loss, algorithm.advantage)

    dppo = {"loss": "dppo", "advantage": "pass_at_k", "parameters": {"divergence": "kl", "k": 3}}
    limit = {"divergence_limit": 0.15}
    assert parameters(dppo, {"advantage": "leave_one_out"}) == {"divergence": "kl"} | limit
    assert parameters(dppo, {"loss": "reinforce"}) == {"k": 3}
    assert parameters(dppo, {"loss": "dppo"}) == {"divergence": "kl", "k": 3} | limit
    assert parameters(dppo, {"loss": "dppo", "parameters": {"k": 4}}) == {"divergence": "tv", "k": 4} | limit
    own = {"loss": "losses:mine", "advantage": "pass_at_k", "parameters": {"zeta": 2, "k": 3}}
    assert parameters(own, {"advantage": "leave_one_out"}) == {"zeta": 2}
    assert parameters(own, {"loss": "losses:other"}) == {"k": 3}


def test_a_resumed_run_keeps_its_teachers_place() -> None:
    inside, replicas, served = (
        experiment({"top_k": 4}),
        experiment({"top_k": 4, "devices": ["cpu:0"]}),
        experiment(SERVED),
    )
    for stored, requested in ((inside, replicas), (replicas, inside)):
        with pytest.raises(ConfigurationError, match=r"the place of teachers\.big: '(in|outside of) the trainer' -> "):
            require_resumable(stored, requested)
    require_resumable(served, experiment(SERVED | {"address": "http://gpu8:8000"}))
    require_resumable(replicas, experiment({"top_k": 4, "devices": ["cpu:1"]}))


def test_demonstrations_need_data_and_whole_batches() -> None:
    with pytest.raises(ConfigurationError, match=r"per_step = 4, coefficient = 1 without data"):
        experiment(demonstrations={"per_step": 4})
    agents = {"environment": {"name": "agents:solve"}, "model": {"path": "models/small", "template": "chat"}}
    with pytest.raises(ConfigurationError, match=r"groups_per_part = 1 .* whose demonstrations are of all of it"):
        validate_experiment(
            {
                "run": {"directory": "run"},
                "tasks": {"train": [{"path": "tasks.jsonl"}]},
                "algorithm": {"policy_coefficient": 0.0, "environment_coefficient": 0.1},
                "demonstrations": {"data": "rows.jsonl"},
                "queue": {"groups_per_part": 1},
                **agents,
            },
            "test",
        )


def test_a_context_names_what_a_task_lacks() -> None:
    teacher = TeacherConfig(path="m", context="{prompt} {answer} {hint}")
    assert teacher.context_of("1+1=", "2", {"hint": 3}) == "1+1= 2 3"
    with pytest.raises(ValueError, match=r"context has \{hint\}, which the task lacks; valid: other, prompt, answer"):
        teacher.context_of("1+1=", "2", {"other": 3})


def test_braces_in_a_tasks_text_are_not_filled_in() -> None:
    teacher = TeacherConfig(path="m", context="{prompt}|{answer}")
    assert teacher.context_of("{answer}", "2", {}) == "{answer}|2"
