"""Versions that go through a store: what a mirror says it has is the announced version, whatever the store does."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from faulty_store import HttpStore
from mirrored_weights import Context, Weights
from node_processes import KEY

from headway.records.errors import WeightsCorrupt
from headway.weights import stores
from headway.weights.mirror import MirrorService
from headway.weights.shared_memory import Publisher

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
SECRET = "a-secret-of-the-test"


def mirrors_at(address: str, run_id: str, nodes: str = "ab") -> list[MirrorService]:
    settings: dict[str, Any] = {"key": KEY, "epoch": 1, "orphan_s": 10.0, "ports": [0], "host": "127.0.0.1"}
    context = cast(Any, Context())
    return [MirrorService(context, run_id=run_id, node=node, store=address, **settings) for node in nodes]


@pytest.fixture
def http_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpStore]:
    monkeypatch.setattr(stores, "_FIRST_PAUSE_S", 0.01)
    store = HttpStore()
    yield store
    store.close()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher(tmp_path.name, directory=tmp_path, whole_every=7) as publisher:
        yield publisher


@pytest.mark.parametrize("fail_share", [0.0, 0.15])
def test_versions_come_through_an_http_server(http_store: HttpStore, publisher: Publisher, fail_share: float):
    http_store.fail_share = fail_share
    origin, reader, late = services = mirrors_at(http_store.address, publisher._stem, "abc")
    weights = Weights(kilobytes=200)
    for version in range(20):
        published = publisher.publish(version, weights.step())
        stored = origin.store_published(published)
        assert weights.are(reader.fetch(published, [], stored))
        if version >= 11:
            assert weights.are(late.fetch(published, [], stored))
        assert len(http_store.objects) <= 2 + len(published.deltas)
    assert reader.versions_by_deltas >= 14
    assert late.versions_whole <= 2
    assert not reader.problem_with(origin.address())
    for service in services:
        service.close()
    assert http_store.objects == {}, "it is left as it was"


@pytest.mark.parametrize("fault", ["forgotten delta", "forgotten whole", "flipped", "cut", "gone"])
def test_what_a_store_loses_or_damages_is_never_a_version(http_store: HttpStore, publisher: Publisher, fault: str):
    origin, reader = mirrors_at(http_store.address, publisher._stem)
    weights = Weights(kilobytes=200)
    published = publisher.publish(0, weights.step())
    reader.fetch(published, [], origin.store_published(published))
    published = publisher.publish(1, weights.step())
    stored = origin.store_published(published)
    deltas = [name for name in http_store.objects if name.endswith(".delta")]
    (whole,) = http_store.objects.keys() - set(deltas)
    if fault == "forgotten delta":
        del http_store.objects[deltas[0]]
    elif fault == "forgotten whole":
        del http_store.objects[whole]
    elif fault == "flipped":
        content = bytearray(http_store.objects[deltas[0]])
        content[-1] ^= 8
        http_store.objects[deltas[0]] = bytes(content)
    elif fault == "cut":
        http_store.objects[deltas[0]] = http_store.objects[deltas[0]][:-1]
    else:
        http_store.fail_share = 1.0
    if fault == "forgotten whole":
        assert weights.are(reader.fetch(published, [], stored))
    else:
        with pytest.raises(WeightsCorrupt):
            reader.fetch(published, [], stored)
    if fault == "gone":
        assert "weights.exchange" in reader.problem_with(origin.address())
    for service in (origin, reader):
        service.close()


@pytest.mark.parametrize("oddity", ["redirects", "has no lengths"])
def test_a_server_that_is_no_store_is_refused_by_name(http_store: HttpStore, publisher: Publisher, oddity: str):
    origin, reader = mirrors_at(http_store.address, publisher._stem)
    http_store.redirects, http_store.has_lengths = oddity == "redirects", oddity == "redirects"
    published = publisher.publish(0, Weights(kilobytes=20).step())
    with pytest.raises(WeightsCorrupt, match="status 307" if oddity == "redirects" else "no content-length"):
        reader.fetch(published, [], origin.store_published(published))
    for service in (origin, reader):
        service.close()


@pytest.fixture
def s3_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if find_spec("moto") is None:
        pytest.skip("moto isn't installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    server_file = Path(__file__).parents[1] / "support" / "faulty_store.py"
    with subprocess.Popen([sys.executable, server_file, str(port), "0.05"], stderr=subprocess.DEVNULL) as server:
        address = (
            f"s3://bucket/run?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1&allow_bucket_creation=1"
        )
        from pyarrow import fs

        for _ in range(100):
            try:
                fs.FileSystem.from_uri(address)[0].create_dir("bucket")
                break
            except OSError:
                time.sleep(0.2)
        yield address
        server.terminate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_versions_through_s3(
    s3_address: str, publisher: Publisher, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level(logging.DEBUG)
    origin, *readers = services = mirrors_at(s3_address, publisher._stem, "abc")
    weights, chances, fetched = Weights(kilobytes=100), random.Random(0), 0
    for version in range(int(os.environ.get("STORE_VERSIONS", "200"))):
        published = publisher.publish(version, weights.step())
        stored = origin.store_published(published)
        for reader in readers:
            if chances.random() < 0.7:
                assert weights.are(reader.fetch(published, [], stored))
                fetched += 1
    by_deltas = sum(reader.versions_by_deltas for reader in readers)
    assert by_deltas >= 0.6 * fetched
    for service in services:
        service.close()
    assert SECRET not in caplog.text
    assert SECRET not in "".join(capfd.readouterr())
    print(f"{fetched} versions fetched, {by_deltas} by deltas")
