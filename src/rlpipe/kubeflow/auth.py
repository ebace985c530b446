"""Where the Kubeflow server is and who is asking it: nobody, a bearer token, cookies, or OpenID Connect.

Secrets come from the environment or from files, never from the command line, and stand in no message: `Credentials.hide` sees to it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit

from rlpipe.errors import ClusterError, ConfigError

HOST, UI_HOST = "RLPIPE_KFP_HOST", "RLPIPE_KFP_UI_HOST"
TOKEN, COOKIES, CLIENT_SECRET = "RLPIPE_KFP_TOKEN", "RLPIPE_KFP_COOKIES", "RLPIPE_KFP_CLIENT_SECRET"
OPENID_SECONDS = 1800
"""An identity token of OpenID Connect lives for an hour; it is asked for again after half of that."""


def address(text: str) -> str:
    """The base address of a Kubeflow Pipelines server; `https` unless said otherwise, what a browser adds after `#` cut off.

    Raises:
        ConfigError: it names no host, or holds a user, a password or a query, which would end up in logs.
    """
    url = text.strip().partition("#")[0]
    parts = _parts(url if "://" in url else f"https://{url}")
    if "@" in parts.netloc:
        do = f"give the address alone; a token belongs into {TOKEN} or a file (--token-file), cookies into {COOKIES} or a file (--cookie-file)"
        raise ConfigError("the address of the Kubeflow server holds a user or a password", got=f"{parts.scheme}://…@{parts.netloc.rpartition('@')[2]}", do=do)
    if parts.query:
        raise ConfigError("the address of the Kubeflow server holds a query", got=f"{parts.scheme}://{parts.netloc}{parts.path}?…", do="give it without")
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[A-Za-z0-9._\-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?", parts.netloc):
        raise ConfigError("this is no address of a Kubeflow server", got=repr(text), accepted="http://host[:port][/path] or https://…")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ConfigError("the address of the Kubeflow server has no possible port", got=parts.netloc, accepted="a port from 1 to 65535")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # What stands in brackets is no address; the text may hold a password.
        raise ConfigError("this is no address of a Kubeflow server", got="text hidden", accepted="http://host[:port][/path] or https://…") from None


@dataclass(frozen=True)
class OpenId:
    """What kfp's client takes to get an identity token; the secret is None for a service account."""

    client_id: str
    other_client_id: str | None = None
    other_client_secret: str | None = field(default=None, repr=False)


class Credentials:
    """Who is asking. Files are read again for every request, since what is in them is replaced before it expires."""

    def __init__(
        self,
        *,
        token: str | None = None,
        token_file: Path | None = None,
        cookies: str | None = None,
        cookie_file: Path | None = None,
        openid: OpenId | None = None,
    ) -> None:
        if openid and (token or token_file):
            raise ConfigError("two ways to get a token are given", got="a token and --client-id", do=f"leave one out; is {TOKEN} set?")
        self._token, self._token_file, self._cookies, self._cookie_file, self._openid = token, token_file, cookies, cookie_file, openid
        self._openid_token: tuple[float, str] | None = None
        self._secrets: set[str] = set()
        if openid and openid.other_client_secret:
            self._remember(openid.other_client_secret)

    def token(self) -> str | None:
        """The bearer token to send now.

        Raises:
            ConfigError: it cannot be read, or cannot be sent in a header.
            ClusterError: the OpenID Connect provider gave none.
        """
        if self._openid:
            return self._openid_now(self._openid)
        return self._now(self._token, self._token_file, TOKEN)

    def cookies(self) -> str | None:
        """The cookies to send now, as `name=value; name=value`.

        Raises:
            ConfigError: they cannot be read, or are no cookies.
        """
        found = self._now(self._cookies, self._cookie_file, COOKIES)
        if found is None:
            return None
        for cookie in found.split(";"):
            name, separator, value = cookie.strip().partition("=")
            if not separator or not name:
                raise ConfigError("what should be cookies is not", got="text hidden", accepted="name=value; name=value, as a browser sends it")
            self._remember(value)
        return found

    def hide(self, text: str) -> str:
        """`text` without any secret that has been used so far."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _now(self, value: str | None, file: Path | None, name: str) -> str | None:
        if file is not None:
            try:
                value = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not text"
                raise ConfigError("a file with credentials cannot be read", got=f"{file}: {reason}") from None
        if value is None:
            return None
        value = value.strip()
        if not re.fullmatch(r"[\x20-\x7e]+", value):
            raise ConfigError(f"what is in {file or name} cannot be sent", got="text hidden", accepted="one line of printable ASCII characters")
        self._remember(value)
        return value

    def _remember(self, secret: str) -> None:
        if len(secret) > 3:
            self._secrets |= {secret, quote(secret, safe="")}

    def _openid_now(self, openid: OpenId) -> str:
        if self._openid_token is None or time.monotonic() - self._openid_token[0] > OPENID_SECONDS:
            self._openid_token = (time.monotonic(), _identity_token(openid))
            self._remember(self._openid_token[1])
        return self._openid_token[1]


def from_environment(
    environ: Mapping[str, str],
    *,
    token_file: Path | None = None,
    cookie_file: Path | None = None,
    client_id: str | None = None,
    other_client_id: str | None = None,
) -> Credentials:
    """Credentials from what the command line names and the environment holds; a file that is named wins over a variable."""
    openid = OpenId(client_id, other_client_id, environ.get(CLIENT_SECRET)) if client_id else None
    return Credentials(
        token=None if token_file else environ.get(TOKEN) or None,
        token_file=token_file,
        cookies=None if cookie_file else environ.get(COOKIES) or None,
        cookie_file=cookie_file,
        openid=openid,
    )


def _identity_token(openid: OpenId) -> str:
    """kfp's own way to an identity token; what it says to a person goes to stderr, so that stdout stays the command's."""
    import contextlib
    import sys

    import google.auth.exceptions
    import requests
    from kfp.client import auth

    try:
        with contextlib.redirect_stdout(sys.stderr):
            token, _ = auth.get_auth_token(openid.client_id, openid.other_client_id, openid.other_client_secret)
        reason = "no token in the answer"
    except (google.auth.exceptions.GoogleAuthError, requests.RequestException, ValueError, KeyError, OSError) as error:
        token, reason = None, type(error).__name__
    if not token or token == "None":
        do = f"look at --client-id, --other-client-id and {CLIENT_SECRET}; a sign-in kept in {auth.LOCAL_KFP_CREDENTIAL} may have expired: move it away"
        raise ClusterError("OpenID Connect gave no identity token", got=reason, do=do)
    return token
