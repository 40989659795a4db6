"""Task sources: JSONL files and reasoning-gym generators, their errors, and keeping sets apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.sources import TaskColumns, TaskSource
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tasks.entry_encoding import pack_entry, unpack_entry
from headway.tasks.sources import (
    load_tasks,
    overlap,
    read_tasks,
    require_disjoint,
    task_id,
    without_prompts_of,
)


def jsonl(path: Path, *lines: object) -> TaskSource:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return TaskSource(path=str(path))


def gym(name: str = "basic_arithmetic", **parameters: object) -> TaskSource:
    given = {"source": "reasoning-gym", "name": name, "parameters": {"size": 20, **parameters}}
    return TaskSource.model_validate(given)


def task(prompt: str, answer: str = "") -> Task:
    return Task(task_id=task_id(prompt, answer), prompt=prompt, answer=answer)


class TestJsonl:
    def test_reads_prompt_answer_and_the_rest_as_metadata(self, tmp_path: Path):
        source = jsonl(
            tmp_path / "t.jsonl",
            {"prompt": "1+1=", "answer": "2", "n": 2, "metadata": {"level": 1}},
            "",
            {"prompt": "é"},
        )
        first, second = load_tasks(source)
        assert (first.prompt, first.answer, first.metadata) == ("1+1=", "2", {"n": 2, "level": 1})
        assert first.source == str(tmp_path / "t.jsonl")
        assert (second.prompt, second.answer, second.metadata) == ("é", "", {})
        assert first.task_id == task_id("1+1=", "2", {"level": 1, "n": 2})
        assert second.task_id == task_id("é", "")
        assert len(first.task_id) == 16
        assert set(first.task_id) <= set("0123456789abcdef")

    def test_duplicates_are_dropped_and_counted(self, tmp_path: Path):
        a, b = {"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}
        read = read_tasks(jsonl(tmp_path / "t.jsonl", a, b, a, a))
        assert [t.answer for t in read.tasks] == ["1", "2"]
        assert read.duplicates == 2

    def test_equal_prompts_with_different_metadata_are_different_tasks(self, tmp_path: Path):
        easy, hard = ({"prompt": "write", "metadata": {"tests": [n], "level": n}} for n in (1, 2))
        again = {"metadata": {"level": 1, "tests": [1]}, "prompt": "write"}
        read = read_tasks(jsonl(tmp_path / "t.jsonl", easy, hard, again))
        assert [t.metadata["level"] for t in read.tasks] == [1, 2]
        assert read.duplicates == 1
        assert len(overlap({"train": read.tasks[:1], "test": read.tasks[1:]})) == 1  # held out by prompt alone

    def test_the_column_answer_is_metadata_where_no_answer_is_taken(self, tmp_path: Path):
        a, b = {"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}
        source = jsonl(tmp_path / "t.jsonl", a, b)
        taken = read_tasks(source.model_copy(update={"columns": TaskColumns(answer="")}))
        assert [(t.answer, t.metadata) for t in taken.tasks] == [("", {"answer": "1"}), ("", {"answer": "2"})]
        assert [(t.answer, t.metadata) for t in read_tasks(source).tasks] == [("1", {}), ("2", {})]

    def test_metadata_that_is_null_is_none(self, tmp_path: Path):
        plain, null = {"prompt": "a", "n": 1}, {"prompt": "a", "n": 1, "metadata": None}
        read = read_tasks(jsonl(tmp_path / "t.jsonl", plain, null))
        assert [t.metadata for t in read.tasks] == [{"n": 1}]
        assert read.duplicates == 1

    def test_limit_keeps_a_subset_chosen_by_the_run_seed(self, tmp_path: Path):
        source = jsonl(tmp_path / "t.jsonl", *({"prompt": str(i)} for i in range(100)))
        limited = source.model_copy(update={"limit": 10})
        picks = [tuple(t.prompt for t in load_tasks(limited, seed)) for seed in (0, 0, 1)]
        assert picks[0] == picks[1] != picks[2]
        assert all(len(set(pick)) == 10 for pick in picks)
        assert picks[0] != tuple(map(str, range(10)))
        assert len(read_tasks(limited).tasks) == 10
        assert len(load_tasks(source.model_copy(update={"limit": 1000}))) == 100

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{oops", "not valid JSON"),
            ('{"prompt": NaN}', "not valid JSON"),
            ("[1]", "expected a JSON object, got list"),
            ({"promt": "x"}, "missing \"prompt\"; did you mean 'promt'?"),
            ({"question": "x"}, 'missing "prompt"; it has: question'),
            ({"prompt": 7}, '"prompt" = 7: must be a string'),
            ({"prompt": ""}, '"prompt" is empty'),
            ({"prompt": "x", "answer": 7}, '"answer" = 7: must be a string'),
            ({"prompt": "x", "metadata": []}, '"metadata" must be an object'),
        ],
    )
    def test_errors_name_file_and_line(self, tmp_path: Path, line: object, message: str):
        source = jsonl(tmp_path / "t.jsonl", {"prompt": "fine"}, "", line)
        with pytest.raises(ConfigurationError) as caught:
            load_tasks(source)
        assert f"{tmp_path / 't.jsonl'}:3: " in str(caught.value)
        assert message in str(caught.value)

    def test_non_utf8_line_is_refused(self, tmp_path: Path):
        (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
        with pytest.raises(ConfigurationError, match=r"t\.jsonl:1: not valid JSON"):
            load_tasks(TaskSource(path=str(tmp_path / "t.jsonl")))

    def test_a_byte_order_mark_is_no_error(self, tmp_path: Path):
        (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n')
        assert load_tasks(TaskSource(path=str(tmp_path / "t.jsonl")))[0].prompt == "x"

    def test_missing_empty_and_folder_paths_are_refused(self, tmp_path: Path):
        with pytest.raises(ConfigurationError, match="no such file"):
            load_tasks(TaskSource(path=str(tmp_path / "none.jsonl")))
        with pytest.raises(ConfigurationError, match="holds no tasks"):
            load_tasks(jsonl(tmp_path / "empty.jsonl", ""))
        with pytest.raises(ConfigurationError, match="is a folder; source = 'datasets'"):
            load_tasks(TaskSource(path=str(tmp_path)))


class TestReasoningGym:
    def test_deterministic_by_seed_also_in_another_process(self):
        here = [t.task_id for t in load_tasks(gym(seed=3))]
        assert here == [t.task_id for t in load_tasks(gym(seed=3))]
        assert here != [t.task_id for t in load_tasks(gym(seed=4))]
        code = (
            "from headway.config.sources import TaskSource; from headway.tasks.sources import load_tasks; "
            "s = TaskSource(source='reasoning-gym', name='basic_arithmetic', "
            "parameters={'size': 20, 'seed': 3}); "
            "print(*[t.task_id for t in load_tasks(s)])"
        )
        environment = os.environ | {"PYTHONHASHSEED": "77"}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.split() == here

    def test_parameters_reach_the_generator_and_the_metadata(self):
        tasks = load_tasks(gym(min_terms=2, max_terms=2))
        assert all(t.metadata["entry"]["metadata"]["num_terms"] == 2 for t in tasks)
        assert tasks[0].metadata["generator"] == "basic_arithmetic"
        assert tasks[0].metadata["parameters"] == {"min_terms": 2, "max_terms": 2}  # without size and seed
        assert json.loads(json.dumps(tasks[0].metadata)) == tasks[0].metadata

    def test_duplicates_of_a_small_space_are_counted(self):
        read = read_tasks(gym(size=200, min_terms=2, max_terms=2, max_digits=1))
        assert len(read.tasks) + read.duplicates == 200
        assert read.duplicates > 0

    def test_unknown_name_gives_the_nearest(self):
        with pytest.raises(ConfigurationError, match="'basic_arithmetc'; did you mean 'basic_arithmetic'"):
            load_tasks(gym("basic_arithmetc"))

    def test_unknown_parameter_gives_the_nearest(self):
        with pytest.raises(ConfigurationError, match="no parameter 'min_term'; did you mean 'min_terms'"):
            load_tasks(gym(min_term=1))

    def test_refused_parameter_says_why(self):
        with pytest.raises(ConfigurationError, match=r"basic_arithmetic refuses parameters .*'min_terms': 0.*: \S"):
            load_tasks(gym(min_terms=0))
        with pytest.raises(ConfigurationError, match="refuses parameters"):
            load_tasks(gym(min_terms="many"))

    def test_generator_without_its_package_names_the_command(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "reasoning_gym", None)
        with pytest.raises(
            ConfigurationError, match=r"source = 'reasoning-gym' .*: pip install 'headway\[reasoning-gym\]'"
        ):
            load_tasks(gym())

    def test_importing_the_module_does_not_import_the_package(self):
        code = "import sys, headway.tasks.sources; print('reasoning_gym' in sys.modules, 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "False"]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.integers())
entries = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["__tuple__", "__pairs__", "__set__", "x"]), inner, max_size=2)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(entries)
def test_an_entry_survives_json(entry: object):
    back = unpack_entry(json.loads(json.dumps(pack_entry(entry))))
    assert back == entry
    assert repr(back) == repr(entry) or isinstance(entry, set) or "{" in repr(entry)  # tuples stay tuples


def test_numpy_scalars_become_plain_and_other_types_are_refused():
    import numpy as np

    packed = pack_entry([np.int64(3), np.float64(0.5), np.str_("a"), np.bool_(True), np.arange(2)])
    assert packed == [3, 0.5, "a", True, [0, 1]]
    assert [type(item) for item in packed] == [int, float, str, bool, list]
    with pytest.raises(TypeError, match="complex"):
        pack_entry({"z": 1j})


class TestDisjoint:
    def test_overlap_error_names_sets_count_and_example(self):
        train, test = [task("a", "1"), task("b"), task("c")], [task("b", "other answer"), task("c"), task("d")]
        with pytest.raises(ConfigurationError) as caught:
            require_disjoint({"tasks.train": train, "tasks.test": test})
        assert "tasks.train and tasks.test share 2 prompts, for example 'b'" in str(caught.value)

    def test_overlap_reports_every_pair(self):
        found = overlap({"x": [task("a"), task("b")], "y": [task("b")], "z": [task("a"), task("b")]})
        assert [(o.first, o.second, o.prompts) for o in found] == [("x", "y", 1), ("x", "z", 2), ("y", "z", 1)]

    def test_equal_answers_are_no_overlap(self):
        require_disjoint({"train": [task("1+1=", "2")], "test": [task("0+2=", "2")]})

    def test_without_prompts_of_makes_them_disjoint(self):
        held_out = [task("b", "other")]
        kept = without_prompts_of([task("a"), task("b"), task("c")], held_out)
        assert [t.prompt for t in kept] == ["a", "c"]
        require_disjoint({"train": kept, "test": held_out})


@settings(deadline=None, max_examples=200)
@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_task_id_is_equal_exactly_for_equal_content(a: tuple[str, str], b: tuple[str, str]):
    assert (task_id(*a) == task_id(*b)) == (a == b)


def test_task_id_keeps_prompt_and_answer_apart():
    assert task_id("ab", "c") != task_id("a", "bc")
    assert task_id("1:a", "") != task_id("", "1:a")


# --- a user's function ---------------------------------------------------------------------------------------


def sums(count: int, start: int = 0):
    for i in range(start, start + count):
        yield {"prompt": f"{i}+1=", "answer": str(i + 1), "level": i % 2}


def no_rows(what: str):
    if what == "raises":
        yield {"prompt": "a"}
        raise OSError("gone")
    yield from {"text": ["a"], "column": [{"question": "a"}], "empty": []}[what]


def own(name: str, **fields: object) -> TaskSource:
    return TaskSource.model_validate({"source": "function", "name": f"{__name__}:{name}", **fields})


def test_a_function_yields_rows():
    found = read_tasks(own("sums", parameters={"count": 3, "start": 5}, limit=2))
    assert len(found.tasks) == 2
    assert {(t.prompt, t.answer, t.metadata["level"]) for t in found.tasks} <= {
        ("5+1=", "6", 1), ("6+1=", "7", 0), ("7+1=", "8", 1),
    }  # fmt: skip
    assert found.tasks[0].source == f"function:{__name__}:sums"
    renamed = own("sums", parameters={"count": 2}, columns={"prompt": "answer", "answer": ""})
    assert [task.prompt for task in load_tasks(renamed)] == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("sums", {}, r"sums called with {} raised TypeError: missing a required argument: 'count'"),
        ("sums", {"count": 2, "strat": 1}, "got an unexpected keyword argument 'strat'"),
        ("no_rows", {"what": "text"}, "row 0: it yielded a str; valid: dictionaries of prompt, answer"),
        ("no_rows", {"what": "column"}, 'row 0: missing "prompt"; it has: question'),
        ("no_rows", {"what": "raises"}, "no_rows after row 0 raised OSError: gone"),
        ("no_rows", {"what": "empty"}, "holds no tasks"),
        ("no_such", {}, "has no 'no_such'; did you mean"),
    ],
)
def test_a_function_that_yields_none_says_why(name: str, parameters: dict[str, object], message: str):
    with pytest.raises(ConfigurationError, match=message):
        load_tasks(own(name, parameters=parameters))


def test_a_function_needs_its_name():
    with pytest.raises(ValueError, match="source 'function' needs 'name', module:function, not 'sums'"):
        TaskSource.model_validate({"source": "function", "name": "sums"})
