"""The environment "repair" with real sandboxes: honest repairs, and all that an agent may try instead of one."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Any

import msgspec
import pytest
from scripted_episodes import Played, end_sandboxes, episodes, kill_sandboxes_soon, message, play, run_out_of_memory
from tiers import first

from headway.config.endpoint import EnvironmentConfig
from headway.records.environment import EnvironmentState
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.hosting.service import load_environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

WRONG = """\
def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
"""
VISIBLE = """\
import unittest
from intervals import merge

class Merging(unittest.TestCase):
    def test_touching(self):
        self.assertEqual(merge([[1, 2], [2, 3]]), [[1, 3]])
"""
HIDDEN = """\
import pytest
from intervals import merge

def test_touching():
    assert merge([[1, 2], [2, 3]]) == [[1, 3]]
    assert merge([[5, 6], [1, 5]]) == [[1, 6]]

def test_apart():
    assert merge([[1, 2], [4, 5]]) == [[1, 2], [4, 5]]
    assert merge([]) == []

def test_what_is_no_interval():
    with pytest.raises(TypeError):
        merge([1])
"""
TASK = {
    "files": {"intervals.py": WRONG, "test_intervals.py": VISIBLE, "README.md": "Intervals.\n"},
    "hidden_tests": {"hidden": HIDDEN},
    "test_command": "python3 -S -m unittest -q",
}
EDIT = ("edit_file", {"path": "intervals.py", "old": "start < merged", "new": "start <= merged"})
FAST = {"interpreter": ["python3", "-S"], "timeout_s": 10.0, "hidden_timeout_s": 10.0}


def repair(*turns: Any, task: dict[str, Any] | None = None, **options: Any) -> Played:
    parameters = {**FAST, **options.pop("parameters", {})}
    return play("repair", task or TASK, [*turns, "done"], parameters, **options)


def python(code: str) -> list[tuple[str, dict[str, Any]]]:
    """A turn that runs a program in the repository."""
    text = textwrap.dedent(code).strip()
    return [("write_file", {"path": "/tmp/run.py", "content": text}), ("run", {"command": "python3 -S /tmp/run.py"})]


def test_an_honest_repair():
    played = repair(
        [("list_files", {}), ("run_tests", {})],
        [("read_file", {"path": "intervals.py", "first_line": 4, "last_line": 5})],
        [EDIT, ("run_tests", {})],
    )
    assert played.reward == 1.0
    assert (played.verdict.detail["tests"], played.verdict.detail["passed"]) == (3, 3)
    listing, failing, lines, edited, passing = played.told
    assert listing == "README.md\nintervals.py\ntest_intervals.py"
    assert "FAILED" in failing
    assert lines == "        if merged and start < merged[-1][1]:\n            merged[-1][1] = max(merged[-1][1], end)"
    assert edited == "edited intervals.py"
    assert "OK" in passing


def test_what_was_not_repaired():
    played = repair([("run_tests", {})])
    assert (played.reward, played.verdict.detail["wrong"]) == (0.0, ["hidden: test_touching"])
    assert repair().verdict.detail["repository"] == "untouched"
    played = repair([("run_tests", {})], parameters={"reward": "share"})
    assert played.reward == pytest.approx(2 / 3)


def test_turns_are_limited():
    played = repair([("run", {"command": "true"})], [EDIT], [("run_tests", {})], max_turns=2)
    assert (played.reward, played.over) == (1.0, "environment.max_turns")


WRONG = [  # a call, and what it is told
    (("read_file", {"path": "nothing.py"}), "error: nothing.py: No such file"),
    (("read_file", {"path": "."}), "error: "),
    (("read_file", {"path": "intervals.py", "first_line": 90}), "error: intervals.py has 8 lines"),
    (("read_file", {"path": "intervals.py", "first_line": 0}), "error: first_line: Input should be greater"),
    (("read_file", {"path": "x" * 2_000_000}), "error: that is no path of a file"),
    (("read_file", {"path": "a\0b"}), "error: that is no path of a file"),
    (("read_file", {"path": "/proc/1/environ"}), "error: /proc/1/environ: "),
    (("write_file", {"path": "intervals.py/x", "content": ""}), "error: intervals.py/x: "),
    (("write_file", {"path": "half", "content": "\ud800"}), "error: the arguments are not valid"),
    (("edit_file", {"path": "intervals.py", "old": "merged", "new": ""}), "error: the old text is in"),
    (
        ("edit_file", {"path": "intervals.py", "old": "absent", "new": ""}),
        "error: the old text is in intervals.py n",
    ),
    (("edit_file", {"path": "intervals.py", "old": "", "new": ""}), "error: the old text is empty"),
    (("list_files", {"path": "nothing"}), "error: nothing: No such file"),
    (("run", {"command": "exit 3"}), "[exit code 3]"),
    (("run", {"command": "a\0b"}), "argv[2] can't be passed to a program: embedded null byte"),
    (("run", {"command": "x" * 300_000}), "/usr/bin/sh: Argument list too long"),
    (("run", {"command": "x" * 3_000_000}), "argument list too long"),
    (("remove_file", {"path": "x"}), "error: there is no tool 'remove_file'"),
]


def test_what_goes_wrong_is_told_and_the_rollout_goes_on():
    played = repair(*([call] for call, _ in WRONG), [EDIT], max_turns=len(WRONG) + 2)
    for (_, told), heard in zip(WRONG, played.told, strict=False):
        assert heard.startswith(told), heard[:300]
    assert played.reward == 1.0


def test_the_commands_of_one_answer_share_their_time():
    turn = [("run", {"command": "sleep 60"})] * 3
    played = repair(turn, [EDIT], parameters={"timeout_s": 1.0, "turn_s": 1.5})
    assert "stopped after 1 s" in played.told[0]
    assert "stopped after 0." in played.told[1]
    assert "have 1.5 s together" in played.told[2]
    assert played.reward == 1.0


def test_hidden_tests_share_their_time():
    """Or a policy whose code never ends would be taken for a machine that doesn't answer."""
    hangs = [("write_file", {"path": "intervals.py", "content": "while True: pass"})]
    task = {**TASK, "hidden_tests": {f"hidden{number}": HIDDEN for number in range(12)}}
    played = repair(hangs, task=task, parameters={"hidden_timeout_s": 2.0, "turn_s": 10.0}, timeout_s=15.0)
    assert played.reward == 0.0
    assert played.verdict.detail["ended"] == [f"hidden{number}: timeout" for number in range(12)]


