"""A trainer's rank that measures its memory and what it reads from disk."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed.fsdp
import torch.distributed.tensor._utils  # noqa: F401  # imports read files and take memory: not those of a load

from headway.models.packed_model import PackedModel
from headway.trainer import learner
from headway.trainer.service import TrainerService


def anonymous_bytes(status: str) -> int:
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


class MeasuredTrainer(TrainerService):
    """The worker's class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._peak_bytes = self._read_bytes = self._sampled_bytes = 0
        threading.Thread(target=self._sample, daemon=True).start()
        opened, divided = learner.open_base, learner.Learner._open_divided

        def counted(open_model: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> PackedModel:
                started_bytes = self._bytes_read()
                model = open_model(*arguments, **options)
                self._read_bytes = self._bytes_read() - started_bytes
                return model

            return call

        with (
            mock.patch.object(learner, "open_base", counted(opened)),
            mock.patch.object(learner.Learner, "_open_divided", counted(divided)),
        ):
            super().__init__(*arguments, **options)

    def _sample(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            self._sampled_bytes += len(status)
            self._peak_bytes = max(self._peak_bytes, anonymous_bytes(status))
            time.sleep(0.001)

    def _bytes_read(self) -> int:
        return int(Path("/proc/self/io").read_text().split()[1]) - self._sampled_bytes  # rchar

    def measured(self) -> tuple[int, int]:
        """The largest anonymous memory since the start, and the bytes read to load the model."""
        return self._peak_bytes, self._read_bytes
