#!/usr/bin/env bash
# Start a real server with a three-word model and check that it answers `world` to `hi`. Needs no download.
# PYTHON chooses the interpreter that has sglang-lite installed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
work="$(mktemp -d)"
server=""
finish() {
  if [ -n "$server" ]; then
    kill -TERM "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap finish EXIT

"$PYTHON" -c 'import sys; from pathlib import Path; from tests.support.smoke_model import build_smoke_model; build_smoke_model(Path(sys.argv[1]))' "$work/model"
port="$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
"$PYTHON" -m sglang_lite serve --model-path "$work/model" --device cpu --port "$port" >"$work/log" 2>&1 &
server=$!

"$PYTHON" - "$port" "$server" <<'PYTHON' || { cat "$work/log" >&2; exit 1; }
import json, os, sys, time, urllib.error, urllib.request

port, server = int(sys.argv[1]), int(sys.argv[2])
base = f"http://127.0.0.1:{port}"
deadline = time.monotonic() + 60
while True:
    try:
        urllib.request.urlopen(f"{base}/health", timeout=5)
        break
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        os.kill(server, 0)  # raises when the server is gone
        if time.monotonic() > deadline:
            sys.exit("smoke: the server is not ready after 60 s")
        time.sleep(0.1)
body = json.dumps({"prompt": "hi", "max_tokens": 1, "temperature": 0}).encode()
request = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=30))
text = answer["choices"][0]["text"]
if text != "world":
    sys.exit(f"smoke: expected 'world', got {text!r}")
print("smoke: ok")
PYTHON
