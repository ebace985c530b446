"""How large a number an expression would evaluate to, found without evaluating it.

Symbolic libraries compute 9**9**9 or 10000000! while parsing, so the size has to be known before they see the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

TOKEN = re.compile(r"\d+(?:\.\d+)?|\*\*|\^|!+|[(\[{]|[)\]}]|[*/]|\\[a-zA-Z]+|[^\W\d]+|\S")
SKIPPED = {"\\left", "\\right", "\\,", "\\!"}
PRODUCTS = {"*", "/", "\\cdot", "\\times", "\\div"}
MAX_DEPTH = 60


def digits(text: str) -> float:
    """An upper bound for |log10| of the largest number in `text`; infinite where it is nested too deeply to tell.

    Plain numbers, `+ - * /`, a bracket as a factor, `^` and `**` (right to left), factorials and all brackets are followed;
    anything else counts as 1, so a symbolic power such as `x^{999999}` is not large.
    """
    try:
        return _Reader([token for token in TOKEN.findall(text) if token not in SKIPPED]).whole()
    except OverflowError:
        return math.inf


class _Reader:
    """Recursive descent over tokens; every method returns a bound for |log10| of what it read."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.place += 1
        return token

    def whole(self) -> float:
        bound = 0.0
        while self.peek():
            bound = max(bound, self.sum())
            if self.peek() in (")", "]", "}"):
                self.take()
        return bound

    def sum(self) -> float:
        bounds = [self.product()]
        while self.peek() and self.peek() not in (")", "]", "}"):
            bounds.append(self.product())
        return max(bounds) + math.log10(len(bounds))

    def product(self) -> float:
        bound = self.power()
        while True:
            if self.peek() in PRODUCTS:
                self.take()
                bound += self.power()
            elif self.peek() in ("(", "[", "{"):
                bound += self.power()
            else:
                return bound

    def power(self) -> float:
        while self.peek() in ("-", "+"):
            self.take()
        bound = self.primary()
        while self.peek().startswith("!"):
            self.take()
            bound = 10**bound * bound
        if self.peek() in ("^", "**"):
            self.take()
            exponent = self.nested(self.power)
            bound *= 10**exponent
        return bound

    def primary(self) -> float:
        token = self.take()
        if token in ("(", "[", "{"):
            bound = self.nested(self.sum)
            if self.peek() in (")", "]", "}"):
                self.take()
            return bound
        if token[:1].isdecimal():
            return _log10(token)
        return 0.0

    def nested(self, read: Callable[[], float]) -> float:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise OverflowError("nested too deeply")
        bound = read()
        self.depth -= 1
        return bound


def _log10(number: str) -> float:
    whole, _, fraction = number.partition(".")
    mantissa = (whole + fraction).lstrip("0")
    return abs(len(mantissa) - len(fraction) + math.log10(float(f"0.{mantissa[:15]}"))) if mantissa else 0.0
