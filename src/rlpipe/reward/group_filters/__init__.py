"""Filters that need rewards, asked at the tail of the reward step."""
