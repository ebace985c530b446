"""Drops trajectories that should not be scored or trained on, by what they are, never by what they earned."""
