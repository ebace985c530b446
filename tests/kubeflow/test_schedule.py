"""`rlpipe schedule set|show|off`: recurring runs."""

from collections.abc import Callable
from typing import Any

import pytest

from rlpipe.errors import ClusterError, ConfigError
from rlpipe.kubeflow import schedule
from rlpipe.kubeflow.client import Server
from rlpipe.kubeflow.schedule import Timing
from rlpipe.kubeflow.submit import Package
from tests.kubeflow.conftest import make_package
from tests.kubeflow.contract_server import ContractServer, api

NIGHTLY, HOURLY = Timing(cron="0 0 3 * * *"), Timing(every_seconds=3600)


def set_nightly(server: Server, package: Package, timing: Timing = NIGHTLY, **options: Any) -> tuple[Any, list[Any]]:
    return schedule.set_schedule(server, "nightly", timing, package, **{"experiment": "papers", **options})


def states(contract: ContractServer) -> list[str]:
    return [one.status for one in contract.of("recurringruns")]


def test_set_makes_one_that_runs_one_at_a_time_and_catches_nothing_up(contract: ContractServer, server: Server, package: Package) -> None:
    made, kept = set_nightly(server, package, service_account="trainer")
    only = contract.of("recurringruns")[0]
    assert (made.recurring_run_id, kept) == (only.recurring_run_id, [])
    assert (only.display_name, only.trigger.cron_schedule.cron, only.status) == ("nightly", "0 0 3 * * *", "ENABLED")
    assert (only.max_concurrency, only.no_catchup, only.service_account) == ("1", True, "trainer")
    assert only.runtime_config.parameters == {"number": 3}


def test_the_same_again_changes_nothing(contract: ContractServer, server: Server, package: Package) -> None:
    first, _ = set_nightly(server, package)
    again, _ = set_nightly(server, package)
    assert first.recurring_run_id == again.recurring_run_id
    assert contract.count("POST", "/recurringruns") == 1


def test_an_update_replaces_one_whose_runs_have_ended(contract: ContractServer, server: Server, package: Package) -> None:
    old, _ = set_nightly(server, package)
    contract.add_run(recurring_run_id=old.recurring_run_id, state="SUCCEEDED", experiment_id=old.experiment_id)
    new, kept = set_nightly(server, package, HOURLY)
    assert [one.recurring_run_id for one in contract.of("recurringruns")] == [new.recurring_run_id]
    assert kept == []
    assert new.trigger.periodic_schedule.interval_second == "3600"


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "PAUSED", "CANCELING", None])
def test_an_update_deletes_nothing_that_has_an_active_run(contract: ContractServer, server: Server, package: Package, state: str | None) -> None:
    """Case B22."""
    old, _ = set_nightly(server, package)
    run = contract.add_run(recurring_run_id=old.recurring_run_id, state=state, experiment_id=old.experiment_id)
    new, kept = set_nightly(server, make_package(package.text, number=4))
    assert [one.recurring_run_id for one in kept] == [old.recurring_run_id]
    assert states(contract) == ["DISABLED", "ENABLED"]
    assert contract.count("DELETE", ".*") == 0
    assert run.state == state
    run.state = "FAILED"
    _, kept = set_nightly(server, make_package(package.text, number=4))
    assert [one.recurring_run_id for one in contract.of("recurringruns")] == [new.recurring_run_id]
    assert kept == []


def test_the_new_one_stands_before_the_old_one_is_switched_off(contract: ContractServer, server: Server, package: Package) -> None:
    """Case B22: a failure in between leaves a schedule."""
    set_nightly(server, package)
    contract.fault("POST", "/recurringruns", status=403)
    with pytest.raises(ClusterError):
        set_nightly(server, package, HOURLY)
    assert states(contract) == ["ENABLED"]


def test_a_lost_answer_leaves_one_schedule(contract: ContractServer, server: Server, package: Package) -> None:
    contract.fault("POST", "/recurringruns", lost=True, times=1)
    set_nightly(server, package)
    assert states(contract) == ["ENABLED"]


