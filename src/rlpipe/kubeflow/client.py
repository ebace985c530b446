"""One Kubeflow Pipelines server: every request with a time limit, repeated where that is safe, and never made twice where it is not.

Built on kfp's own API client (`kfp_server_api`) rather than on `kfp.Client`, which reads the machine's kubeconfig and kfp settings,
prints, asks on its own, sends without time limits, and repeats nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kfp_server_api
import urllib3

from rlpipe.errors import ClusterError, ConfigError
from rlpipe.kubeflow.answers import ConflictError, UnansweredError, UnreachableError, not_the_api, refused, unanswered
from rlpipe.kubeflow.auth import Credentials

log = logging.getLogger("rlpipe")


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server, in seconds."""

    connect: float = 10
    read: float = 60
    tries: int = 4
    """How often a request is sent before its failure counts."""
    first_wait: float = 1
    """The wait before the second try; each later one is twice as long."""
    looks: int = 6
    """How often to look, after a lost answer, for what may have been made; a server may list it late."""
    look_wait: float = 2.5
    poll: float = 5
    outage: float = 300
    """How long a server may be away while a run is waited for."""


PATIENCE = Patience()
PAGE = 100


class Server:
    """The API of one server.

    Args:
        host: its address, as `auth.address` gives it.
        namespace: the user's own, where several users share a server.
        ui_host: the address of its pages, where that is another one.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        *,
        namespace: str | None = None,
        ca_cert: Path | None = None,
        ui_host: str | None = None,
        patience: Patience = PATIENCE,
    ) -> None:
        if ca_cert is not None and not ca_cert.is_file():
            raise ConfigError("the file with the certificate authority is not there", got=str(ca_cert), do="give --ca-cert FILE in PEM form")
        self.host, self.ui_host, self.namespace, self.patience = host, ui_host or host, namespace, patience
        self._credentials = credentials
        configuration = kfp_server_api.Configuration()
        configuration.host = host
        configuration.ssl_ca_cert = str(ca_cert) if ca_cert else None
        configuration.retries = urllib3.Retry(total=0, raise_on_redirect=False)  # Repeated here instead, and no redirect followed with a token.
        configuration.api_key_prefix["authorization"] = "Bearer"
        self._configuration = configuration
        self._api = kfp_server_api.ApiClient(configuration)
        self.runs = kfp_server_api.RunServiceApi(self._api)
        self.experiments = kfp_server_api.ExperimentServiceApi(self._api)
        self.pipelines = kfp_server_api.PipelineServiceApi(self._api)
        self.uploads = kfp_server_api.PipelineUploadServiceApi(self._api)
        self.recurring_runs = kfp_server_api.RecurringRunServiceApi(self._api)

    def send(self, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """One request, sent once.

        Raises:
            UnansweredError: no answer, or one of 500, 502, 503, 504.
            ConflictError: 409.
            ClusterError: any other refusal, or an answer that is not the API's.
        """
        failure = None
        self._identify()
        try:
            answer = call(*args, **options, _request_timeout=(self.patience.connect, self.patience.read))
        except (kfp_server_api.ApiTypeError, kfp_server_api.ApiValueError):
            raise
        except kfp_server_api.ApiException as error:
            failure = self._refused(what, error)
        except urllib3.exceptions.HTTPError as error:
            failure = unanswered(what, error, self.host)
        except (ValueError, TypeError, AttributeError) as error:
            # kfp's client trips over a body that is no UTF-8, over no body, and over fields of another type than documented.
            inner = error.__context__
            failure = self._refused(what, inner) if isinstance(inner, kfp_server_api.ApiException) else not_the_api(what, type(error).__name__)
        if failure is not None:  # Raised out here: the text of kfp's own error holds the answer's headers, cookies among them.
            raise self._hidden(failure)
        return answer

    def ask(self, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A request that may be carried out twice, such as reading or ending: repeated with growing waits. Raises as `send`."""
        for wait in self._waits():
            try:
                answer = self.send(what, call, *args, **options)
                break
            except UnansweredError as error:
                if wait is None:
                    raise
                self._pause(wait, error)
        return self._json(what, answer)

    def create(self, what: str, find: Callable[[], Any | None], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make something exactly once: after a lost answer it is looked for, several times, before it is made again.

        Args:
            find: what was made, if the server lists it by now.

        Raises:
            ClusterError: as `send`; also when it cannot be found out whether it was made.
        """
        for wait in self._waits():
            try:
                return self._json(what, self.send(what, call, *args, **options))
            except (UnansweredError, ConflictError) as error:
                found = None if isinstance(error, UnreachableError) else self._look(what, find)
                if found is not None:
                    log.info("request=%r state=found_after_lost_answer", what)
                    return found
                if wait is None or isinstance(error, ConflictError):
                    raise
                self._pause(wait, error)
        raise AssertionError("the last try returns or raises")

    def everything(
        self, what: str, call: Callable[..., Any], field: str, *args: Any, matching: Mapping[str, str] | None = None, limit: int | None = None, **options: Any
    ) -> list[Any]:
        """All that a list call gives, newest first, its pages joined; `matching` keeps what has these values.

        Raises:
            ClusterError: as `ask`; also when the server leads back to a page it gave already.
        """
        if matching:
            options["filter"] = filter_text(matching)
        found: list[Any] = []
        token, seen = "", {""}
        while limit is None or len(found) < limit:
            answer = self.ask(what, call, *args, page_token=token, page_size=min(PAGE, limit or PAGE), sort_by="created_at desc", **options)
            found += getattr(answer, field) or []
            token = answer.next_page_token
            if not token:
                break
            if token in seen:
                raise not_the_api(what, "the same page again")
            seen.add(token)
        return found[:limit]

    def text(self, what: str, path: str, query: Mapping[str, str]) -> str:
        """The plain text at a path of the server. Raises as `send`; an HTML page is not what was asked for."""

        def call(**limits: Any) -> Any:
            asked = {"query_params": list(query.items()), "header_params": {"Accept": "text/plain"}, "auth_settings": ["Bearer"]}
            answer = self._api.call_api(path, "GET", {}, **asked, _preload_content=False, _return_http_data_only=True, **limits)
            return answer.headers.get("content-type", ""), answer.data

        kind, data = self.send(what, call)
        if "html" in kind:
            raise not_the_api(what, kind)
        return str(data.decode("utf-8", "replace"))

    def link(self, kind: str, identity: str) -> str:
        """The page of a run or recurring run."""
        return f"{self.ui_host}/#/{kind}/details/{identity}"

    @property
    def in_namespace(self) -> dict[str, Any]:
        """The namespace as an option of list calls."""
        return {"namespace": self.namespace} if self.namespace else {}

    def _identify(self) -> None:
        self._api.cookie = self._credentials.cookies()
        token = self._credentials.token()
        if token:
            self._configuration.api_key["authorization"] = token

    def _refused(self, what: str, error: kfp_server_api.ApiException) -> ClusterError:
        if not error.status:
            return not_the_api(what, str(error.reason)[:300])
        return refused(what, error.status, error.body, error.headers)

    def _json(self, what: str, answer: Any) -> Any:
        """`answer`, unless it was read out of something that is no JSON object: kfp's client makes an empty object of a sign-in page.

        kfp's client also makes a text of whatever stands where one should be, so the answer's own texts are looked at as they came.
        """
        response = self._api.last_response
        kind = response.urllib3_response.headers.get("content-type", "nothing")
        if "json" not in kind:
            raise not_the_api(what, kind)
        try:
            content = json.loads(response.data)
        except ValueError:
            raise not_the_api(what, "a body that is no JSON") from None
        if not isinstance(content, dict):
            raise not_the_api(what, f"JSON that is no object but {type(content).__name__}")
        texts = [name for name, declared in getattr(answer, "openapi_types", {}).items() if declared == "str"]
        odd = next((name for name in texts if not isinstance(content.get(name, ""), str | None)), None)
        if odd is not None:
            raise not_the_api(what, f"JSON whose {odd} is no text")
        return answer

    def _hidden(self, error: ClusterError) -> ClusterError:
        hide = self._credentials.hide
        return type(error)(hide(error.what), got=hide(str(error.got)), do=error.do)

    def _waits(self) -> Iterator[float | None]:
        for i in range(self.patience.tries - 1):
            yield self.patience.first_wait * 2**i
        yield None

    def _pause(self, wait: float, error: ClusterError) -> None:
        log.warning("kubeflow=unanswered reason=%r next_try_seconds=%.3g", str(error.got), wait)
        time.sleep(wait)

    def _look(self, what: str, find: Callable[[], Any | None]) -> Any | None:
        for i in range(self.patience.looks):
            time.sleep(self.patience.look_wait if i else 0)
            try:
                found = find()
            except ClusterError as error:
                do = "look with `rlpipe runs list` or on the server's pages, and run the same command again only if it was not made"
                raise ClusterError(f"the answer was lost, and whether it happened cannot be found out: {what}", got=str(error), do=do) from None
            if found is not None:
                return found
        return None


def filter_text(matching: Mapping[str, str]) -> str:
    """A filter of the API for equal values. The server decodes it once more than it should, so `%` and `+` are encoded here."""
    predicates = [kfp_server_api.V2beta1Predicate(operation="EQUALS", key=key, string_value=value) for key, value in matching.items()]
    content = kfp_server_api.ApiClient().sanitize_for_serialization(kfp_server_api.V2beta1Filter(predicates=predicates))
    return json.dumps(content).replace("%", "%25").replace("+", "%2B")
