"""Seeds that depend on what is sampled, never on a counter, the batch or the clock."""

from __future__ import annotations

import hashlib


def seed(*parts: int | str) -> int:
    """A 63-bit seed from named parts, such as (run seed, round, group id, index, turn)."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
