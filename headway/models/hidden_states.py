"""Summaries of a model's hidden states, small enough to compare between processes.

Shapes: n tokens, d width, p projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway.records.generation import PathScores

PROJECTIONS = 8  # per hidden state; they estimate a difference of two states to a third, over many tokens to a few %
_KEY = 0x6865616477617900


class HiddenStates:
    """Records projections of the residual stream before the first layer and after each layer, on ``PROJECTIONS`` random
    sign vectors that are the same in all processes. At any width they preserve the ratio of a difference to the state
    itself (Johnson & Lindenstrauss 1984)."""

    def __init__(self) -> None:
        self._signs_dp: Tensor | None = None
        self._projections: list[list[Tensor]] = [[]]  # by pass, then by layer

    def add(self, x_nd: Tensor) -> None:
        """Record the residual stream before the next layer, or after the last one."""
        x_nd = x_nd.detach().reshape(-1, x_nd.shape[-1])
        if self._signs_dp is None:
            bits_d = np.random.Philox(key=_KEY).random_raw(x_nd.shape[-1])
            bits_dp = (bits_d[:, None] >> np.arange(PROJECTIONS, dtype=np.uint64)) & np.uint64(1)
            self._signs_dp = torch.from_numpy(bits_dp.astype(np.float32) * 2 - 1).to(x_nd.device)
        self._projections[-1].append((x_nd.float() @ self._signs_dp).cpu())

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace what this pass has recorded, each layer's [n, p], by ``function`` of it."""
        self._projections[-1] = [function(x_np) for x_np in self._projections[-1]]

    def end_pass(self) -> None:
        """End a pass: the next call of `add` records the input of the first layer, for further tokens."""
        self._projections.append([])

    @contextmanager
    def recording(self, layers: nn.ModuleList) -> Iterator[None]:
        """Record the passes of a model, whose decoder layers are ``layers``, inside the block."""

        def enter(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.add(inputs[0] if inputs else named["hidden_states"])

        def leave(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.add(output[0] if isinstance(output, tuple) else output)

        hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers[:1]]
        hooks += [layer.register_forward_hook(leave) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def scores(self, logits_nv: Tensor, ids: tuple[int, ...], first: int = 0) -> PathScores:
        """The scores of ``ids``, the recorded tokens from ``first`` on. ``logits_nv``: the logits after the last n of
        them."""
        passes = [torch.stack(layers) for layers in self._projections if layers]
        if not passes:
            return PathScores(logprobs=chosen_logprobs(logits_nv, ids))
        hidden = torch.cat(passes, dim=1)[:, first : first + len(ids)]
        return PathScores(logprobs=chosen_logprobs(logits_nv, ids), hidden=hidden.numpy())


def chosen_logprobs(logits_nv: Tensor, ids: tuple[int, ...]) -> np.ndarray:
    """log-softmax of the last n - 1 ``ids``, float32, each from the logits after the token before it. ``logits_nv``:
    the logits after the last n ids."""
    targets_n = torch.tensor(ids[1 - len(logits_nv) :], device=logits_nv.device)
    logprobs_nv = torch.log_softmax(logits_nv[:-1].float(), dim=-1)
    return logprobs_nv.gather(-1, targets_n[:, None])[:, 0].cpu().numpy()
