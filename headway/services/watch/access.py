"""Access to the page: keys, hosts, methods; and the headers of every answer."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.recording.sessions import KeyRefused
from headway.runtime.addresses import is_loopback
from headway.services.watch.stream import encode

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def json_response(value: object, status: int = 200) -> Response:
    """An answer in JSON; NaN becomes null."""
    body = value if isinstance(value, bytes) else encode(value)
    return Response(body, status, media_type="application/json")


class AccessControl:
    """The ASGI application in front of the page's own.

    Without keys, only names of this machine are accepted as the request's host: else a page elsewhere, whose name its
    owner lets point here, could read everything (DNS rebinding). With keys every request needs one: as ``Authorization:
    Bearer KEY``, or once as ``?key=KEY``, which sets a cookie of this process and leads to the address without it.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str] = ()) -> None:
        self._app, self._keys = app, tuple(keys)
        self._accepted = ApiKeys(self._keys)
        self._secret = secrets.token_bytes(32)
        self._cookie = f"headway_{secrets.token_hex(4)}"  # of several servers on one host each has its own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers["Cache-Control"] = "no-store" if scope["path"].startswith("/api/") else "no-cache"
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that goes no further; None: it does."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            answer = json_response({"error": f"method {scope['method']}: valid: GET, HEAD"}, 405)
            answer.headers["Allow"] = "GET, HEAD"
            return answer
        if "\0" in scope["path"]:
            return json_response({"error": "a path has no zero byte"}, 400)
        if not self._keys:
            host = headers.get("host", "")
            named = host if host.rpartition(":")[2].isdigit() and not host.endswith("]") else f"{host}:0"
            if not is_loopback(named):
                return json_response({"error": f"host {host!r}: valid: localhost, 127.0.0.1"}, 421)
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("key")
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = given if given is not None else bearer.strip() if scheme.lower() == "bearer" else ""
        if given is None and not key and self._known(headers.get("cookie", "")):
            return None
        try:
            self._accepted.require(key)
        except KeyRefused as error:
            answer = json_response({"error": f"{error}; in a browser: open the address with ?key=KEY once"}, 401)
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        if given is None:
            return None
        rest = urlencode([(name, value) for name, value in query if name != "key"])
        place = "/" + quote(scope["path"].lstrip("/\\")) + (f"?{rest}" if rest else "")
        answer = RedirectResponse(place, 303)
        answer.set_cookie(self._cookie, self._token(key), httponly=True, samesite="strict")
        return answer

    def _token(self, key: str) -> str:
        return hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()

    def _known(self, text: str) -> bool:
        try:
            cookie = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return False
        given = "" if cookie is None else cookie.value
        return any([hmac.compare_digest(given.encode(), self._token(key).encode()) for key in self._keys])
