"""A reader of weights in a device's memory, in a process of its own: ``python -m benchmarks.parts.weight_reader DEVICE
FOLDER``. For each version on standard input it prints the seconds of fetching it, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import msgspec
import torch

from headway.records.generation import PublishedWeights
from headway.weights.device_memory import CudaMemory, DeviceMemory
from headway.weights.shared_memory import Subscriber

STAND_IN = Path(__file__).resolve().parents[2] / "tests" / "support"


def device_memory(device: str, folder: str) -> DeviceMemory:
    """The memory of the first GPU; on a CPU its stand-in of the tests: files in ``folder``."""
    if device == "cuda":
        return CudaMemory(torch.device("cuda", 0))
    sys.path.append(str(STAND_IN))
    return importlib.import_module("device_stand_in").SharedDevice(Path(folder))


def main() -> None:
    reader = Subscriber(device_memory(*sys.argv[1:]))
    for line in sys.stdin:
        published, started = msgspec.json.decode(line, type=PublishedWeights), time.perf_counter()
        reader.fetch(published)
        seconds = {"fetch": time.perf_counter() - started, "copy": reader.spent.copy_s, "check": reader.spent.hash_s}
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
