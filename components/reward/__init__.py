"""Component `reward`."""

from .component import reward as reward
