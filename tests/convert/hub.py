"""A Hugging Face Hub on this machine: just the calls that downloading and header reading make."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


@contextmanager
def local_hub(folder: Path) -> Iterator[tuple[str, list[tuple[str, str, int]]]]:
    """Serve `folder` as the repository tiny/model; yields the endpoint and a log of (method, file, bytes sent)."""
    log: list[tuple[str, str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if re.fullmatch(r"/api/models/tiny/model(/revision/[^/]+)?", path):
                files = [{"rfilename": p.relative_to(folder).as_posix()} for p in folder.rglob("*") if p.is_file()]
                info = {"id": "tiny/model", "modelId": "tiny/model", "sha": COMMIT, "siblings": files, "tags": [],
                        "private": False, "downloads": 0, "likes": 0}  # fmt: skip
                return self.answer(200, json.dumps(info).encode())
            if re.fullmatch(r"/api/models/tiny/model/tree/[^/]+", path):
                files = [
                    {
                        "type": "file",
                        "oid": "0" * 40,
                        "size": p.stat().st_size,
                        "path": p.relative_to(folder).as_posix(),
                    }
                    for p in folder.rglob("*")
                    if p.is_file()
                ]
                return self.answer(200, json.dumps(files).encode())
            match = re.fullmatch(r"/tiny/model/resolve/[^/]+/(.+)", path)
            if not match:
                return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            if not (folder / match[1]).is_file():
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            data = (folder / match[1]).read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            status = 200
            if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                status, start, stop = 206, int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{stop}/{len(data)}"
                data = data[start : stop + 1]
            log.append((self.command, match[1], 0 if self.command == "HEAD" else len(data)))
            return self.answer(status, data, headers)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        server.server_close()
