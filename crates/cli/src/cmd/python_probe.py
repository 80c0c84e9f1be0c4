"""Prints as JSON what this Python has of Forebay and vLLM: `cmd/python.rs` runs it."""

import json
import platform
from importlib import metadata


def version(package: str) -> str | None:
    """The version that is installed, if one is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def why_not() -> str | None:
    """Why the package cannot be imported, if it cannot."""
    try:
        import forebay  # noqa: F401
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason.
        return f"{type(error).__name__}: {error}"
    return None


seen = {
    "python": platform.python_version(),
    "forebay": version("forebay"),
    "vllm": version("vllm"),
    "plugins": [each.name for each in metadata.entry_points(group="vllm.general_plugins")],
}
seen["import_error"] = None if seen["forebay"] is None else why_not()
print(json.dumps(seen))
