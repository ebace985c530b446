"""Kubeflow Pipelines: compile, run locally, submit, wait. With `components/` and `pipelines/`, the only place that imports kfp.

In a wheel, `components` and `pipelines` lie in this package; in a checkout they are folders at its root, found through `__path__`.
"""

from pathlib import Path

if not (Path(__file__).parent / "components").is_dir():
    __path__.append(str(Path(__file__).parents[3]))
