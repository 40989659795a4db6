"""Access to the page: keys, hosts, methods."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote, urlencode

from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.exchange import HttpExchange
from headway.generator.endpoint.refusals import Headers, HttpError
from headway.generator.recording.sessions import KeyRefused
from headway.runtime.addresses import is_loopback_host


class AccessControl:
    """The check of every request, before it is looked at.

    Without keys, only names of this machine are accepted as the request's host: else a page elsewhere, whose name its
    owner lets point here, could read everything (DNS rebinding). With keys every request needs one: as ``Authorization:
    Bearer KEY``, or once as ``?key=KEY``, which sets a cookie of this process and leads to the address without it.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = tuple(keys)
        self._accepted = ApiKeys(self._keys)
        self._secret = secrets.token_bytes(32)
        self._cookie = f"headway_{secrets.token_hex(4)}"  # of several servers on one host each has its own

    def require(self, exchange: HttpExchange) -> Headers:
        """Raise HttpError for a request that goes no further; else the headers of a redirect that answers it, or ()."""
        if exchange.method not in ("GET", "HEAD"):
            allow = ((b"allow", b"GET, HEAD"),)
            raise HttpError(405, f"method {exchange.method}: valid: GET, HEAD", headers=allow)
        if not self._keys:
            host = exchange.header("host")
            if not is_loopback_host(host):
                raise HttpError(421, f"host {host!r}: valid: localhost, 127.0.0.1")
            return ()
        given = exchange.query.get("key")
        key = exchange.key if given is None else given
        if given is None and not key and self._known(exchange.header("cookie")):
            return ()
        try:
            self._accepted.require(key)
        except KeyRefused as error:
            what = f"{error}; in a browser: open the address with ?key=KEY once"
            raise HttpError(401, what, headers=((b"www-authenticate", b"Bearer"),)) from None
        if given is None:
            return ()
        rest = urlencode({name: value for name, value in exchange.query.items() if name != "key"})
        place = "/" + quote(exchange.path.lstrip("/\\")) + (f"?{rest}" if rest else "")
        cookie = f"{self._cookie}={self._token(key)}; HttpOnly; Path=/; SameSite=strict"
        return (b"location", place.encode()), (b"set-cookie", cookie.encode())

    def _token(self, key: str) -> str:
        return hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()

    def _known(self, text: str) -> bool:
        try:
            cookie = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return False
        given = "" if cookie is None else cookie.value
        return any([hmac.compare_digest(given.encode(), self._token(key).encode()) for key in self._keys])
