"""No root is needed: what an ordinary user gets, and what is said of what he doesn't."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sandbox_backends import leftovers_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
UID = 54_321
HERE = Path(__file__).parents[1] / "support"


def readable_by_all() -> bool:
    places = [HERE.parents[1] / "headway" / "sandbox" / "guest" / "zygote.py", *HERE.parents]
    return Path("/usr/bin/python3").exists() and all(place.stat().st_mode & 0o005 == 0o005 for place in places[1:])


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are those of an ordinary user then")
@pytest.mark.skipif(not readable_by_all(), reason="other users can't read this checkout")
@pytest.mark.parametrize("walls", ["own", "bubblewrap"])
def test_an_ordinary_user_has_sandboxes_too(walls: str):
    program = shutil.which("bwrap") if walls == "bubblewrap" else ""
    if program is None:
        pytest.skip("bubblewrap isn't installed: apt-get install bubblewrap")
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, UID, UID)
        command = [sys.executable, str(HERE / "sandbox_unprivileged.py"), name, str(UID), program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["uid"] == UID
        assert told["seen"] >= 2
        assert told["kept"] == "kept\n"
        assert told["said"][:2] == ["1000", "1000"]
        if walls == "own":  # bubblewrap's user is a user of ours, who is this one outside
            assert told["said"][2:4] == [str(UID), "1"], "it sees another user, who is this one outside"
        assert not any(fatal for fatal, _ in told["allowed"]), told["allowed"]
        if not told["memory_limit"]:
            assert int(told["said"][4]) == 96 * 1024, "each process is limited where the whole can't be"
            refused = [line for fatal, line in told["refused"] if fatal and "untrusted code could take all" in line]
            assert ["chown" in line and "sandbox.allow_unbounded" in line for line in refused] == [True]
            assert any("can take all memory" in line for _, line in told["allowed"]), (
                "it says so where that is accepted"
            )
        assert not leftovers_of(Path(name) / "state", UID)["directories"]
        assert list(Path(name, "state").iterdir()) == []
