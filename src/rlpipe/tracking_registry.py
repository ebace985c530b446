"""Policies as registered versions of one MLflow model, by reference unless they are small."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient


CHAMPION = "champion"


class Registry:
    """The versions that one run registers.

    Args:
        client: MLflow's client.
        model: the registered model's name.
        run_key: the run whose versions these are.
        copy_below_mb: policies smaller than this are copied into MLflow's artifact store.
    """

    def __init__(self, client: MlflowClient, model: str, run_key: str, copy_below_mb: float) -> None:
        self._client, self._model, self._key, self._copy_below_mb = client, model, run_key, copy_below_mb

    def find(self, fingerprint: str) -> str | None:
        """The version of a policy with this fingerprint."""
        wanted = f"name = '{self._model}' and tags.sha256 = '{fingerprint}' and tags.run_key = '{self._key}'"
        found = self._client.search_model_versions(wanted, max_results=1)
        return str(found[0].version) if found else None

    def register(self, folder: Path, run_id: str, tags: dict[str, str], uri: str) -> str:
        """The version of a policy, made unless this run has registered it already.

        Args:
            folder: the policy.
            run_id: MLflow's run that made it.
            tags: with `sha256`, `dvc`, `path` and `run_key`.
            uri: where the policy is kept; no URI for what DVC holds.
        """
        if not self._client.search_registered_models(f"name = '{self._model}'", max_results=1):
            self._client.create_registered_model(self._model)
        found = self.find(tags["sha256"])
        if found:
            return found
        source = self._source(folder, run_id, tags, uri)
        return str(self._client.create_model_version(self._model, source, run_id=run_id, tags=tags).version)

    def tag(self, fingerprint: str, name: str, value: str) -> None:
        """Tag the version of a policy, if there is one."""
        if (version := self.find(fingerprint)) is not None:
            self._client.set_model_version_tag(self._model, version, name, value)

    def champion(self) -> str | None:
        """The version that the alias points at."""
        found = self._client.search_registered_models(f"name = '{self._model}'", max_results=1)
        return str(found[0].aliases[CHAMPION]) if found and CHAMPION in found[0].aliases else None

    def promote(self, version: str, why: str, at: float) -> str | None:
        """Point the alias `champion` at a version, which notes when (UTC), why and in whose place; returns the champion before.

        The notes come first, so that a promotion that was cut short is done again whole.
        """
        before = self.champion()
        if before != version:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
            for name, value in (("champion_since", since), ("champion_because", why), ("champion_after", before or "")):
                self._client.set_model_version_tag(self._model, version, name, value)
            self._client.set_registered_model_alias(self._model, CHAMPION, version)
        return before

    def versions(self) -> dict[str, dict[str, str]]:
        """The tags of every version of the model, whichever run registered it; the newest first."""
        found = self._client.search_model_versions(f"name = '{self._model}'", max_results=1000)
        return {str(version.version): dict(version.tags) for version in sorted(found, key=lambda version: -int(version.version))}

    def _source(self, folder: Path, run_id: str, tags: dict[str, str], uri: str) -> str:
        """Where the version's bytes are: a copy in the artifact store if small, else where the policy is kept."""
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        tags["bytes"] = str(num_bytes)
        if num_bytes < self._copy_below_mb * 1e6:
            self._client.log_artifacts(run_id, str(folder), "policy")
            return f"runs:/{run_id}/policy"
        return uri if "://" in uri else f"dvc://{tags['dvc'] or tags['sha256']}/{tags['path']}"


def accuracy(metrics: Mapping[str, Any]) -> dict[str, str]:
    """What evaluate measured, as a tag of the version; a version is registered whatever the numbers are."""
    value = metrics.get("greedy_accuracy")
    return {"greedy_accuracy": f"{value:.6g}"} if value is not None and math.isfinite(value) else {}
