"""Numbers of ranks among which a model's attention heads and experts can be divided; torch-free."""

from __future__ import annotations

from headway.models.configuration import DecoderConfig
from headway.models.families import FAMILIES
from headway.records.errors import ConfigurationError


def heads_of_rank(heads: int, ranks: int) -> int:
    """The heads of a layer that each of ``ranks`` has: a part of them, or 1 that others have too if there are fewer."""
    return max(1, heads // ranks)


def require_heads(heads: int, kv_heads: int, ranks: int, *, copied: bool = True) -> None:
    """Raise ConfigurationError unless each of ``ranks`` can have equally many query heads with all of their key/value
    heads. ``copied``: several ranks may have the same key/value head."""
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    valid = [count for count in divisors if kv_heads % count == 0 or (copied and count % kv_heads == 0)]
    if ranks not in valid:
        raise ConfigurationError(
            f"trainer.context_parallel = {ranks}: {heads} query heads and {kv_heads} key/value heads can't be divided "
            f"among {ranks} ranks; valid: {', '.join(map(str, valid))}"
        )


def require_divisible(config: object, context: int = 1, experts: int = 1) -> None:
    """Raise ConfigurationError if ``context`` ranks can't divide the heads of a model, or ``experts`` its experts.
    ``config``: of a decoder, or a model of transformers, whose heads are known once it is loaded."""
    if isinstance(config, DecoderConfig):
        require_heads(config.heads, config.kv_heads, context)
    if experts > 1 and (reason := _indivisible(config, experts)):
        raise ConfigurationError(f"trainer.expert_parallel = {experts}: {reason}")


def _indivisible(config: object, ranks: int) -> str:
    """The reason why ``ranks`` can't divide a model's experts, and what is valid; "": they can."""
    if not isinstance(config, DecoderConfig):
        mixtures = ", ".join(family.architecture for family in FAMILIES.values() if family.experts)
        return f"not supported for models of transformers; valid: 1, or {mixtures} in Headway's implementation"
    if config.routing is None:
        return "the model has no experts; valid: 1"
    count = config.routing.experts
    if count % ranks == 0:
        return ""
    valid = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
    return f"{count} experts can't be divided among {ranks} ranks; valid: {valid}"
