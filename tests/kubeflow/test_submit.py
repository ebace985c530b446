"""`rlpipe submit` against a server made of the API's own models."""

import dataclasses
import hashlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlpipe.errors import ClusterError, ConfigError
from rlpipe.kubeflow import submit as submitting
from rlpipe.kubeflow.answers import UnreachableError
from rlpipe.kubeflow.auth import Credentials
from rlpipe.kubeflow.client import Server, filter_text
from rlpipe.kubeflow.submit import Package, ensure_version, pipeline_spec
from tests.kubeflow.conftest import FAST, make_package
from tests.kubeflow.contract_server import ContractServer, detail, serving, stage


def submit(server: Server, package: Package, **options: Any) -> Any:
    return submitting.submit(server, package, **{"experiment": "papers", **options})


def test_a_run_carries_spec_arguments_experiment_and_service_account(contract: ContractServer, server: Server, package: Package) -> None:
    run = submit(server, package, run_name="first", service_account="trainer")
    made = contract.of("runs")[0]
    assert (run.run_id, made.display_name, made.service_account) == (made.run_id, "first", "trainer")
    assert made.runtime_config.parameters == {"number": 3}
    assert sorted(made.pipeline_spec["root"]["dag"]["tasks"]) == ["double", "double-2"]
    assert contract.of("experiments")[0].display_name == "papers"
    assert made.experiment_id == contract.of("experiments")[0].experiment_id


def looking_long(contract: ContractServer) -> Server:
    return Server(contract.url, Credentials(), patience=dataclasses.replace(FAST, looks=10, look_wait=0.3))


def test_the_experiment_is_made_once(contract: ContractServer, server: Server, package: Package) -> None:
    submit(server, package, experiment="100% + more")
    submit(server, package, experiment="100% + more")
    assert [one.display_name for one in contract.of("experiments")] == ["100% + more"]
    assert len(contract.of("runs")) == 2


def test_runs_without_a_name_have_different_ones(contract: ContractServer, server: Server, package: Package) -> None:
    submit(server, package)
    submit(server, package)
    first, second = contract.of("runs")
    assert first.display_name != second.display_name
    assert first.display_name.startswith("tiny 20")


def test_a_platform_document_travels_with_the_spec(spec_text: str) -> None:
    text = spec_text + "---\nplatforms:\n  kubernetes:\n    deploymentSpec: {}\n"
    assert pipeline_spec(text)["platform_spec"] == {"platforms": {"kubernetes": {"deploymentSpec": {}}}}
    assert pipeline_spec(text)["pipeline_spec"] == pipeline_spec(spec_text)


@pytest.mark.parametrize("text", ["- a list", "a: [", "no: root"])
def test_what_is_no_pipeline_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        pipeline_spec(text)


@pytest.mark.parametrize("path", ["/experiments", "/runs"])
@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_error_then_success_is_one_run(contract: ContractServer, server: Server, package: Package, path: str, status: int) -> None:
    contract.fault("POST", path, status=status, times=2)
    submit(server, package)
    assert len(contract.of("runs")) == 1
    assert contract.count("POST", path) == 3


def test_a_server_that_keeps_failing_is_given_up(contract: ContractServer, server: Server, package: Package) -> None:
    contract.fault("POST", "/runs", status=500)
    with pytest.raises(ClusterError, match=r"500 for: create run tiny .*scripted 500"):
        submit(server, package)
    assert contract.count("POST", "/runs") == FAST.tries


@pytest.mark.parametrize(("status", "words"), [(400, "something wrong"), (401, "RLPIPE_KFP_TOKEN"), (403, "--namespace"), (404, "--host"), (409, "already")])
def test_a_refusal_is_explained_and_not_repeated(contract: ContractServer, server: Server, package: Package, status: int, words: str) -> None:
    contract.fault("POST", "/runs", status=status)
    with pytest.raises(ClusterError, match=f"{status} for: create run") as caught:
        submit(server, package)
    assert words in str(caught.value)
    assert contract.count("POST", "/runs") == 1
    assert contract.of("runs") == []


