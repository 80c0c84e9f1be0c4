#!/usr/bin/env python3
"""What becomes of a stream that waits for an event of another process, when that process dies or is stopped.

    bench/ipc_event_probe.py [--json FILE] [--recorder GPU] [--waiter GPU] [--limit SECONDS]

One process, the recorder, has an event that others may open (`cuIpcGetEventHandle`). Another one, the waiter,
has a stream wait for it (`cuStreamWaitEvent`), with a write and an event of its own behind that. The recorder
gets SIGKILL or SIGSTOP at one of three points: before it recorded the event, while work is under way in front
of the event, or after the event has passed. For each case a line says whether the waiter's stream went on,
after how long, with which error, and whether another stream of the waiter's and `cuCtxSynchronize` still
worked. Needs libcuda alone (or the driver that FOREBAY_LIBCUDA names), and one GPU or two.
"""

import argparse
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORK_S = 2.0  # In front of the event, unless the driver's queue holds less.
WORK_BYTES = 1 << 30
WORK_CALLS_MAX = 4000
LIMIT_S = 10.0
ANSWER_LIMIT_S = 120.0
NOT_READY = 600
INTERPROCESS = 4 | 2  # And without a time, which it must not have.
POINTS = ("before_record", "under_way", "passed")
SIGNALS = {"none": None, "sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}


class Handle(ctypes.Structure):
    """`CUipcEventHandle`."""

    _fields_ = (("bytes", ctypes.c_byte * 64),)


class DriverError(Exception):
    """A call of the driver failed."""


class Gpu:
    """A GPU's primary context, current on this thread, by ctypes."""

    def __init__(self, ordinal: int) -> None:
        path = os.environ.get("FOREBAY_LIBCUDA", "libcuda.so.1")
        self.cuda = ctypes.CDLL(path)
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def status(self, name: str, *arguments: Any) -> int:
        """What a call says."""
        function = getattr(self.cuda, name, None)
        if function is None:
            raise DriverError(f"this driver has no {name}")
        return int(function(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """A call that must not fail."""
        status = self.status(name, *arguments)
        if status:
            raise DriverError(f"{name}: error {status}")

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def event(self, flags: int) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), flags)
        return event

    def memory(self, size: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address


def say(**answer: Any) -> None:
    """An answer to the process that started this one."""
    print(json.dumps(answer), flush=True)


def record(ordinal: int) -> None:
    """The recorder: does what each line of its input asks for."""
    gpu = Gpu(ordinal)
    stream, event, handle = gpu.stream(), gpu.event(INTERPROCESS), Handle()
    gpu.call("cuIpcGetEventHandle", ctypes.byref(handle), event)
    say(handle=bytes(handle.bytes).hex())
    source, target = gpu.memory(WORK_BYTES), gpu.memory(WORK_BYTES)

    def copies(count: int) -> None:
        for _ in range(count):
            gpu.call("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(WORK_BYTES), stream)

    copies(1)
    gpu.call("cuStreamSynchronize", stream)
    begun = time.perf_counter()
    copies(8)
    gpu.call("cuStreamSynchronize", stream)
    each_s = (time.perf_counter() - begun) / 8
    for line in sys.stdin:
        if line.strip() == "work":
            copies(min(WORK_CALLS_MAX, max(1, round(WORK_S / each_s))))
        gpu.call("cuEventRecord", event, stream)
        if line.strip() == "passed":
            gpu.call("cuEventSynchronize", event)
        say(is_passed=gpu.status("cuEventQuery", event) == 0)


def wait(ordinal: int, handle: str, limit_s: float) -> None:
    """The waiter: has a stream wait when it is told to, and says what came of it."""
    gpu = Gpu(ordinal)
    stream, other, event, own = gpu.stream(), gpu.stream(), ctypes.c_void_p(), gpu.event(2)
    memory = gpu.memory(4096)
    gpu.cuda.cuIpcOpenEventHandle.argtypes = (ctypes.c_void_p, Handle)
    gpu.call("cuIpcOpenEventHandle", ctypes.byref(event), Handle.from_buffer_copy(bytes.fromhex(handle)))
    say(is_open=True)
    sys.stdin.readline()
    waited = gpu.status("cuStreamWaitEvent", stream, event, 0)
    begun = time.perf_counter()
    gpu.status("cuMemsetD32Async", memory, 7, ctypes.c_size_t(1024), stream)
    gpu.status("cuEventRecord", own, stream)
    say(wait_status=waited)
    sys.stdin.readline()  # The signal was sent.
    status = NOT_READY
    while status == NOT_READY and time.perf_counter() - begun < limit_s:
        status = gpu.status("cuEventQuery", own)
        time.sleep(0.001)
    passed_s = time.perf_counter() - begun
    gpu.status("cuMemsetD32Async", memory, 8, ctypes.c_size_t(1024), other)
    time.sleep(0.1)
    say(status=status, passed_s=round(passed_s, 3), other_stream=gpu.status("cuStreamQuery", other))
    # Last: it may never come back.
    say(synchronize=gpu.status("cuCtxSynchronize"))


class Process:
    """This program again, in a role."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))
        self.said.put(None)

    def hear(self, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        """The next answer. None that comes in time, or the end, is an error."""
        try:
            answer = self.said.get(timeout=limit_s)
        except queue.Empty:
            raise DriverError(f"no answer in {limit_s:.0f} s") from None
        if answer is None:
            assert self.process.stderr is not None
            lines = self.process.stderr.read().strip().splitlines()
            raise DriverError(lines[-1] if lines else f"exit code {self.process.wait()}")
        return answer

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def probe(point: str, by: str, gpus: tuple[int, int], limit_s: float) -> dict[str, Any]:
    """One case: what the waiter said."""
    recorder = Process("--role", "record", "--recorder", str(gpus[0]))
    started = [recorder]
    try:
        handle = recorder.hear()["handle"]
        role = ("--role", "wait", "--waiter", str(gpus[1]), "--handle", handle, "--limit", str(limit_s))
        waiter = Process(*role)
        started.append(waiter)
        waiter.hear()
        found: dict[str, Any] = {"name": f"ipc_event.{point}.{by}"}
        if point != "before_record":
            recorder.tell("work" if point == "under_way" else "passed")
            found["was_passed"] = recorder.hear()["is_passed"]
        send: Callable[[int], None] = recorder.process.send_signal
        number = SIGNALS[by]
        if number is not None and point == "before_record":
            send(number)
        waiter.tell()
        found |= waiter.hear()
        if number is not None and point != "before_record":
            send(number)
        waiter.tell()
        found |= waiter.hear(limit_s + ANSWER_LIMIT_S)
        try:
            found |= waiter.hear(limit_s)
        except DriverError:
            found["synchronize"] = "hangs"
        return found
    finally:
        for process in started:
            process.kill()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--recorder", type=int, default=0, help="ordinal of the recorder's GPU (default 0)")
    parser.add_argument("--waiter", type=int, default=0, help="ordinal of the waiter's GPU (default 0)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="how long a stream is waited for")
    parser.add_argument("--role", choices=("record", "wait"), help=argparse.SUPPRESS)
    parser.add_argument("--handle", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "record":
        return record(args.recorder)
    if args.role == "wait":
        return wait(args.waiter, args.handle, args.limit)
    rows = []
    for point in POINTS:
        for by in SIGNALS:
            try:
                found = probe(point, by, (args.recorder, args.waiter), args.limit)
            except DriverError as error:
                found = {"name": f"ipc_event.{point}.{by}", "error": str(error)}
            print(found, flush=True)
            rows.append(found)
    if args.json:
        gpus = {"recorder": args.recorder, "waiter": args.waiter}
        args.json.write_text(json.dumps({"bench": "ipc_event", "gpus": gpus, "rows": rows}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
