"""Component `evaluate`."""

from .component import evaluate as evaluate
