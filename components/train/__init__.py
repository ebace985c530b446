"""Component `train`."""

from .component import train as train
