"""A training that was killed goes on after its last whole checkpoint, to the bytes and numbers it would have had."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from rlpipe import artifact
from rlpipe.stopping import Terminated
from rlpipe.train import checkpoints, fit
from rlpipe.train.backends.torch_backend import TorchBackend
from rlpipe.train.section import Config
from rlpipe.train.step import run
from tests.factories import tiny_policy
from tests.train.factories import config, evaluation_artifact, random_groups, scored_dataset

EVERY_STEP = {"groups_per_step": 1, "learning_rate": 1e-2, "checkpoint": {"seconds": 0}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    return {
        "scored": scored_dataset(root / "scored", random_groups(4, temperatures=(0.7, 1.3))),
        "policy_in": tiny_policy(root / "policy"),
        "evaluation_in": evaluation_artifact(root / "evaluation"),
    }


def train(settings: Config, policy: Path, inputs: dict[str, Path]) -> dict[str, Any]:
    """The numbers of the round, but for its seconds."""
    policy.mkdir(exist_ok=True)
    numbers = run(settings, **inputs, policy=policy, round_index=1).numbers
    return {name: value for name, value in numbers.items() if not name.startswith("seconds")}


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, do: Any) -> list[int]:
    """Call `do` at the start of the backend's `number`-th step; returns the steps that were made."""
    made: list[int] = []
    step = TorchBackend.step

    def counted(self: TorchBackend, rate: float) -> float:
        if len(made) + 1 == number:
            do()
        made.append(len(made) + 1)
        return step(self, rate)

    monkeypatch.setattr(TorchBackend, "step", counted)
    return made


def killed() -> None:
    raise KeyboardInterrupt


OTHERS: list[dict[str, Any]] = [
    {},
    {"optimizer": {"state": "bfloat16"}},
    {"optimizer": {"state": "int8"}},
    {"optimizer_state": "reset"},
    {"trainable": {"type": "lora", "rank": 2}},
    {"kl": {"coefficient": 0.1}, "epochs": 2},
]


@pytest.mark.parametrize("others", OTHERS, ids=lambda others: "-".join(others) or "plain")
def test_a_killed_training_goes_on_to_the_same_bytes(inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, Any]) -> None:
    settings = config(**EVERY_STEP, **others)
    whole = train(settings, tmp_path / "whole", inputs)
    with monkeypatch.context() as patch:
        at_step(patch, 3, killed)
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "killed", inputs)
    with monkeypatch.context() as patch:
        made = at_step(patch, 0, killed)
        assert train(settings, tmp_path / "killed", inputs) == whole
    assert len(made) == whole["optimizer_steps"] - 2
    assert artifact.folder_fingerprint(tmp_path / "killed") == artifact.folder_fingerprint(tmp_path / "whole")


def test_the_newest_whole_checkpoint_is_taken_and_what_was_skipped_is_named(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(**EVERY_STEP)
    train(settings, tmp_path / "whole", inputs)
    monkeypatch.setattr(checkpoints, "_remove_others", lambda place: None)
    with monkeypatch.context() as patch:
        at_step(patch, 4, killed)
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "killed", inputs)
    folder = tmp_path / "killed" / artifact.RESUME
    assert sorted(path.name for path in folder.iterdir()) == ["000001", "000002", "000003"]
    (folder / "000003" / "manifest.json").unlink()
    weights = folder / "000002" / checkpoints.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    made = at_step(monkeypatch, 0, killed)
    train(settings, tmp_path / "killed", inputs)
    assert len(made) == 3
    assert [f"checkpoint={name} state=skipped" in caplog.text for name in ("000003", "000002", "000001")] == [True, True, False]
    assert artifact.folder_fingerprint(tmp_path / "killed") == artifact.folder_fingerprint(tmp_path / "whole")


def test_sigterm_ends_the_step_saves_and_leaves(inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(**EVERY_STEP | {"checkpoint": {"seconds": None}})
    train(settings, tmp_path / "whole", inputs)
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Terminated):
            train(settings, tmp_path / "ended", inputs)
    found = checkpoints.newest(tmp_path / "ended")
    assert found is not None
    assert found.num_steps == 2
    train(settings, tmp_path / "ended", inputs)
    assert artifact.folder_fingerprint(tmp_path / "ended") == artifact.folder_fingerprint(tmp_path / "whole")


def test_sigterm_in_the_last_step_saves_and_leaves_too(inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(**EVERY_STEP | {"checkpoint": {"seconds": None}})
    steps = train(settings, tmp_path / "whole", inputs)["optimizer_steps"]
    with monkeypatch.context() as patch:
        at_step(patch, steps, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Terminated):
            train(settings, tmp_path / "ended", inputs)
    made = at_step(monkeypatch, 0, killed)
    train(settings, tmp_path / "ended", inputs)
    assert made == []
    assert artifact.folder_fingerprint(tmp_path / "ended") == artifact.folder_fingerprint(tmp_path / "whole")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")])
def test_a_checkpoint_without_room_ends_no_training(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    whole = train(config(**EVERY_STEP), tmp_path / "whole", inputs)

    def full(place: Path, *_: Any) -> None:
        (place / "half").mkdir(parents=True)
        raise error

    monkeypatch.setattr(checkpoints, "_write", full)
    assert train(config(**EVERY_STEP), tmp_path / "full", inputs) == whole
    assert "checkpoint=000001 state=not_saved reason=No space left on device" in caplog.text
    assert list((tmp_path / "full" / artifact.RESUME).iterdir()) == []


def test_a_step_that_outlasts_the_grace_is_left(inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            signal.pause()

    at_step(monkeypatch, 2, endless)
    with pytest.raises(Terminated):
        train(config(**EVERY_STEP | {"checkpoint": {"seconds": 0, "grace_seconds": 0.05}}), tmp_path / "ended", inputs)
    found = checkpoints.newest(tmp_path / "ended")
    assert found is not None
    assert found.num_steps == 1


def test_a_kill_while_the_policy_is_written_trains_no_step_again(inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(**EVERY_STEP)
    train(settings, tmp_path / "whole", inputs)
    with monkeypatch.context() as patch:
        patch.setattr(fit, "save_trained", lambda *_: killed())
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "killed", inputs)
    made = at_step(monkeypatch, 0, killed)
    train(settings, tmp_path / "killed", inputs)
    assert len(made) == 1
    assert artifact.folder_fingerprint(tmp_path / "killed") == artifact.folder_fingerprint(tmp_path / "whole")


def test_how_often_it_is_saved_decides_no_bytes() -> None:
    from rlpipe import params

    assert params.deciding(config()) == params.deciding(config(checkpoint={"seconds": None, "grace_seconds": 3}))
