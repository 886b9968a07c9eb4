"""A hub on this machine: as much of the hub's HTTP interface as its own clients use to read a data set or a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class SmallHub:
    """Data sets and models by name; each has its files by commit, and `main` names the last one added."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.asked: list[str] = []  # "GET /path" of each request
        self.endpoint = ""
        self.sizes: dict[str, int] = {}  # by path, where a listing shall give another size than the file has
        self.cuts: dict[str, int] = {}  # by path: bytes after which the next connection is closed
        self.gated: set[str] = set()  # names

    def add(self, name: str, files: Mapping[str, str | bytes]) -> str:
        """A new commit with these files; its hash."""
        content = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        commit = hashlib.sha1(repr(content).encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = content
        return commit

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        known = self.commits.get(name, {})
        commit = list(known)[-1] if known and revision == "main" else revision
        return (commit, known[commit]) if commit in known else None


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}


def _tree(hub: SmallHub, files: dict[str, bytes], under: str, recursive: bool) -> list[dict[str, object]]:
    """What lies in the directory `under`, and with `recursive` beneath it."""
    inside = {path: path.removeprefix(f"{under}/" if under else "") for path in files if path.startswith(f"{under}/" if under else "")}
    found = [_entry(path, files[path]) for path, rest in inside.items() if recursive or "/" not in rest]
    directories = {path[: len(path) - len(rest)] + rest.split("/")[0] for path, rest in inside.items() if "/" in rest}
    found = [entry | {"size": hub.sizes.get(str(entry["path"]), entry["size"])} for entry in found]
    return found + [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(directories)]


def _handler(hub: SmallHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _cut(self, content: bytes, at: int) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:at])
            self.close_connection = True

        def _json(self, value: object) -> None:
            self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def _missing(self, what: str) -> None:
            self._answer(404, b'{"error": "not found"}', X_Error_Code=what, X_Error_Message=what)

        def _serve(self) -> None:
            address = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            hub.asked.append(f"{self.command} {address.path}")
            parts = unquote(address.path).strip("/").split("/")
            if parts[0] not in ("api", "datasets"):
                parts = ["models", *parts]  # a model's files lie at the top
            if parts[0] == "api":
                name, verb, revision = (
                    "/".join(parts[2:4]),
                    parts[4] if len(parts) > 4 else "revision",
                    parts[5] if len(parts) > 5 else "main",
                )
            else:
                name, verb, revision = "/".join(parts[1:3]), *(*parts[3:5], "", "")[:2]
            if name not in hub.commits:
                return self._missing("RepoNotFound")
            found = hub.find(name, revision)
            if found is None:
                return self._missing("RevisionNotFound")
            commit, files = found
            if verb == "revision":
                listed = _tree(hub, files, "", recursive=True)
                siblings = [{"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]} for e in listed if e["type"] == "file"]
                return self._json({"id": name, "sha": commit, "private": False, "gated": False, "siblings": siblings, "tags": []})
            if verb == "tree":
                return self._json(_tree(hub, files, "/".join(parts[6:]), "recursive=true" in address.query.lower()))
            if verb == "paths-info":
                asked = parse_qs(body).get("paths") or json.loads(body or "{}").get("paths", [])
                return self._json([_entry(path, files[path]) for path in asked if path in files])
            path = "/".join(parts[5:])
            if path not in files:
                return self._missing("EntryNotFound")
            if name in hub.gated:
                return self._answer(403, X_Error_Code="GatedRepo", X_Error_Message=f"Access to model {name} is restricted")
            content = files[path]
            if self.command == "GET" and (given := self.headers.get("Range")):
                begin = int(given.removeprefix("bytes=").split("-")[0])
                hub.asked[-1] += f" from {begin}"
                span = f"bytes {begin}-{len(content) - 1}/{len(content)}"
                return self._answer(206, content[begin:], Content_Range=span, X_Repo_Commit=commit)
            if self.command == "GET" and path in hub.cuts:
                return self._cut(content, hub.cuts.pop(path))
            return self._answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=commit)

        do_GET = do_HEAD = do_POST = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    """Serves on a free port; set HF_ENDPOINT to its `endpoint` for a process that shall use it."""
    hub = SmallHub()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
