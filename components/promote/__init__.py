"""Component `promote`."""

from .component import promote as promote
