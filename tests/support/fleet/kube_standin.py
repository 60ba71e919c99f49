"""A stand-in for the Kubernetes API: one namespace over HTTP, which notes every call."""

from __future__ import annotations

import json
import re
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

_PLACE = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v\d)/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)


class KubeStandin:
    """Objects by (kind, name), and the calls as (verb, kind, name).

    Attributes:
        calls: what was asked, in order; of subresources as ``deployments/scale``.
        refuse: statuses to answer with, by (verb, kind).
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.refuse: dict[tuple[str, str], int] = {}
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # One packet for each answer.
            wbufsize = -1

            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                code, answer = standin.answer(self.command, self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = _handle  # noqa: N815

            def log_message(self, *_: object) -> None:
                """The calls are noted already."""

        self._server = ThreadingHTTPServer(("localhost", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://localhost:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._version = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def put(self, kind: str, name: str, **content: Any) -> None:
        """An object as it is from now on."""
        self._version += 1
        meta = {"name": name, "namespace": "fleet", "resourceVersion": str(self._version)}
        content["metadata"] = {**content.get("metadata", {}), **meta}
        self.objects[kind, name] = content

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """The status and the object that a request is answered with."""
        parts = urlsplit(path)
        match = _PLACE.fullmatch(parts.path)
        if not match or match["namespace"] != "fleet":
            return 404, _status(404, f"no such place: {path}")
        kind, name = match["kind"], match["name"] or ""
        shown = f"{kind}/{match['sub']}" if match["sub"] else kind
        verb = {"GET": "get" if name else "list", "POST": "create", "PUT": "update"}
        asked = verb.get(method, "patch"), shown
        with self._lock:
            self.calls.append((*asked, name))
            if code := self.refuse.get(asked):
                return code, _status(code, "not allowed here")
            if asked[0] == "list":
                labels = parse_qs(parts.query).get("labelSelector", [""])[0]
                found = [o for (k, _), o in self.objects.items() if k == kind and _fits(o, labels)]
                return 200, {"items": found, "metadata": {}}
            if asked[0] == "create":
                name = body["metadata"]["name"]
                if (kind, name) in self.objects:
                    return 409, _status(409, "it exists")
            elif (kind, name) not in self.objects:
                return 404, _status(404, f"{name} not found")
            if asked[0] == "update":
                known = self.objects[kind, name]["metadata"]["resourceVersion"]
                if body["metadata"].get("resourceVersion") != known:
                    return 409, _status(409, "it has changed")
            if asked[0] in ("create", "update"):
                self.put(kind, name, metadata=body["metadata"], spec=body["spec"])
            if asked[0] == "patch":
                self.put(kind, name, **_merged(self.objects[kind, name], body))
            return 200, self.objects[kind, name]


def _merged(old: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """By key, as far down as both have one; null takes a key away."""
    new = deepcopy(old)
    for key, value in patch.items():
        if isinstance(value, dict):
            new[key] = _merged(new.get(key, {}), value)
        elif value is None:
            new.pop(key, None)
        else:
            new[key] = value
    return new


def _fits(item: dict[str, Any], selector: str) -> bool:
    labels = item["metadata"].get("labels", {})
    pairs = (pair.replace("==", "=").split("=") for pair in selector.split(",") if pair)
    return all(labels.get(key) == value for key, value in pairs)


def _status(code: int, text: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "message": text}
