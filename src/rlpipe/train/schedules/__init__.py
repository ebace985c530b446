"""Schedules: how the learning rate and the passes over a batch run through a round."""
