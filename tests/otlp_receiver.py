"""A receiver of OTLP over HTTP, in a process of its own: `otlp_receiver.py PORT FILE`.

Checks each body against OpenTelemetry's published protobuf, and writes its spans to a file, one JSON object
a line. Whoever reads the file finds whole lines. Knows nothing of Forebay.
"""

import http.server
import json
import sys
import threading
from pathlib import Path

from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

BODIES = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}

WRITING = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    """Takes what the protocol allows; refuses the rest with 400."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            # A field that the protocol does not have is an error.
            json_format.Parse(body, BODIES[self.path]())
            status = 200
        except (KeyError, json_format.ParseError) as error:
            print(f"{self.path}: {error}", file=sys.stderr, flush=True)
            status = 400
        if status == 200 and self.path == "/v1/traces":
            self.keep(json.loads(body))
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def keep(self, body: dict[str, list[dict[str, list[dict[str, list[dict[str, object]]]]]]]) -> None:
        lines = [
            json.dumps({"resource": resource["resource"], **span}) + "\n"
            for resource in body["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]
        kept, written = Path(sys.argv[2]), Path(sys.argv[2] + ".part")
        with WRITING:
            written.write_text((kept.read_text() if kept.exists() else "") + "".join(lines))
            written.replace(kept)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print("ready", flush=True)
    server.serve_forever()
