"""The pipelines: rounds of post-training, and retraining from a champion."""
