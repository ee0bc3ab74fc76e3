"""A W&B server on loopback that keeps what `wandb sync` uploads, as far as the client of wandb 0.31 asks for it.

Four things are asked of it: what it has of a run (``RunResumeStatus``), to open the run (``UpsertBucket``), to take
lines of the run's streams from an offset on (``file_stream``), and where to put files (``CreateRunFiles``, then PUT).
"""

from __future__ import annotations

import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENTITY, PROJECT = "entity", "project"
HISTORY, EVENTS = "wandb-history.jsonl", "wandb-events.jsonl"
LIMIT = 300.0  # seconds for an upload, which takes two on a machine that has nothing else to do


@dataclass
class UploadedRun:
    """What the server has of a run.

    Attributes:
        streams: Name -> line by offset. The client says the offset; it asks for the number of lines first.
        overwritten: Lines of history that came again with other content, so that the first ones are lost.
        files: Name -> content.
        exit_codes: Of the sessions that were uploaded, in order.
    """

    streams: defaultdict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    overwritten: list[int] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the run's history in order; an offset that was left out fails."""
        found = self.streams[HISTORY]
        return [json.loads(found[offset]) for offset in range(len(found))]

    def take(self, request: dict[str, Any]) -> None:
        """Takes what a session sends to the run's streams; a request that is sent again changes nothing."""
        for name, chunk in request.get("files", {}).items():
            for offset, line in enumerate(chunk["content"], chunk["offset"]):
                if name == HISTORY and self.streams[name].get(offset, line) != line:
                    self.overwritten.append(offset)
                self.streams[name][offset] = line
        if request.get("complete"):
            self.exit_codes.append(request["exitcode"])

    def status(self) -> dict[str, Any]:
        """Returns what a client asks that goes on with the run; without the ``t`` a run counts as not yet started."""
        found: dict[str, Any] = {"config": "{}", "wandbConfig": '{"t": 1}', "logLineCount": 0, "tags": []}
        found["summaryMetrics"] = self.streams["wandb-summary.json"].get(0, "{}")
        for kind, name in (("history", HISTORY), ("events", EVENTS)):
            lines = self.streams[name]
            found[f"{kind}LineCount"] = len(lines)
            found[f"{kind}Tail"] = json.dumps([lines[max(lines)]] if lines else [])
        return found


class SyncServer:
    """The server, which listens as long as its context lasts.

    Args:
        home: A folder for what the client keeps in the user's home.

    Attributes:
        url: Its address.
        runs: Id -> what it has of the run.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self.runs: dict[str, UploadedRun] = {}
        self._lock = threading.Lock()  # requests come on several connections
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> SyncServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def sync(self, folders: Sequence[Path]) -> subprocess.CompletedProcess[str]:
        """Runs the real `wandb sync` against this server, with no settings or key of the user's."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        environment |= {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0123456789" * 4, "WANDB_ERROR_REPORTING": "false"}
        environment |= {f"WANDB_{name}_DIR": str(self._home / name.lower()) for name in ("CONFIG", "CACHE", "DATA")}
        command = [str(Path(sys.executable).with_name("wandb")), "sync", *map(str, folders)]
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": LIMIT}
        return subprocess.run(command, env=environment, cwd=self._home, **options)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Returns the answer to a request; what is not known gets an empty one."""
        parts = path.strip("/").split("/")
        with self._lock:
            if parts == ["graphql"]:
                request = json.loads(body)
                return {"data": self._graphql(request["query"], request["variables"] or {})}
            if parts[0] == "files" and parts[-1] == "file_stream":
                self.runs[parts[-2]].take(json.loads(body))
            elif parts[0] == "upload":
                self.runs[parts[1]].files["/".join(parts[2:])] = body
        return {}

    def _graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "1", "name": PROJECT, "entity": {"id": "2", "name": ENTITY}}
        name = str(variables.get("name") or variables.get("run"))
        described = {"id": name, "name": name, "displayName": name}
        if "RunResumeStatus" in query:
            bucket = {**described, **self.runs[name].status()} if name in self.runs else None
            return {"model": {**project, "bucket": bucket}}
        if "UpsertBucket" in query:
            inserted = name not in self.runs
            lines = self.runs.setdefault(name, UploadedRun()).streams[HISTORY]
            bucket = {**described, "config": "{}", "project": project, "historyLineCount": len(lines)}
            return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
        if "CreateRunFiles" in query:
            files = [{"name": file, "uploadUrl": f"{self.url}/upload/{name}/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": files}}
        return {}


def _handler(server: SyncServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            data = json.dumps(server.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
