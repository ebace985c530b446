"""Scorers that cannot score."""


def raises(trajectory, task):
    """Always a plain bug."""
    return 1 + "1"


def not_a_number(trajectory, task):
    """Always NaN."""
    return float("nan")
