"""Every failure rlpipe explains itself, one type per boundary it can cross, each with a documented exit code."""

from __future__ import annotations

from typing import Any


class RlpipeError(Exception):
    """A failure with a message a user can act on.

    Args:
        what: what was wrong, as a sentence without a full stop.
        got: the value found.
        accepted: what would have been right.
        do: the next thing to try.
    """

    exit_code = 1

    def __init__(self, what: str, *, got: Any = None, accepted: Any = None, do: str | None = None) -> None:
        self.what, self.got, self.accepted, self.do = what, got, accepted, do
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.got is not None:
            parts.append(f"got {self.got}")
        if self.accepted is not None:
            parts.append(f"accepted: {self.accepted}")
        if self.do is not None:
            parts.append(f"do: {self.do}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.got, self.accepted, self.do)


def _rebuild(kind: type[RlpipeError], what: str, got: Any, accepted: Any, do: str | None) -> RlpipeError:
    return kind(what, got=got, accepted=accepted, do=do)


class ConfigError(RlpipeError, ValueError):
    """A parameter, command-line argument or combination of them that cannot work."""

    exit_code = 2


class CheckError(RlpipeError, ValueError):
    """A dataset broke a rule at a step's boundary."""

    exit_code = 3


class NoSignalError(RlpipeError):
    """No group can teach anything and `run.no_signal` is `stop`."""

    exit_code = 4


class ScorerError(RlpipeError):
    """More rewards could not be computed than `reward.max_unscorable` allows."""

    exit_code = 5


class ArtifactError(RlpipeError, OSError):
    """An artifact is missing, unfinished, damaged or of another schema version."""

    exit_code = 6


class StorageError(RlpipeError, OSError):
    """The disk is full or cannot be written."""

    exit_code = 7


class EngineError(RlpipeError):
    """The generation engine failed, or an optional engine or backend is not installed."""

    exit_code = 8


class TrainingError(RlpipeError):
    """A loss, gradient or advantage is not finite."""

    exit_code = 9


class DeadlineError(RlpipeError):
    """A step, or waiting for a run, took longer than its time limit."""

    exit_code = 11


class ClusterError(RlpipeError):
    """The Kubeflow API refused a request, answered wrongly, or cannot be reached."""

    exit_code = 12


class RunFailedError(RlpipeError):
    """A submitted run, or a run on a local Kubeflow runner, failed."""

    exit_code = 13


class RunCancelledError(RlpipeError):
    """A submitted run was cancelled."""

    exit_code = 14


class PreflightError(RlpipeError):
    """Something the run needs is not there: an endpoint, a secret, the model, free space."""

    exit_code = 15


class TrackingError(RlpipeError):
    """MLflow refused a request, answered wrongly, or cannot be reached. Never ends a run, only a command that is about MLflow."""

    exit_code = 16


DIFFERENT = 17
"""Exit code of `rlpipe reproduce` where the run came out different."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


BROKEN_IMPORT = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError, AssertionError)
"""What an optional library that does not fit the machine was seen to raise when imported."""