def test_a_lost_answer_leaves_exactly_one_run(contract: ContractServer, server: Server, package: Package) -> None:
    """Case B18, for runs: the server made the run, the answer did not arrive."""
    contract.fault("POST", "/runs", lost=True, times=1)
    run = submit(server, package)
    assert [one.run_id for one in contract.of("runs")] == [run.run_id]
    assert contract.count("POST", "/runs") == 1


def test_a_lost_answer_and_a_server_that_lists_late_leave_one_run(contract: ContractServer, package: Package) -> None:
    contract.fault("POST", "/runs", lost=True, times=1)
    contract.shown_after = 0.5
    submit(looking_long(contract), package)
    assert len(contract.of("runs")) == 1
    assert contract.count("GET", "/runs") > 1


def test_a_request_lost_before_it_was_carried_out_is_made_again(contract: ContractServer, server: Server, package: Package) -> None:
    contract.fault("POST", "/runs", status=503, times=1)
    submit(server, package, run_name="again")
    assert len(contract.of("runs")) == 1


def test_an_older_run_of_the_same_name_is_not_taken_for_the_new_one(contract: ContractServer, server: Server, package: Package) -> None:
    first = submit(server, package, run_name="nightly")
    contract.fault("POST", "/runs", status=503, times=1)
    second = submit(server, package, run_name="nightly")
    assert first.run_id != second.run_id
    assert len(contract.of("runs")) == 2


def test_nothing_is_made_twice_when_it_cannot_be_looked_up(contract: ContractServer, server: Server, package: Package) -> None:
    contract.fault("POST", "/runs", lost=True, times=1)
    contract.fault("GET", "/runs", status=500)
    with pytest.raises(ClusterError, match="cannot be found out: create run"):
        submit(server, package)
    assert len(contract.of("runs")) == 1


def test_a_hang_ends(contract: ContractServer, server: Server, package: Package) -> None:
    contract.fault("GET", "/experiments", seconds=20)
    began = time.monotonic()
    with pytest.raises(ClusterError, match="ReadTimeoutError for: list experiments"):
        submit(server, package)
    assert FAST.tries * FAST.read <= time.monotonic() - began < 10


def test_a_hang_after_which_the_run_was_made_leaves_one_run(contract: ContractServer, package: Package) -> None:
    contract.fault("POST", "/runs", seconds=FAST.read + 0.2, times=1)
    submit(looking_long(contract), package)
    assert len(contract.of("runs")) == 1


def test_a_server_slow_to_list_is_waited_for(contract: ContractServer, server: Server, package: Package) -> None:
    contract.fault("GET", "/experiments", seconds=0.3)
    contract.fault("GET", "/runs", seconds=0.3)
    contract.fault("POST", "/runs", lost=True, times=1)
    submit(server, package)
    assert len(contract.of("runs")) == 1


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_no_server_is_said(package: Package) -> None:
    with pytest.raises(UnreachableError, match="port-forward"):
        submit(Server(f"http://127.0.0.1:{free_port()}", Credentials(), patience=FAST), package)


def test_a_server_that_comes_up_late_is_reached(package: Package) -> None:
    port = free_port()
    submitted = []
    patience = dataclasses.replace(FAST, first_wait=0.3)
    caller = threading.Thread(target=lambda: submitted.append(submit(Server(f"http://127.0.0.1:{port}", Credentials(), patience=patience), package)))
    caller.start()
    time.sleep(0.1)
    with serving(port) as contract:
        caller.join(20)
        assert [run.run_id for run in contract.of("runs")] == [run.run_id for run in submitted]
    assert len(submitted) == 1


