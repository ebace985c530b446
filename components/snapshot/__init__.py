"""Component `snapshot`."""

from .component import snapshot as snapshot
