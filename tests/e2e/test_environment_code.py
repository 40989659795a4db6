"""The environment "code" with real sandboxes: honest programs, and all that programs may try to look honest."""

from __future__ import annotations

import textwrap

import pytest
from scripted_episodes import Played, end_sandboxes, kill_sandboxes_soon, need_limits, play, run_out_of_memory
from tiers import first

from headway.config.endpoint import EnvironmentConfig
from headway.records.errors import ConfigurationError
from headway.rollout.hosting.service import load_environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
SUMS = {"tests": [{"stdin": f"{n} {n + 1}\n", "stdout": f"{2 * n + 1}\n", "public": n < 2} for n in range(6)]}
CALLS = {
    "function": "ordered",
    "tests": [{"arguments": [[3, 1, n]], "returns": sorted([3, 1, n])} for n in range(5)],
}
FAST = {"timeout_s": 2.0, "interpreter": ["python3", "-I", "-S"]}


def program(code: str) -> str:
    return f"Here it is.\n```python\n{textwrap.dedent(code).strip()}\n```\n"


def judge(code: str, metadata: dict | None = None, **parameters) -> Played:
    return play("code", metadata or SUMS, [program(code)], {**FAST, **parameters})


HONEST_SUM = "a, b = map(int, input().split())\nprint(a + b)"
HONEST_CALL = "def ordered(numbers: List[int]) -> tuple:\n    print('busy')\n    return tuple(sorted(numbers))"


@pytest.mark.slow
def test_honest_programs_pass():
    played = judge(HONEST_SUM)
    assert (played.reward, played.verdict.solved, played.outcomes) == (1.0, True, {"passed": 6})
    played = judge(HONEST_CALL, CALLS)
    assert (played.reward, played.outcomes) == (1.0, {"passed": 5})
    wrapped = "class Solution:\n    def ordered(self, numbers):\n        return sorted(numbers)"
    assert judge(wrapped, CALLS).reward == 1.0
    exits = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)"
    assert judge(exits).reward == 1.0


def test_the_share_that_passes():
    code = "a, b = map(int, input().split())\nprint(a + b if a < 3 else 0)"
    played = judge(code, reward="share")
    assert (played.reward, played.outcomes) == (0.5, {"passed": 3, "wrong": 3})
    assert not played.verdict.solved
    assert judge(code).outcomes == {"passed": 3, "wrong": 1, "not run": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(17)", "wrong"),
        ("", "wrong"),
        ("print(", "error"),
        ("raise SystemExit(3)", "error"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(100)", "timeout"),
        ("while True: print('x' * 1000)", "timeout"),
        ("print('x' * (1 << 21))", "truncated output"),
        ("import os; os.kill(os.getpid(), 9)", "error"),
    ],
)
def test_what_goes_wrong_is_counted(code, outcome):
    played = judge(code)
    assert played.reward == 0.0
    assert played.outcomes == {outcome: 1, "not run": 5}


def test_out_of_memory():
    need_limits()
    played = judge("held = [bytearray(1 << 20) for _ in range(1000)]")
    assert (played.reward, played.outcomes) == (0.0, {"out of memory": 1, "not run": 5})


def test_no_program():
    played = play("code", SUMS, ["I don't know."], FAST)
    assert (played.reward, played.verdict.detail["code"]) == (0.0, "none")


# Each of these knows where the tests of other systems keep what they know.
CHEATS_AT_STDOUT = {
    "says that it passed": "print('passed'); print('OK'); print('6 passed'); print('{\"reward\": 1.0}')",
    "leaves early": "import os; print('ok'); os._exit(0)",
    "plants a reward": """
        import os
        for name in ('reward', 'reward.txt', 'reward.json', 'result.json', '/work/reward', '/tmp/reward', 'expected'):
            open(name, 'w').write('1.0')
        """,
    "prints everything it was given": "import sys; sys.stdout.write(sys.stdin.read())",
    "prints everything at once": "print(*range(100000))",
    "kills whoever judges": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "kills its parent": "import os; os.kill(os.getppid(), 9)",
    "removes python": """
        import os, shutil
        for path in ('/usr/bin/python3', '/usr/bin/python3.11', '/usr/lib/python3.11'):
            try: os.unlink(path)
            except OSError: pass
        shutil.rmtree('/usr', ignore_errors=True); shutil.rmtree('/work', ignore_errors=True)
        """,
    "a symlink for a program": "import os; os.unlink('solution.py'); os.symlink('/dev/zero', 'solution.py')",
    "bombs": "import os\nwhile True: os.fork()",
    "fills the disk": """
        import os
        try:
            for number in range(100): open(f'/tmp/{number}', 'wb').write(bytes(1 << 20))
        except OSError: pass
        """,
    "uses up all inodes": """
        try:
            for number in range(100000): open(f'/tmp/{number}', 'wb')
        except OSError: pass
        """,
}


