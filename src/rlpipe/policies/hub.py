"""Model folders from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlpipe.errors import ConfigError, EngineError


def snapshot(model: str, patterns: Sequence[str]) -> Path:
    """The local folder of a hub model, downloaded unless the hub's own cache has it.

    Args:
        model: `owner/name`, or `owner/name@revision`.
        patterns: file names wanted.

    Raises:
        ConfigError: the hub has no such model or revision, or does not let this user have it.
        EngineError: the hub cannot be reached.
    """
    from huggingface_hub import errors, snapshot_download

    name, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(patterns)))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(
            "no such model on the Hugging Face hub, or no access to it", got=model, do="check model.path; set HF_TOKEN for a gated model"
        ) from error
    except (OSError, errors.HTTPError) as error:
        raise EngineError(
            "the Hugging Face hub cannot be reached and its cache does not hold the model",
            got=f"{model} ({type(error).__name__})",
            accepted="a folder, or an id that was downloaded before",
            do="set model.path to a local folder, or go online once",
        ) from error
