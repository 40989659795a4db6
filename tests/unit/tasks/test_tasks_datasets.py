"""Hugging Face data sets as a source: local files and folders, columns, conversions, what is refused and how."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from packages import needs

from headway.config.load import validate_experiment
from headway.config.sources import SftSource, TaskSource
from headway.orchestrator.task_sets import load_task_sets
from headway.records.errors import ConfigurationError
from headway.tasks.demonstrations import Conversation, Pair, read_demonstrations
from headway.tasks.sources import load_tasks, read_tasks

needs("datasets")
datasets: Any = None  # once a test runs
ROWS = [{"question": f"{i}+1=", "target": i + 1, "level": {"n": i}} for i in range(4)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its lock files don't belong into the user's home; the network isn't asked."""
    global datasets
    datasets = importlib.import_module("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


def source(**fields: Any) -> TaskSource:
    columns = {"prompt": "question", "answer": "target"}
    return TaskSource.model_validate({"source": "datasets", "columns": columns, **fields})


def refusal(**fields: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_tasks(source(**fields))
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in every form there is."""
    made = tmp_path_factory.mktemp("data")
    train = datasets.Dataset.from_list(ROWS)
    test = datasets.Dataset.from_list([{"question": "9+1=", "target": 10, "level": {"n": 9}}])
    train.save_to_disk(made / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(made / "several")
    train.to_parquet(made / "rows.parquet")
    train.to_json(made / "rows.json")
    train.remove_columns("level").to_csv(made / "rows.csv", index=False)
    (made / "files").mkdir()
    for split, rows in (("train", train), ("test", test)):
        rows.to_parquet(made / "files" / f"{split}-00000-of-00001.parquet")
    return made


@pytest.mark.parametrize("name", ["one", "several", "rows.parquet", "rows.json", "rows.csv", "files"])
def test_all_file_formats_give_equal_tasks(folder: Path, name: str) -> None:
    tasks = load_tasks(source(path=str(folder / name)))
    assert [(task.prompt, task.answer) for task in tasks] == [(f"{i}+1=", str(i + 1)) for i in range(4)]
    assert {task.source for task in tasks} == {str(folder / name)}
    if name != "rows.csv":
        assert [task.metadata for task in tasks] == [{"level": {"n": i}} for i in range(4)]


def test_split_is_chosen_by_name_or_default(folder: Path) -> None:
    for name in ("several", "files"):
        assert [task.prompt for task in load_tasks(source(path=str(folder / name), split="test"))] == ["9+1="]
        said = refusal(path=str(folder / name), split="tset")
        assert "split = 'tset'; did you mean 'test'? it has: train, test" in said
    only = folder / "only-test"
    datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS)).save_to_disk(only)
    assert len(load_tasks(source(path=str(only)))) == 4
    two = folder / "no-train"
    part = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(test=part, validation=part).save_to_disk(two)
    assert "'split' is needed; it has: test, validation" in refusal(path=str(two))


def test_errors_name_missing_files_splits_and_columns(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = str(folder / "rows.parquet")
    nearest = refusal(path=parquet, columns={"prompt": "qestion"})
    assert f"{parquet} row 0: missing \"qestion\"; did you mean 'question'? it has: level, question" in nearest
    assert 'missing "zzz"; it has: level, question, target' in refusal(path=parquet, columns={"prompt": "zzz"})
    wanted = {"prompt": "question", "answer": "gold"}
    assert 'missing "gold"; it has: level, question, target' in refusal(path=parquet, columns=wanted)
    assert "no such file or folder" in refusal(path=str(folder / "nowhere"))
    assert "single file, without splits" in refusal(path=parquet, split="test")
    assert "without splits: leave 'split' out" in refusal(path=str(folder / "one"), split="test")
    assert "save_to_disk, which keeps no subsets" in refusal(path=str(folder / "one"), subset="main")
    assert "subset = 'main': BuilderConfig 'main' not found" in refusal(path=str(folder / "files"), subset="main")
    (tmp_path / "notes.txt").write_text("x")
    assert ".txt files can't be read; valid: .parquet, .json" in refusal(path=str(tmp_path / "notes.txt"))
    (tmp_path / "broken.parquet").write_text("x")
    assert "broken.parquet can't be read: " in refusal(path=str(tmp_path / "broken.parquet"))
    (tmp_path / "empty").mkdir()
    assert "empty can't be read: " in refusal(path=str(tmp_path / "empty"))
    datasets.Dataset.from_dict({"question": [], "target": []}).to_parquet(tmp_path / "none.parquet")
    assert "none.parquet holds no tasks" in refusal(path=str(tmp_path / "none.parquet"))
    offline = refusal(name="openai/gsm8k", subset="main")
    assert "openai/gsm8k: the Hugging Face hub can't be reached" in offline
    assert "hf download openai/gsm8k --repo-type dataset --local-dir FOLDER" in offline
    monkeypatch.setitem(sys.modules, "datasets", None)
    missing = refusal(path=parquet)
    assert missing.startswith("source = 'datasets' needs the package datasets")
    assert "pip install 'headway[datasets]'" in missing


def test_unusable_answers_and_metadata_are_refused(tmp_path: Path) -> None:
    def one(**row: Any) -> str:
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / "t.parquet")
        return str(tmp_path / "t.parquet")

    columns = {"prompt": "q", "answer": "a"}
    assert '"a" = None: must be a text or a number; columns.answer = "" takes none' in refusal(
        path=one(q="x", a=None), columns=columns
    )
    assert '"a" = True: must be' in refusal(path=one(q="x", a=True), columns=columns)
    assert '"q" = 3: must be a string' in refusal(path=one(q=3, a="1"), columns=columns)
    assert '"raw" holds a bytes, which has no JSON form; leave it out with a function of your own' in refusal(
        path=one(q="x", a="1", raw=b"1"), columns=columns
    )
    path = one(q="x", a=0.5)
    [task] = load_tasks(source(path=path, columns=columns))
    assert (task.answer, task.metadata) == ("0.5", {})
    [task] = load_tasks(source(path=path, columns={"prompt": "q", "answer": ""}))
    assert (task.answer, task.metadata) == ("", {"a": 0.5})


def test_conversation_prompts_share_message_text(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "1+1="}
    rows = [{"chat": [system, user], "answer": "2"}, {"chat": [user], "answer": "2"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    path = str(tmp_path / "t.parquet")
    first, second = load_tasks(source(path=path, columns={"prompt": "chat"}))
    assert first.messages == (system, user)
    assert first.prompt is first.messages[1]["content"]  # not held twice
    assert (first.prompt, second.prompt) == ("1+1=", "1+1=")
    assert first.task_id != second.task_id
    experiment = {"run": {"directory": "r"}, "model": {"path": "m"}}
    train = {"source": "datasets", "path": path, "columns": {"prompt": "chat"}}
    with pytest.raises(ConfigurationError, match=r"tasks.train: .* are conversations.*set model.template = 'chat'"):
        load_task_sets(validate_experiment({**experiment, "tasks": {"train": train}}, "test"))
    for chat, message in (
        ([user, {"role": "assistant", "content": "2"}], "ends with the assistant's message"),
        ([system], "holds no message of a user"),
        ([{"role": "human", "content": "x"}], r'"chat"\[0\]: role = .human.; valid: system'),
    ):
        datasets.Dataset.from_list([{"chat": chat, "answer": "2"}]).to_parquet(path)
        with pytest.raises(ConfigurationError, match=message):
            load_tasks(source(path=path, columns={"prompt": "chat"}))


CONVERSIONS = """
def easy(row):
    return {"prompt": row["question"], "answer": str(row["target"])} if row["target"] < 3 else None

def none(row):
    return None

def text(row):
    return row["question"]

def broken(row):
    return row["qestion"]

def chat(row):
    return {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "1"}]}