def test_schedules_of_others_are_left_alone(contract: ContractServer, server: Server, package: Package) -> None:
    contract.kept["recurringruns"]["theirs"] = api.V2beta1RecurringRun(recurring_run_id="theirs", display_name="nightly", description="mine", status="ENABLED")
    set_nightly(server, package)
    schedule.switch_off(server, "nightly")
    assert states(contract) == ["ENABLED", "DISABLED"]


def test_off_starts_no_more_and_leaves_what_is_going_on(contract: ContractServer, server: Server, package: Package) -> None:
    """Case B22."""
    old, _ = set_nightly(server, package)
    run = contract.add_run(recurring_run_id=old.recurring_run_id, state="RUNNING", experiment_id=old.experiment_id)
    assert [one.recurring_run_id for one in schedule.switch_off(server, "nightly")] == [old.recurring_run_id]
    assert schedule.switch_off(server, "nightly") == []
    assert (states(contract), run.state, contract.count("DELETE", ".*")) == (["DISABLED"], "RUNNING", 0)


def test_on_again_after_off(contract: ContractServer, server: Server, package: Package) -> None:
    set_nightly(server, package)
    schedule.switch_off(server, "nightly")
    set_nightly(server, package)
    assert states(contract) == ["ENABLED"]


def test_a_schedule_of_an_ensured_version_refers_to_it(contract: ContractServer, server: Server, package: Package) -> None:
    made, _ = set_nightly(server, package, ensured=True)
    assert made.pipeline_version_reference.pipeline_version_id == contract.of("versions")[0].pipeline_version_id


def test_show_tells_when_and_what(server: Server, package: Package) -> None:
    made, _ = set_nightly(server, package)
    (found,) = schedule.ours(server, "nightly")
    start = f"schedule=nightly recurring_run={made.recurring_run_id} state=on cron='0 0 3 * * *' about='rlpipe tiny {package.version}"
    assert schedule.line(found).startswith(start)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "neither"),
        ({"cron": "0 0 3 * * *", "every_seconds": 5}, "both"),
        ({"cron": "0 3 * * *"}, 'put the seconds first: "0 0 3 * * *"'),
        ({"cron": "soon"}, "six fields"),
        ({"every_seconds": 0}, "positive"),
    ],
)
def test_timings_that_mean_something_else_than_meant_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Timing(**given)
    assert words in str(caught.value)


def test_retraining_is_scheduled_with_its_champion(contract: ContractServer, rlpipe: Callable[..., int]) -> None:
    scheduled = ("schedule", "set", "--params", "configs/micro.yaml", "--every", "600", "--pipeline", "retraining", "--champion")
    assert rlpipe(*scheduled, "s3://models/first", "--retrain-below", "0.5") == 0
    assert rlpipe(*scheduled, "s3://models/second") == 0
    (made,) = contract.of("recurringruns")
    assert made.runtime_config.parameters["champion_uri"] == "s3://models/second"
    assert "retrain_below" not in made.runtime_config.parameters


def test_the_command_sets_shows_and_switches_off(contract: ContractServer, rlpipe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """Case B22."""
    scheduled = ("schedule", "set", "--params", "configs/micro.yaml")
    assert rlpipe(*scheduled, "--every", "600") == 0
    (first,) = contract.of("recurringruns")
    assert capsys.readouterr().out == f"recurring_run={first.recurring_run_id}\nlink={contract.url}/#/recurringrun/details/{first.recurring_run_id}\n"
    run = contract.add_run(recurring_run_id=first.recurring_run_id, state="RUNNING")
    assert rlpipe(*scheduled, "--every", "900") == 0
    assert f"kept={first.recurring_run_id} reason=" in capsys.readouterr().out
    assert rlpipe("schedule", "show") == 0
    second, old = capsys.readouterr().out.splitlines()
    assert "state=on every_seconds=900" in second
    assert "state=off every_seconds=600" in old
    assert old.endswith(f"active_runs={run.run_id}")
    assert rlpipe("schedule", "off") == 0
    assert capsys.readouterr().out.endswith("state=off active_runs=none\n")
    assert states(contract) == ["DISABLED", "DISABLED"]
    assert rlpipe(*scheduled) == 2
