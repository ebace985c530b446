"""Component `filter`."""

from .component import filter as filter
