"""Component `rollout`."""

from .component import rollout as rollout
