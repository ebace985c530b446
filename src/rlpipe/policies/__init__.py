"""Kinds of policy, one file each: load, save, version, and `evaluate(batch, needs)`. Importing this package needs no torch."""
