"""Rows as their files have them: texts of numbers, conversations as text, contradictions, what isn't UTF-8."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from packages import needs

from headway.cli import main as cli
from headway.config.sources import SftSource, TaskSource, VerifierSettings
from headway.records.errors import ConfigurationError
from headway.rollout.verification.scorers import score_guarded
from headway.rollout.verification.verifiers import resolve_verifier
from headway.tasks.demonstrations import Pair, read_demonstrations
from headway.tasks.sources import load_tasks
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer

needs("datasets")
needs("pyarrow")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def parquet(folder: Path, **columns: Any) -> Path:
    """A file whose columns are Arrow arrays or lists."""
    import pyarrow as pa
    from pyarrow import parquet as files

    files.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


def answers(path: Path, **columns: str) -> list[str]:
    tasks = load_tasks(TaskSource.model_validate({"source": "datasets", "path": str(path), "columns": columns}))
    return [task.answer for task in tasks]


def prompts(count: int) -> list[str]:
    return [f"question {i}" for i in range(count)]


# --- numbers as answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([2.0, 0.5, -3.0], ["2", "0.5", "-3"]),
        ([100.0, 0.0, 12.0], ["100", "0", "12"]),
        ([0.25, 1024.0, -0.125], ["0.25", "1024", "-0.125"]),
    ],
)
def test_whole_floats_are_integers(tmp_path: Path, kind: str, values: list[float], texts: list[str]) -> None:
    import pyarrow as pa

    path = parquet(tmp_path, prompt=prompts(3), answer=pa.array(values, pa.float64()).cast(kind))
    assert answers(path) == texts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-05, "0.00001"),
        (2.5e-07, "0.00000025"),
        (1e16, "10000000000000000"),
        (1.5e20, "150000000000000000000"),
        (1e22, "10000000000000000000000"),
        (-3e-06, "-0.000003"),
        (0.1, "0.1"),
    ],
)
def test_answers_have_no_exponents(tmp_path: Path, value: float, text: str) -> None:
    assert answers(parquet(tmp_path, prompt=["q"], answer=[value])) == [text]


def test_a_float32_is_its_shortest_text(tmp_path: Path) -> None:
    import pyarrow as pa

    path = parquet(tmp_path, prompt=prompts(3), answer=pa.array([0.1, 2.7, 3.0], pa.float32()))
    found = answers(path)
    assert [float(text) for text in found] == pytest.approx([0.1, 2.7, 3.0])
    assert found[2] == "3"
    assert not any("e" in text for text in found)


@pytest.mark.parametrize("kind", ["int8", "int32", "int64", "uint64"])
def test_integers_stay(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    assert answers(parquet(tmp_path, prompt=prompts(3), answer=pa.array([0, 7, 42], kind))) == ["0", "7", "42"]


def test_texts_of_parquet_stay(tmp_path: Path) -> None:
    texts = ["007", "1.50", "2.0", "1e-05"]
    assert answers(parquet(tmp_path, prompt=prompts(4), answer=texts)) == texts


@pytest.mark.parametrize(
    "texts",
    [
        ["007", "042", "1"],
        ["1.50", "2.00", "0.5"],
        ["1e3", "2", "3"],
        ["1,000", "2,000", "3"],
        ["2.0", "3.0", "4.0"],
        ["true", "false", "true"],
        ["12345678901234567890123", "1", "2"],
        ["2024-05-17", "2024-05-18", "1999-01-01"],
        ["+5", "-5", "5"],
        [".5", "0.50", "5."],
        ["NA", "null", "None"],
        ["nan", "inf", "1"],
    ],
)
def test_the_texts_of_a_csv_file_stay(tmp_path: Path, texts: list[str]) -> None:
    lines = "".join(f'question {i},"{text}"\n' for i, text in enumerate(texts))
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + lines)
    assert answers(tmp_path / "rows.csv") == texts


def test_an_unquoted_csv_file_keeps_its_texts_under_other_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,target,level\n007,1.50,3\n010,2.00,4\n")
    source = {"source": "datasets", "path": str(tmp_path / "rows.csv")}
    source["columns"] = {"prompt": "question", "answer": "target"}  # type: ignore[assignment]
    tasks = load_tasks(TaskSource.model_validate(source))
    assert [(task.prompt, task.answer) for task in tasks] == [("007", "1.50"), ("010", "2.00")]
    assert [task.metadata for task in tasks] == [{"level": 3}, {"level": 4}]  # other columns keep their types


def test_the_pairs_of_a_csv_file_keep_their_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,solution\n007,1.50\n010,2.00\n")
    rows = read_demonstrations(SftSource(source="datasets", path=str(tmp_path / "rows.csv")))
    assert [row for _, row in rows] == [Pair(prompt="007", solution="1.50"), Pair(prompt="010", solution="2.00")]


@pytest.mark.parametrize(("name", "value", "response"), [("exact", 2.0, "2"), ("math", 1e-05, "\\boxed{0.00001}")])
def test_a_float_answer_is_solved(tmp_path: Path, name: str, value: float, response: str) -> None:
    path = parquet(tmp_path, prompt=["q"], answer=[value])
    [task] = load_tasks(TaskSource(source="datasets", path=str(path)))
    assert score_guarded(resolve_verifier(VerifierSettings(name=name)), task, response).solved


# --- nested answers ---------------------------------------------------------------------------------------

NESTED = {
    "a struct": ("reward_model.ground_truth", {"reward_model": [{"ground_truth": "46", "style": "rule"}]}),
    "another struct": ("extra.answer", {"extra": [{"answer": "46", "index": 1}]}),
    "two levels": ("a.b.c", {"a": [{"b": {"c": "46"}}]}),
    "a number": ("reward_model.ground_truth", {"reward_model": [{"ground_truth": 46.0}]}),
}


@pytest.mark.parametrize("case", NESTED)
def test_a_nested_answer_is_read_or_refused(tmp_path: Path, case: str) -> None:
    column, rows = NESTED[case]
    path = parquet(tmp_path, prompt=["q"], **rows)
    try:
        found = answers(path, answer=column)
    except ConfigurationError as error:
        assert column in str(error)  # noqa: PT017 - it may be refused, by name
    else:
        assert found == ["46"]


def experiment(folder: Path, train: str, verifier: str, test: str = "", extra: str = "") -> Path:
    tokenizer = train_byte_fallback_tokenizer(["1+2=3", "40+50=90"], 300, folder / "model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": tokenizer.vocabulary_size,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")  # no tensors
    (folder / "e.toml").write_text(
        f'[run]\ndirectory = "{folder / "run"}"\n[model]\npath = "{folder / "model"}"\n{extra}\n'
        f"[tasks.train]\n{train}\n{test}\n{verifier}\n[trainer]\nlearning_rate = 1e-4\n"
    )
    return folder / "e.toml"


def checked(capsys: pytest.CaptureFixture[str], file: Path) -> tuple[int, str]:
    code = cli.main(["check", str(file), "--no-calibrate"])
    return code, re.sub(r"\s+", " ", "".join(capsys.readouterr()))


@pytest.mark.parametrize("pattern", ["(\\\\d+)$", "answer is (.*)", "\\\\d+", "x=(?P<x>.)"])
@pytest.mark.parametrize("where", ["nested", "empty", "blank"])
def test_a_regex_without_an_answer_is_refused_or_reads_it(
    tmp_path: Path, pattern: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {"prompt": "1+1="}
    row |= (
        {"reward_model": {"ground_truth": "2"}} if where == "nested" else {"answer": "" if where == "empty" else "  "}
    )
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    file = experiment(
        tmp_path,
        f'path = "{tmp_path / "tasks.jsonl"}"',
        f'[verifier]\nname = "regex"\nparameters = {{pattern = "{pattern}"}}',
    )
    code, said = checked(capsys, file)
    assert code == 2, said


def test_a_regex_with_an_answer_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    verifier = '[verifier]\nname = "regex"\nparameters = {pattern = "([0-9]+)$"}'
    code, said = checked(capsys, experiment(tmp_path, f'path = "{tmp_path / "tasks.jsonl"}"', verifier))
    assert code == 0, said


# --- what check says of the rows --------------------------------------------------------------------------


def findings(said: str, word: str) -> list[str]:
    """The findings that have this word."""
    return [line for line in re.split(r"(?:warning|error|info): ", said)[1:] if word in line]


MESSAGES = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    "prompt",
    [
        json.dumps(MESSAGES),
        json.dumps([{"role": "system", "content": "Be brief."}, *MESSAGES]),
        json.dumps(MESSAGES, indent=2),
        " " + json.dumps([{"content": "1+1=", "role": "user"}]),
        json.dumps([{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]),
    ],
    ids=["one message", "two", "in lines", "another order", "parts"],
)
def test_a_conversation_as_text_is_said_or_read(
    tmp_path: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    tasks = f'path = "{tmp_path / "tasks.jsonl"}"'
    _, said = checked(capsys, experiment(tmp_path, tasks, '[verifier]\nname = "exact"', extra='template = "chat"'))
    assert re.search("JSON|conversation|messages", said)
    assert re.search(r"\b1\b", said)


def test_a_prompt_that_is_other_json_is_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": text, "answer": "2"} for text in ("[1, 2, 3]", '{"role": "x"}', "[]", '["user"]')]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = f'path = "{tmp_path / "tasks.jsonl"}"'
    code, said = checked(capsys, experiment(tmp_path, tasks, '[verifier]\nname = "exact"'))
    assert (code, "conversation" in said) == (0, False)


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([("a=", "1"), ("a=", "2")], 1),
        ([("a=", "1"), ("a=", "2"), ("b=", "1"), ("b=", "2"), ("c=", "3")], 2),
        ([("a=", "1"), ("b=", "1"), ("a=", "x")], 1),
        ([("a=", "1"), ("a=", "2"), ("a=", "3")], 1),
    ],
)
def test_equal_prompts_with_contradictory_answers_are_said(
    tmp_path: Path, rows: list[tuple[str, str]], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows]
    (tmp_path / "tasks.jsonl").write_text("".join(lines))
    tasks = f'path = "{tmp_path / "tasks.jsonl"}"'
    _, said = checked(capsys, experiment(tmp_path, tasks, '[verifier]\nname = "exact"'))
    assert any("answer" in line and re.search(rf"\b{count}\b", line) for line in findings(said, "prompt")), said


def test_equal_rows_are_no_contradiction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "a=", "answer": "1"}] * 2 + [{"prompt": "b=", "answer": "1"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = f'path = "{tmp_path / "tasks.jsonl"}"'
    code, said = checked(capsys, experiment(tmp_path, tasks, '[verifier]\nname = "exact"'))
    assert (code, "contradict" in said) == (0, False)


@pytest.mark.parametrize("spelling", ["a= ", " a=", "a=\n", "a=\u00a0", "\ta=\r\n"])
@pytest.mark.parametrize("split", ["test", "validation"])
def test_tasks_that_are_shared_but_for_white_space_are_said(
    tmp_path: Path, spelling: str, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, prompt in (("train", "a="), ("other", spelling)):
        rows = [{"prompt": prompt, "answer": "1"}, {"prompt": f"{name} 1+1=", "answer": "2"}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = f'path = "{tmp_path / "train.jsonl"}"'
    test = f'[tasks.{split}]\npath = "{tmp_path / "other.jsonl"}"'
    _, said = checked(capsys, experiment(tmp_path, tasks, '[verifier]\nname = "exact"', test))
    assert any(
        re.search(r"tasks\.train", line) and re.search(r"\b1\b.{0,60}(prompt|task)", line)
        for line in findings(said, split)
    )


# --- halves of surrogate pairs ----------------------------------------------------------------------------

HALVES = ["a\\ud800b", "\\udfff", "x \\ud83d", "\\ude00\\ud83d"]


def require_half_named(error: ConfigurationError, folder: Path) -> None:
    said = str(error).replace(str(folder), "")
    assert "rows.jsonl:2" in said
    assert re.search(r"surrogate|\\u[dD]|U\+D|UTF", said), said
    assert "truncated" not in said


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("column", ["prompt", "answer", "note"])
def test_half_of_a_surrogate_pair_in_tasks_is_named(tmp_path: Path, column: str, half: str) -> None:
    rows = ['{"prompt": "1+1=", "answer": "2", "note": "n"}', '{"prompt": "q", "answer": "2", "note": "n"}']
    key = {"prompt": '"q"', "answer": '"2"', "note": '"n"'}[column]
    rows[1] = rows[1].replace(f'"{column}": {key}', f'"{column}": "{half}"')
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(ConfigurationError) as caught:
        load_tasks(TaskSource(path=str(tmp_path / "rows.jsonl")))
    require_half_named(caught.value, tmp_path)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "HALF", "solution": "b"}',
        '{"prompt": "a", "solution": "HALF"}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "HALF"}]}',
    ],
)
def test_half_of_a_surrogate_pair_in_demonstrations_is_named(tmp_path: Path, row: str, half: str) -> None:
    rows = ['{"prompt": "a", "solution": "b"}', row.replace("HALF", half)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(ConfigurationError) as caught:
        list(read_demonstrations(SftSource(path=str(tmp_path / "rows.jsonl"))))
    require_half_named(caught.value, tmp_path)


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "\\ud83d\\ude00?", "answer": "\\ud83d\\ude00"}\n')
    [task] = load_tasks(TaskSource(path=str(tmp_path / "rows.jsonl")))
    assert (task.prompt, task.answer) == ("😀?", "😀")
