"""Check of a loss's contract: ``python -m headway.trainer.loss_conformance module:function KEY=NUMBER`` (or a name).

A loss returns one finite value per token for any finite log-probabilities. Tokens of one sample don't affect those of
another, so that packing can't change the gradient. It has a gradient through ``logprobs_m`` only, and is deterministic.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import torch

from headway.records.errors import ConfigurationError, HeadwayError, HookFailed
from headway.runtime.hooks import Hook
from headway.trainer.losses import LossSettings, TokenTerms, resolve, token_loss

_TOKENS_S = (3, 1, 4)  # tokens of each sample of the made-up batch
_DEFAULTS = LossSettings()


def loss_violations(loss: Hook, settings: LossSettings = _DEFAULTS) -> Iterator[str]:
    """Yield the violations of the contract by ``loss``."""
    try:
        yield from _violations(loss, settings)
    except HookFailed as error:
        yield str(error)


def _violations(loss: Hook, settings: LossSettings) -> Iterator[str]:
    terms = _terms(scale=0.3)
    batch_loss_m = token_loss(loss, terms, settings).loss_m
    if not torch.equal(batch_loss_m, token_loss(loss, terms, settings).loss_m):
        yield str(loss.failed("gives another loss for the same terms: a replay would train on something else"))
        return
    start = 0
    for sample, tokens in enumerate(_TOKENS_S):
        sample_loss_m = token_loss(loss, _slice_terms(terms, slice(start, start + tokens)), settings).loss_m
        if not torch.allclose(sample_loss_m, batch_loss_m[start : start + tokens], rtol=1e-5, atol=1e-6):
            yield str(loss.failed(f"gives sample {sample} another loss with others beside it: packing would change it"))
        start += tokens
    if not batch_loss_m.requires_grad:
        yield str(loss.failed("has no gradient: it doesn't depend on logprobs_m, or detaches it"))
    for scale, case in ((500.0, "log-ratios of 500"), (0.0, "equal log-probabilities")):
        loss_m = token_loss(loss, _terms(scale=scale), settings).loss_m
        if not torch.isfinite(loss_m).all():
            yield str(loss.failed(f"isn't finite for {case}: losses.ratio bounds them"))


def _terms(scale: float) -> TokenTerms:
    """Make a batch of three samples. ``scale``: largest size of its log-ratios, in nats."""
    tokens = sum(_TOKENS_S)
    log_ratio_m = scale * torch.linspace(-1.0, 1.0, tokens)
    behaviour_m = -1.0 - scale - 0.1 * torch.arange(tokens)
    return TokenTerms(
        logprobs_m=(behaviour_m + log_ratio_m).requires_grad_(),
        proximal_m=behaviour_m + 0.5 * log_ratio_m,
        behaviour_m=behaviour_m,
        advantages_m=torch.repeat_interleave(torch.tensor([2.3, -0.7, 0.5]), torch.tensor(_TOKENS_S)),
        sequence_m=torch.repeat_interleave(torch.arange(len(_TOKENS_S)), torch.tensor(_TOKENS_S)),
        keep_m=torch.ones(tokens, dtype=torch.bool),
    )


def _slice_terms(terms: TokenTerms, tokens: slice) -> TokenTerms:
    tensor_by_name = {field.name: getattr(terms, field.name)[tokens] for field in dataclasses.fields(terms)}
    tensor_by_name["sequence_m"] = tensor_by_name["sequence_m"] - tensor_by_name["sequence_m"][0]
    return TokenTerms(**tensor_by_name)


def main(arguments: list[str]) -> int:
    """Check the losses that are named, with the parameters ``KEY=NUMBER`` of a user's own. Returns the exit code: 0 if
    all keep their contract, 1 if one doesn't, 2 if one can't be found."""
    violations: list[str] = []
    names = [argument for argument in arguments if "=" not in argument]
    try:
        parameters = dict(_parameter(argument) for argument in arguments if "=" in argument)
        settings = LossSettings(parameters=parameters)
        for name in names:
            violations += loss_violations(resolve(name), settings)
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n".join(violations) or f"{', '.join(names)}: the contract is kept")
    return 1 if violations else 0


def _parameter(argument: str) -> tuple[str, float]:
    key, _, text = argument.partition("=")
    try:
        return key, float(text)
    except ValueError:
        raise ConfigurationError(f"{argument}: {text!r} isn't a number") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
