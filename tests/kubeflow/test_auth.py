"""Who is asking, and that no secret is ever shown."""

import json
import logging
import os
import pickle
import ssl
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from rlpipe.errors import ClusterError, ConfigError
from rlpipe.kubeflow import auth, runs
from rlpipe.kubeflow.auth import Credentials, OpenId, address, from_environment
from rlpipe.kubeflow.client import Server
from tests.kubeflow.conftest import FAST
from tests.kubeflow.contract_server import ContractServer

MARKER = "marker-5f2c/secret+value"
COOKIES = f"authservice_session={MARKER}; lang=en"


def sent(contract: ContractServer, credentials: Credentials) -> dict[str, str]:
    runs.newest(Server(contract.url, credentials, patience=FAST))
    return {name.lower(): value for name, value in contract.seen_headers[-1].items()}


def test_nobody_sends_nothing(contract: ContractServer) -> None:
    headers = sent(contract, Credentials())
    assert "authorization" not in headers
    assert "cookie" not in headers


def test_a_token_and_cookies_are_sent(contract: ContractServer) -> None:
    contract.token, contract.cookie = MARKER, COOKIES
    headers = sent(contract, from_environment({"RLPIPE_KFP_TOKEN": f"{MARKER}\n", "RLPIPE_KFP_COOKIES": COOKIES}))
    assert (headers["authorization"], headers["cookie"]) == (f"Bearer {MARKER}", COOKIES)


def test_files_are_read_for_every_request(contract: ContractServer, tmp_path: Path) -> None:
    token, cookies = tmp_path / "token", tmp_path / "cookies"
    server = Server(contract.url, from_environment({"RLPIPE_KFP_TOKEN": "old"}, token_file=token, cookie_file=cookies), patience=FAST)
    for number in ("1", "2"):
        token.write_text(f"token-{number}\n")
        cookies.write_text(f"session=cookie-{number}\n")
        contract.token, contract.cookie = f"token-{number}", f"session=cookie-{number}"
        assert runs.newest(server) == []


def test_a_wrong_token_is_said_without_showing_it(contract: ContractServer) -> None:
    """The server answers with the very token; case B07."""
    contract.token = "another"
    with pytest.raises(ClusterError, match=r"401 for: list runs \(not a valid token: Bearer \*\*\*\)") as caught:
        sent(contract, Credentials(token=MARKER))
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(pickle.loads(pickle.dumps(caught.value)).__dict__)
    assert MARKER not in shown
    assert "own-session" not in shown


@pytest.mark.parametrize(("status", "debug"), [(401, True), (401, False), (403, True), (409, False), (500, True), (302, True)])
def test_no_secret_in_anything_the_command_line_says(contract: ContractServer, tmp_path: Path, status: int, debug: bool) -> None:
    """Case B07, in a process of its own: stdout, stderr, logs and tracebacks."""
    contract.token = "another"
    if status != 401:
        contract.fault("GET", "/runs", status=status, raw=f"<p>{MARKER}".encode(), headers={"location": f"/login?token={MARKER}"})
    program = (
        "import logging; logging.basicConfig(level=logging.DEBUG);"
        "from rlpipe import cli; from rlpipe.kubeflow import client; client.PATIENCE = client.Patience(first_wait=0.01, read=2);"
        f"raise SystemExit(cli.main(['runs', 'list'] + {['--debug'] * debug}))"
    )
    environ = {**os.environ, "RLPIPE_KFP_HOST": contract.url, "RLPIPE_KFP_TOKEN": MARKER, "RLPIPE_KFP_COOKIES": COOKIES, "RLPIPE_KFP_CLIENT_SECRET": MARKER}
    done = subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if debug else 12)
    assert f"{status} for: list runs" in done.stderr
    assert MARKER not in done.stdout + done.stderr
    assert "Traceback" in done.stderr if debug else "Traceback" not in done.stderr


@pytest.mark.parametrize("text", [f"{MARKER}\nsecond line", "", f"{MARKER}é", f"{MARKER}\x00"])
def test_a_token_that_cannot_be_sent_is_refused_unseen(contract: ContractServer, tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError, match="cannot be sent") as caught:
        sent(contract, Credentials(token_file=file))
    assert MARKER not in "".join(traceback.format_exception(caught.value))
    assert contract.requests == []


def test_cookies_that_are_none_are_refused_unseen(contract: ContractServer) -> None:
    with pytest.raises(ConfigError, match="should be cookies") as caught:
        sent(contract, Credentials(cookies=MARKER))
    assert MARKER not in str(caught.value)


