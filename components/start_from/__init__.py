"""Component `start_from`."""

from .component import start_from as start_from
