"""The Envoy that docs/envoy.md shows: where its program is, and its configuration with other ports."""

import pathlib
import re
import shutil
import sys

PAGE = pathlib.Path(__file__).parents[1] / "docs/envoy.md"
# Where this Python's packages have their programs, or those of the tests without vLLM.
PLACES = [pathlib.Path(sys.executable).parent, PAGE.parents[1] / ".venv/bin"]
ENVOY = next(
    filter(None, (shutil.which("envoy", path=str(place)) for place in PLACES)), shutil.which("envoy")
)


def config(port: int, pickers: list[int], engines: list[int]) -> str:
    """The configuration of an Envoy that listens there, before these ports."""
    found = re.search(r"^```yaml\n(static_resources:.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, "the page shows a configuration"
    shown = found[1].replace("port_value: 10000", f"port_value: {port}")
    return with_endpoints(with_endpoints(shown, 9002, pickers), 8000, engines)


def with_endpoints(config: str, port: int, ports: list[int]) -> str:
    """The configuration with these endpoints in the place of those that begin with this port."""
    line = re.search(rf"( +)- endpoint: .*port_value: {port}\}}.*\n(?:\1- endpoint: .*\n)*", config)
    assert line, port
    first = line[0].splitlines()[0]
    return config.replace(line[0], "".join(first.replace(str(port), str(new)) + "\n" for new in ports))


def command(config: pathlib.Path) -> list[str]:
    """How it is started, with one thread that carries requests."""
    assert ENVOY is not None
    return [ENVOY, "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warn"]
