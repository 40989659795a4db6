"""Names of source files in stacks: where a file is decides, whatever the folders on the way are called."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from headway.runtime.stalls import stacks
from headway.runtime.stalls.stacks import short_path
from headway.runtime.stalls.watchdog import timeout_stack

ROOT = Path(__file__).parents[3]


def test_our_own_files_are_named_by_package_and_libraries_by_their_place():
    assert short_path(stacks.__file__) == "headway/runtime/stalls/stacks.py"
    assert short_path(os.path.realpath(stacks.__file__)) == "headway/runtime/stalls/stacks.py"
    assert short_path(asyncio.tasks.__file__) == "<library>/asyncio/tasks.py"
    assert short_path(xxhash.__file__) == "<library>/xxhash/__init__.py"
    assert short_path("<frozen importlib._bootstrap>") == "<frozen importlib._bootstrap>"
    assert short_path("<string>") == "<string>"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/headway/tests/support/stall_functions.py", "support/stall_functions.py"),
        ("/home/me/rewards/score.py", "rewards/score.py"),
        ("/home/me/my runs/score.py", "my runs/score.py"),
        ("/home/me/headway/rewards.py", "me/headway/rewards.py"),  # of no package of ours
        ("/srv/headway/headway/rewards.py", "srv/headway/headway/rewards.py"),
        ("/headway/rewards.py", "/headway/rewards.py"),
        ("/home/me/lib/python3.11/mine/score.py", "mine/score.py"),
        ("/home/me/site-packages/mine/score.py", "mine/score.py"),
        (f"{ROOT}/headway_rewards/score.py", "headway_rewards/score.py"),
        ("score.py", "score.py"),
    ],
)
def test_a_user_s_file_is_never_taken_for_ours_or_a_library_s(path: str, name: str):
    assert short_path(path) == name


@pytest.mark.parametrize("place", ["headway", "site-packages", "my runs", "lib/python3.11/headway"])
def test_the_package_is_found_wherever_it_lies(place: str, tmp_path: Path):
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / "headway").symlink_to(ROOT / "headway")
    (folder / "mine").mkdir()
    (folder / "mine/coins.py").write_text("def reply():\n    raise ValueError('none')\n")
    code = (
        "from headway.runtime.hooks import source_location\nfrom headway.runtime.stalls import stacks\n"
        "from mine import coins\n"
        "print(stacks.__file__, stacks.short_path(stacks.__file__), stacks.short_path(coins.__file__), sep='\\n')\n"
        "try: coins.reply()\nexcept ValueError as error: print(source_location(error))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    ours, own, users, raised = ended.stdout.splitlines() or [ended.stderr, "", "", ""]
    assert Path(ours).is_relative_to(folder)
    assert own == "headway/runtime/stalls/stacks.py"
    installed = place == "site-packages"
    assert users == ("<library>/mine/coins.py" if installed else "mine/coins.py")
    assert raised == ("" if installed else "coins.py:2 in reply")


def test_a_watchdogs_traceback_is_that_of_the_methods():
    threads = {
        "links": '  File "/lib/selectors.py", line 468 in select\n  File "/lib/threading.py", line 9 in run\n',
        "methods": (
            '  File "/user/simulator.py", line 7 in step\n  File "/headway/flow/host.py", line 9 in serve_methods\n'
            '  File "/lib/threading.py", line 1002 in _bootstrap\n'
        ),
        "main": '  File "/lib/threading.py", line 320 in wait\n',
    }
    dump = "\n".join(f"Thread 0x00007f (most recent call first):\n{frames}" for frames in threads.values())
    log = f"Timeout (of a library)\nTimeout (0:01:06)!\n{dump}"
    assert timeout_stack(log).splitlines()[:2] == ["Timeout (0:01:06)!", '  File "/user/simulator.py", line 7 in step']
    assert "select" not in timeout_stack(log)
    assert "wait" not in timeout_stack(log)
    in_main = log.replace("serve_methods", "other")
    assert timeout_stack(in_main) == 'Timeout (0:01:06)!\n  File "/lib/threading.py", line 320 in wait'
    assert timeout_stack(f"Timeout (of a library)\nFatal Python error: Segmentation fault\n\n{dump}") == ""
