"""A Kubeflow server in memory, a client that does not wait long, a compiled pipeline of two tasks, and the command line against them."""

import hashlib
from collections.abc import Callable, Iterator

import pytest

from rlpipe import cli
from rlpipe.kubeflow import client
from rlpipe.kubeflow.auth import Credentials
from rlpipe.kubeflow.client import Patience, Server
from rlpipe.kubeflow.submit import Package
from tests.kubeflow.contract_server import ContractServer, serving

FAST = Patience(connect=2, read=1.0, tries=4, first_wait=0.01, looks=4, look_wait=0.06, poll=0.01, outage=0.2)


@pytest.fixture
def contract() -> Iterator[ContractServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(contract: ContractServer) -> Server:
    return Server(contract.url, Credentials(), patience=FAST)


@pytest.fixture(scope="session")
def spec_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    from kfp import compiler, dsl

    @dsl.component(base_image="example/image:1", install_kfp_package=False)
    def double(number: int) -> int:
        return number * 2

    @dsl.pipeline(name="tiny")
    def tiny(number: int = 1) -> int:
        return double(number=double(number=number).output).output

    file = tmp_path_factory.mktemp("compiled") / "tiny.yaml"
    compiler.Compiler().compile(tiny, str(file))
    return file.read_text()


@pytest.fixture
def package(spec_text: str) -> Package:
    return make_package(spec_text)


def make_package(text: str, number: int = 3) -> Package:
    return Package(name="tiny", version=hashlib.sha256(text.encode()).hexdigest()[:12], text=text, arguments={"number": number})


@pytest.fixture
def rlpipe(contract: ContractServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line, its server the one in memory."""
    monkeypatch.setattr(client, "PATIENCE", FAST)
    monkeypatch.setenv("RLPIPE_KFP_HOST", contract.url)
    return lambda *argv: cli.main(list(argv))
