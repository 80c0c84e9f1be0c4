"""Stands in for SGLang's kernels, whose wheels are made for CUDA, where there is a CPU alone.

It has no kernel: SGLang computes on CPUs without AMX in plain torch. It gives a name to what SGLang's
modules import when they are loaded. Who calls one is told that it is not there.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_arguments: object, **_named: object) -> NoReturn:
        raise NotImplementedError(f"the stand-in for SGLang's kernels has no {name}")

    return absent
