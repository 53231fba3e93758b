"""A stand-in of the Hugging Face hub on this machine, so that its real client can be tested without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """Repositories by kind and name, each with its files; what was asked of it, in order."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.asked: list[str] = []
        self.cards: list[str] = []
        """The model cards that the client had checked."""
        self.refuses = False
        """Whether whoever writes is told that they may not."""
        self.address = ""


class _Answers(BaseHTTPRequestHandler):
    hub: LocalHub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), Content_Type="application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"POST {self.path}")
        if self.hub.refuses:
            self._json(403, {"error": "You have no rights here."})
        elif self.path == "/api/validate-yaml":
            self.hub.cards.append(json.loads(body)["content"])
            self._json(200, {"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}" if given.get("organization") else given["name"]
            self.hub.files.setdefault(f"models/{name}", {})
            self.hub.private[name] = given.get("private") or given.get("visibility") == "private"
            self._json(200, {"url": f"{self.hub.address}/{name}", "name": name, "id": name})
        elif found := re.fullmatch(r"/api/(\w+)/(.+)/preupload/main.*", self.path):
            paths = [f["path"] for f in json.loads(body)["files"]]
            self._json(200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        elif found := re.fullmatch(r"/api/(\w+)/(.+)/commit/main.*", self.path):
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    content = base64.b64decode(value["content"])
                    self.hub.files[f"{found[1]}/{found[2]}"][value["path"]] = content
            url = f"{self.hub.address}/{found[2]}/commit/{COMMIT}"
            self._json(200, {"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None, "success": True})
        else:
            self._json(404, {"error": f"not here: {self.path}"})

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        path = unquote(self.path.partition("?")[0])
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            data = self.hub.files.get(f"{found[1] or 'models/'}{found[2]}", {}).get(found[4])
            if data is None:
                self._send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            else:
                tag = f'"{hashlib.sha1(data).hexdigest()}"'  # noqa: S324 - a tag, not a secret
                self._send(200, data, ETag=tag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")
        elif found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(?:revision/\w+|tree/.*))?", path):
            files = self.hub.files.get(f"{found[1]}/{found[2]}")
            if files is None:
                self._send(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            elif "/tree/" in path:
                listed = [{"type": "file", "path": f, "size": len(d), "oid": COMMIT} for f, d in files.items()]
                self._json(200, listed)
            else:
                self._json(200, {"id": found[2], "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]})
        else:
            self._json(404, {"error": f"not here: {path}"})

    def do_HEAD(self) -> None:
        self.do_GET()


@contextmanager
def local_hub(monkeypatch: Any, cache: Any) -> Iterator[LocalHub]:
    """A hub of this machine's own, which the client talks to instead of the real one."""
    from huggingface_hub import constants

    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in {
        "ENDPOINT": hub.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
    }.items():
        if hasattr(constants, name):
            monkeypatch.setattr(constants, name, value)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
