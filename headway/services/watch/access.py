"""Controls the access to the page by keys, hosts and methods."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote, urlencode

from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.errors import Headers, HttpError
from headway.generator.endpoint.exchange import HttpExchange
from headway.generator.recording.sessions import KeyRefused
from headway.runtime.addresses import is_loopback_host


class AccessControl:
    """Checks every request before it is processed.

    Without keys, only names of this machine are accepted as the request's host; otherwise a page of another site, whose
    name resolves to this machine, could read everything (DNS rebinding). With keys every request needs a key, as
    ``Authorization: Bearer KEY``, or once as ``?key=KEY``, which sets a cookie of this process and redirects to the
    address without the key.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = tuple(keys)
        self._accepted = ApiKeys(self._keys)
        self._secret = secrets.token_bytes(32)
        self._cookie = f"headway_{secrets.token_hex(4)}"  # differs between servers on one host

    def require(self, exchange: HttpExchange) -> Headers:
        """Return () for an accepted request, or the headers of the redirect that answers it. Raises HttpError for a
        refused request."""
        if exchange.method not in ("GET", "HEAD"):
            allow = ((b"allow", b"GET, HEAD"),)
            raise HttpError(405, f"method {exchange.method}: valid: GET, HEAD", headers=allow)
        if not self._keys:
            host = exchange.header("host")
            if not is_loopback_host(host):
                raise HttpError(421, f"host {host!r}: valid: localhost, 127.0.0.1")
            return ()
        query_key = exchange.query.get("key")
        key = exchange.key if query_key is None else query_key
        if query_key is None and not key and self._has_valid_cookie(exchange.header("cookie")):
            return ()
        try:
            self._accepted.require(key)
        except KeyRefused as error:
            message = f"{error}; in a browser: open the address with ?key=KEY once"
            raise HttpError(401, message, headers=((b"www-authenticate", b"Bearer"),)) from None
        if query_key is None:
            return ()
        rest_query = urlencode({name: value for name, value in exchange.query.items() if name != "key"})
        location = "/" + quote(exchange.path.lstrip("/\\")) + (f"?{rest_query}" if rest_query else "")
        cookie = f"{self._cookie}={self._token(key)}; HttpOnly; Path=/; SameSite=strict"
        return (b"location", location.encode()), (b"set-cookie", cookie.encode())

    def _token(self, key: str) -> str:
        return hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()

    def _has_valid_cookie(self, text: str) -> bool:
        try:
            cookie = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return False
        token = "" if cookie is None else cookie.value
        return any([hmac.compare_digest(token.encode(), self._token(key).encode()) for key in self._keys])