@pytest.mark.parametrize("cheat", first(4, CHEATS_AT_STDOUT, pytest.mark.long))
def test_cheats_with_what_is_printed(cheat):
    played = judge(CHEATS_AT_STDOUT[cheat], reward="share", total_s=6.0)
    assert played.reward == 0.0
    assert "passed" not in played.outcomes


SEARCH = """
import gc, glob, os, sys
def found():
    texts = [str(frame) for frame in sys._current_frames().values()]
    texts += [repr(value) for value in gc.get_objects() if isinstance(value, (dict, list, tuple, str))]
    for name in os.environ.values(): texts.append(name)
    places = ('/work/**', '/tmp/**', '/home/user/**', '/dev/shm/*')
    for pattern in ('/proc/*/cmdline', '/proc/*/environ', '/proc/*/fd/*', *places):
        for path in glob.glob(pattern, recursive=True):
            if path.startswith('/proc/' + str(os.getpid())) or 'self' in path: continue
            try: texts.append(open(path, 'rb').read(100000).decode('latin-1'))
            except OSError: pass
    for process in os.listdir('/proc'):
        if process.isdigit() and int(process) != os.getpid():
            try: texts.append(open(f'/proc/{process}/mem', 'rb').read(10).decode('latin-1'))
            except OSError: pass
    return texts
"""


def test_what_is_expected_is_nowhere_to_be_found():
    """Whatever of what is expected a program could see, it would see forwards: here it is spelt backwards."""
    told = {"tests": [{"stdin": "go", "stdout": "wanted-8f1c\n"}]}
    played = judge(SEARCH + "print(len(found()) > 100, [t for t in found() if 'f8-detnaw' in t[::-1]])", told)
    assert played.reward == 0.0
    assert played.verdict.detail["first_failure"]["got"] == "True []\n"
    called = {"function": "f", "tests": [{"arguments": [], "returns": "wanted-8f1c"}]}
    played = judge(SEARCH + "def f(): return [t for t in found() if 'f8-detnaw' in t[::-1]]", called)
    assert played.reward == 0.0
    assert played.verdict.detail["first_failure"]["got"] == "[]"


CHEATS_IN_A_CALL = {
    "equal to everything": """
        class Any(list):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
        def ordered(numbers): return Any()
        """,
    "leaves early": "import os; os._exit(0)",
    "leaves early from the call": "import os\ndef ordered(numbers): os._exit(0)",
    "leaves by an exception": "def ordered(numbers): raise SystemExit(0)",
    "patches the comparison": """
        import builtins, json, operator
        json.dumps = lambda *_, **__: 'true'
        builtins.all = lambda *_: True
        operator.eq = lambda *_: True
        def ordered(numbers): return True
        """,
    "prints a verdict": """
        def ordered(numbers):
            import os
            for descriptor in range(1, 20):
                try: os.write(descriptor, b'true\\n{"passed": true}\\npassed\\n')
                except OSError: pass
        """,
    "has several values": "def ordered(numbers): return {'any': [sorted(numbers)], 'reward': 1}",
    "answers twice": """
        import atexit, os, sys
        def ordered(numbers):
            for descriptor in range(3, 10):
                try: os.write(descriptor, b'[1]')
                except OSError: pass
            return sorted(numbers)[::-1]
        """,
    "nests deep": "def ordered(numbers):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "returns too much": "def ordered(numbers): return 'x' * (1 << 22)",
    "returns without end": "import itertools\ndef ordered(numbers): return itertools.count()",
    "is no function": "ordered = 5",
    "isn't there": "pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", first(4, CHEATS_IN_A_CALL, pytest.mark.long))
def test_cheats_in_a_call(cheat):
    played = judge(CHEATS_IN_A_CALL[cheat], CALLS, reward="share")
    assert played.reward == 0.0
    assert "passed" not in played.outcomes


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(20):
            try: os.close(descriptor)
            except OSError: pass
        time.sleep(1000)
    os._exit(0)
os.wait()
others = [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 1]
print(sum(b'python3' in open(f'/proc/{p}/cmdline', 'rb').read() for p in others))
"""


def test_a_daemon_does_not_live_to_see_the_next_test():
    """Itself and the daemon it has just made: with those of earlier tests there would be more."""
    assert judge(DAEMON, {"tests": [{"stdout": "2"}] * 4}).reward == 1.0


def test_every_test_has_a_directory_of_its_own_and_the_program_as_it_was_handed_in():
    code = "import os\nprint(os.listdir('.'))\nopen('solution.py', 'a').write('print(1)')\nopen('left', 'w')"
    assert judge(code, {"tests": [{"stdout": "['solution.py']"}] * 3}).reward == 1.0


PLANTS = """
import os, site, sys
home = os.path.expanduser('~')
for folder in (f'{home}/.local/lib/python3.11/site-packages', '/work', '.', '/tmp', '/usr/lib/python3/dist-packages'):
    try:
        os.makedirs(folder, exist_ok=True)
        for name in ('sitecustomize.py', 'usercustomize.py', 'json.py', 'typing.py', 'conftest.py', 'os.py'):
            open(f'{folder}/{name}', 'w').write('print(__name__); import os; os._exit(0)')
    except OSError: pass
