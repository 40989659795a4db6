"""Search over a run's rollouts: it finds what looking at each one would, whatever grows, tears or is deleted."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.config.schema import LedgerConfig
from headway.records.errors import ConfigurationError
from headway.records.rollout import FinishedGroup
from headway.records.tokens import TokenIds
from headway.report.watch.cache import cache_folder
from headway.report.watch.rollouts import text_index
from headway.report.watch.rollouts.columns import StreamTail
from headway.report.watch.rollouts.text_index import TokenTable, fold, folded
from headway.report.watch.rollouts.watched_rollouts import WatchedRollouts
from headway.runtime.clock import VirtualClock
from headway.telemetry.rollouts.joined import JoinedRollouts
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.rollouts.segments import SegmentFile, list_segments
from headway.tokens.tokenizer import Tokenizer
from tests.support.real_tokenizers import write
from tests.support.recorded import random_group, rows_in

WORDS = [
    "the ",
    "answer",
    " É",
    "té",
    " Ответ",
    "你好",
    "<script>alert(1)</script>",
    "\n",
    "def f(x):",
    "İ",
    "ſK",
    "🙂",
    "x",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write("qwen", tmp_path_factory.mktemp("model")))


@pytest.fixture
def tokens(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable(tokenizer.vocabulary_bytes(), tokenizer.special_ids)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text_index, "_FIRST_ROWS", 3)  # several chunks
    monkeypatch.setattr(
        "headway.report.watch.rollouts.watched_rollouts._INDEX_WAIT_S", 60.0
    )  # tests don't wait for a thread
    monkeypatch.setattr("headway.report.watch.rollouts.columns._KEEP_ROWS", 1)


def written_groups(tokenizer: Tokenizer, count: int, first: int = 0) -> list[FinishedGroup]:
    """Groups whose tokens are some text, or none at all, in one or several sequences."""

    def own(ids: Any) -> TokenIds:
        encoded = tokenizer.encode("".join(chance.choice(WORDS) for _ in range(len(ids)))) if len(ids) % 3 else ids
        return TokenIds([int(n) % tokenizer.vocabulary_size for n in np.resize(np.array(encoded or [0]), len(ids))])

    found = []
    for index in range(first, first + count):
        chance, group = random.Random(index), random_group(index, 1 + index % 4)
        members = []
        for one in group.rollouts:
            branches = tuple(msgspec.structs.replace(b, response_ids=own(b.response_ids)) for b in one.branches)
            members.append(
                msgspec.structs.replace(
                    one, prompt_ids=own(one.prompt_ids), response_ids=own(one.response_ids), branches=branches,
                    reward=round(one.reward, 1),
                )
            )  # fmt: skip
        found.append(FinishedGroup(group=group.group, rollouts=tuple(members)))
    return found


def record(run: Path, groups: list[FinishedGroup], segment_bytes: int = 30_000) -> RolloutRecorder:
    """The recorder, not closed, of groups of which every second has ended."""
    recorder = RolloutRecorder(
        run, LedgerConfig(), VirtualClock(), lambda *a, **k: None, segment_bytes=segment_bytes, reserve_bytes=0
    )
    recorder.begin(lambda share: 0)
    recorder.unfinished(10_000, "task-1", {0: 5, 1: 70})
    for group in groups:
        recorder.finished(group)
        recorder.flush()
    for group in groups[::2]:
        index = group.group.index
        trains = index % 3 > 0
        recorder.ended([index], "trained" if trains else "filtered", "why", index // 4 if trains else None)
    recorder.flush()
    return recorder


def folded_text(text: bytes) -> bytes:
    """``text`` as a search sees it, character by character."""

    def lower(c: str) -> str:
        other = c.lower()
        same = len(other) == 1 and len(other.encode("utf-8", "surrogateescape")) == len(
            c.encode("utf-8", "surrogateescape")
        )
        return other if same and (ord(c) < 128) == (ord(other) < 128) and ord(c) < 1 << 16 else c

    return "".join(map(lower, text.decode("utf-8", "surrogateescape"))).encode("utf-8", "surrogateescape")


class BruteForce:
    """All rows of a record with their texts, looked at one by one."""

    def __init__(self, run: Path, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.vocabulary_bytes()
        ends = JoinedRollouts(run)
        self.rows: list[dict[str, Any]] = []
        for number, row in enumerate(rows_in(run)):
            sequences = [row["prompt_ids"], row["response_ids"], *(b["response_ids"] for b in row["branches"] or ())]
            row["texts"] = [folded_text(b"".join(vocabulary[i] for i in ids)) for ids in sequences]
            row["ending"], _, row["step"] = ends.end_of(row)
            spans = [row["span_versions"], *(b["span_versions"] for b in row["branches"] or ())]
            row["spans"] = [(own[0], own[-1]) for own in spans if own]
            self.rows.append(row | {"row": number})

    def search(self, query: dict[str, Any]) -> list[int]:
        order = query.get("order", "newest")
        found = [row for row in reversed(self.rows) if self._passes(row, query)]
        if order != "newest":
            key, sign = order.lstrip("-"), -1 if order.startswith("-") else 1
            found.sort(key=lambda row: row["row"] if order == "oldest" else sign * row[key])
        return [row["row"] for row in found]

    @staticmethod
    def _passes(row: dict[str, Any], query: dict[str, Any]) -> bool:
        needle = folded_text(query.get("text", "").encode())
        tests = [not needle or any(needle in text for text in row["texts"])]
        for name in ("reward", "tokens", "step"):
            for edge, sign in (("from", 1), ("to", -1)):
                if f"{name}_{edge}" in query:
                    tests.append(row[name] is not None and sign * row[name] >= sign * query[f"{name}_{edge}"])
        if "version_from" in query:
            tests.append(max((last for _, last in row["spans"]), default=-1) >= query["version_from"])
        if "version_to" in query:
            tests.append(min((first for first, _ in row["spans"]), default=1 << 30) <= query["version_to"])
        for name in ("solved", "group", "ending"):
            if name in query:
                tests.append(row[name] == query[name] and (name != "solved" or row["verified"]))
        if "task" in query:
            tests.append(row["task_id"].startswith(query["task"]))
        return all(tests) and (not query.get("failure") or row["failure"] is not None)


def queries(brute: BruteForce, count: int) -> Iterator[dict[str, Any]]:
    """Random queries, most of which find something."""
    chance = random.Random(count)
    for _ in range(count):
        row = chance.choice(brute.rows)
        text = chance.choice(row["texts"]).decode("utf-8", "ignore")
        at = chance.randrange(len(text) + 1)
        piece = text[at : at + chance.choice([1, 2, 5, 30])]
        upper = piece.upper() if len(piece.upper()) == len(piece) else piece
        possible = {
            "text": chance.choice([piece, upper, "absent word", "É"]),
            "reward_from": chance.random(), "reward_to": chance.random(), "tokens_from": chance.randrange(200),
            "tokens_to": chance.randrange(400), "solved": chance.random() < 0.5, "task": row["task_id"],
            "ending": row["ending"], "version_from": chance.randrange(6), "version_to": chance.randrange(6),
            "step_from": chance.randrange(12), "step_to": chance.randrange(12), "group": row["group"], "failure": True,
        }  # fmt: skip
        names = chance.sample(sorted(possible), chance.choice([0, 1, 1, 2, 3]))
        orders = ["newest", "oldest", "reward", "-reward", "tokens", "-tokens"]
        yield {name: possible[name] for name in {*names, *chance.choice([[], ["text"]])}} | {
            "order": chance.choice(orders)
        }


@pytest.fixture
def only_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of row numbers alone: their texts are read one by one."""
    monkeypatch.setattr(WatchedRollouts, "_summary", lambda self, table, row, found: {"row": row})


