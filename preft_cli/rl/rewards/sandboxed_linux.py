"""What a Linux process can give up for good, without any privilege: system calls (seccomp) and writing (Landlock).

Kernels and processors that lack one of them go without it.
"""

import ctypes
import os
import platform
import struct
from errno import EPERM
from pathlib import Path

SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2
# System calls: fork, vfork, clone, clone3 (processes and threads); execve, execveat; socket, io_uring_setup (network);
# kill, tkill, tgkill, pidfd_open, pidfd_send_signal, ptrace, process_vm_writev (other processes);
# setrlimit, prlimit64 (root could lift its limits); setsid, setpgid (the group that is killed in the end).
CALLS = {
    "x86_64": (
        0xC000003E,
        [57, 58, 56, 435, 59, 322, 41, 425, 62, 200, 234, 434, 424, 101, 311, 160, 302, 112, 109],
    ),
    "aarch64": (0xC00000B7, [220, 435, 221, 281, 198, 425, 129, 130, 131, 434, 424, 117, 271, 164, 261, 157, 154]),
}
LAST_CALL = 0x40000000
"""From here on the numbers of another ABI, which would call the same by other names."""
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | EPERM, 0x80000000
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITES = [1, *range(4, 13)]
"""Bits of Landlock's rights: write to files; remove and make files, folders and all else."""
WRITES_SINCE = {2: 13, 3: 14}
"""Rights that came with later versions: move between folders; truncate."""


def confine(folder: Path) -> None:
    """From now on nothing is written outside of `folder`, and no call of `CALLS` is made. Reading stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        _write_below(libc, folder)
        _refuse_calls(libc)


def _write_below(libc: ctypes.CDLL, folder: Path) -> None:
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    bits = WRITES + [bit for since, bit in WRITES_SINCE.items() if version >= since]
    rights = sum(1 << bit for bit in bits)
    handled = struct.pack("=Q", rights)
    rules = libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    for path in (folder, Path(os.devnull)):
        # A file has fewer rights than a folder: those that it can have are the first one and truncate's.
        allowed = rights if path.is_dir() else rights & (1 << 1 | 1 << 14)
        below = os.open(path, os.O_PATH)
        libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, below), 0)
        os.close(below)
    libc.syscall(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _refuse_calls(libc: ctypes.CDLL) -> None:
    if platform.machine() not in CALLS:
        return
    architecture, calls = CALLS[platform.machine()]
    lines = [
        (LOAD, 0, 0, 4),  # the architecture
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the call's number
        (AT_LEAST, 0, 1, LAST_CALL),
        (RETURN, 0, 0, KILL),
    ]
    for call in calls:
        lines += [(EQUAL, 0, 1, call), (RETURN, 0, 0, REFUSE)]
    lines.append((RETURN, 0, 0, ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))

    class SockFprog(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(SockFprog(len(lines), ctypes.addressof(program))), 0, 0)
