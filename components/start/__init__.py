"""Component `start`."""

from .component import start as start