def test_a_missing_file_is_named(contract: ContractServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone: No such file"):
        sent(contract, Credentials(token_file=tmp_path / "gone"))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("kubeflow.example/pipeline/", "https://kubeflow.example/pipeline"),
        ("http://localhost:8080", "http://localhost:8080"),
        ("localhost:8080", "https://localhost:8080"),
        ("https://kubeflow.example/pipeline/#/runs/details/1", "https://kubeflow.example/pipeline"),
        ("http://[::1]:8888", "http://[::1]:8888"),
    ],
)
def test_addresses(given: str, found: str) -> None:
    assert address(given) == found


@pytest.mark.parametrize("given", ["ftp://host", "http://", "", "https://host/?token=hunter2", "https://ada:hunter2@host", "ada:hunter2@host"])
def test_addresses_that_are_refused_show_no_password(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        address(given)
    assert "hunter2" not in str(caught.value)
    if "@" in given:
        assert "RLPIPE_KFP_TOKEN" in str(caught.value)


@pytest.mark.parametrize("given", ["http://host:65536", "host:99999/pipeline", "http://host:0", "http://[::1]:70000", "http://[zz]", "http://["])
def test_an_address_that_leads_nowhere_is_refused_at_once(contract: ContractServer, rlpipe: Callable[..., int], given: str) -> None:
    assert rlpipe("runs", "list", "--host", given) == 2
    assert contract.requests == []


def test_no_server_named(rlpipe: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RLPIPE_KFP_HOST")
    assert rlpipe("runs", "list") == 2
    assert "--host" in capsys.readouterr().err


def test_the_machines_own_kfp_settings_count_for_nothing(contract: ContractServer, tmp_path: Path) -> None:
    """kfp's own client takes cookies and a namespace from there."""
    kept = tmp_path / ".config/kfp/context.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"namespace": "elsewhere", "client_authentication_cookie": "a=b"}))
    program = "import sys; from rlpipe import cli; sys.exit(cli.main(['runs', 'list']))"
    environ = {**os.environ, "HOME": str(tmp_path), "RLPIPE_KFP_HOST": contract.url, "KF_PIPELINES_ENDPOINT": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "cookie" not in {name.lower() for name in contract.seen_headers[-1]}


def test_a_missing_certificate_authority_is_named(contract: ContractServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        Server(contract.url, Credentials(), ca_cert=tmp_path / "ca.pem")


def test_openid_as_kfp_takes_it(contract: ContractServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sign-in that kfp kept is exchanged for an identity token, once, and that is sent."""
    from kfp.client import auth as kfp_auth

    kept = tmp_path / "credentials.json"
    kept.write_text(json.dumps({"server-id": {"refresh_token": MARKER, "other_client_id": "mine", "other_client_secret": MARKER}}))
    monkeypatch.setattr(kfp_auth, "LOCAL_KFP_CREDENTIAL", str(kept))
    monkeypatch.setattr(kfp_auth, "OAUTH_TOKEN_URI", contract.url + "/token")
    contract.identity_token, contract.token = "identity-1", "identity-1"
    server = Server(contract.url, Credentials(openid=OpenId("server-id", "mine", MARKER)), patience=FAST)
    assert runs.newest(server) == runs.newest(server) == []
    assert contract.count("POST", "/token") == 1


def test_openid_that_fails_is_said_unseen(contract: ContractServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from kfp.client import auth as kfp_auth

    kept = tmp_path / "credentials.json"
    kept.write_text(json.dumps({"server-id": {"refresh_token": MARKER, "other_client_id": "mine", "other_client_secret": MARKER}}))
    monkeypatch.setattr(kfp_auth, "LOCAL_KFP_CREDENTIAL", str(kept))
    monkeypatch.setattr(kfp_auth, "OAUTH_TOKEN_URI", contract.url + "/token")
    with caplog.at_level(logging.DEBUG), pytest.raises(ClusterError, match="no identity token") as caught:
        sent(contract, Credentials(openid=OpenId("server-id", "mine", MARKER)))
    assert MARKER not in "".join(traceback.format_exception(caught.value)) + caplog.text


def test_two_ways_to_a_token_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="two ways"):
        from_environment({auth.TOKEN: MARKER}, client_id="server-id")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "kubeflow in a test")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - timedelta(days=1), now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    signed, private = folder / "ca.pem", folder / "key.pem"
    signed.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return signed, private


def test_a_certificate_counts_only_when_its_authority_is_given(contract: ContractServer, tmp_path: Path) -> None:
    signed, private = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed, private)
    contract.socket = context.wrap_socket(contract.socket, server_side=True)
    url = contract.url.replace("http:", "https:")
    with pytest.raises(ClusterError, match=r"no safe connection .* --ca-cert"):
        runs.newest(Server(url, Credentials(token=MARKER), patience=FAST))
    assert contract.requests == []
    assert runs.newest(Server(url, Credentials(), ca_cert=signed, patience=FAST)) == []
