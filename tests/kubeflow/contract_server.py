"""A Kubeflow Pipelines server in memory, made of the API's own models: what kfp's client library reads and writes decides its answers.

A request that does not fit the model is answered 400, a second thing of the same name 409. Faults are scripted with `fault`, what runs do with `script`.
"""

from __future__ import annotations

import email
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlsplit

import kfp_server_api as api
import yaml

V2 = "/apis/v2beta1"
FILTERS = {
    "runs": {"display_name", "run_id", "experiment_id", "recurring_run_id", "state"},
    "experiments": {"display_name"},
    "pipelines": {"display_name"},
    "versions": {"display_name"},
    "recurringruns": {"display_name"},
}
LISTS = {
    "runs": (api.V2beta1ListRunsResponse, "runs"),
    "experiments": (api.V2beta1ListExperimentsResponse, "experiments"),
    "pipelines": (api.V2beta1ListPipelinesResponse, "pipelines"),
    "versions": (api.V2beta1ListPipelineVersionsResponse, "pipeline_versions"),
    "recurringruns": (api.V2beta1ListRecurringRunsResponse, "recurring_runs"),
}
CLIENT = api.ApiClient()


class RefusedError(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Fault:
    """What goes wrong with the next `times` requests of this method and path."""

    method: str
    path: str
    status: int | None = None
    """Answer with this status instead of carrying the request out."""
    lost: bool = False
    """Carry the request out and close the connection without an answer."""
    seconds: float = 0
    """Wait first."""
    page: bool = False
    """Answer 200 with an HTML page."""
    raw: bytes | None = None
    """Answer with this body instead of an API error."""
    kind: str = "text/html"
    """The content type of `raw`."""
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1_000_000


def detail(name: str, state: str = "RUNNING", *, task_id: str | None = None, error: str | None = None, **fields: Any) -> Any:
    """One task of a run."""
    status = api.GoogleRpcStatus(code=2, message=error) if error else None
    return api.V2beta1PipelineTaskDetail(display_name=name, task_id=task_id or name, state=state, error=status, **fields)


def stage(state: str, *tasks: Any, error: str | None = None) -> Any:
    """What one look at a run finds."""
    status = api.GoogleRpcStatus(code=2, message=error) if error else None
    return api.V2beta1Run(state=state, error=status, run_details=api.V2beta1RunDetails(task_details=list(tasks)))


class ContractServer(ThreadingHTTPServer):
    """Its state, its script and its record of requests, open to tests."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.kept: dict[str, dict[str, Any]] = {name: {} for name in FILTERS}
        self.packages: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.seen_headers: list[dict[str, str]] = []
        self.script: list[Any] = []
        self.looks: dict[str, int] = {}
        self.shown_after = 0.0
        self.made_at: dict[str, float] = {}
        self.token: str | None = None
        self.identity_token: str | None = None
        self.cookie: str | None = None
        self.logs: dict[str, str] = {}
        self.logs_from = "ui"
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, method: str, path: str, **what: Any) -> None:
        """From now on, `method` on paths that match `path` goes wrong."""
        self.faults.append(Fault(method, path, **what))

    def count(self, method: str, path: str) -> int:
        """How many requests of this method had a path that matches."""
        return sum(method == one and re.fullmatch(path, place) is not None for one, place in self.requests)

    def add_run(self, **fields: Any) -> Any:
        """A run made by something else."""
        run = api.V2beta1Run(run_id=str(uuid.uuid4()), created_at=datetime.now(UTC), **fields)
        self.kept["runs"][run.run_id] = run
        return run

    def of(self, kind: str) -> list[Any]:
        """What was made, in order."""
        return list(self.kept[kind].values())


@contextmanager
def serving(port: int = 0) -> Iterator[ContractServer]:
    """A server on this port, or on a free one."""
    server = ContractServer(port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    server: ContractServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def _handle(self, method: str) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = parts.path.removeprefix(V2)
        with self.server.lock:
            self.server.requests.append((method, path))
            self.server.seen_headers.append(dict(self.headers))
            fault = next((one for one in self.server.faults if one.method == method and one.times > 0 and re.fullmatch(one.path, path)), Fault("", ""))
            fault.times -= 1
        time.sleep(fault.seconds)
        try:
            self._answer(fault, method, path, {key: values[0] for key, values in parse_qs(parts.query).items()}, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self, fault: Fault, method: str, path: str, query: dict[str, str], body: bytes) -> None:
        if fault.page:
            return self._send(200, b"<!doctype html><title>Sign in</title>", "text/html")
        try:
            if fault.status:
                if fault.raw is not None:
                    return self._send(fault.status, fault.raw, fault.kind, fault.headers)
                raise RefusedError(fault.status, f"scripted {fault.status}")
            if path == "/token":
                return self._token()
            self._sign_in()
            with self.server.lock:
                answer = Api(self.server).carry_out(method, path, query, body, self.headers)
        except RefusedError as error:
            content = {"error": error.message, "message": error.message, "code": error.status}
            return self._send(error.status, json.dumps(content).encode(), headers=fault.headers)
        if fault.lost:
            self.close_connection = True
            return None
        if isinstance(answer, str):
            return self._send(200, answer.encode(), "text/html" if answer.startswith("<") else "text/plain")
        return self._send(200, json.dumps(CLIENT.sanitize_for_serialization(answer)).encode())

    def _token(self) -> None:
        """What an OpenID Connect provider answers."""
        if self.server.identity_token is None:
            raise RefusedError(400, "invalid_grant")
        self._send(200, json.dumps({"id_token": self.server.identity_token}).encode())

    def _sign_in(self) -> None:
        given = self.headers.get("authorization"), self.headers.get("cookie")
        if self.server.token and given[0] != f"Bearer {self.server.token}":
            raise RefusedError(401, f"not a valid token: {given[0]}")
        if self.server.cookie and given[1] != self.server.cookie:
            raise RefusedError(401, f"not a valid session: {given[1]}")

    def _send(self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("set-cookie", "session=marker-of-the-servers-own-session")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class Api:
    """What each request does."""

    def __init__(self, server: ContractServer) -> None:
        self.server, self.kept = server, server.kept

    def carry_out(self, method: str, path: str, query: dict[str, str], body: bytes, headers: Any) -> Any:
        routes = (
            ("GET", "/(runs|experiments|pipelines|recurringruns)", lambda kind: self.listed(kind, query)),
            ("GET", "/pipelines/([^/]+)/versions", lambda pipeline: self.listed("versions", query, pipeline_id=pipeline)),
            ("GET", "/runs/([^/:]+)", self.look),
            ("GET", "/(experiments|recurringruns)/([^/:]+)", self.one),
            ("POST", "/runs", lambda: self.create_run(read(body, "V2beta1Run"))),
            ("POST", "/experiments", lambda: self.create_experiment(read(body, "V2beta1Experiment"))),
            ("POST", "/pipelines", lambda: self.create_pipeline(read(body, "V2beta1Pipeline"))),
            ("POST", "/pipelines/upload_version", lambda: self.upload_version(query, body, headers)),
            ("POST", "/recurringruns", lambda: self.create_recurring_run(read(body, "V2beta1RecurringRun"))),
            ("POST", "/runs/([^/:]+):terminate", self.terminate),
            ("POST", "/recurringruns/([^/:]+):disable", self.disable),
            ("DELETE", "/recurringruns/([^/:]+)", lambda identity: self.delete(identity, query)),
            ("GET", "/k8s/pod/logs", lambda: self.log("ui", query.get("podname", ""))),
            ("GET", "/apis/v1alpha1/runs/[^/]+/nodes/([^/]+)/log", lambda pod: self.log("api", pod)),
        )
        for asked, pattern, act in routes:
            match = re.fullmatch(pattern, path)
            if asked == method and match:
                return act(*match.groups())
        raise RefusedError(404, "Not Found")

    def one(self, kind: str, identity: str) -> Any:
        if identity not in self.kept[kind]:
            raise RefusedError(404, f"{kind[:-1]} {identity} not found.")
        return self.kept[kind][identity]

    def listed(self, kind: str, query: dict[str, str], **fixed: str) -> Any:
        matching = predicates(kind, query.get("filter", "")) | fixed
        matching |= {key: query[key] for key in ("experiment_id", "namespace") if query.get(key)}
        fresh = time.monotonic() - self.server.shown_after
        found = [one for identity, one in self.kept[kind].items() if self.server.made_at.get(identity, 0.0) <= fresh]
        found = [one for one in found if all(getattr(one, key, None) == value for key, value in matching.items())]
        if query.get("sort_by") == "created_at desc":
            found.reverse()
        start, size = int(query.get("page_token") or 0), int(query.get("page_size") or 20)
        model, name = LISTS[kind]
        more = str(start + size) if start + size < len(found) else None
        return model(**{name: found[start : start + size], "total_size": len(found), "next_page_token": more})

    def look(self, identity: str) -> Any:
        """A run as far as the script has come; each look is one step further."""
        run = self.one("runs", identity)
        if self.server.script and run.state not in ("CANCELED",):
            turn = self.server.looks.get(identity, 0)
            self.server.looks[identity] = turn + 1
            found = self.server.script[min(turn, len(self.server.script) - 1)]
            run.state, run.error, run.run_details = found.state, found.error, found.run_details
        return run

    def keep(self, kind: str, field: str, made: Any) -> Any:
        identity = str(uuid.uuid4())
        setattr(made, field, identity)
        made.created_at = datetime.now(UTC)
        self.kept[kind][identity] = made
        self.server.made_at[identity] = time.monotonic()
        return made

    def unique(self, kind: str, made: Any, *fields: str) -> None:
        if any(all(getattr(one, name) == getattr(made, name) for name in fields) for one in self.kept[kind].values()):
            raise RefusedError(409, f"{made.display_name} already exists.")

    def create_experiment(self, made: Any) -> Any:
        self.unique("experiments", made, "display_name", "namespace")
        return self.keep("experiments", "experiment_id", made)

    def create_pipeline(self, made: Any) -> Any:
        self.unique("pipelines", made, "display_name", "namespace")
        return self.keep("pipelines", "pipeline_id", made)

    def upload_version(self, query: dict[str, str], body: bytes, headers: Any) -> Any:
        if query.get("pipelineid") not in self.kept["pipelines"]:
            raise RefusedError(404, "pipeline not found")
        text = uploaded(body, headers)
        made = api.V2beta1PipelineVersion(pipeline_id=query["pipelineid"], display_name=query["name"], name=query["name"])
        self.unique("versions", made, "display_name", "pipeline_id")
        made = self.keep("versions", "pipeline_version_id", made)
        self.server.packages[made.pipeline_version_id] = text
        return made

    def runnable(self, made: Any) -> None:
        if not made.display_name:
            raise RefusedError(400, "display_name is empty")
        if made.experiment_id not in self.kept["experiments"]:
            raise RefusedError(404, "experiment not found")
        reference = made.pipeline_version_reference
        if (made.pipeline_spec is None) == (reference is None):
            raise RefusedError(400, "one of pipeline_spec and pipeline_version_reference")
        if reference and reference.pipeline_version_id not in self.kept["versions"]:
            raise RefusedError(404, "pipeline version not found")
        spec = made.pipeline_spec or next(iter(yaml.safe_load_all(self.server.packages[reference.pipeline_version_id])))
        spec = spec.get("pipeline_spec", spec)
        known = set(spec["root"].get("inputDefinitions", {}).get("parameters", {}))
        unknown = set(made.runtime_config.parameters or {}) - known
        if unknown:
            raise RefusedError(400, f"unknown parameters: {sorted(unknown)}")

    def create_run(self, made: Any) -> Any:
        self.runnable(made)
        made.state = "PENDING"
        return self.keep("runs", "run_id", made)

    def create_recurring_run(self, made: Any) -> Any:
        self.runnable(made)
        if not 1 <= int(made.max_concurrency or 0) <= 10:
            raise RefusedError(400, "max_concurrency")
        made.status = "ENABLED" if made.mode == "ENABLE" else "DISABLED"
        return self.keep("recurringruns", "recurring_run_id", made)

    def terminate(self, identity: str) -> dict[str, Any]:
        self.one("runs", identity).state = "CANCELED"
        return {}

    def disable(self, identity: str) -> dict[str, Any]:
        recurring = self.one("recurringruns", identity)
        recurring.status, recurring.mode = "DISABLED", "DISABLE"
        return {}

    def delete(self, identity: str, query: dict[str, str]) -> dict[str, Any]:
        """As in the real one, what it owns is collected with it, unless orphaned."""
        del self.kept["recurringruns"][identity]
        if query.get("propagation_policy") != "ORPHAN":
            for run in self.kept["runs"].values():
                if run.recurring_run_id == identity and run.state == "RUNNING":
                    run.state = "FAILED"
        return {}

    def log(self, place: str, pod: str) -> str:
        if self.server.logs_from != place:
            if place == "api" and self.server.logs_from == "ui":
                return "<!doctype html><title>the pages</title>"
            raise RefusedError(404, "Not Found")
        if pod not in self.server.logs:
            raise RefusedError(500, f"Could not get main container logs: pods {pod} not found")
        return self.server.logs[pod]


def read(body: bytes, model: str) -> Any:
    """The body as the API's model.

    Raises:
        RefusedError: it is not JSON, has other fields, or fields of another type.
    """
    try:
        content = json.loads(body)
        misfit = misfits(content, model)
        if not misfit:
            return CLIENT.deserialize(SimpleNamespace(data=body), model)
    except ValueError as error:
        misfit = str(error)
    raise RefusedError(400, f"does not fit {model}: {misfit}")


def misfits(value: Any, kind: str) -> str | None:
    """Where a JSON value is not what the generated models declare."""
    if kind.startswith("list["):
        inner = kind[5:-1]
        return next((found for one in value if (found := misfits(one, inner))), None) if isinstance(value, list) else f"{value!r} is no list"
    if kind == "object" or kind.startswith("dict(") or kind == "datetime":
        return None
    if kind in ("str", "int", "bool", "float"):
        return None if type(value).__name__ == kind else f"{value!r} is no {kind}"
    model = getattr(api, kind)
    if not model.openapi_types:
        return None if value in model.allowable_values else f"{value!r} is none of {model.allowable_values}"
    fields = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
    unknown = [name for name in value if name not in fields]
    return f"unknown field {unknown[0]}" if unknown else next((found for name, one in value.items() if (found := misfits(one, fields[name]))), None)


def predicates(kind: str, text: str) -> dict[str, str]:
    """The values that a filter asks for. As in the real server, it is decoded once more than the query already was."""
    if not text:
        return {}
    found = read(unquote_plus(text).encode(), "V2beta1Filter")
    for predicate in found.predicates:
        if predicate.operation != "EQUALS" or predicate.key not in FILTERS[kind]:
            raise RefusedError(400, f"cannot filter {kind} by {predicate.key}")
    return {predicate.key: predicate.string_value for predicate in found.predicates}


def uploaded(body: bytes, headers: Any) -> str:
    """The file in a multipart body."""
    message = email.message_from_bytes(b"content-type: " + headers["content-type"].encode() + b"\r\n\r\n" + body)
    for part in message.walk():
        if part.get_param("name", header="content-disposition") == "uploadfile":
            return part.get_payload(decode=True).decode()
    raise RefusedError(400, "no uploadfile")
