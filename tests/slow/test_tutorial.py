"""docs/tutorial.md, done by the installed command in an empty folder: its files, changes and commands as they stand."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from page_blocks import Command, changed, do_page
from test_wheel import ROOT, built, headway, new_shell  # noqa: F401  (fixtures)

PAGE = ROOT / "docs/tutorial.md"
MOST_S = 20 * 60
# Fewer steps, smaller batches, less measuring: the commands, not what comes of them.
_BATCHES = ("--queue.groups_per_step=2", "--rollout.group_size=4")
_UNTESTED = ("--evaluation.test=never",)
SHORT = {
    "headway quickstart": ("--sft.steps=5", "--run.steps=2", "--queue.filter_zero_variance=false", *_UNTESTED),
    "headway sft": ("--sft.steps=40",),
    "headway check": ("--calibrate-s=1", *_BATCHES),
    "headway train": ("--run.steps=16", "--run.time_limit_s=200", "--evaluation.every_s=5", *_BATCHES, *_UNTESTED),
    "headway watch": ("--port=0",),
}
pytestmark = pytest.mark.real


def short(command: Command) -> tuple[str, ...]:
    options = SHORT.get(" ".join(command.text.split()[:2]), ())
    untested = command.waits_for is None and "--dry-run" not in command.text
    chosen = tuple(option for option in options if untested or option not in _UNTESTED)
    if "lag_s" in command.text:  # where episodes take seconds, and a model that was hardly taught solves few tasks
        chosen = (*chosen, "--evaluation.every_s=600", "--queue.filter_zero_variance=false")
    return chosen


def environment(command: Path) -> dict[str, str]:
    """Variables of a shell in which the command's environment is active."""
    kept = new_shell()
    return kept | {"PATH": f"{command.parent}:{kept['PATH']}", "COLUMNS": "100", "NO_COLOR": "1"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_works(headway: Path, tmp_path: Path) -> None:
    for ran in do_page(PAGE, tmp_path, environment(headway), short):
        print(f"{ran.seconds:6.1f} s  {ran.command.text}")
        assert ran.code == ran.command.code, f"{ran.command.text}: {ran.output[-3000:]}"
        assert ran.missing == [], f"{ran.command.text}: {ran.output}"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_tutorial_learns_in_twenty_minutes(headway: Path, tmp_path: Path) -> None:
    ran = list(do_page(PAGE, tmp_path, environment(headway)))
    assert [one.output for one in ran if one.code != one.command.code] == []
    reports = [one.output for one in ran if one.command.text.startswith(("headway quickstart", "headway report"))]
    assert ["Is it learning? Yes" in " ".join(output.split()) for output in reports] == [True, True]
    assert sum(one.seconds for one in ran) < MOST_S


def test_a_block_that_nobody_does_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nls\n```\n")
    with pytest.raises(ValueError, match="that nobody does"):
        list(do_page(page, tmp_path, {}))
    page.write_text("<!-- not run: why -->\n```sh\nls\n```\n")
    assert list(do_page(page, tmp_path, {})) == []


def test_a_change_fits_one_place() -> None:
    assert changed("a\nb\nc\n", " a\n-b\n+d\n") == "a\nd\nc\n"
    with pytest.raises(ValueError, match="0 places"):
        changed("a\nc\n", "-b\n+d\n")


if __name__ == "__main__":  # the whole page, as long as it takes: python tests/slow/test_tutorial.py /env/bin/headway
    for one in do_page(PAGE, Path(tempfile.mkdtemp(prefix="tutorial-")), environment(Path(sys.argv[1]))):
        print(f"$ {one.command.text}   [{one.code}, {one.seconds:.1f} s]\n{one.output}", flush=True)
