"""--push-to-hub against a server that answers as the hub's API does, through huggingface_hub itself."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import mlx.core as mx
import pytest

from deltatune.cli import main
from deltatune.export.model_card import check_repository

# Raised inside huggingface_hub, by the way in which it uploads a file.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class HubStub(BaseHTTPRequestHandler):
    """Creates repositories, takes large files by their hash and a commit; refuses as `refused` says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.body()
        server, path = self.server, self.path
        server.requests.append((path, self.headers.get("Authorization"), body))
        if server.refused and server.refused[0] in path:
            self.answer(server.refused[1], {"error": server.refused[2]})
        elif path.endswith("/create"):
            self.answer(200, {"url": f"{server.address}/me/it"})
        elif path.endswith("/preupload/main"):
            files = [{"path": file["path"], "shouldIgnore": False} for file in json.loads(body)["files"]]
            modes = ("regular", "lfs")
            self.answer(200, {"files": [f | {"uploadMode": modes[f["path"].endswith(".safetensors")]} for f in files]})
        elif path.endswith("/objects/batch"):
            action = {"upload": {"href": f"{server.address}/store"}}
            objects = [{**found, "actions": action} for found in json.loads(body)["objects"]]
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif path.endswith("/commit/main"):
            self.answer(200, {"commitUrl": f"{server.address}/me/it/commit/1", "commitOid": "1"})
        else:
            self.answer(200, {})

    do_GET = do_PUT = do_POST  # noqa: N815

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, code: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        if "error" in content:
            self.send_header("X-Error-Message", content["error"])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch):
    """A running stub of the hub, to which huggingface_hub talks."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubStub)
    server.address, server.requests, server.refused = f"http://127.0.0.1:{server.server_address[1]}", [], None
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    # The hub's other way of storage has a protocol of its own.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def push(tmp_path):
    """push() exports a small adapter to tmp_path/out and to me/it on the hub; returns the exit code."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    options = {"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0, "keys": ["a.q_proj"]}}
    (adapter / "adapter_config.json").write_text(json.dumps(options))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {"a.q_proj.lora_a": mx.zeros((2, 8))})
    words = ["export", "--to", "mlx", "--model", "a/b", "--adapter-path", str(adapter)]
    return lambda: main([*words, "--save-path", str(tmp_path / "out"), "--push-to-hub", "me/it"])


def test_the_folder_goes_to_a_private_repository(server, push, tmp_path, capsys):
    assert push() == 0
    assert f"Uploaded to {server.address}/me/it" in capsys.readouterr().out
    sent = {path: json.loads(body) for path, _, body in server.requests if path.endswith("/create")}
    created = sent["/api/repos/create"]
    assert (created["organization"], created["name"]) == ("me", "it")
    assert created.get("visibility") == "private" or created.get("private") is True
    stored = [body for path, _, body in server.requests if path == "/store"]
    assert stored == [(tmp_path / "out" / "adapters.safetensors").read_bytes()]
    commit = next(body for path, _, body in server.requests if path.endswith("/commit/main"))
    lines = [json.loads(line)["value"] for line in commit.splitlines()]
    small = {line["path"]: base64.b64decode(line["content"]) for line in lines if "content" in line}
    assert small == {name: (tmp_path / "out" / name).read_bytes() for name in ("README.md", "adapter_config.json")}
    assert [line["path"] for line in lines if line.get("algo") == "sha256"] == ["adapters.safetensors"]
    assert all(token == "Bearer hf_secret" for path, token, _ in server.requests if path.endswith(("/create", "/main")))


@pytest.mark.bad_input("--push-to-hub: a wrong token, a file that is not taken, a full account, no connection")
@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (("/", 401, "Invalid username or password."), "Invalid username or password."),
        (("/store", 403, "The disk is full."), "Error while uploading 'adapters.safetensors'"),
        (("/commit/main", 403, "Private repository storage limit reached."), "storage limit reached."),
        (None, "refused"),
    ],
)
def test_a_refusal_of_the_hub_leaves_the_export(refused, said, server, push, tmp_path, monkeypatch, capsys):
    server.refused = refused
    if refused is None:
        # Nothing listens on this port.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert push() == 2
    message = capsys.readouterr().err
    assert said in message
    assert f"The export is complete in {tmp_path / 'out'}" in message
    assert (tmp_path / "out" / "adapters.safetensors").is_file()
    assert check_repository("me/it") is None
