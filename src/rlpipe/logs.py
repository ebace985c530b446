"""What a process of rlpipe says, and what the libraries in it do not."""

from __future__ import annotations

import logging
import os
import sys


def quiet(debug: bool) -> None:
    """One logger for people; third parties speak only from warnings on, telemetry is off.

    A short spin at OpenMP barriers was no slower on an idle machine; a long one wastes the core that other work needs.
    """
    for name, value in {
        "GOMP_SPINCOUNT": "3000",
        "DVC_NO_ANALYTICS": "1",
        "GX_ANALYTICS_ENABLED": "false",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("rlpipe").setLevel(logging.DEBUG if debug else logging.INFO)
