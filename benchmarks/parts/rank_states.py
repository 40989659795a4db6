"""A trainer's rank that says how much memory its state has (ranks.py)."""

from __future__ import annotations

from headway.trainer.service import TrainerService


class MeasuredRank(TrainerService):
    def state_bytes(self) -> int:
        """Of the live storages of weights, gradients and moments."""
        storages = [tensor.untyped_storage() for tensor in self.learner.resident()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
