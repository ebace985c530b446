"""Component `gather`."""

from .component import gather as gather
