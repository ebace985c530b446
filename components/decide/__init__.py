"""Component `decide`."""

from .component import decide as decide