for name in ('.profile', '.bashrc', '.pythonrc', '.pdbrc'):
    open(f'{home}/{name}', 'w').write('echo planted')
print('clean')
"""


def test_what_one_test_plants_is_not_run_by_the_next():
    assert judge(PLANTS, {"tests": [{"stdout": "clean"}] * 3}, interpreter=["python3", "-I"]).reward == 1.0


def test_the_time_of_all_tests_together_is_limited():
    """Or a policy whose programs never end would be taken for a machine that doesn't answer."""
    parameters = {**FAST, "reward": "share", "timeout_s": 0.5, "total_s": 1.2}
    slow = program("import time; time.sleep(100)")
    played = play("code", {"tests": [{"stdout": "x"}] * 60}, [slow], parameters, timeout_s=20.0)
    assert (played.reward, played.outcomes) == (0.0, {"timeout": 60})


# --- whose fault it is ----------------------------------------------------------------------------------------------


def test_a_sandbox_that_is_lost_is_no_reward():
    turns = [program("print(1)"), program(HONEST_SUM)]
    played = play("code", SUMS, turns, {**FAST, "feedback_turns": 1}, before_score=end_sandboxes)
    assert played.lost.boundary == "sandbox"


def test_a_sandbox_that_dies_under_a_test_is_infrastructure():
    slow = program("import time; time.sleep(100)")
    played = play("code", SUMS, [slow], {**FAST, "timeout_s": 60.0}, before_score=kill_sandboxes_soon)
    assert played.lost.infrastructure
    assert played.lost.boundary == "sandbox"


def test_a_sandbox_that_used_up_its_memory_is_the_programs_doing():
    parameters = {**FAST, "feedback_turns": 1, "reward": "share"}
    played = play("code", SUMS, [program("print(1)")] * 2, parameters, before_score=run_out_of_memory)
    assert (played.reward, played.outcomes) == (0.0, {"out of memory": 6})


def test_a_sandbox_without_the_interpreter_is_the_environments_fault():
    failure = judge(HONEST_SUM, interpreter=["pypy12"]).lost
    assert "pypy12 doesn't run in the sandbox" in failure.cause
    assert not failure.infrastructure


def test_a_task_without_tests_fails_before_anything_is_sampled():
    played = play("code", {"tests": []}, [program(HONEST_SUM)], FAST)
    assert "the task's tests can't be read" in played.lost.cause
    assert played.told == []


def test_parameters_are_checked():
    with pytest.raises(ConfigurationError, match="valid: all, share"):
        load_environment(EnvironmentConfig(name="code", parameters={"reward": "some"}))
    with pytest.raises(ConfigurationError, match="valid: tokens, lines"):
        load_environment(EnvironmentConfig(name="code", parameters={"compare": "exact"}))


# --- several turns --------------------------------------------------------------------------------------------------


def test_feedback_tells_of_public_tests_alone():
    turns = [program("print(7)"), "Hm.", program(HONEST_SUM), program("print(0)")]
    played = play("code", SUMS, turns, {**FAST, "feedback_turns": 3})
    assert played.reward == 1.0, "over once all public tests pass"
    first, second = played.told
    assert "test 1: wrong\ninput: 0 1\n\nexpected: 1\n\noutput: 7" in first
    assert "test 2: wrong" in first
    assert "test 3" not in first
    assert "There is no program in this answer" in second


def test_feedback_ends():
    played = play("code", SUMS, [program("print(7)")] * 3, {**FAST, "feedback_turns": 1})
    assert (played.reward, len(played.told)) == (0.0, 1)


def test_handing_in_with_a_tool():
    parameters = {**FAST, "submit": True, "feedback_turns": 1}
    turns = [[("submit", {"program": "x"})], [("submit", {"code": "print(7)"})], [("submit", {"code": HONEST_SUM})]]
    played = play("code", SUMS, turns, parameters)
    assert played.reward == 1.0
    assert "code: Field required" in played.told[0]
    assert "test 1: wrong" in played.told[1]
    assert play("code", SUMS, [[("submit", {"code": HONEST_SUM})]], {**FAST, "submit": True}).reward == 1.0
