"""Train: one round's scored trajectories and a policy in, a better policy out. Importing this package needs no torch."""
