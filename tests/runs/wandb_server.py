"""A server on loopback that plays wandb's: it takes runs, and their rows by the file stream."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "a" * 40


class Server(ThreadingHTTPServer):
    """``mode``: what it does once it has taken a run: ``ok``, ``hang``, ``die``, 500 or 401."""

    daemon_threads = True

    def __init__(self, mode: str | int = "ok") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode = mode
        self.paths: list[str] = []  # of all requests
        self.keys: set[str | None] = set()
        self.runs: dict[str, list[str]] = {}  # a run's name -> the lines of its history
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client that leaves is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body, server = self._body(), self.server
        server.paths.append(self.path)
        server.keys.add(self.headers.get("Authorization"))
        taken = "RunResumeStatus" in body or "UpsertBucket" in body
        if server.mode == "die" and not taken:
            self.close_connection = True
            return
        if server.mode == "hang" and not taken:
            server.over.wait(200)
        code = server.mode if isinstance(server.mode, int) and not taken else 200
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            answer = {"data": self._graphql(json.loads(body))}
        elif self.path.endswith("/file_stream") and code == 200:
            self._stream(self.path.split("/")[4], json.loads(body))
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST

    def _body(self) -> str:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return body.decode(errors="replace")

    def _graphql(self, asked: dict[str, Any]) -> dict[str, Any]:
        given, query = asked["variables"], asked["query"]
        if "UpsertBucket" in query:
            name = given["name"]
            self.server.runs.setdefault(name, [])
            project = {"name": "klrl", "entity": {"name": "me"}}
            bucket = {"id": "b", "name": name, "displayName": name, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "CreateRunFiles" in query:
            url = f"{self.server.url}/upload"
            files = [{"name": name, "uploadUrl": url} for name in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        lines = self.server.runs.get(given.get("name", ""))
        if "RunResumeStatus" in query and lines:
            bucket = {"id": "b", "name": given["name"], "config": "{}", "summaryMetrics": "{}"}
            bucket |= {"historyLineCount": len(lines), "historyTail": json.dumps(lines[-1:])}
            bucket |= {"eventsTail": "[]", "eventsLineCount": 0, "logLineCount": 0}
            return {
                "model": {"id": "m", "name": "klrl", "entity": {"name": "me"}, "bucket": bucket}
            }
        return {"model": None, "serverInfo": {"features": []}}

    def _stream(self, run: str, told: dict[str, Any]) -> None:
        history = (told.get("files") or {}).get("wandb-history.jsonl")
        if history:
            self.server.runs.setdefault(run, [])[history["offset"] :] = history["content"]


@contextmanager
def serving(mode: str | int = "ok") -> Iterator[Server]:
    """Serve in a thread of this process."""
    with Server(mode) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
