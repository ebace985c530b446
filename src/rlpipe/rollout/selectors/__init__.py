"""Which tasks a round attempts. A selector is a frozen section with `init() -> state` and `__call__(state, …) -> (visits, state)`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpipe.rollout.selectors.uniform import Uniform, Visit

__all__ = ["Selector", "Uniform", "Visit"]

Selector = Annotated[Uniform, Field()]
