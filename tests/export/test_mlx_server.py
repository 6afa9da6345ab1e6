"""mlx_lm.server, started as the guide says, answers with the adapter that `--to mlx` wrote."""

import json
import socket
import sys
import time
import urllib.error
import urllib.request

import mlx_lm

from console import started
from deltatune.cli import main
from saved_adapters import adapted

PROMPT, TOKENS = "the quick brown", 8
PATIENCE = 60.0


def test_the_server_answers_with_the_adapter(tiny_checkpoint, tmp_path):
    base = str(tiny_checkpoint("qwen3_5"))
    adapted(tiny_checkpoint("qwen3_5"), tmp_path / "adapter", scale=60.0)
    shared = str(tmp_path / "to-share")
    words = ["export", "--to", "mlx", "--model", base, "--adapter-path", str(tmp_path / "adapter")]
    assert main([*words, "--save-path", shared]) == 0
    plain, expected = (
        mlx_lm.generate(*mlx_lm.load(base, adapter_path=path), prompt=PROMPT, max_tokens=TOKENS)
        for path in (None, shared)
    )
    assert plain != expected
    assert answer(["--model", base, "--adapter-path", shared]) == expected


def answer(words: list[str]) -> str:
    """Start mlx_lm.server with these words, and return its answer to PROMPT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "mlx_lm", "server", *words, "--port", port]
    with started(command, stdout=None, stderr=None) as server:
        content = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                    return json.loads(reply.read())["choices"][0]["text"]
            except urllib.error.URLError:
                if server.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.1)
