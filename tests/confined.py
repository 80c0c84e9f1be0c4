"""`confined.py ROOT UID CAPABILITIES COMMAND...` runs a command as a container of the chart is run.

Its root is ROOT, which it cannot write to; it has these capabilities at most, by their numbers with commas
between them, and cannot gain others. What is mounted is gone with it. Wants to be root.
"""

import ctypes
import os
import subprocess
import sys

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
CLONE_NEWNS = 0x00020000
WRITABLE = ("run/forebay", "var/lib/forebay")


def main() -> None:
    """Confines itself, and becomes the command."""
    root, uid, capabilities, command = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    allowed = {int(number) for number in capabilities.split(",") if number}
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mounts = [["--make-rprivate", "/"], ["--bind", root, root], ["-t", "proc", "proc", f"{root}/proc"]]
    mounts += [["--bind", f"{root}/{folder}", f"{root}/{folder}"] for folder in WRITABLE]
    for mount in [*mounts, ["-o", "remount,ro,bind", root]]:
        subprocess.run(["mount", *mount], check=True)
    os.chroot(root)
    os.chdir("/")
    for number in set(range(64)) - allowed:
        # Those that this kernel does not know cannot be had either.
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
