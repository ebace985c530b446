"""Component `finish`."""

from .component import finish as finish
