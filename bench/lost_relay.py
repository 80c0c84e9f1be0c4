"""A relay GPU is lost while copies for another GPU run: no copy may end as success with wrong bytes.

Run it under the preload on a host with two GPUs or more, and nothing else on them:

    FOREBAY_PRELOAD=stats forebay run -- python3 bench/lost_relay.py [trap|address] [stream|waited]

It copies 64 MiB there and back again and again, has a kernel on GPU 1 trap (or write to an illegal address)
meanwhile, and compares every copy that the driver says has succeeded. It needs the driver alone: no toolkit,
no package. Exit code 0: every success was right; 1: one was not; 2: the host is not fit. What follows the
fault is printed.
"""

import ctypes
import sys
import time
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p

BYTES = 64 << 20
# Enough for the copying library to start, and to see how copies end after the fault.
SECONDS_BEFORE = 5.0
COPIES_AFTER = 200

BODIES = {
    "trap": "trap;",
    "address": ".reg .b64 %p; mov.u64 %p, 16; st.global.u32 [%p], 1;",
}
PTX = """.version 7.0
.target sm_80
.address_size 64
.visible .entry forebay_trap()
{{ {body} ret; }}
"""


class Driver:
    """The functions that are used, each by its symbol; a result other than 0 is given, not raised."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: object) -> int:
        return int(getattr(self.library, name)(*arguments))

    def check(self, name: str, *arguments: object) -> None:
        code = self(name, *arguments)
        if code != 0:
            print(f"{name} gives {code}: this host is not fit for the test")
            sys.exit(2)


class Host:
    """Pinned memory with a pattern of its own for each round."""

    def __init__(self, driver: Driver) -> None:
        self.at = c_void_p()
        driver.check("cuMemHostAlloc", byref(self.at), c_size_t(BYTES), 1)

    def fill(self, number: int) -> None:
        block = bytes((number * 7 + at * 31 + (at >> 8)) & 0xFF for at in range(1 << 16))
        assert self.at.value is not None
        for offset in range(0, BYTES, len(block)):
            ctypes.memmove(self.at.value + offset, block, len(block))

    def clear(self) -> None:
        ctypes.memset(self.at, 0xEE, BYTES)

    def holds(self, other: "Host") -> bool:
        return ctypes.string_at(self.at, BYTES) == ctypes.string_at(other.at, BYTES)


def copy(driver: Driver, stream: c_void_p | None, to: object, source: object, out: bool) -> int:
    """One copy, in a stream that is then waited for, or by a call that waits. Gives the first error."""
    name = "cuMemcpyDtoH" if out else "cuMemcpyHtoD"
    if stream is None:
        return driver(f"{name}_v2", to, source, c_size_t(BYTES))
    code = driver(f"{name}Async_v2", to, source, c_size_t(BYTES), stream)
    return driver("cuStreamSynchronize", stream) or code


def main(fault: str = "trap", how: str = "stream") -> int:
    """Copies, loses GPU 1, copies on; gives the exit code."""
    driver = Driver()
    driver.check("cuInit", 0)
    contexts = [c_void_p(), c_void_p()]
    for gpu, context in enumerate(contexts):
        driver.check("cuDevicePrimaryCtxRetain", byref(context), c_int(gpu))
    driver.check("cuCtxSetCurrent", contexts[1])
    module, function = c_void_p(), c_void_p()
    driver.check("cuModuleLoadData", byref(module), c_char_p(PTX.format(body=BODIES[fault]).encode()))
    driver.check("cuModuleGetFunction", byref(function), module, c_char_p(b"forebay_trap"))
    driver.check("cuCtxSetCurrent", contexts[0])
    source, target, memory, stream = Host(driver), Host(driver), c_uint64(), c_void_p()
    driver.check("cuMemAlloc_v2", byref(memory), c_size_t(BYTES))
    driver.check("cuStreamCreate", byref(stream), 1)
    used = stream if how == "stream" else None

    started, rounds, after = time.monotonic(), 0, 0
    codes: dict[str, int] = {}
    is_lost = False
    while after < COPIES_AFTER:
        rounds += 1
        if rounds % 8 == 1:
            source.fill(rounds)
        target.clear()
        if not is_lost and time.monotonic() - started > SECONDS_BEFORE:
            # The kernel runs while the next copies do: nobody waits for it.
            driver.check("cuCtxSetCurrent", contexts[1])
            driver.check("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
            driver.check("cuCtxSetCurrent", contexts[0])
            is_lost = True
        there = copy(driver, used, memory, source.at, out=False)
        back = copy(driver, used, target.at, memory, out=True)
        if there == back == 0 and not source.holds(target):
            print(f"WRONG BYTES AS SUCCESS in round {rounds}, {after} copies after the fault")
            return 1
        if is_lost:
            after += 1
            outcome = "right" if there == back == 0 else f"error {there or back}"
            codes[outcome] = codes.get(outcome, 0) + 1
        elif there or back:
            print(f"copies give {there or back} before the fault: this host is not fit for the test")
            return 2
    print(f"{fault}, {how}: {rounds - after} rounds before the fault; after it: {codes}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
