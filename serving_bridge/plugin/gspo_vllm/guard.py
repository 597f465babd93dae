"""A token in front of every route of a vLLM server: `--middleware gspo_vllm.guard.AdminToken`.

vLLM's own `--api-key` leaves the routes that pause a server and change its weights open to whoever reaches the port.
"""

import hmac
import os
import sys

TOKEN = "GSPO_VLLM_TOKEN"  # noqa: S105 (a name)
"""Environment variable that holds the token."""
PRESENCE = "/gspo_vllm"
"""A path that only a server answers whose processes have registered this package."""


class AdminToken:
    """ASGI middleware: 401 for a request without `Authorization: Bearer $GSPO_VLLM_TOKEN`, but for GET /health.

    RuntimeError at start when the variable is not set.
    """

    def __init__(self, app):
        token = os.environ.get(TOKEN, "")
        if not token:
            raise RuntimeError(f"{TOKEN} is not set; it is the token that requests to this server must carry")
        self.app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):
            if scope["type"] == "http" and scope["path"] == PRESENCE and sys.modules[__name__.rpartition(".")[0]].registered:
                await _answer(send, 200, b"{}")
            else:
                await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, 401, b'{"error": "this server wants Authorization: Bearer <GSPO_VLLM_TOKEN>"}')

    def _allowed(self, scope):
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] == "/health":
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _answer(send, status, body):
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