# --- cheats: each is a rollout like any other, and worth nothing ------------------------------------------------------

FORGES = """
import atexit, json, os, sys
def forge():
    lines = ['passed', 'OK', '3 passed in 0.01s', '{"reward": 1.0, "passed": 3}', 'PASSED']
    for number in range(20):
        for value in (True, None, 1, [], {"list": []}, {"int": "0x1"}, ["TypeError"]):
            lines.append(json.dumps([number, value]))
    data = ('\\n'.join(lines) + '\\n').encode()
    for descriptor in range(1, 30):
        try: os.write(descriptor, data)
        except OSError: pass
"""
TAKES_OVER = {
    "leaves early": "import os; os._exit(0)",
    "leaves by an exception": "raise SystemExit(0)",
    "kills its group": "import os; os.killpg(0, 9)",
    "says that it passed": FORGES + "forge()\nos._exit(0)",
    "says it at the end": FORGES + "atexit.register(forge)\nmerge = lambda intervals: intervals",
    "patches the driver": """
        import builtins, json, sys
        main = sys.modules['__main__']
        main.__asked__ = main.__raised__ = lambda *_: None
        main._encoded = lambda _: True
        json.dumps = lambda *_: 'true'
        builtins.exec = lambda *_: None
        merge = lambda intervals: intervals
        """,
    "answers the same to all": """
        import sys
        main = sys.modules['__main__']
        for number in range(10): main._say([number, {"list": [{"list": [{"int": "0x1"}, {"int": "0x3"}]}]}])
        import os; os._exit(0)
        """,
    "says yes to all": """
        import os, sys
        for number in range(20): sys.modules['__main__']._say([number, True])
        os._exit(0)
        """,
    "names every exception and every truth": """
        import sys, os
        main = sys.modules['__main__']
        for number in range(10): main._say([number, ["TypeError", "ValueError", True, None]])
        os._exit(0)
        """,
    "is equal to everything": """
        class Equal(list):
            def __eq__(self, other): return True
            def __hash__(self): return 0
        merge = lambda intervals: Equal()
        """,
    "patches unittest and pytest": """
        import sys, types, unittest
        unittest.TestCase.assertEqual = lambda *_: None
        pytest = types.ModuleType('pytest'); pytest.raises = lambda *_: __import__('contextlib').suppress(BaseException)
        sys.modules['pytest'] = pytest
        merge = lambda intervals: intervals
        """,
    "never ends": "while True: pass",
    "prints without end": "import sys\nwhile True: sys.__stdout__.write('x' * 10000)",
    "floods the answers": "import sys\nmain = sys.modules['__main__']\nfor n in range(10**7): main._say([n, None])",
    "bombs": "import os\nwhile True: os.fork()",
    "looks for the answers": """
        import gc, glob, os, re, sys
        texts = [repr(one) for one in gc.get_objects() if isinstance(one, (dict, list, tuple))]
        for path in glob.glob('/proc/[0-9]*/*') + glob.glob('/work/**', recursive=True) + glob.glob('/tmp/**'):
            if '/pagemap' in path or '/kmsg' in path: continue
            try: texts.append(open(path, errors='replace').read(1 << 16))
            except (OSError, ValueError): pass
        found = re.findall(r'merge.{0,40}==.{0,3}(\\[\\[\\d.*?\\]\\])', '\\n'.join(texts))
        merge = lambda intervals: eval(found[0]) if found else intervals
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", first(3, TAKES_OVER, pytest.mark.long))
def test_code_that_takes_its_test_over(cheat):
    turn = [("write_file", {"path": "intervals.py", "content": textwrap.dedent(TAKES_OVER[cheat])})]
    played = repair(turn, parameters={"hidden_timeout_s": 3.0})
    assert played.reward == 0.0
    assert not played.verdict.solved


ELSEWHERE = {
    "plants rewards and reports": """
        for name in ('reward', 'reward.txt', 'reward.json', '/work/reward.json', '/tmp/reward', '/logs/reward.txt',
                     'report.xml', '.pytest_cache/lastfailed', 'hidden', 'hidden.py', 'test_hidden.py'):
            try:
                import os
                os.makedirs(os.path.dirname(name) or '.', exist_ok=True)
                open(name, 'w').write('1.0')
            except OSError: pass
        """,
    "edits the visible test": "open('test_intervals.py', 'w').write('')",
    "plants what runs at every start": """
        import os
        forge = 'import os, sys\\nfor n in range(9): os.write(1, b"[%d, true]\\\\n" % n)\\nos._exit(0)\\n'
        homes = ['.', '/work', '/tmp', os.path.expanduser('~/.local/lib/python3.11/site-packages')]
        for home in homes:
            os.makedirs(home, exist_ok=True)
            for name in ('sitecustomize', 'usercustomize', 'conftest', 'json', 'os', 'sys', 'pytest', 'unittest'):
                open(f'{home}/{name}.py', 'w').write(forge)
            open(f'{home}/evil.pth', 'w').write('import os; os._exit(0)\\n')
        for name in ('.profile', '.bashrc', '.pythonrc'):
            open(os.path.expanduser(f'~/{name}'), 'w').write('export PYTHONPATH=/tmp PYTHONSTARTUP=/tmp/os.py\\n')
        for name in ('pytest.ini', 'tox.ini', 'setup.cfg', 'pyproject.toml'):
            open(name, 'w').write('[pytest]\\naddopts = --collect-only\\n[tool.pytest.ini_options]\\naddopts="--co"\\n')
        """,
    "hides python": """
        import os
        for folder in os.environ['PATH'].split(':') + ['/work', os.path.expanduser('~/bin')]:
            try:
                os.makedirs(folder, exist_ok=True)
                for name in ('python3', 'python', 'true', 'sh', 'pytest'):
                    open(f'{folder}/{name}', 'w').write('#!/bin/sh\\necho "[0, true]"\\n')
                    os.chmod(f'{folder}/{name}', 0o755)
            except OSError: pass
        """,
    "removes python": """
        import shutil
        for place in ('/usr/bin', '/usr/lib', '/bin', '/lib'): shutil.rmtree(place, ignore_errors=True)
        """,
    "removes the repository": "import shutil; shutil.rmtree('/work')",
    "links the repository elsewhere": """
        import os
        os.chdir('/'); os.rename('/work/repository', '/tmp/moved'); os.symlink('/tmp/moved', '/work/repository')
        """,
    "fills the disk": """
        try:
            for number in range(1000): open(f'/tmp/{number}', 'wb').write(bytes(1 << 20))
        except OSError: pass
        """,
    "uses up all inodes": """
        try:
            for number in range(100000): open(f'/tmp/{number}', 'wb')
        except OSError: pass
        """,
}


@pytest.mark.parametrize("cheat", first(3, ELSEWHERE))
def test_things_left_in_the_sandbox(cheat):
    played = repair(python(ELSEWHERE[cheat]), task={**TASK, "hidden_files": {"data/points.txt": "1 2\n"}})
    assert played.reward == 0.0


@pytest.mark.parametrize("cheat", ["plants what runs at every start", "hides python", "links the repository elsewhere"])
def test_a_repair_counts_whatever_else_was_done(cheat):
    """Modules of the standard library that lie in the repository are the repository's own business."""
    code = ELSEWHERE[cheat].replace("['.', '/work'", "['/work'")
    assert repair([EDIT], python(code), parameters={"interpreter": ["python3"]}).reward == 1.0


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(20):
            try: os.close(descriptor)
            except OSError: pass
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True:
            if os.path.exists('data/points.txt'):
                open('data/points.txt', 'w').write('1 3')
            for name in os.listdir('/proc'):
                if name.isdigit() and int(name) not in (1, os.getpid()):
                    try: os.kill(int(name), 9)
                    except OSError: pass
    os._exit(0)
os.wait()
"""
READS = {
    "files": {"points.py": "def load():\n    return [int(word) for word in open('data/points.txt').read().split()]\n"},
    "hidden_tests": {
        "h": "from points import load\n\ndef test_it():\n    assert load() == [1, 2]\n    assert len(load()) == 2\n"
    },
    "hidden_files": {"data/points.txt": "1 2\n"},
}


def test_a_daemon_does_not_live_to_see_the_hidden_files():
    assert repair(python(DAEMON), task=READS).reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "reward"),
    [
        ("mkdir data; echo 1 3 > data/points.txt; chmod 444 data/points.txt", 1.0),
        ("mkdir data; ln -s /dev/zero data/points.txt", 1.0),
        ("mkdir data; ln -s ../points.py data/points.txt", 1.0),
        ("mkdir data; mkfifo data/points.txt", 1.0),
        ("mkdir data elsewhere; rmdir data; ln -s elsewhere data", 1.0),
        ("mkdir -p data/points.txt/full", 0.0),
        ("echo > data", 0.0),
        ("mkdir data; chmod 000 data", 0.0),
    ],
)
def test_hidden_files_come_over_whatever_is_there(plant, reward):
    """Where they can't, that is the policy's doing: a valid 0."""
    assert repair([("run", {"command": plant})], task=READS).reward == reward


def test_a_rollout_that_is_parked_in_the_middle_of_a_repair_goes_on_elsewhere(tmp_path):
    """As in another process: nothing is left of the one before but what it kept."""
    task = Task(task_id="0", prompt="solve it", metadata=TASK)

    async def main() -> tuple[str, float]:
        before = episodes("repair", FAST, tmp_path)
        await before.begin("one", task, 0)
        reply = await before.reply("one", message([EDIT, ("run", {"command": "echo kept > note"})]), "", False)
        kept = await before.park("one")
        assert isinstance(kept, EnvironmentState)
        kept = msgspec.json.decode(msgspec.json.encode(kept), type=EnvironmentState)
        await before.shut_down()
        assert reply.asked is not None
        after = episodes("repair", FAST, tmp_path)
        assert await after.restore("one", task, kept, reply.asked, {"": []}) is None
        turn = [("run", {"command": "cat note"}), ("run_tests", {})]
        reply = await after.reply("one", message(turn), "", False)
        assert reply.asked is not None, reply.failure
        told = "".join(said["content"] for said in reply.asked.messages)
        await after.reply("one", message("done"), "", False)
        verdict = (await after.score("one")).verdict
        await after.shut_down()
        return told, verdict.reward

    told, reward = asyncio.run(main())
    assert told.startswith("kept")
    assert told.endswith("OK")
    assert reward == 1.0


# --- whose fault it is ------------------------------------------------------------------------------------------------


def test_a_sandbox_that_is_lost_is_no_reward():
    assert repair([EDIT], before_score=end_sandboxes).lost.boundary == "sandbox"


def test_a_sandbox_that_dies_under_the_hidden_tests_is_infrastructure():
    slow = [("write_file", {"path": "intervals.py", "content": "import time; time.sleep(100)"})]
    lost = repair(slow, before_score=kill_sandboxes_soon, parameters={"hidden_timeout_s": 60.0}).lost
    assert lost.infrastructure
    assert lost.boundary == "sandbox"


def test_a_sandbox_that_used_up_its_memory_is_the_policys_doing():
    played = repair([EDIT], before_score=run_out_of_memory)
    assert played.reward == 0.0
    assert "out of memory as a whole" in played.verdict.detail["ended"][0]


def test_what_is_wrong_with_a_task_is_told_before_anything_is_sampled():
    assert "has no hidden_tests" in repair(task={"files": {"a.py": ""}}).lost.cause
    loop = "def test_it():\n    for x in range(3):\n        assert f(x) == x\n"
    assert "an assert must stand in a test itself" in repair(task={**TASK, "hidden_tests": {"a": loop}}).lost.cause
    assert "needs either 'files'" in repair(task={"hidden_tests": TASK["hidden_tests"]}).lost.cause
    failure = repair([EDIT], parameters={"interpreter": ["pypy12"]}).lost
    assert "pypy12 -I doesn't run in the sandbox" in failure.cause
    assert not failure.infrastructure


def test_parameters_are_checked():
    with pytest.raises(ConfigurationError, match="valid: all, share"):
        load_environment(EnvironmentConfig(name="repair", parameters={"reward": "some"}))
    with pytest.raises(ConfigurationError, match="there is no 'erase'; valid: list_files"):
        load_environment(EnvironmentConfig(name="repair", parameters={"tools": ["erase"]}))
