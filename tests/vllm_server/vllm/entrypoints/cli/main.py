"""A stand-in for vLLM's command line, as far as the demo sees it: it serves, counts, and computes nothing.

It takes only what vLLM takes, and says what vLLM says. Must never be imported beside the real one. By
`FOREBAY_TEST_VLLM` it does worse: it "never serves", or it "never ends" when it is asked to.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COUNTERS = {
    "prefix_cache_hits": 7,
    "external_prefix_cache_hits": 70,
    "forebay_tokens_disk": 20,
    "forebay_tokens_peer": 10,
    "forebay_stores_done": 3,
    "prompt_tokens": 7,
    "num_preemptions": 7,
}


class Handler(BaseHTTPRequestHandler):
    """Answers with as many tokens as are asked for."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        label = '{engine="0",model_name="demo"}'
        lines = [f"vllm:{name}_total{label} {value}.0" for name, value in COUNTERS.items()]
        self.answer("text/plain", "\n".join(lines) + "\n")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = asked["max_tokens"]
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens}
        usage["prompt_tokens_details"] = {"cached_tokens": len(asked["prompt"]) // 2}
        one = {"index": 0, "text": "t" * tokens, "token_ids": [5] * tokens, "finish_reason": "length"}
        events = [json.dumps({"choices": [one]}), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        self.answer("text/event-stream", "".join(f"data: {event}\n\n" for event in events))

    def answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def main() -> None:
    """Serves where it is told to, if what it is told fits together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model", type=pathlib.Path)
    for name in ("served-model-name", "host", "kv-transfer-config"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "block-size", "num-gpu-blocks-override"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    args = parser.parse_args()
    connector = json.loads(args.kv_transfer_config)
    # No module path: in the real vLLM the plug-in registers this name.
    assert connector["kv_connector"] == "ForebayConnector"
    assert pathlib.Path(connector["kv_connector_extra_config"]["node"]).is_socket()
    # A block is vLLM's own.
    assert (args.num_gpu_blocks_override - 1) * args.block_size >= args.max_model_len
    assert (args.model / "config.json").exists()
    manners = os.environ.get("FOREBAY_TEST_VLLM", "")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if manners else lambda *_: sys.exit(0))
    if manners == "never serves":
        # vLLM too has started a process of its own long before it serves.
        subprocess.run([sys.executable, "-c", "import signal; signal.pause()"], check=True)
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    print(f"INFO [api_server.py] Starting vLLM server on http://{args.host}:{args.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
