"""Credentials kept out of messages: what git and DVC say may repeat a URL or a value of the environment."""

from __future__ import annotations

import os
import re

PRIVATE = re.compile(r"PASSWORD|PASSPHRASE|SECRET|TOKEN|CONNECTION_STRING|(?<!SSH)_KEY$")
"""Environment variables whose values no message may hold, by their name."""
SHORTEST = 4
"""Shorter values would blacken ordinary words."""


def without_secrets(text: str) -> str:
    """`text` with credentials in URLs and the values of private environment variables replaced by `***`."""
    for name, value in os.environ.items():
        if PRIVATE.search(name) and len(value.strip()) >= SHORTEST:
            text = text.replace(value.strip(), "***")
    return re.sub(r"://[^/\s@]+@", "://***@", text)
