"""Lists of torch's operators by name, read from operators.toml, and names that mean the same operator."""

from __future__ import annotations

import tomllib
from importlib.resources import files

_LISTS = tomllib.loads((files("headway.kernels") / "operators.toml").read_text(encoding="utf-8"))
WORDS = {name: frozenset(text.split()) for name, text in _LISTS.items() if isinstance(text, str)}
FAMILIES = [(family["of"].split(), family["also"].split()) for family in _LISTS["families"]]
PREFIXES = ("native_", "special_", "linalg_", "cudnn_", "mkldnn_")


def canonical(name: str) -> str:
    """An operator's name without underscores, case, prefixes and overload: ``aten::_softmax.int`` is "softmax"."""
    name = packet_name(name).lower().strip("_")
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("_", "")


def packet_name(name: str) -> str:
    """An operator's name in torch.ops.aten: "add" for ``aten::add.Tensor`` and ``aten.add``."""
    return name.removeprefix("aten::").removeprefix("aten.").split(".")[0]


def with_relatives(names: tuple[str, ...]) -> frozenset[str]:
    """The operators ``names``, and operators that compute the same (operators.toml's families)."""
    packet_names = {packet_name(name) for name in names}
    canonical_names = {canonical(name) for name in packet_names}
    families = (group + others for group, others in FAMILIES if canonical_names & {canonical(name) for name in group})
    return frozenset(packet_names.union(*families))
