"""Scores trajectories in child processes, and drops the groups that cannot teach."""
