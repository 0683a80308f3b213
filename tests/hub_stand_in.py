"""A hub on the loopback: enough of huggingface.co's protocol for huggingface_hub's own client to push and to load.

    with stand_in() as hub:         # hub.url for HF_ENDPOINT; hub.repositories[name][path] -> bytes
        ...

Files are kept as one commit. Those of TEXT's endings come inside the commit, others by LFS: a batch, a PUT, a pointer.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TEXT = (".json", ".md", ".txt", ".jinja", "SHA256SUMS", ".gitattributes")


class Hub(ThreadingHTTPServer):
    """What has been pushed to it, and which requests it had no answer for."""

    daemon_threads = True
    token = "hf_standin"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}  # by sha256
        self.unanswered: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def answer(self, status: int, body: object = None, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = b""
            while size := int(self.rfile.readline(), 16):
                parts += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return parts
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_any(self) -> None:
        path, hub, body = self.path.partition("?")[0], self.server, self.body()
        known = self.headers.get("Authorization") == f"Bearer {hub.token}"
        for method, pattern, respond in ROUTES:
            if self.command in method and (found := re.fullmatch(pattern, path)):
                name = found.groupdict().get("name")
                if method == "POST" and not known:  # a PUT goes to an address that only who knows may ask for
                    return self.answer(401, {"error": "Invalid username or password."})
                if name is not None and name not in hub.repositories:
                    headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                    return self.answer(404, {"error": "Repository not found"}, headers)
                return respond(self, hub, body, **found.groupdict())
        hub.unanswered.append(f"{self.command} {self.path}")
        return self.answer(404, {"error": "no such page"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def create(self, hub, body):
        asked = json.loads(body)
        name = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
        name = name if "/" in name else f"someone/{name}"
        hub.repositories.setdefault(name, {})
        if asked.get("private") or asked.get("visibility") == "private":
            hub.private.add(name)
        self.answer(200, {"url": f"{hub.url}/{name}", "id": name, "name": name})

    def preupload(self, hub, body, name):
        files = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "regular" if path.endswith(TEXT) else "lfs" for path in files}
        self.answer(
            200, {"files": [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in files]}
        )

    def batch(self, hub, body, name):
        objects = [
            {**one, "actions": {"upload": {"href": f"{hub.url}/large/{one['oid']}"}}}
            for one in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def put(self, hub, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        hub.large[oid] = body
        self.answer(200, {})

    def commit(self, hub, body, name):
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.repositories[name][value["path"]] = hub.large[value["oid"]]
        self.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/{self.sha(name)}", "commitOid": self.sha(name)})

    def sha(self, name: str) -> str:
        files = self.server.repositories[name]
        return hashlib.sha1(b"".join(path.encode() + files[path] for path in sorted(files))).hexdigest()

    def info(self, hub, body, name, revision=None):
        siblings = [{"rfilename": path} for path in hub.repositories[name]]
        self.answer(200, {"_id": name, "id": name, "modelId": name, "sha": self.sha(name), "siblings": siblings})

    def tree(self, hub, body, name, revision, folder):
        files, folder = hub.repositories[name], (folder or "").lstrip("/")
        found = [
            {"type": "file", "path": path, "size": len(files[path]), "oid": hashlib.sha1(files[path]).hexdigest()}
            for path in files
            if path.startswith(folder)
        ]
        if folder and not found:
            return self.missing(name)
        self.answer(200, found)

    def missing(self, name):
        self.answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.sha(name)})

    def resolve(self, hub, body, name, revision, path):
        if path not in hub.repositories[name]:
            return self.missing(name)
        content = hub.repositories[name][path]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self.sha(name)}
        return self.answer(200, content, headers)


NAME = r"(?P<name>[^/]+/[^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", lambda self, hub, body: self.answer(200, {"errors": [], "warnings": []})),
    ("POST", f"/api/models/{NAME}/preupload/main", Handler.preupload),
    ("POST", f"/{NAME}.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/large/(?P<oid>[0-9a-f]{64})", Handler.put),
    ("POST", f"/api/models/{NAME}/commit/main", Handler.commit),
    ("GET", f"/api/models/{NAME}(/revision/(?P<revision>[^/]+))?", Handler.info),
    ("GET", f"/api/models/{NAME}/tree/(?P<revision>[^/]+)(?P<folder>/.*)?", Handler.tree),
    ("GETHEAD", f"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]


@contextmanager
def stand_in():
    """A `Hub` that answers until the block ends."""
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
