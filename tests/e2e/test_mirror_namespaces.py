"""Mirrors of three network namespaces, which lose versions, links and their processes, have what they say they have."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from mirror_process import MirrorProcess
from mirrored_weights import Weights
from node_processes import KEY, namespaces, no_namespaces, set_link

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights.shared_memory import Publisher, Subscriber
from headway.weights.slots import reap

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces()),
]


class Machines:
    """A publisher's mirror in a namespace, and readers in three others, one of which joins late."""

    def __init__(self, folder: Path, spaces: list[str], stack: ExitStack) -> None:
        settings: dict[str, Any] = {"run_id": folder.name, "key": KEY, "epoch": 1, "orphan_s": 10.0, "ports": [0]}
        self.mirrors = [
            stack.enter_context(
                closing(MirrorProcess(space, node="sxyz"[index], host=f"10.77.0.{index + 1}", **settings))
            )
            for index, space in enumerate(spaces)
        ]
        self.spaces = spaces
        self.counts = Counter[str]()

    def fetch(self, index: int, published: PublishedWeights, source: int) -> PublishedWeights | None:
        """Fetch a version from another mirror; None where that, or this one, has it no more."""
        reader = self.mirrors[index]
        old_statistics = reader.call("statistics")
        try:
            copy = reader.call("fetch", published, [(self.mirrors[source].address, ())])
        except WeightsCorrupt:
            self.counts["refused"] += 1
            return None
        statistics = reader.call("statistics")
        for key in ("versions_by_deltas", "versions_whole"):
            self.counts[key] += statistics[key] - old_statistics[key]
        return copy

    def kill_in_fetch(self, index: int, published: PublishedWeights, delay_s: float) -> None:
        """Kill a mirror while it fetches, and start another in its place."""
        reader = self.mirrors[index]
        reader.begin("fetch", published, [(self.mirrors[0].address, ())])
        time.sleep(delay_s)
        reader.kill()
        reader.start()
        self.counts["killed"] += 1

    def cut(self, index: int, seconds: float) -> threading.Timer:
        """Take a mirror's link down for some seconds; what is on its way is lost."""
        set_link(self.spaces[index], index, up=False)
        restored = threading.Timer(seconds, set_link, (self.spaces[index], index, True))
        restored.start()
        self.counts["cut"] += 1
        return restored


def are(copy: PublishedWeights, tensors: dict[str, torch.Tensor]) -> bool:
    fetched = Subscriber().fetch(copy)
    return all(torch.equal(fetched[name], tensor) for name, tensor in tensors.items())


def announcements(faults: random.Random, newest: int) -> list[int]:
    """The versions that a mirror is told to fetch now, the newest or the one before, in any order: none, or some, of
    which one may come twice."""
    chance = faults.random()
    if chance < 0.25 or newest == 0:
        return [] if newest else [0]
    return [newest, newest - 1] if chance < 0.35 else [newest] * (1 + (chance < 0.45))


def run_versions(folder: Path, versions: int) -> Counter[str]:
    """Publish so many, and compare every one that a mirror says it has; returns counts."""
    faults, weights = random.Random(1), Weights(kilobytes=400)
    history: dict[int, tuple[PublishedWeights, dict[str, torch.Tensor]]] = {}
    with (
        namespaces(4) as spaces,
        ExitStack() as stack,
        Publisher(folder.name, directory=folder, whole_every=200) as publisher,
    ):
        machines = Machines(folder, spaces, stack)
        for version in range(versions):
            tensors = weights.step()
            published = publisher.publish(version, tensors)
            machines.mirrors[0].call("serve_published", published)
            history[version] = published, {name: tensor.clone() for name, tensor in tensors.items()}
            history.pop(version - 2, None)
            holders = {0}
            for index in (1, 2, 3):
                if index == 3 and version < versions // 4:  # it joins late
                    continue
                for announced in announcements(faults, version):
                    offered, expected = history[announced]
                    if faults.random() < 0.1 and offered.deltas:
                        lost = faults.randrange(len(offered.deltas))
                        deltas = tuple(delta for n, delta in enumerate(offered.deltas) if n != lost)
                        offered = msgspec.structs.replace(offered, deltas=deltas)
                    if faults.random() < 0.04:
                        machines.kill_in_fetch(index, offered, faults.random() * 0.03)
                        holders.discard(index)
                        continue
                    restored = machines.cut(index, 0.3 * faults.random()) if faults.random() < 0.03 else None
                    source = faults.choice(sorted(holders)) if announced == version else 0
                    copy = machines.fetch(index, offered, source)
                    if restored is not None:
                        restored.join()
                    if copy is not None:
                        assert are(copy, expected), f"{index} has another version {announced}"
                        machines.counts["checked"] += 1
                        holders |= {index} if announced == version else set()
    reap(folder.name)
    assert not list(Path("/dev/shm").glob(f"headway-{folder.name}-*"))
    return machines.counts


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_versions_are_bit_equal_over_three_namespaces(tmp_path: Path):
    require_sound(run_versions(tmp_path, 40))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_versions_are_bit_equal_over_three_namespaces(tmp_path: Path):
    require_sound(run_versions(tmp_path, int(os.environ.get("DELTA_VERSIONS", "1000"))))


def require_sound(counts: Counter[str]) -> None:
    print(dict(counts))
    assert all(counts[name] for name in ("checked", "killed", "cut")), "every fault has happened"
    assert counts["versions_by_deltas"] >= 0.6 * counts["checked"]
    assert counts["refused"] <= 0.05 * counts["checked"]