"""


def test_convert_function_maps_and_drops_rows(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rows.py").write_text(CONVERSIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = str(folder / "rows.parquet")

    def convert(name: str) -> TaskSource:
        return TaskSource(source="datasets", path=path, convert=name)

    read = read_tasks(convert("own_rows:easy"))
    assert [task.answer for task in read.tasks] == ["1", "2"]
    assert read.left_out == 2
    for name, message in {
        "own_rows:none": "holds no tasks: own_rows:none left out all 4 rows",
        "own_rows:text": r"row 0: own_rows:text returned a str; valid: a dictionary or None",
        "own_rows:broken": r"row 0: own_rows:broken raised KeyError: 'qestion'",
        "own_rows:eazy": r"convert = 'own_rows:eazy': own_rows has no 'eazy'; did you mean 'easy'\? valid: module:f",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            load_tasks(convert(name))
    chats = list(read_demonstrations(SftSource(source="datasets", path=path, convert="own_rows:chat")))
    assert isinstance(chats[0][1], Conversation)
    assert chats[3][0] == f"{path} row 3"


def test_demonstrations_are_read_from_data_sets(tmp_path: Path) -> None:
    rows = [
        {"talk": [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b", "name": "x"}]},
        {"q": "a", "solution": "b"},
    ]
    for number, row in enumerate(rows):
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / f"{number}.parquet")
    columns = {"messages": "talk", "prompt": "q"}

    def read(number: int, columns: dict[str, str]) -> Any:
        data = {"source": "datasets", "path": str(tmp_path / f"{number}.parquet"), "columns": columns}
        return next(read_demonstrations(SftSource.model_validate(data)))[1]

    talk = read(0, columns)
    assert talk.messages == ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"})
    assert read(1, columns) == Pair(prompt="a", solution="b")
    with pytest.raises(ConfigurationError, match='it has the columns talk; needed: "prompt" and "solution", or "mess'):
        read(0, {})
