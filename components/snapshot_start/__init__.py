"""Component `snapshot_start`."""

from .component import snapshot_start as snapshot_start
