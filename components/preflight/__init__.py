"""Component `preflight`."""

from .component import preflight as preflight
