"""Faults drawn over all packages at one commit, and carried to where their code lives at a later one.

The packages take turns, in an order drawn by the commit's hash, and each fault is drawn evenly from all that its
package has: a small package has as many as a big one. Left out are projects' templates (data), the two modules beside
the packages, and vLLM's engines, whose tests need an environment of their own. A fault runs against the tests of its
package and the golden ones alone, those that name its module first. Before, one run of these with a probe at every
fault's place (`execute`) says which files of tests get there at all: the others can't fail by it, and aren't run.

A fault that no test caught isn't run again. Others are carried by machine where the same expression stands in the same
function, or in one place of the package that can only be meant; otherwise by hand (`HAND`): where it lives now, or why
it is gone with its code.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

from planted_faults import ROOT, Clean, Fault, NoTests, catcher_of, copied, drawable, files_for, found_once, run_tests

LEFT_OUT = ("headway/templates/", "headway/generator/engines/vllm/")
MORE_TESTS = {"report": ["tests/unit/watch"], "services": ["tests/unit/watch"]}  # the page that watches runs
HAND = ROOT / "benchmarks/results/faults-carried.json"
TABLE = ROOT / "benchmarks/results/faults-120.txt"
TELLING = 12  # characters of an expression that is looked for in the whole package


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A fault that has run against the tests of its package at one commit."""

    number: int  # in the order in which faults are drawn
    commit: str
    fault: Fault
    test: str | None  # that catches it


