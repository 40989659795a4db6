"""Forward passes of a transformers model over its own cache: which rows it can compute in one batch, and how.

Shapes: n rows, k tokens fed to each, v vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headway.generator.engines.hf.caches import join, joinable, take
from headway.models.hf.model import HfModel, shift_obstacle
from headway.models.hf.pixels import Pixels
from headway.models.hidden_states import HiddenStates
from headway.records.errors import ConfigurationError
from headway.records.generation import PathScores, Probe, ProbeScores

_log = logging.getLogger(__name__)
Batching = Literal["padded", "equal lengths", "single rows"]
_REMEDY = "Nothing can be sampled from it; valid: generator.engine = 'vllm' or 'vllm-server'"
_CACHES = ("past_key_values", "cache_params")  # names of a cache in forward()
_ROUGH = 0.03  # two correct passes' logits in half precision may differ by this share of the largest ...
_CLOSE = 1e-4  # ... and in single precision by this


class HfRunner:
    """Runs an `HfModel` with caches; keeps no rows.

    ``batching``: which rows are computed together. "padded": all; "equal lengths": those with as many tokens, where
    rows can't be padded on the left; "single rows": where the cache is one of the model's own, or
    ``fixed_shapes``. A trial of a few tokens at the start, together and alone, must agree, else fewer rows are computed
    together, "single rows" at the least; the log has the reason.
    """

    def __init__(self, model: HfModel, fixed_shapes: bool = False) -> None:
        """Raises ConfigurationError for a model without a cache, or that can't begin one."""
        self.model = model
        self._module = model.module.eval()
        self._taken = inspect.signature(self._module.forward).parameters
        cache_names = [name for name in _CACHES if name in self._taken]
        if not cache_names:
            raise ConfigurationError(
                f"{type(self._module).__name__}: its forward() takes no cache ({' or '.join(_CACHES)}). {_REMEDY}"
            )
        self._cache = cache_names[0]
        self.device = next(self._module.parameters()).device
        self.batching: Batching = "single rows" if fixed_shapes else self._try_batches()

    def feed(
        self, ids_nk: Tensor, cache: Any, computed: Sequence[int], beside: Mapping[str, Any] = {}
    ) -> tuple[Tensor, Any]:
        """Compute ``ids_nk`` after what ``cache`` has: ``computed`` tokens of each row, padded on the left to the
        longest; None: nothing. Returns the logits after the last token, [n, v], and the cache with all tokens.
        ``beside``: further arguments of the model."""
        logits_n1v, cache = self._feed(ids_nk, cache, computed, 1, beside)
        return logits_n1v[:, 0], cache

    def feed_all(self, ids_1k: Tensor, cache: Any, computed: Sequence[int]) -> tuple[Tensor, Any]:
        """Compute the tokens of one row as `feed` does, and return the logits after each, [k, v]."""
        logits_1kv, cache = self._feed(ids_1k, cache, computed, ids_1k.shape[1], {})
        return logits_1kv[0], cache

    def beside(self, ids_1k: Tensor, pictures: Pixels) -> dict[str, Any]:
        """Return arguments for `feed` of a new row with these pictures; the model then computes the positions."""
        arguments = self.model.picture_arguments(ids_1k.to(self.device), [pictures], self._taken) if pictures else {}
        return arguments | ({"position_ids": None} if arguments and "position_ids" in self._taken else {})

    def shifted_positions(self, positions: np.ndarray, shifts: Sequence[int]) -> dict[str, Any]:
        """Return arguments for `feed` of one token for each row, whose positions pictures have shifted."""
        positions_n = torch.from_numpy(positions + np.array(shifts)).to(self.device)
        return {"position_ids": positions_n[:, None]} if any(shifts) else {}

    def _feed(
        self, ids_nk: Tensor, cache: Any, computed: Sequence[int], logits_to_keep: int, beside: Mapping[str, Any]
    ) -> tuple[Tensor, Any]:
        """Do what `feed` does, but return the logits [n, k, v] after the last ``logits_to_keep`` tokens."""
        longest_tokens, k = max(computed), ids_nk.shape[1]
        computed_n = torch.tensor(computed, device=self.device)
        forward_arguments: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if "position_ids" in self._taken:
            forward_arguments["position_ids"] = computed_n[:, None] + torch.arange(k, device=self.device)
        if min(computed) < longest_tokens:
            position = torch.arange(longest_tokens + k, device=self.device)
            forward_arguments["attention_mask"] = (position >= longest_tokens - computed_n[:, None]).long()
        if "logits_to_keep" in self._taken:
            forward_arguments["logits_to_keep"] = logits_to_keep
        outputs = self._module(input_ids=ids_nk.to(self.device), **{**forward_arguments, **beside})
        return outputs.logits[:, -logits_to_keep:], getattr(outputs, self._cache)

    @torch.inference_mode()
    def score(self, probe: Probe, pictures: Pixels) -> ProbeScores:
        """Score a probe whose prompt has these pictures on a cache of its own: by one pass (``prefill``), and by one
        over the prompt and a third of the random tokens and then token by token (``decode``)."""
        ids, prompt_tokens, scores_by_path = probe.prompt + probe.ids, len(probe.prompt), dict[str, PathScores]()
        first_decoded, token_count = prompt_tokens + max(1, len(probe.ids) // 3), len(ids)
        for path, pass_ends in {"prefill": [token_count], "decode": [*range(first_decoded, token_count + 1)]}.items():
            cache, states, logits, shift = None, HiddenStates(), list[Tensor](), 0
            for start, end in itertools.pairwise([0, *pass_ends]):
                part_ids, logit_count = torch.tensor([ids[start:end]]), end - max(start, prompt_tokens - 1)
                extra = self.shifted_positions(np.array([start]), [shift]) if start else self.beside(part_ids, pictures)
                with states.recording(self.model.layers):
                    part_logits, cache = self._feed(part_ids, cache, [start], logit_count, extra)
                shift = self.model.position_shift if pictures else 0
                logits.append(part_logits[0])
                states.end_pass()
            scores_by_path[path] = states.scores(self.model.sampled(torch.cat(logits)), ids)
        return ProbeScores(probe=probe, precision=str(self.model.dtype).removeprefix("torch."), paths=scores_by_path)

    @torch.inference_mode()
    def _try_batches(self) -> Batching:
        """Return the largest batches whose rows have the same logits as alone; logs why they aren't larger."""
        try:
            cache = self.feed(torch.zeros((1, 1), dtype=torch.int64), None, [0])[1]
        except (AttributeError, ValueError) as error:  # its outputs have no cache; layers of linear attention alone
            class_name = type(self._module).__name__
            raise ConfigurationError(f"{class_name}: it can't begin a cache ({error}). {_REMEDY}") from error
        if not (reason := self._why_not_padded(cache) or self._batch_difference(5, 3)):
            return "padded"
        _log.warning("%s: rows of different lengths aren't batched: %s", self.model.config.model_type, reason)
        reason = self._batch_difference(4, 4) if joinable(cache) else "its cache is of a class of its own"
        if not reason:
            return "equal lengths"
        _log.warning("%s: every row is computed alone: %s", self.model.config.model_type, reason)
        return "single rows"

    def _why_not_padded(self, cache: Any) -> str:
        if not {"position_ids", "attention_mask"} <= self._taken.keys():
            return "its forward() takes no position_ids or no attention_mask"
        if self.model.rope_by_length:
            return "rotary embeddings depend on the longest row"
        return shift_obstacle(self._module) or ("" if joinable(cache) else "its cache is of a class of its own")

    def _batch_difference(self, *lengths: int) -> str:
        """Return why rows of these lengths can't be batched; "" if they have the same logits in a batch as alone, also
        after one is taken out."""
        row_ids = [(torch.arange(length)[None] * 7 + length) % self.model.config.vocabulary_size for length in lengths]
        next_ids = torch.tensor([[1], [2]])
        try:
            caches = [self.feed(ids, None, [0])[1] for ids in row_ids]
            both_nv, cache = self.feed(next_ids, join(caches), lengths)
            rest_nv, _ = self.feed(next_ids[1:], take(cache, [1], lengths[1] + 1), [lengths[1] + 1])
            caches = [self.feed(ids, None, [0])[1] for ids in row_ids]
            first_nv, _ = self.feed(next_ids[:1], caches[0], lengths[:1])
            second_nv, cache = self.feed(next_ids[1:], caches[1], lengths[1:])
            third_nv, _ = self.feed(next_ids[1:], cache, [lengths[1] + 1])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the boundary to a model's own code: what it can't do in a batch, it does alone
            return f"a trial failed ({type(error).__name__}: {str(error).strip()[:80]})"
        batch_nv, alone_nv = torch.cat([both_nv, rest_nv]).float(), torch.cat([first_nv, second_nv, third_nv]).float()
        allowed = _CLOSE if first_nv.dtype == torch.float32 else _ROUGH
        difference, largest = float((batch_nv - alone_nv).abs().max()), float(alone_nv.abs().max())
        return "" if difference <= allowed * largest else f"logits differ by {difference:.1g} (largest: {largest:.1g})"
