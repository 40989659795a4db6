"""Forward passes of a transformers model over its own cache: which rows it can compute in one batch, and how.

Shapes: n rows, k tokens fed to each, v vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from headway.generator.engines.hub.caches import join, joinable, take
from headway.models.hidden_states import HiddenStates
from headway.models.hub.model import HubModel
from headway.records.errors import ConfigurationError
from headway.records.generation import PathScores, ProbeScores

Batching = Literal["padded", "equal lengths", "single rows"]
_CACHES = ("past_key_values", "cache_params")  # names of a cache in forward()
_ROUGH = 0.03  # two right passes' logits in half precision may differ by this share of the largest ...
_CLOSE = 1e-5  # ... and in single precision by this
_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the longest row of a batch


class HubRunner:
    """Runs a `HubModel` with caches. Keeps no rows.

    ``batching``: which rows are computed together. "padded": all; "equal lengths": those with as many tokens, where
    states are recurrent or the model takes no mask; "single rows": where the cache is one of the model's own, or
    ``fixed_shapes``. A trial of a few tokens at the start, together and alone, must agree.
    """

    def __init__(self, model: HubModel, fixed_shapes: bool = False) -> None:
        """Raises ConfigurationError for a model without a cache."""
        self.model = model
        self._module = model.module.eval()
        self._taken = inspect.signature(self._module.forward).parameters
        found = [name for name in _CACHES if name in self._taken]
        if not found:
            raise ConfigurationError(
                f"{type(self._module).__name__}: its forward() takes no cache ({' or '.join(_CACHES)}), so nothing can "
                "be sampled from it; valid: generator.engine = 'vllm' or 'vllm-server'"
            )
        self._cache = found[0]
        self.device = next(self._module.parameters()).device
        self.batching: Batching = "single rows" if fixed_shapes else self._try_batches()

    def feed(self, ids_nk: Tensor, cache: Any, computed: Sequence[int]) -> tuple[Tensor, Any]:
        """Compute ``ids_nk`` after what ``cache`` has: ``computed`` tokens of each row, padded on the left to the
        longest; None: nothing. Returns the logits after the last token, [n, v], and the cache with all tokens."""
        logits_nkv, cache = self._feed(ids_nk, cache, computed, logits_to_keep=1)
        return logits_nkv[:, -1], cache

    def _feed(self, ids_nk: Tensor, cache: Any, computed: Sequence[int], logits_to_keep: int = 0) -> tuple[Tensor, Any]:
        """As `feed`; the logits [n, k, v] after the last ``logits_to_keep`` of the tokens where the model can
        leave out the others; 0: after each."""
        longest, k = max(computed), ids_nk.shape[1]
        computed_n = torch.tensor(computed, device=self.device)
        inputs: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if "position_ids" in self._taken:
            inputs["position_ids"] = computed_n[:, None] + torch.arange(k, device=self.device)
        if min(computed) < longest:
            place = torch.arange(longest + k, device=self.device)
            inputs["attention_mask"] = (place >= longest - computed_n[:, None]).long()
        if "logits_to_keep" in self._taken:
            inputs["logits_to_keep"] = logits_to_keep
        out = self._module(input_ids=ids_nk.to(self.device), **inputs)
        return out.logits, getattr(out, self._cache)

    @torch.inference_mode()
    def score(self, ids: tuple[int, ...]) -> ProbeScores:
        """Score ``ids`` on a cache of their own: by one pass (``prefill``), and by one over a third of them and then
        token by token (``decode``)."""
        found, tokens = dict[str, PathScores](), len(ids)
        for path, ends in {"prefill": [tokens], "decode": [*range(max(1, tokens // 3), tokens + 1)]}.items():
            cache, states, logits = None, HiddenStates(), list[Tensor]()
            for start, end in itertools.pairwise([0, *ends]):
                part = torch.tensor([ids[start:end]])
                with states.watching(self.model.layers):
                    out, cache = self._feed(part, cache, [start])
                logits.append(out[0])
                states.end_pass()
            found[path] = states.scores(torch.cat(logits), ids)
        return ProbeScores(ids=ids, precision=str(self.model.dtype).removeprefix("torch."), paths=found)

    @torch.inference_mode()
    def _try_batches(self) -> Batching:
        """The largest batches whose rows come out as they do alone."""
        cache = self.feed(torch.zeros((1, 1), dtype=torch.int64), None, [0])[1]
        masked = {"position_ids", "attention_mask"} <= self._taken.keys() and not self._rope_by_length()
        if masked and joinable(cache, recurrent=False) and self._agree(5, 3):
            return "padded"
        return "equal lengths" if joinable(cache) and self._agree(4, 4) else "single rows"

    def _rope_by_length(self) -> bool:
        rope = getattr(self._module.config.get_text_config(), "rope_parameters", None) or {}
        return any(isinstance(one, dict) and one.get("rope_type") in _BY_LENGTH for one in (rope, *dict(rope).values()))

    def _agree(self, *lengths: int) -> bool:
        """Whether rows of these lengths have the same logits in a batch as alone, and when one has left it."""
        rows = [(torch.arange(length)[None] * 7 + length) % self.model.config.vocabulary_size for length in lengths]
        newest = torch.tensor([[1], [2]])
        try:
            caches = [self.feed(row, None, [0])[1] for row in rows]
            both, cache = self.feed(newest, join(caches), lengths)
            left, _ = self.feed(newest[1:], take(cache, [1], lengths[1] + 1), [lengths[1] + 1])
            caches = [self.feed(row, None, [0])[1] for row in rows]
            first, _ = self.feed(newest[:1], caches[0], lengths[:1])
            second, cache = self.feed(newest[1:], caches[1], lengths[1:])
            third, _ = self.feed(newest[1:], cache, [lengths[1] + 1])
        except Exception:  # the boundary to a model's own code: whatever it can't do in a batch, it does in single rows
            return False
        got, expected = torch.cat([both, left]).float(), torch.cat([first, second, third]).float()
        allowed = _CLOSE if first.dtype == torch.float32 else _ROUGH
        return bool((got - expected).abs().max() <= allowed * expected.abs().max())
