"""Seeds of rollouts."""

from __future__ import annotations

import hashlib


def rollout_seed(run_seed: int, group: int, member: int, purpose: str = "") -> int:
    """Return a rollout's sampling seed, 0 <= seed < 2**63: a hash of (run seed, group index, member, purpose).

    Seeds are counter-based: no generator has a state, so the order in which rollouts start doesn't matter and a resumed
    rollout samples on from (seed, position) as if it had never stopped (DESIGN rule 12). ``purpose`` separates
    evaluations, whose splits use the same group numbers; that of training is "".
    """
    key_text = f"{run_seed}:{group}:{member}" + (f":{purpose}" if purpose else "")
    digest = hashlib.blake2b(key_text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
