"""Rollout: attempts at tasks by the current policy."""
