"""Evaluation on held-out tasks, and the promote or hold decision."""
