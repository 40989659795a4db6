"""Whether a process leaks: its memory and its open sockets while it works.

    python benchmarks/soak.py PID [--seconds 600] [--every 2]

Looks from outside, every ``--every`` seconds, until the time is over or the process has ended. Of the samples the first
fifth is warm-up; the second fifth is compared with the last. It *leaks* when its resident memory has grown by more than
4 MB and 2 %, or its sockets by more than 8 (a pool of connections may breathe), from the median of the one to the
median of the other.

Last line, one JSON object: ``rss_mb`` (at the end), ``rss_growth_mb`` and ``sockets_growth`` (as above),
``rss_slope_mb_per_min`` (least squares after the warm-up), ``sockets``, ``files`` (all open ones), ``seconds``,
``leaks``. Exit code 1 when it leaks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from statistics import linear_regression, median
from typing import Any, NamedTuple

MEMORY_BYTES, MEMORY_SHARE = 4 << 20, 0.02
SOCKETS = 8


class Sample(NamedTuple):
    at_s: float
    rss_bytes: int
    sockets: int
    files: int  # open ones, sockets among them


def sample(pid: int) -> Sample:
    """What it holds now. Raises OSError when it is gone."""
    with open(f"/proc/{pid}/statm") as file:
        pages = int(file.read().split()[1])
    links: list[str] = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:  # closed a moment ago
            continue
    sockets = sum(link.startswith("socket:") for link in links)
    return Sample(time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE"), sockets, len(links))


def watch(pid: int, seconds: float, every_s: float) -> list[Sample]:
    """Samples until the time is over or the process has ended."""
    found: list[Sample] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        try:
            found.append(sample(pid))
        except OSError:
            break
        time.sleep(every_s)
    return found


def verdict(samples: Sequence[Sample]) -> dict[str, Any]:
    """What is printed. Raises ValueError for fewer than ten samples: nothing could be said."""
    if len(samples) < 10:
        raise ValueError(f"{len(samples)} samples: at least 10 are needed")
    fifth = len(samples) // 5
    early, late, warm = samples[fifth : 2 * fifth], samples[-fifth:], samples[fifth:]
    rss = [median(one.rss_bytes for one in part) for part in (early, late)]
    sockets = [median(one.sockets for one in part) for part in (early, late)]
    slope, _ = linear_regression([one.at_s for one in warm], [one.rss_bytes for one in warm])
    growth = rss[1] - rss[0]
    leaks = growth > max(MEMORY_BYTES, MEMORY_SHARE * rss[0]) or sockets[1] - sockets[0] > SOCKETS
    return {
        "rss_mb": samples[-1].rss_bytes / 1e6,
        "rss_growth_mb": growth / 1e6,
        "rss_slope_mb_per_min": 60 * slope / 1e6,
        "sockets": samples[-1].sockets,
        "sockets_growth": sockets[1] - sockets[0],
        "files": samples[-1].files,
        "seconds": samples[-1].at_s - samples[0].at_s,
        "leaks": leaks,
    }


async def watched(pid: int, seconds: float, every_s: float) -> dict[str, Any]:
    """`verdict` on a process that this file watches as a process of its own. Raises RuntimeError when that fails."""
    options = [f"--seconds={seconds}", f"--every={every_s}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(pid), *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    if not output:
        raise RuntimeError(f"soak.py ended with {process.returncode}: {errors.decode()[-2000:]}")
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pid", type=int)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds")
    options = parser.parse_args()
    found = verdict(watch(options.pid, options.seconds, options.every))
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))
    sys.exit(found["leaks"])


if __name__ == "__main__":
    main()