@pytest.mark.parametrize("path", ["/experiments", "/runs"])
def test_a_page_instead_of_the_api_is_recognised(contract: ContractServer, server: Server, package: Package, path: str) -> None:
    contract.fault("POST", path, page=True)
    with pytest.raises(ClusterError, match=r"not the Kubeflow Pipelines API; got text/html"):
        submit(server, package)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"null", "no object but NoneType"),
        (b"[1, 2, 3]", "no object but list"),
        (b"{garbage", "a body that is no JSON"),
        (b'{"next_page_token": 5}', "next_page_token is no text"),
    ],
)
def test_a_list_that_is_no_json_object_is_not_an_empty_one(
    contract: ContractServer, rlpipe: Callable[..., int], capsys: pytest.CaptureFixture[str], body: bytes, words: str
) -> None:
    contract.fault("GET", "/runs", status=200, raw=body, kind="application/json")
    assert rlpipe("runs", "list") == 12
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("identity", [b'""', b"null", b"7", b'{"a": 1}'])
def test_a_run_whose_id_is_no_text_is_none(contract: ContractServer, server: Server, package: Package, identity: bytes) -> None:
    contract.fault("POST", "/runs", status=200, raw=b'{"run_id": ' + identity + b"}", kind="application/json")
    with pytest.raises(ClusterError, match=r"not the Kubeflow Pipelines API; got JSON (without|whose) run_id"):
        submit(server, package)


def test_a_redirect_is_not_followed(contract: ContractServer, server: Server, package: Package) -> None:
    contract.fault("GET", "/experiments", status=302, headers={"location": "https://login.example/dex?state=private"})
    with pytest.raises(ClusterError, match=r"https://login\.example/dex") as caught:
        submit(server, package)
    assert "private" not in str(caught.value)


def test_a_body_that_is_no_utf8_does_not_hide_the_status(contract: ContractServer, server: Server, package: Package) -> None:
    contract.fault("GET", "/experiments", status=502, raw=b"<html>\xff\xfe", times=1)
    submit(server, package)
    contract.fault("GET", "/experiments", status=403, raw=b"<html>\xff\xfe", times=1)
    with pytest.raises(ClusterError, match="403 for: list experiments"):
        submit(server, package)


def test_the_same_package_has_one_version_and_a_changed_one_a_second(contract: ContractServer, server: Server, package: Package) -> None:
    """Case B18: the first version is named by the content, not like the pipeline."""
    first = ensure_version(server, package)
    assert ensure_version(server, package) == first
    assert [one.display_name for one in contract.of("versions")] == [package.version]
    assert contract.packages[first[1]] == package.text
    changed = make_package(package.text + "# changed\n")
    assert ensure_version(server, changed)[0] == first[0]
    assert [one.display_name for one in contract.of("versions")] == [package.version, changed.version]
    assert [one.display_name for one in contract.of("pipelines")] == ["tiny"]


@pytest.mark.parametrize("path", ["/pipelines", "/pipelines/upload_version"])
@pytest.mark.parametrize("fault", [{"lost": True}, {"status": 500}])
def test_versions_survive_lost_answers(contract: ContractServer, server: Server, package: Package, path: str, fault: dict[str, Any]) -> None:
    """Case B18."""
    contract.fault("POST", path, **fault, times=1)
    ensure_version(server, package)
    assert len(contract.of("pipelines")) == len(contract.of("versions")) == 1


def test_a_run_of_an_ensured_version_refers_to_it(contract: ContractServer, server: Server, package: Package) -> None:
    submit(server, package, ensured=True)
    submit(server, package, ensured=True)
    first, second = contract.of("runs")
    assert first.pipeline_spec is None
    assert first.pipeline_version_reference.pipeline_version_id == second.pipeline_version_reference.pipeline_version_id
    assert len(contract.of("versions")) == 1


def test_the_namespace_goes_where_the_api_wants_it(contract: ContractServer, package: Package) -> None:
    submit(Server(contract.url, Credentials(), namespace="ada", patience=FAST), package)
    assert contract.of("experiments")[0].namespace == "ada"


def test_filters_survive_being_decoded_twice() -> None:
    assert filter_text({"display_name": "a+b 5%"}) == '{"predicates": [{"operation": "EQUALS", "key": "display_name", "string_value": "a%2Bb 5%25"}]}'


MICRO = ("--params", "configs/micro.yaml", "--rounds", "2")


