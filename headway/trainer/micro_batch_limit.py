"""The sizes of micro-batches, halved once when a device's memory can't hold one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar, cast

import torch

from headway.algorithms.step_plan import MicroBatchSize
from headway.config.schema import TrainerConfig
from headway.records.errors import HookFailed, OutOfDeviceMemory
from headway.trainer.learner import Learner

T = TypeVar("T")


class MicroBatchLimit:
    """The most tokens and samples of a micro-batch, equal on all ranks.

    ``may_halve``: False keeps the shapes of micro-batches, as ``run.deterministic`` promises."""

    def __init__(self, settings: TrainerConfig, learner: Learner, *, may_halve: bool) -> None:
        self.size = MicroBatchSize.of(settings)
        self.halved = ""  # which micro-batches were halved, and why
        self._may_halve = may_halve
        self._learner = learner

    def attempt(self, passes: Callable[[], T], undo: Callable[[], None]) -> T:
        """Return what the ``passes`` over micro-batches return. If they exceed the memory of any rank's device, halve
        the limit on all ranks, ``undo`` what the passes did, and repeat them; the second time raise OutOfDeviceMemory,
        and at once if ranks divide the weights: the others then wait inside a layer for the rank that is short."""
        while True:
            outcome, shortage = None, ""
            try:
                outcome = passes()
            except (torch.OutOfMemoryError, HookFailed) as error:  # keep no error: its frames hold the activations
                if not (shortage := _shortage_of(error)):
                    raise
                if self._learner.ranks.mesh is not None:
                    self._halve(shortage)
            if not self._is_short_anywhere(shortage):
                return cast("T", outcome)
            self._halve(shortage or "another rank is out of memory")
            undo()

    def _is_short_anywhere(self, shortage: str) -> bool:
        device, is_short = self._learner.device, float(bool(shortage))
        if shortage and device.type == "cuda":
            torch.cuda.empty_cache()
        return bool(self._learner.ranks.sum_(torch.tensor(is_short, device=device)).item())

    def _halve(self, shortage: str) -> None:
        key = "micro_batch_samples" if self.size.packing == "fixed" else "micro_batch_tokens"
        limit = getattr(self.size, key.removeprefix("micro_batch_")) or 1
        half = limit // 2
        cause_text = f"micro-batches of trainer.{key} = {limit} don't fit in a device's memory ({shortage})"
        if self.halved or not self._may_halve or not half or self._learner.ranks.mesh is not None:
            valid_text = f"at most {half}" if half else "none smaller"
            raise OutOfDeviceMemory(f"{cause_text}; valid: {valid_text}, or trainer.gradient_checkpointing = 'full'")
        self.halved = f"{cause_text}: they have at most {half} from now on"
        self.size = replace(self.size, **{key.removeprefix("micro_batch_"): half})


@contextmanager
def reporting_shortage() -> Iterator[None]:
    """Raise OutOfDeviceMemory for an optimiser's state, made before any weight changes, or a publication too large."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = f"optimiser and published weights don't fit in a device's memory ({_shortage_of(error)})"
        raise OutOfDeviceMemory(f"{problem}; valid: model.adapter, a smaller model or larger devices") from error


def _shortage_of(error: BaseException) -> str:
    """The allocator's first sentence, also from within the user's loss; "" for an error of another kind."""
    cause = error.__cause__ if isinstance(error, HookFailed) else error
    return str(cause).partition(". ")[0] or "out of memory" if isinstance(cause, torch.OutOfMemoryError) else ""