def commit_of(name: str) -> str:
    """The hash of the commit that ``name`` stands for."""
    asked = subprocess.run(["git", "rev-parse", f"{name}^{{commit}}"], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        raise NoTests(asked.stderr.strip())
    return asked.stdout.strip()


def at_commit(commit: str, folder: Path) -> Path:
    """The files of ``commit``, in ``folder``."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=archive.stdout, check=True)
    return folder


@cache
def faults_of(module: str, root: Path) -> list[Fault]:
    """Every fault that can be drawn from ``module`` of the checkout ``root``."""
    return list(drawable(module, root))


@cache
def modules_of(root: Path) -> list[str]:
    """Modules that faults are drawn from, as paths in the checkout ``root``."""
    modules = (str(path.relative_to(root)) for path in (root / "headway").glob("*/**/*.py"))
    return sorted(module for module in modules if not module.startswith(LEFT_OUT))


def drawn_over_all(root: Path, commit: str) -> Iterator[Fault]:
    """Faults in the order in which they are drawn, the packages in turn, until there are none left."""
    chance = random.Random(commit)
    left: dict[str, list[Fault]] = {}
    for module in modules_of(root):
        left.setdefault(module.split("/")[1], []).extend(faults_of(module, root))
    packages = sorted(left)
    chance.shuffle(packages)
    while any(left.values()):
        for package in packages:
            if left[package]:
                yield left[package].pop(chance.randrange(len(left[package])))


GOLDEN = "tests/golden"


def folders_of(*modules: str) -> list[str]:
    """Folders of the tests of the packages that ``modules`` are in, and of the golden ones."""
    packages = dict.fromkeys(module.split("/")[1] for module in modules)
    folders = [folder for package in packages for folder in (f"tests/unit/{package}", *MORE_TESTS.get(package, []))]
    return [*dict.fromkeys(folders), GOLDEN]


# A process that a test starts has the name of the test in its environment; where it hasn't, any test may have been it.
_PROBE = """import os
_seen = set()
def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        try:
            with open(__file__ + ".hits", "a") as file:
                file.write(f"{number} {test}\\n")
        except OSError:
            pass
"""
ALONE = ("headway/sandbox/guest/", "headway/sandbox/linux/", "headway/kernels/guest/")  # import nothing but the library


@dataclass(frozen=True, kw_only=True)
class Executed:
    """How tests without a fault ran, with a probe at each fault's place."""

    files: dict[int, set[str]]  # that execute it, by number; a folder: not known which of it. Absent: it had no probe
    failed: dict[str, list[str]]  # by folder

    def reached(self, number: int, tests: Sequence[str]) -> list[str]:
        """Those files of ``tests`` that execute the place of a fault."""
        places = self.files.get(number, {"tests"})
        return [test for test in tests if any(f"{test}/".startswith(f"{place}/") for place in places)]

    def passed(self, test: str) -> bool:
        """Whether ``test`` passed; False: not known."""
        ran = [failed for folder, failed in self.failed.items() if test.startswith(f"{folder}/")]
        return any(test not in failed and test.partition("::")[0] not in failed for failed in ran)


def execute(faults: dict[int, Fault], clean: Path, folder: Path, notes: Path, at_once: int) -> Executed:
    """Run the tests of all packages that ``faults`` are in, with a probe at each place outside sandboxes.

    ``notes`` keeps what the tests of each folder have shown.
    """
    probed = {number: fault for number, fault in faults.items() if not fault.module.startswith(ALONE)}
    with_probes = copied(folder / "probed", clean)
    (with_probes / "planted_probe.py").write_text(_PROBE)
    for module in {fault.module for fault in probed.values()}:
        here = [(number, fault) for number, fault in probed.items() if fault.module == module]
        target = with_probes / module
        target.write_text(_with_probes(target.read_text(encoding="utf-8"), here), encoding="utf-8")
    known: dict[str, dict] = json.loads(notes.read_text()) if notes.exists() else {}

    def run(tests: str) -> None:
        mine = [number for number, fault in probed.items() if tests in folders_of(fault.module)]
        if tests in known and set(map(str, mine)) <= known[tests]["files"].keys():
            return
        copy = copied(folder / f"probed-{tests.replace('/', '-')}", with_probes)
        began = time.monotonic()
        ended = run_tests(copy, [tests], stop=False, limit_s=3600.0)
        if ended.code not in (0, 1):
            raise NoTests(f"{tests} don't run with probes: {ended.said}")
        hits = copy / "planted_probe.py.hits"
        lines = [line.partition(" ") for line in hits.read_text().splitlines()] if hits.exists() else []
        files = {str(number): sorted({file for n, _, file in lines if int(n) == number}) for number in mine}
        known[tests] = {"files": files, "failed": ended.failed}
        notes.write_text(json.dumps(known))
        share = f"{sum(map(bool, files.values()))} of {len(mine)}"
        print(f"{tests} executes the places of {share} faults, {time.monotonic() - began:.0f} s", flush=True)

    folders = dict.fromkeys(part for fault in probed.values() for part in folders_of(fault.module))
    with ThreadPoolExecutor(at_once) as several:
        list(several.map(run, folders))
    return Executed(
        files={
            number: {file or tests for tests in folders_of(fault.module) for file in known[tests]["files"][str(number)]}
            for number, fault in probed.items()
        },
        failed={tests: shown["failed"] for tests, shown in known.items()},
    )


def _with_probes(text: str, faults: Sequence[tuple[int, Fault]]) -> str:
    """``text`` of a module that notes each time when the expression of one of ``faults`` is evaluated."""
    edits = [(fault.start, 1, -len(fault.before), f"(_planted_hit({number}) or (") for number, fault in faults]
    edits += [(fault.start + len(fault.before), 0, len(fault.before), "))") for _, fault in faults]
    for at, _, _, more in sorted(edits, reverse=True):
        text = text[:at] + more + text[at:]
    future = re.search(r"^from __future__ import [^\n]*$", text, re.MULTILINE)
    if future is None:
        return "from planted_probe import hit as _planted_hit; " + text
    return f"{text[: future.end()]}; from planted_probe import hit as _planted_hit{text[future.end() :]}"


def read_results(path: Path) -> list[Tried]:
    """What `try_all` has written to ``path``, in the order in which faults were drawn."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    tried = [Tried(**row | {"fault": Fault(**row["fault"])}) for row in rows]
    return sorted(tried, key=lambda one: one.number)


def try_all(todo: Iterable[tuple[int, Callable[[], Tried]]], results: Path, at_once: int) -> bool:
    """Run ``todo``, ``at_once`` at a time, and add each result to ``results`` as it comes. False where one couldn't
    be run: the others are."""
    writing = threading.Lock()

    def one(number: int, run: Callable[[], Tried]) -> bool:
        try:
            tried = run()
        except NoTests as error:
            print(f"error: {number}: {error}", flush=True)
            return False
        with writing, results.open("a") as file:
            file.write(json.dumps(asdict(tried)) + "\n")
            print(f"{number} {tried.fault}: {tried.test or 'SURVIVED'}", flush=True)
        return True

    with ThreadPoolExecutor(at_once) as several:
        return all([done.result() for done in [several.submit(one, *part) for part in todo]])


def try_drawn(count: int, name: str, results: Path, folder: Path, at_once: int) -> bool:
    """Run the first ``count`` faults that are drawn at the commit ``name``; those in ``results`` are not run again."""
    commit = commit_of(name)
    clean = Clean(at_commit(commit, folder / "clean"))
    faults = dict(enumerate(itertools.islice(drawn_over_all(clean.folder, commit), count)))
    without = execute(faults, clean.folder, folder, results.with_suffix(".probes.json"), at_once)
    clean.passed = without.passed
    done = {tried.number for tried in read_results(results)}

    def run(number: int, fault: Fault) -> Tried:
        tests, _ = files_for(fault.module, folders_of(fault.module), clean.folder)
        test = catcher_of(fault, clean, [without.reached(number, tests)])
        return Tried(number=number, commit=commit, fault=fault, test=test)

    todo = [(number, partial(run, number, fault)) for number, fault in faults.items() if number not in done]
    return try_all(todo, results, at_once)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the expressions of the checkout ``old`` stand in the checkout ``new``."""

    old: Path
    new: Path
    renamed: dict[str, str]  # modules

    def place(self, fault: Fault) -> Fault | None:
        """``fault`` of the old checkout in the new one; None: not by machine."""
        module = self.renamed.get(fault.module, fault.module)
        before, after = self._same(fault, self.old, [fault.module]), self._same(fault, self.new, [module])
        inside = [one for one in after if one.function == fault.function]
        beside = [one for one in before if one.function == fault.function]
        if inside and len(inside) == len(beside):
            return inside[beside.index(fault)]
        if len(before) == len(after) == 1:
            return after[0]
        everywhere = self._same(fault, self.new, modules_of(self.new))
        name = fault.function.rpartition(".")[2]
        named = [one for one in everywhere if one.function.rpartition(".")[2] == name]
        if not inside and len(beside) == len(named) == 1:
            return named[0]
        once = len(self._same(fault, self.old, modules_of(self.old))) == len(everywhere) == 1
        return everywhere[0] if once and len(fault.before) >= TELLING else None

    def _same(self, fault: Fault, root: Path, modules: Sequence[str]) -> list[Fault]:
        there = (one for module in modules if (root / module).exists() for one in faults_of(module, root))
        return [one for one in there if one.what == fault.what and _plain(one.before) == _plain(fault.before)]


@cache
def _plain(expression: str) -> str:
    return ast.unparse(ast.parse(f"({expression})", mode="eval"))


def renamed_since(commit: str) -> dict[str, str]:
    """Modules that Git finds again under another path in the present checkout, by their path at ``commit``."""
    command = ["git", "diff", "-M", "--name-status", "--diff-filter=R", commit, "--", "headway"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {old: new for _, old, new in (line.split("\t") for line in said.splitlines())}


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A fault, and its place in the present checkout."""

    tried: Tried
    now: Fault | None
    gone: str = ""  # why, where its code is gone
    by_hand: bool = False


def carried(tried: Tried, places: Places, hand: dict[str, dict[str, str]]) -> Carried:
    """Find the place of ``tried``. Raises ValueError where one that was found by hand isn't there."""
    told, old = hand.get(str(tried.number)), tried.fault
    if told is None:
        return Carried(tried=tried, now=places.place(old))
    if told["was"] != f"{old.module}:{old.line}":
        raise ValueError(f"{HAND.name}: {tried.number} was {old.module}:{old.line}, not {told['was']}")
    if "gone" in told:
        return Carried(tried=tried, now=None, gone=told["gone"], by_hand=True)
    now = found_once(told["module"], told["before"], told["after"], old.what)
    return Carried(tried=tried, now=replace(now, function=told.get("function", "")), by_hand=True)


def first_to_try(test: str, root: Path) -> list[str]:
    """``test``, or its file, where it stands in the checkout ``root``; no two files of tests share a name."""
    path, _, name = test.partition("::")
    files = [str(file.relative_to(root)) for file in (root / "tests").rglob(Path(path).name)] if "/" in path else []
    if len(files) != 1:
        return []
    known = f"def {name.rpartition('::')[2].partition('[')[0]}(" in (root / files[0]).read_text(encoding="utf-8")
    return [f"{files[0]}::{name}"] if known and "[" not in name else files


def carry(count: int, source: Path, results: Path | None, folder: Path, clean: Clean, at_once: int) -> int:
    """Plant the first ``count`` faults of ``source`` whose code isn't gone in the present checkout, and run those that
    were caught against the tests of where they live now, and of the package that they came from. Without ``results``
    only their places are shown. Returns the exit code."""
    drawn = read_results(source)
    old = at_commit(drawn[0].commit, folder / "old")
    places = Places(old=old, new=ROOT, renamed=renamed_since(drawn[0].commit))
    hand = json.loads(HAND.read_text()) if HAND.exists() else {}
    found: list[Carried] = []
    while len([one for one in found if not one.gone]) < count and len(found) < len(drawn):
        found.append(carried(drawn[len(found)], places, hand))
    nowhere = [one for one in found if one.tried.test and not one.gone and one.now is None]
    short = count - len([one for one in found if not one.gone])
    for one in found if results is None else nowhere:
        print(f"{one.tried.number} {one.tried.fault} in {one.tried.fault.function}\n    {_place(one)}", flush=True)
    if short > 0:
        print(f"{short} more are needed: --all-packages {len(drawn) + short} --at {drawn[0].commit} --results {source}")
    if results is None or nowhere or short > 0:
        return 2 if nowhere or short > 0 else 0
    commit = commit_of("HEAD")

    def run(one: Carried, now: Fault, test: str) -> Tried:
        folders = folders_of(now.module, one.tried.fault.module)
        caught = None
        with contextlib.suppress(NoTests):  # a file that can't be imported has no test of that name
            caught = catcher_of(now, clean, [first_to_try(test, clean.folder)])
        caught = caught or catcher_of(now, clean, [files_for(now.module, folders, clean.folder)[0]])
        return Tried(number=one.tried.number, commit=commit, fault=now, test=caught)

    done = {tried.number for tried in read_results(results) if tried.commit == commit}
    todo = [
        (one.tried.number, partial(run, one, one.now, one.tried.test))
        for one in found
        if one.now and one.tried.test and one.tried.number not in done
    ]
    if not try_all(todo, results, at_once):
        return 2
    after = {tried.number: tried.test for tried in read_results(results) if tried.commit == commit}
    lines, figures = table(found, after, drawn[0].commit, commit)
    TABLE.write_text("\n".join([*lines, json.dumps(figures)]) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    return 1 if len(figures["lost"]) > 2 else 0


def table(found: Sequence[Carried], after: dict[int, str | None], old: str, new: str) -> tuple[list[str], dict]:
    """The lines of the table of all faults that were carried, and the figures of its last line."""
    here = [one for one in found if not one.gone]
    before = [one for one in here if one.tried.test]
    lost = [one.tried.number for one in before if after[one.tried.number] is None]
    lines = [
        f"Faults drawn over all packages at {old}, whose hash is the seed (packages in turn, evenly inside each), and",
        f"carried to where their code lives at {new}.",
        "Left out: headway/templates (data), vLLM's engines (an environment of their own). Each ran at the old commit",
        "against the files of its package's unit tests and of the golden ones that execute its place; those that were",
        "caught, at the new one against all of these and of the package that they live in now. A fault is caught by a",
        "test that fails, fails again alone, and passes without it. 'by hand': placed so (faults-carried.json).",
        "",
        "number | fault at the old commit | caught before by | place now | caught after by",
    ]
    for one in found:
        number, test = one.tried.number, one.tried.test
        then = "-" if one.gone else "not run" if test is None else after[number] or "LOST"
        lines.append(f"{number} | {one.tried.fault} | {test or 'survived'} | {_place(one)} | {then}")
    figures = {
        "planted": len(here),
        "caught_before": len(before),
        "caught_after": len(before) - len(lost),
        "lost": lost,
        "gone": [one.tried.number for one in found if one.gone],
        "by_hand": [one.tried.number for one in here if one.by_hand],
    }
    return lines, figures


def _place(one: Carried) -> str:
    if one.now is None:
        return f"gone: {one.gone}" if one.gone else "to carry by hand" if one.tried.test else "not looked for"
    old, now = one.tried.fault, one.now
    how = "by hand" if one.by_hand else "same" if now.module == old.module else "moved"
    return f"{now.module}:{now.line} {now.function} ({how})"
