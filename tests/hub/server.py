"""The Hub's HTTP API, as far as huggingface_hub needs it to make, fill, list and read repositories of models.

Two servers on loopback: the Hub itself, and the storage for large files, which has its own addresses and gets no token.
Every request is logged.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .faults import Fault
from .store import Blob, Repo, is_large

_CHUNK = 1 << 14


@dataclass
class Request:
    """One request, as it came in.

    Attributes:
        received, sent: bytes of the bodies, as far as they went.
        status: of the answer; 0 if there was none.
    """

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes = b""
    received: int = 0
    sent: int = 0
    status: int = 0

    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """Answer with an error, as the Hub does: a status, a code in a header, and a message."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str):
        said = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answer = Answer(status, json.dumps({"error": message}).encode(), said | extra)


def as_json(value: object, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


@dataclass
class Hub:
    """A Hub that runs.

    Attributes:
        endpoint, storage: addresses.
        users: token -> who it belongs to, and may write there; the first is `token`.
        repos: by name.
        log: of all requests.
        faults: the first that matches a request strikes.
        part_size: large files above it come in parts of it; None for all in one.
    """

    users: dict[str, str]
    part_size: int | None = None
    endpoint: str = ""
    storage: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    log: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    closed: threading.Event = field(default_factory=threading.Event)

    @property
    def token(self) -> str:
        return next(iter(self.users))

    @property
    def user(self) -> str:
        return self.users[self.token]

    def add(self, name: str, **kind: bool) -> Repo:
        """A new repository; fill it with `Repo.add_folder`."""
        repo = self.repos[name] = Repo(name, **kind)
        return repo

    def requests(self, where: str) -> list[Request]:
        """Those of the log whose method and path begin with a regular expression."""
        return [request for request in self.log if re.match(where, f"{request.method} {request.path}")]


# What the routes do. Each gets the Hub, the request, the name of who asks (None without a token), and the parts of the
# path that its pattern names.


def whoami(hub: Hub, request: Request, user: str | None) -> Answer:
    if user is None:
        raise Refusal(401, "Invalid username or password.")
    return as_json({"type": "user", "name": user, "orgs": [], "auth": {"accessToken": {"role": "write"}}})


def create_repo(hub: Hub, request: Request, user: str | None) -> Answer:
    asked = request.json()
    owner = asked.get("organization") or user
    name = f"{owner}/{asked['name']}"
    _let_write(owner, user, f'create a model under the namespace "{owner}"')
    url = f"{hub.endpoint}/{name}"
    if name in hub.repos:
        return as_json({"error": "You already created this model repo", "url": url}, 409)
    hub.add(name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return as_json({"url": url, "name": name})


def model_info(hub: Hub, request: Request, user: str | None, repo: str, revision: str = "main") -> Answer:
    there, commit = _read(hub, user, repo, revision)
    return as_json(
        {"id": repo, "modelId": repo, "sha": commit.oid, "private": there.private, "gated": there.gated and "manual",
         "downloads": 0, "likes": 0, "tags": [], "siblings": [{"rfilename": path} for path in commit.files]}
    )  # fmt: skip


def refs(hub: Hub, request: Request, user: str | None, repo: str) -> Answer:
    there, _ = _read(hub, user, repo)
    kinds = {"branches": ("heads", there.branches), "tags": ("tags", there.tags), "converts": ("convert", {})}
    return as_json(
        {
            kind: [{"name": name, "ref": f"refs/{ref}/{name}", "targetCommit": oid} for name, oid in found.items()]
            for kind, (ref, found) in kinds.items()
        }
    )


def commits(hub: Hub, request: Request, user: str | None, repo: str, revision: str) -> Answer:
    there, commit = _read(hub, user, repo, revision)
    rows, oid = [], commit.oid
    while oid is not None:
        row = there.commits[oid]
        rows.append({"id": oid, "title": row.title, "message": "", "authors": [], "date": "2024-01-01T00:00:00.000Z"})
        oid = row.parent
    return as_json(rows)


def tree(hub: Hub, request: Request, user: str | None, repo: str, revision: str, folder: str = "") -> Answer:
    _, commit = _read(hub, user, repo, revision)
    inside = {path: blob for path, blob in commit.files.items() if path.startswith(f"{folder}/" if folder else "")}
    deep = request.query.get("recursive", ["false"])[0].lower() in ("true", "1")
    depth = folder.count("/") + bool(folder)
    rows = [blob.entry(path) for path, blob in inside.items() if deep or path.count("/") == depth]
    parents = {"/".join(path.split("/")[:n]) for path in inside for n in range(depth + 1, path.count("/") + 1)}
    rows += [
        {"type": "directory", "path": p, "oid": "0" * 40, "size": 0} for p in parents if deep or p.count("/") == depth
    ]
    return as_json(sorted(rows, key=lambda row: str(row["path"])))


def paths_info(hub: Hub, request: Request, user: str | None, repo: str, revision: str) -> Answer:
    _, commit = _read(hub, user, repo, revision)
    paths = parse_qs(request.body.decode()).get("paths", [])
    return as_json([commit.files[path].entry(path) for path in paths if path in commit.files])


def branch(hub: Hub, request: Request, user: str | None, repo: str, name: str) -> Answer:
    there = _write(hub, user, repo)
    if request.method == "DELETE":
        del there.branches[name]
        return as_json({})
    if name in there.branches:
        raise Refusal(409, "Reference already exists")
    start = there.find(request.json().get("startingPoint") or "main")
    if start is None:
        raise Refusal(404, "Invalid rev id", "RevisionNotFound")
    there.branches[name] = start.oid
    return as_json({}, 201)


def tag(hub: Hub, request: Request, user: str | None, repo: str, name: str) -> Answer:
    there = _write(hub, user, repo)
    if request.method == "DELETE":
        del there.tags[name]
        return as_json({})
    asked = request.json()["tag"]
    if asked in there.tags:
        raise Refusal(409, f"Tag {asked} already exists")
    there.tags[asked] = _read(hub, user, repo, name)[1].oid
    return as_json({}, 201)


def preupload(hub: Hub, request: Request, user: str | None, repo: str, revision: str) -> Answer:
    there = _write(hub, user, repo)
    files = _read(hub, user, repo, revision)[1].files
    asked = request.json()
    rules = asked.get("gitIgnore")
    if rules is None:
        rules = files[".gitignore"].content.decode() if ".gitignore" in files else ""
    rows = []
    for file in asked["files"]:
        path = file["path"]
        large = is_large(path, file["size"]) or b"\0" in base64.b64decode(file["sample"])
        row = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": path in rules.split()}
        if old := files.get(path):
            row["oid"] = old.etag
        rows.append(row)
    return as_json({"files": rows, "commitOid": there.branches[revision]})


def batch(hub: Hub, request: Request, user: str | None, repo: str) -> Answer:
    """Of each large file: where to send it, in how many parts, or nothing if it is there."""
    there = _write(hub, user, repo)
    rows = []
    for asked in request.json()["objects"]:
        oid, size = asked["oid"], asked["size"]
        row = {"oid": oid, "size": size}
        if oid not in there.objects:
            place = f"{hub.storage}/large/{repo}/{oid}"
            if hub.part_size and size > hub.part_size:
                numbers = range(1, -(-size // hub.part_size) + 1)
                header = {"chunk_size": str(hub.part_size)} | {str(n): f"{place}/{n}?signature=s3cret" for n in numbers}
                row["actions"] = {"upload": {"href": f"{hub.endpoint}/complete/{repo}/{oid}", "header": header}}
            else:
                verify = {"href": f"{hub.endpoint}/verify/{repo}/{oid}"}
                row["actions"] = {"upload": {"href": f"{place}?signature=s3cret"}, "verify": verify}
        rows.append(row)
    return as_json({"transfer": "basic", "objects": rows})


def put(hub: Hub, request: Request, user: str | None, repo: str, oid: str, number: str = "") -> Answer:
    if "authorization" in request.headers:
        raise Refusal(400, "Only one auth mechanism allowed")  # as S3 has it
    there = hub.repos[repo]
    if number:
        there.parts[oid, int(number)] = request.body
    else:
        _keep(there, oid, request.body)
    return Answer(200, headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})


def complete(hub: Hub, request: Request, user: str | None, repo: str, oid: str) -> Answer:
    there = hub.repos[repo]
    numbers = [part["partNumber"] for part in request.json()["parts"]]
    assert numbers == list(range(1, len(numbers) + 1))
    _keep(there, oid, b"".join(there.parts.pop((oid, number)) for number in numbers))
    return as_json({})


def verify(hub: Hub, request: Request, user: str | None, repo: str, oid: str) -> Answer:
    if len(hub.repos[repo].objects.get(oid, b"")) != request.json()["size"]:
        raise Refusal(404, "Object is not there, or not whole")
    return as_json({})


def commit(hub: Hub, request: Request, user: str | None, repo: str, revision: str) -> Answer:
    there = _write(hub, user, repo)
    lines = [json.loads(line) for line in request.body.splitlines()]
    head = there.branches.get(revision)
    if head is None:
        raise Refusal(404, "Invalid rev id", "RevisionNotFound")
    files, header = dict(there.commits[head].files), {}
    for line in lines:
        value = line["value"]
        match line["key"]:
            case "header":
                header = value
                if value.get("parentCommit", head) != head:
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            case "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), large=False)
            case "lfsFile":
                if value["oid"] not in there.objects:
                    raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                files[value["path"]] = Blob(there.objects[value["oid"]], large=True)
            case "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
            case "deletedFolder":
                files = {path: blob for path, blob in files.items() if not path.startswith(value["path"])}
    made = there.add(revision, files, header["summary"])
    return as_json({"success": True, "commitOid": made.oid, "commitUrl": f"{hub.endpoint}/{repo}/commit/{made.oid}"})


def resolve(hub: Hub, request: Request, user: str | None, repo: str, revision: str, path: str) -> Answer:
    there, commit = _read(hub, user, repo, revision)
    if there.gated and user != repo.split("/")[0]:
        message = f"Access to model {repo} is restricted. You must have access to it and be authenticated."
        raise Refusal(401 if user is None else 403, message, "GatedRepo")
    if path not in commit.files:
        raise Refusal(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.oid)
    blob = commit.files[path]
    if not blob.large:
        return _ranged(request, blob, {"X-Repo-Commit": commit.oid})
    return Answer(
        302,
        headers={
            "Location": f"{hub.storage}/large/{repo}/{blob.sha256}?signature=s3cret",
            "X-Repo-Commit": commit.oid,
            "X-Linked-Etag": f'"{blob.etag}"',
            "X-Linked-Size": str(len(blob.content)),
        },
    )


def get_large(hub: Hub, request: Request, user: str | None, repo: str, oid: str) -> Answer:
    return _ranged(request, Blob(hub.repos[repo].objects[oid], large=True), {})


def validate_yaml(hub: Hub, request: Request, user: str | None) -> Answer:
    import yaml

    match = re.match(r"---\n(.*?\n)---\n", request.json()["content"], re.DOTALL)
    try:
        head = yaml.safe_load(match[1]) if match else None
        wrong = [] if head is None or isinstance(head, dict) else ["the metadata is not a table"]
    except yaml.YAMLError as error:
        head, wrong = None, [str(error).splitlines()[0]]
    remarks = [] if head else ["empty or missing yaml metadata in repo card"]
    said = {kind: [{"message": text} for text in texts] for kind, texts in (("errors", wrong), ("warnings", remarks))}
    return as_json(said, 400 if wrong else 200)


_NAME = r"(?P<repo>[\w.-]+/[\w.-]+)"
_REV = r"(?P<revision>[^/]+)"
_REF = r"(?P<name>[^/]+)"
_LARGE = rf"{_NAME}/(?P<oid>[0-9a-f]{{64}})"
ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("GET", rf"/api/models/{_NAME}", model_info),
    ("GET", rf"/api/models/{_NAME}/revision/{_REV}", model_info),
    ("GET", rf"/api/models/{_NAME}/refs", refs),
    ("GET", rf"/api/models/{_NAME}/commits/{_REV}", commits),
    ("GET", rf"/api/models/{_NAME}/tree/{_REV}(?:/(?P<folder>.+))?", tree),
    ("POST", rf"/api/models/{_NAME}/paths-info/{_REV}", paths_info),
    ("POST|DELETE", rf"/api/models/{_NAME}/branch/{_REF}", branch),
    ("POST|DELETE", rf"/api/models/{_NAME}/tag/{_REF}", tag),
    ("POST", rf"/api/models/{_NAME}/preupload/{_REV}", preupload),
    ("POST", rf"/api/models/{_NAME}/commit/{_REV}", commit),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", batch),
    ("GET|HEAD", rf"/{_NAME}/resolve/{_REV}/(?P<path>.+)", resolve),
    ("POST", f"/complete/{_LARGE}", complete),
    ("POST", f"/verify/{_LARGE}", verify),
    ("PUT", rf"/large/{_LARGE}(?:/(?P<number>\d+))?", put),
    ("GET|HEAD", f"/large/{_LARGE}", get_large),
]


def _read(hub: Hub, user: str | None, name: str, revision: str = "main") -> tuple[Repo, Any]:
    """A repository that the user may see, and the commit of a revision."""
    repo = hub.repos.get(name)
    if repo is None or (repo.private and user != name.split("/")[0]):
        raise Refusal(401 if user is None else 404, "Repository not found", "RepoNotFound")
    if (commit := repo.find(revision)) is None:
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return repo, commit


def _write(hub: Hub, user: str | None, name: str) -> Repo:
    repo, _ = _read(hub, user, name)
    _let_write(name.split("/")[0], user, f"write to {name}")
    return repo


def _let_write(owner: str | None, user: str | None, what: str) -> None:
    if user is None:
        raise Refusal(401, "Invalid username or password.")
    if user != owner:
        raise Refusal(403, f"You don't have the rights to {what}")


def _keep(repo: Repo, oid: str, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != oid:
        raise Refusal(400, "The content has not the hash that it was announced with")
    repo.objects[oid] = content


def _ranged(request: Request, blob: Blob, headers: dict[str, str]) -> Answer:
    """A file, or the part of it that is asked for."""
    headers = {"ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes", **headers}
    span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if not span:
        return Answer(200, blob.content, headers)
    size = len(blob.content)
    start, stop = int(span[1]), min(int(span[2] or size), size - 1)
    if start >= size:
        return Answer(416, headers={"Content-Range": f"bytes */{size}"})
    return Answer(206, blob.content[start : stop + 1], headers | {"Content-Range": f"bytes {start}-{stop}/{size}"})


class _Gone(Exception):
    """The client, or we for it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written apart

    def __init__(self, hub: Hub, *args: Any):
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *args: object) -> None:
        pass

    def handle_any(self) -> None:
        address = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, address.path, parse_qs(address.query), headers)
        named = f"{request.method} {request.path}"
        with self.hub.lock:
            self.hub.log.append(request)
            fault = next((fault for fault in self.hub.faults if fault.strikes(named)), Fault(""))
        try:
            request.body = self.read_body(request, fault)
            if fault.delay:
                threading.Event().wait(fault.delay)
            fault.struck.set()
            answer = Answer(fault.status, b"", fault.headers) if fault.status else self.answer(request)
            if fault.lose_answer:
                self.drop()
            self.write(request, answer)
        except (_Gone, ConnectionError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def read_body(self, request: Request, fault: Fault) -> bytes:
        body = bytearray()
        for size in self.sizes():
            left = size
            while left:
                stops = [stop for stop in (fault.drop_after, fault.hang_after) if stop is not None]
                piece = self.rfile.read(min(left, _CHUNK, *(max(stop - len(body), 0) for stop in stops)))
                body += piece
                left -= len(piece)
                request.received = len(body)
                if stops and len(body) >= stops[0]:
                    fault.struck.set()
                    if fault.hang_after is not None:
                        self.hub.closed.wait()
                    self.drop()
                if not piece:
                    raise _Gone
        return bytes(body)

    def sizes(self) -> Iterator[int]:
        """Sizes of the pieces that a body comes in."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield int(self.headers.get("Content-Length") or 0)
            return
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            yield size
            self.rfile.readline()
        self.rfile.readline()

    def drop(self) -> None:
        """Reset the connection, so that the client notices at once."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        raise _Gone

    def answer(self, request: Request) -> Answer:
        for methods, pattern, route in ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match and request.method in methods.split("|"):
                parts = {name: unquote(part) for name, part in match.groupdict().items() if part is not None}
                try:
                    with self.hub.lock:
                        return route(self.hub, request, self.user(request), **parts)
                except Refusal as refusal:
                    return refusal.answer
        return Refusal(404, f"Sorry, we can't find {request.method} {request.path}").answer

    def user(self, request: Request) -> str | None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token)

    def write(self, request: Request, answer: Answer) -> None:
        request.status = answer.status
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            request.sent = len(answer.body)
            self.wfile.write(answer.body)


@contextmanager
def hub_server(
    *, user: str = "me", token: str = "hf_KvfoldTestsOnly0123456789", part_size: int | None = None
) -> Iterator[Hub]:
    """Run a Hub on loopback.

    Args:
        user, token: who may write, and to repositories of that name only.
        part_size: see `Hub`.
    """
    hub = Hub({token: user}, part_size=part_size)
    with ExitStack() as stack:
        addresses = []
        for _ in range(2):
            server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
            server.daemon_threads = True
            stack.callback(server.server_close)
            threading.Thread(target=partial(server.serve_forever, 0.02), daemon=True).start()
            stack.callback(server.shutdown)
            addresses.append(f"http://127.0.0.1:{server.server_port}")
        hub.endpoint, hub.storage = addresses
        stack.callback(hub.closed.set)
        yield hub
