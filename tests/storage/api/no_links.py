"""Run CODE while the kernel refuses hard links, as on FAT: python no_links.py CODE. Exits with 77 if it cannot."""

import ctypes
import platform
import struct
import sys

LINK_CALLS = {"x86_64": (86, 265), "aarch64": (37,)}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # errno 1: EPERM
LOAD_CALL, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def refuse_links() -> bool:
    """Install the filter for this process permanently; return False if that is not possible."""
    calls = LINK_CALLS.get(platform.machine())
    if calls is None:
        return False
    lines = [(LOAD_CALL, 0, 0, 0)]
    lines += [(JUMP_IF_EQUAL, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    program = Program(len(lines), code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


if __name__ == "__main__":
    if not refuse_links():
        sys.exit(77)
    exec(sys.argv[1])
