"""Component `decide` through its own function, on real artifacts."""

from pathlib import Path

import pytest

from ...conftest import Made, call
from ..component import decide


@pytest.mark.parametrize(("below", "retrain"), [(1.01, True), (0.0, False)])
def test_retraining_is_decided_by_the_metric(below: float, retrain: bool, begun: Made, tmp_path: Path) -> None:
    worth, made = call(decide, tmp_path, evaluation=begun["evaluation"], metric="greedy_accuracy", below=below)
    assert worth is retrain
    assert ("**retrain**" if retrain else "**keep the champion**") in Path(made["summary"].path).read_text()


def test_a_metric_that_is_not_there_is_refused(begun: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(decide, tmp_path, evaluation=begun["evaluation"], metric="accuracy", below=0.9)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "got accuracy" in said
    assert "greedy_accuracy" in said
