"""A client of `tlora serve` in plain Python: `TLORA_API_KEY=... python examples/own_client.py URL BASE_MODEL DATA_FILE OUT`

Uploads a file, submits a job, follows its events until it has ended, and unpacks its adapter into OUT. It needs this file alone, not
tlora; docs/reference/http.md lists all routes.
"""

import io
import json
import os
import sys
import tarfile
import uuid
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ENDED = ("succeeded", "failed", "cancelled")


class Server:
    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key

    def open(self, method: str, path: str, body: bytes | None = None, content_type: str = "application/json") -> Any:
        """The answer as a file. An order with the same Idempotency-Key, sent again, is done once."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": content_type, "Idempotency-Key": uuid.uuid4().hex}
        return urlopen(Request(self.url + path, body, headers, method=method))

    def ask(self, method: str, path: str, **fields: Any) -> Any:
        with self.open(method, path, json.dumps(fields).encode() if fields else None) as answer:
            return json.load(answer)

    def upload(self, file: Path) -> str:
        """The id of the file there."""
        mark = uuid.uuid4().hex
        part = '--{}\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
        head = part.format(mark, "purpose", "") + "fine-tune\r\n" + part.format(mark, "file", f'; filename="{file.name}"')
        body = head.encode() + file.read_bytes() + f"\r\n--{mark}--\r\n".encode()
        with self.open("POST", "/v1/files", body, f"multipart/form-data; boundary={mark}") as answer:
            return json.load(answer)["id"]

    def follow(self, job: str) -> None:
        """Print what happens to the job until it has ended: server-sent events."""
        with self.open("GET", f"/v1/jobs/{job}/events/stream") as stream:
            for line in stream:
                if line.startswith(b"data:"):
                    print(line[5:].decode().strip())  # noqa: T201


def main(url: str, base_model: str, file: str, out: str, **fields: Any) -> dict[str, Any]:
    """The job as the server shows it once it has ended. `fields`: any of a jobs file."""
    server = Server(url, os.environ["TLORA_API_KEY"])
    order = {"name": "own", "base_model": base_model, "data": {"file": server.upload(Path(file))}} | fields
    job = server.ask("POST", "/v1/jobs", **order)
    while job["status"] not in ENDED:
        server.follow(job["id"])
        job = server.ask("GET", f"/v1/jobs/{job['id']}")
    if job["status"] == "succeeded":
        with server.open("GET", f"/v1/jobs/{job['id']}/adapter") as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as archive:
            archive.extractall(out, filter="data")
    return job


if __name__ == "__main__":
    print(main(*sys.argv[1:]))  # noqa: T201