def all_pages(watched: WatchedRollouts, query: dict[str, Any], limit: int) -> list[int]:
    """The rows of all pages."""
    found: list[int] = []
    after = ""
    while True:
        page = watched.search(**query, limit=limit, after=after)
        assert not page["problems"]
        assert page["indexed_share"] == 1
        found += [row["row"] for row in page["rows"]]
        if page["after"] is None:
            return found
        assert len(page["rows"]) == limit
        after = page["after"]


@pytest.mark.slow
@pytest.mark.usefixtures("only_rows")
def test_search_finds_what_looking_at_each_rollout_finds(
    tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable
) -> None:
    record(tmp_path / "run", written_groups(tokenizer, 90)).close()
    assert len(list_segments(tmp_path / "run" / "rollouts" / "finished")) > 3
    brute = BruteForce(tmp_path / "run", tokenizer)
    watched = WatchedRollouts(tmp_path / "run", tokens)
    found_some = 0
    for query in queries(brute, 120):
        expected = brute.search(query)
        found_some += 0 < len(expected) < len(brute.rows)
        assert all_pages(watched, query, 1 + len(expected) // 2) == expected, query
        assert watched.search(**query, limit=500)["total"] == len(expected), query
    assert found_some > 45, "else the queries show nothing"
    watched.close()


def test_snippets_are_the_text_itself_and_whole_characters(
    tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable
) -> None:
    record(tmp_path / "run", written_groups(tokenizer, 30)).close()
    watched, whole = WatchedRollouts(tmp_path / "run", tokens), 0
    for text in ("SCRIPT>alert", "é", "你", "ответ", "DEF F(X)"):
        page = watched.search(text=text, limit=500)
        assert page["rows"], text
        for row in page["rows"]:
            shown = row["snippet"]
            assert folded(shown["match"]) == folded(text)
            shown_text = shown["before"] + shown["match"] + shown["after"]
            if "\ufffd" not in shown_text:  # tokens show broken characters otherwise
                assert any(shown_text in "".join(s["tokens"]) for s in watched.rollout(row["row"])["sequences"])
                whole += 1
    assert whole > 40
    watched.close()


def test_fold_keeps_every_character_in_its_place() -> None:
    characters = [chr(code) for code in range(1 << 16) if not 0xD800 <= code < 0xE000] + ["𐐀", "🙂"]
    text = "".join(characters).encode()
    assert folded("".join(characters)) == folded_text(text)
    assert folded("ÀÉΣЖＡ Straße") == "àéσжａ straße".encode()
    for seed in range(200):
        data = np.random.default_rng(seed).integers(0, 256, seed, np.uint8)
        assert len(fold(data.copy())) == seed, "broken characters neither"


# --- growth and damage -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("only_rows")
def test_what_arrives_between_two_calls_is_found(tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable) -> None:
    groups = written_groups(tokenizer, 60)
    recorder = record(tmp_path, groups[:20], segment_bytes=10_000)
    watched = WatchedRollouts(tmp_path, tokens)
    for number, group in enumerate(groups[20:], start=20):
        recorder.finished(group)
        recorder.flush()
        recorder.ended([number], "trained", "", number)
        if number % 5 == 0:
            brute = BruteForce(tmp_path, tokenizer)
            for query in queries(brute, 12):
                assert all_pages(watched, query, 500) == brute.search(query), query
    recorder.close()
    watched.close()
    again = WatchedRollouts(tmp_path, tokens)
    assert all_pages(again, {"text": "answer"}, 500) == BruteForce(tmp_path, tokenizer).search({"text": "answer"})
    again.close()


def test_long_record_is_read_in_parts(
    tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, written_groups(tokenizer, 30)).close()
    monkeypatch.setattr("headway.report.watch.rollouts.columns._BATCHES", 12)
    watched, counts = WatchedRollouts(tmp_path, tokens), list[int]()
    while (page := watched.search())["problems"]:
        assert "try again" in page["problems"][0]
        counts.append(page["rollouts"])
    whole = BruteForce(tmp_path, tokenizer)
    assert counts == sorted(set(counts))
    assert len(counts) == 2
    assert all_pages(watched, {}, 7) == whole.search({})
    watched.close()


@pytest.mark.slow
def test_newest_page_is_there_before_the_others_are_read(
    tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, written_groups(tokenizer, 90), segment_bytes=20_000).close()
    segments = list_segments(tmp_path / "rollouts" / "finished")
    newest = [row for row in BruteForce(tmp_path, tokenizer).search({}) if row >= segments[-3].first]
    whole = WatchedRollouts(tmp_path, tokens)
    whole.search(text="x")  # reads everything
    whole.close()
    cut = len(newest) - 2
    expected = [whole.search(limit=cut), whole.search(limit=1, after=str(newest[cut - 1]))]
    shutil.rmtree(cache_folder(tmp_path))

    may_read, opened, batches = threading.Event(), list[Path](), SegmentFile.batches
    read = WatchedRollouts._read
    monkeypatch.setattr(WatchedRollouts, "_read", lambda self: (may_read.wait(60.0), read(self)))
    monkeypatch.setattr(SegmentFile, "batches", lambda self, *a: (opened.append(self.path), batches(self, *a))[1])
    watched = WatchedRollouts(tmp_path, tokens)
    found = [watched.search(limit=cut), watched.search(limit=1, after=str(newest[cut - 1]))]
    assert [page.pop("indexed_share") for page in found] == [0.0, 0.0]
    assert found == [{name: page[name] for name in page if name != "indexed_share"} for page in expected]
    assert {path for path in opened if path.parent.name == "finished"} == {one.path for one in segments[-3:]}
    may_read.set()  # what else is asked waits for it
    brute = BruteForce(tmp_path, tokenizer)
    assert all_pages(watched, {"text": "answer"}, 500) == brute.search({"text": "answer"})
    assert all_pages(watched, {}, 40) == brute.search({})
    watched.close()


def test_torn_batch_is_left_out_until_it_is_whole(tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable) -> None:
    record(tmp_path, written_groups(tokenizer, 12), segment_bytes=1 << 20).close()
    (segment,) = list_segments(tmp_path / "rollouts" / "finished")
    data = segment.path.read_bytes()
    whole = BruteForce(tmp_path, tokenizer)
    for cut in (0, 7, 500, len(data) // 2, len(data) - 30):
        segment.path.write_bytes(data[:cut])
        watched = WatchedRollouts(tmp_path, tokens)
        page = watched.search(text="e", limit=500)
        assert [str(segment.path) in problem for problem in page["problems"]] == [True], cut
        assert page["rollouts"] < len(whole.rows)
        assert [row["row"] for row in page["rows"]] == [n for n in whole.search({"text": "e"}) if n < page["rollouts"]]
        segment.path.write_bytes(data)
        assert all_pages(watched, {"text": "e"}, 500) == whole.search({"text": "e"})
        watched.close()
        shutil.rmtree(cache_folder(tmp_path))


def test_rows_behind_a_damaged_segment_keep_their_numbers(
    tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable
) -> None:
    record(tmp_path, written_groups(tokenizer, 60), segment_bytes=20_000).close()
    whole = BruteForce(tmp_path, tokenizer)
    first, second, third, *_ = list_segments(tmp_path / "rollouts" / "finished")
    second.path.write_bytes(b"\xa7" * 5000)
    watched = WatchedRollouts(tmp_path, tokens)
    page = watched.search(text="answer", limit=500)
    expected = [n for n in whole.search({"text": "answer"}) if not second.first <= n < third.first]
    assert [row["row"] for row in page["rows"]] == expected
    assert watched.search()["total"] == len(whole.rows) - (third.first - second.first), "what is lost is no row"
    assert len(page["problems"]) == 1
    with pytest.raises(ConfigurationError, match="can't be read"):
        watched.rollout(second.first)
    watched.close()
    assert first.first == 0


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["deleted", "garbage", "middle", "cut", "emptied", "swapped"])
def test_cache_may_be_deleted_or_damaged_at_any_time(
    damage: str, tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable
) -> None:
    run = tmp_path / "run"
    record(run, written_groups(tokenizer, 30)).close()
    brute = BruteForce(run, tokenizer)
    watched = WatchedRollouts(run, tokens)
    assert all_pages(watched, {"text": "answer"}, 500) == brute.search({"text": "answer"})
    files = [path for path in sorted(cache_folder(run).iterdir()) if path.suffix != ".lock"]
    assert len(files) == 4
    whole = {path: path.read_bytes() for path in files}
    for spoilt in (files, *([path] for path in files)):
        for path, data in whole.items():
            path.write_bytes(data)
        for path in spoilt:
            data, part = whole[path], len(whole[path]) // 4
            if damage == "deleted":
                path.unlink()
            else:
                middle = data[:part] + data[-part:] + data[2 * part :]
                damaged = {"garbage": b"\xfe" * len(data), "middle": middle, "cut": data[: 2 * part], "emptied": b""}
                path.write_bytes(damaged.get(damage, whole[files[files.index(path) - 1]]))
        fresh = WatchedRollouts(run, tokens)
        for one in (fresh, watched):
            one.search(text="answer")
            assert all_pages(one, {"text": "answer"}, 500) == brute.search({"text": "answer"}), spoilt
        fresh.close()
    watched.close()


def test_cache_of_another_record_in_the_same_place_is_not_used(
    tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable
) -> None:
    run = tmp_path / "run"
    for first in (0, 100):
        shutil.rmtree(run / "rollouts", ignore_errors=True)
        record(run, written_groups(tokenizer, 30, first)).close()
        watched = WatchedRollouts(run, tokens)
        brute = BruteForce(run, tokenizer)
        assert all_pages(watched, {"text": "the"}, 500) == brute.search({"text": "the"})
        watched.close()


def test_two_watchers_share_one_index(
    tmp_path: Path, tokenizer: Tokenizer, tokens: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, written_groups(tokenizer, 30)).close()
    brute = BruteForce(tmp_path, tokenizer)
    first, second = WatchedRollouts(tmp_path, tokens), WatchedRollouts(tmp_path, tokens)
    assert all_pages(first, {"text": "the"}, 500) == brute.search({"text": "the"})
    monkeypatch.setattr(StreamTail, "batches", lambda *a: pytest.fail("read again"))
    monkeypatch.setattr(second._columns, "table", first._columns.table)
    monkeypatch.setattr(first._columns, "_fresh", lambda *a: iter(()))
    assert all_pages(second, {"text": "the"}, 500) == brute.search({"text": "the"})
    first.close()
    second.close()


# --- other runs ------------------------------------------------------------------------------------------


def test_without_a_tokenizer_figures_are_searched_and_text_is_said_to_be_not(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    record(tmp_path, written_groups(tokenizer, 10)).close()
    watched = WatchedRollouts(tmp_path, None)
    assert watched.search(solved=True)["total"] == len(BruteForce(tmp_path, tokenizer).search({"solved": True}))
    page = watched.search(text="the")
    assert page["rows"] == []
    assert "tokenizer" in page["problems"][0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("order", "best"), ("reward_from", "x"), ("ending", "lost"), ("after", "x"), ("limit", "x"), ("colour", "red")],
)
def test_bad_queries_name_the_key(name: str, value: str, tmp_path: Path, tokens: TokenTable) -> None:
    with pytest.raises(ConfigurationError, match=name):
        WatchedRollouts(tmp_path, tokens).search(**{name: value})


def test_folder_without_rollouts_is_empty(tmp_path: Path, tokens: TokenTable) -> None:
    watched = WatchedRollouts(tmp_path, tokens)
    page = watched.search(text="x")
    assert (page["rows"], page["total"], page["rollouts"]) == ([], 0, 0)
    assert watched.tasks(4)["tasks"] == []
    assert watched.newest_of_task("x") is None
    with pytest.raises(ConfigurationError, match="row = 0"):
        watched.rollout(0)
    watched.close()
