"""A model behind an OpenAI-compatible URL that answers by a table, as policies that cheat would."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def scripted_model(answers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Its base URL.

    Args:
        answers: for each text that the first user message may contain, the answer of each turn; the
            last one repeats.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = _answer(answers, asked)
            kind = "text/event-stream" if asked.get("stream") else "application/json"
            body = (_events if asked.get("stream") else _whole)(asked["model"], text)
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(answers: Mapping[str, Sequence[str]], asked: Mapping[str, Any]) -> str:
    users = [_text(each["content"]) for each in asked["messages"] if each["role"] == "user"]
    (turns,) = [turns for name, turns in answers.items() if name in users[0]]
    return turns[min(len(users), len(turns)) - 1]


def _whole(model: str, text: str) -> bytes:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps(_object(model, "chat.completion", {"index": 0, **choice})).encode()


def _events(model: str, text: str) -> bytes:
    kind = "chat.completion.chunk"
    deltas = (({"role": "assistant", "content": text}, None), ({}, "stop"))
    chunks = [
        _object(model, kind, {"index": 0, "delta": delta, "finish_reason": reason})
        for delta, reason in deltas
    ]
    return "".join(f"data: {line}\n\n" for line in (*map(json.dumps, chunks), "[DONE]")).encode()


def _object(model: str, kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "scripted", "object": kind, "created": 0, "model": model}
    return {**head, "choices": [choice], "usage": usage}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
