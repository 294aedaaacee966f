"""A small Hugging Face Hub on this machine: what the real client needs of its protocol, in memory.

Import this before huggingface_hub, which reads where the Hub is when it is imported.
"""

import base64
import hashlib
import json
import os
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
LARGE = 2000  # bytes; larger files, and those that are not text, go the way of Git LFS


class Hub(BaseHTTPRequestHandler):
    repos, stored, log, lies = {}, {}, [], {}
    """{repository: {name: content}}, {oid: content}, [(method, path)], {(repo, name): size}"""

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    @classmethod
    def commit_of(cls, repo):
        listing = sorted(
            (name, hashlib.sha1(content).hexdigest()) for name, content in cls.repos[repo].items()
        )
        return hashlib.sha1(json.dumps([repo, listing]).encode()).hexdigest()

    def route(self):
        path = unquote(urlsplit(self.path).path)
        self.log.append((self.command, path))
        if (
            self.command in ("POST", "PUT")
            and self.headers.get("Authorization") != f"Bearer {TOKEN}"
            and "/lfs/" not in path
        ):
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            wanted = json.loads(self.body())
            repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if repo.startswith("other/"):
                return self.answer(
                    403,
                    {
                        "error": "You don't have the rights to create a model "
                        "under the namespace other"
                    },
                )
            status = 409 if repo in self.repos else 200
            self.repos.setdefault(repo, {})
            return self.answer(status, {"url": f"{ENDPOINT}/{repo}", "id": repo})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if path.startswith("/lfs/"):
            if self.command == "PUT":
                content = self.body()
                assert hashlib.sha256(content).hexdigest() == path[5:]
                self.stored[path[5:]] = content
                return self.answer(200)
            return self.answer(200, self.stored[path[5:]], ETag=f'"{path[5:]}"')
        kind = "api" if path.startswith("/api/models/") else ""
        words = path.removeprefix("/api/models/").strip("/").split("/")
        repo, rest = "/".join(words[:2]).removesuffix(".git"), words[2:]
        if repo not in self.repos:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return self.of_repo(kind, repo, rest)

    def of_repo(self, kind, repo, rest):
        files = self.repos[repo]
        if kind == "api" and rest[:1] in ([], ["revision"]):
            siblings = [
                {"rfilename": n, "size": self.lies.get((repo, n), len(c))} for n, c in files.items()
            ]
            return self.answer(
                200,
                {"id": repo, "modelId": repo, "sha": self.commit_of(repo), "siblings": siblings},
            )
        if kind == "api" and rest[0] == "tree":
            return self.answer(
                200,
                [
                    {"type": "file", "path": n, "size": len(c), "oid": "0" * 40}
                    for n, c in files.items()
                ],
            )
        if kind == "api" and rest[0] == "preupload":
            modes = []
            for file in json.loads(self.body())["files"]:
                mode = (
                    "regular"
                    if file["size"] <= LARGE and file["path"].endswith((".md", ".json", ".py"))
                    else "lfs"
                )
                modes.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            return self.answer(200, {"files": modes})
        if rest[-2:] == ["objects", "batch"]:
            action = lambda oid: {"upload": {"href": f"{STORAGE}/lfs/{oid}"}}  # noqa: E731
            objects = [
                {**o, "actions": action(o["oid"])} for o in json.loads(self.body())["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if kind == "api" and rest[0] == "commit":
            for line in self.body().splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    files[value["path"]] = self.stored[value["oid"]]
                elif item["key"] == "deletedFile":
                    files.pop(value["path"])
            commit = self.commit_of(repo)
            return self.answer(
                200, {"commitUrl": f"{ENDPOINT}/{repo}/commit/{commit}", "commitOid": commit}
            )
        if rest[0] == "resolve":
            name = "/".join(rest[2:])
            if name not in files:
                return self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            content, oid = files[name], hashlib.sha256(files[name]).hexdigest()
            headers = {"ETag": f'"{oid}"', "X_Repo_Commit": self.commit_of(repo)}
            if len(content) <= LARGE:
                return self.answer(200, content, **headers)
            self.stored[oid] = content
            linked = {
                "X_Linked_Size": len(content),
                "X_Linked_ETag": f'"{oid}"',
                "Location": f"{STORAGE}/lfs/{oid}",
            }
            return self.answer(302, **headers, **linked)
        return self.answer(404, {"error": f"this little Hub has no {self.path}"})

    do_GET = do_HEAD = do_POST = do_PUT = route


assert "huggingface_hub" not in sys.modules, "it would talk to the real Hub"
SERVER = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
ENDPOINT = f"http://127.0.0.1:{SERVER.server_port}"
STORAGE = ENDPOINT.replace(
    "127.0.0.1", "localhost"
)  # large files are at another address, as those of the real Hub
threading.Thread(target=SERVER.serve_forever, daemon=True).start()
SETTINGS = {
    "HF_ENDPOINT": ENDPOINT,
    "HF_HOME": tempfile.mkdtemp(),
    "HF_TOKEN": TOKEN,
    "HF_HUB_DISABLE_XET": "1",
}
os.environ.update(SETTINGS, HF_HUB_DISABLE_TELEMETRY="1")
