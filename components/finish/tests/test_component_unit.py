"""Component `finish` through its own function, on real artifacts."""

from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from ...conftest import RUN_ID, Store, call
from ..component import finish


def ended(state: str, error: str = "") -> dsl.PipelineTaskFinalStatus:
    return dsl.PipelineTaskFinalStatus(
        state=state, pipeline_job_resource_name="job", pipeline_task_name="run", error_code=1 if error else 0, error_message=error
    )


def test_the_summary_says_how_the_run_ended(measured: dict[str, Any], sections: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13 too: ended twice, it is ended."""
    for folder in (tmp_path / "first", tmp_path / "second"):
        _, made = call(finish, folder, status=ended("SUCCEEDED"), tracking=sections["tracking"], run_id=RUN_ID)
        summary = Path(made["summary"].path).read_text()
        assert "Run succeeded" in summary
        assert RUN_ID in summary
    statuses = {name: run.info.status for name, run in store.runs().items() if run.data.tags.get("rlpipe.run_id") == RUN_ID}
    assert set(statuses.values()) == {"FINISHED"}


def test_a_failed_run_gets_its_summary_too(sections: dict[str, Any], tmp_path: Path) -> None:
    _, made = call(finish, tmp_path, status=ended("FAILED", "train of round 1: the disk is full"), tracking=sections["tracking"], run_id="another")
    summary = Path(made["summary"].path).read_text()
    assert "Run failed" in summary
    assert "the disk is full" in summary


@pytest.mark.parametrize("tracking", [{"enabled": False}])
def test_without_tracking_there_still_is_a_summary(tracking: dict[str, Any], tmp_path: Path) -> None:
    _, made = call(finish, tmp_path, status=ended("SUCCEEDED"), tracking=tracking, run_id="another")
    assert "Run succeeded" in Path(made["summary"].path).read_text()
