"""Kills runs at their writes, renames, commits and tracking calls, and looks at what the next run makes of it: `make test-faults`."""
