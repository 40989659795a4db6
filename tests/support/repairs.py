"""The shipped repair environment under a random model, which knows no tools: each of its answers is made an edit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diary import Diary

from headway.rollout.environment import Episode
from headway.rollout.environments.repair import Repair

SOURCE = """\
LINES = '''
# notes
# end
'''.splitlines()[2:-1]
def last(): return int(LINES[-1].split()[1], 16) % 2
def double(value): return 2 * value
"""
HIDDEN = """\
from notes import double, last
def test_last():
    assert last() == 1
def test_double():
    assert double(2) == 4
"""


def write_repositories(file: Path, count: int = 200) -> None:
    """Tasks whose repository is one file, the diary."""
    found = {"files": {"notes.py": SOURCE}, "hidden_tests": {"hidden": HIDDEN}}
    rows = [json.dumps({"prompt": f"{index}?", **found}) + "\n" for index in range(count)]
    file.write_text("".join(rows), encoding="utf-8")


class Repairs(Diary, Repair):
    """What the hidden tests say of the repository at the end is the reward: 1 where the last edit's digest is odd."""

    async def write(self, line: str, episode: Episode) -> None:
        assert await self.edit_file("notes.py", "# end\n", line + "# end\n", episode) == "edited notes.py"
        assert int(await self.run("wc -l < notes.py", episode)) == 6 + len(episode.state["lines"])

    async def read(self, episode: Episode) -> str:
        content = await self.read_file("notes.py", episode)
        return content.partition("# notes\n")[2].partition("# end")[0]

    async def score(self, episode: Episode) -> Any:
        return {**await Diary.score(self, episode), **await Repair.score(self, episode)}