def test_the_command_prints_run_and_link_and_waits(contract: ContractServer, rlpipe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    contract.script = [stage("RUNNING", detail("train")), stage("SUCCEEDED", detail("train", "SUCCEEDED"))]
    assert rlpipe("submit", *MICRO, "--wait", "--name", "first", "--set", "kubeflow.service_account=trainer", "--set", "kubeflow.experiment=papers") == 0
    (made,) = contract.of("runs")
    assert capsys.readouterr().out == f"run={made.run_id}\nlink={contract.url}/#/runs/details/{made.run_id}\n"
    assert (made.display_name, made.service_account, contract.of("experiments")[0].display_name) == ("first", "trainer", "papers")
    assert set(made.runtime_config.parameters) >= {"rollout", "train"}


def test_the_command_ends_with_the_code_of_the_run(contract: ContractServer, rlpipe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    contract.script = [stage("FAILED", detail("train", "FAILED", error="loss is not finite"))]
    assert rlpipe("submit", *MICRO, "--wait") == 13
    assert "train: loss is not finite" in capsys.readouterr().err


def test_the_command_ends_a_run_whose_budget_ran_out(contract: ContractServer, rlpipe: Callable[..., int]) -> None:
    contract.script = [stage("RUNNING")]
    assert rlpipe("submit", *MICRO, "--wait", "--set", "kubeflow.run_timeout_seconds=1") == 11
    assert contract.of("runs")[0].state == "CANCELED"


def test_the_command_ends_with_12_when_the_server_refuses(contract: ContractServer, rlpipe: Callable[..., int]) -> None:
    contract.fault("POST", "/runs", status=403)
    assert rlpipe("submit", *MICRO) == 12


@pytest.mark.parametrize("options", [("--pipeline", "nothing"), ("--rounds", "0"), ("--set", "kubeflow.unknown=1")])
def test_the_command_refuses_wrong_params_before_it_sends_any(contract: ContractServer, rlpipe: Callable[..., int], options: tuple[str, ...]) -> None:
    assert rlpipe("submit", *MICRO, *options) == 2
    assert contract.requests == []


def test_the_command_keeps_a_version(contract: ContractServer, rlpipe: Callable[..., int]) -> None:
    """Case B18."""
    assert rlpipe("submit", *MICRO, "--ensure-version") == rlpipe("submit", *MICRO, "--ensure-version") == 0
    (version,) = contract.of("versions")
    assert version.display_name == hashlib.sha256(contract.packages[version.pipeline_version_id].encode()).hexdigest()[:12]


RETRAINING = (*MICRO, "--pipeline", "retraining")
CHAMPION = ("--champion", "s3://models/policy")


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (CHAMPION, {"champion_uri": "s3://models/policy"}),
        ((*CHAMPION, "--metric", "pass_at_k", "--retrain-below", "0"), {"champion_uri": "s3://models/policy", "metric": "pass_at_k", "retrain_below": 0.0}),
    ],
)
def test_retraining_is_given_its_champion(contract: ContractServer, rlpipe: Callable[..., int], options: tuple[str, ...], given: dict[str, Any]) -> None:
    assert rlpipe("submit", *RETRAINING, *options) == 0
    (made,) = contract.of("runs")
    sent = made.runtime_config.parameters
    assert {name: sent[name] for name in ("champion_uri", "metric", "retrain_below") if name in sent} == given
    assert "rollout" in sent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RETRAINING, "the URI of the policy artifact, as the registered version's `source` shows it"),
        ((*RETRAINING, "--champion", ""), "needs a champion"),
        ((*RETRAINING, *CHAMPION, "--retrain-below", "nan"), "needs a number"),
        ((*MICRO, *CHAMPION), "for the pipeline retraining"),
        ((*MICRO, "--retrain-below", "0"), "for the pipeline retraining"),
    ],
)
@pytest.mark.parametrize("command", [("submit",), ("schedule", "set", "--every", "600")])
def test_retraining_without_what_it_needs_is_refused_before_anything_is_sent(
    contract: ContractServer, rlpipe: Callable[..., int], capsys: pytest.CaptureFixture[str], command: tuple[str, ...], options: tuple[str, ...], words: str
) -> None:
    assert rlpipe(*command, *options) == 2
    assert words in capsys.readouterr().err
    assert contract.requests == []
