"""What Linux offers to isolate a program: namespaces, mounts, capabilities, Landlock, by ctypes.

For the supervisor and its monitor alone: most calls change the calling process for good. Each
function does one thing and raises ``OSError`` where the kernel refuses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Collection, Iterable

_libc = ctypes.CDLL(None, use_errno=True)

# <sched.h>
_NAMESPACES = {
    "mount": 0x00020000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
# <sys/mount.h>
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
# <sys/prctl.h> and <linux/capability.h>
_SET_PDEATHSIG, _SET_DUMPABLE, _CAPBSET_DROP = 1, 4, 24
_SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS, _CAPABILITY_VERSION = 36, 38, 0x20080522
# <linux/landlock.h>
_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_MAKE_CHAR, _MAKE_BLOCK, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/opt")
_INFORMATION = (
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
    "/sys/devices/system/cpu",
    "/sys/fs/cgroup",
    "/sys/kernel/mm/transparent_hugepage",
)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def _syscall(number: int, *arguments: int | bytes) -> int:
    """A system call that libc may not know. Bytes are passed by address, and only read."""
    plain = (ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments)
    return int(_libc.syscall(ctypes.c_long(number), *plain))


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    result = _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero)
    _check(result, f"prctl {option}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [os.fsencode(text) for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data))
    _check(result, f"mount on {target}")


def _set_read_only(target: str, read_only: bool, flags: int) -> None:
    on, off = (_ATTR_RDONLY, 0) if read_only else (0, _ATTR_RDONLY)
    attributes = struct.pack("=QQQQ", on, off, 0, 0)
    arguments = (_AT_FDCWD, os.fsencode(target), flags, attributes, len(attributes))
    _check(_syscall(_SYS_MOUNT_SETATTR, *arguments), f"mount_setattr on {target}")


def adopt_orphans() -> None:
    """From here on, a descendant whose parent ends becomes a child of this process."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int) -> None:
    """Have the kernel send ``signal`` to this process when its parent ends."""
    _prctl(_SET_PDEATHSIG, signal)


def unshare(names: Collection[str]) -> None:
    """Take new namespaces. The caller keeps its pid, only its children are in a new ``pid``.

    In a new ``user`` namespace the caller has all capabilities, and its own uid and gid, which
    are the only ones there. In a new ``net`` no interface is up. What happens to mounts in a new
    ``mount`` is not seen outside.
    """
    if not names:
        return  # seccomp filters refuse even the call that asks for nothing
    uid, gid = os.geteuid(), os.getegid()
    flags = sum(_NAMESPACES[name] for name in names)
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")
    if "user" in names:
        ids = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))
        for name, text in ids:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        # No program needs capabilities in user namespaces of its own. /proc may be masked.
        with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    if "mount" in names:
        _mount("none", "/", "", _RECURSIVE | _PRIVATE)


def mount_proc() -> None:
    """Mount the /proc of the caller's own pid namespace."""
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def freeze_files(scratch: str) -> bool:
    """Make every file read-only but those below ``scratch``; False where the kernel cannot.

    Landlock alone would still allow chmod, chown and utime on whatever belongs to this user.
    """
    _mount(scratch, scratch, "", _BIND)
    try:
        _set_read_only("/", True, _AT_RECURSIVE)
    except OSError:
        return False
    _set_read_only(scratch, False, 0)
    return True


def cover(folder: str) -> None:
    """Put an empty folder that no process may enter over ``folder``, if there is one."""
    if os.path.isdir(folder):
        flags = _RDONLY | _NOSUID | _NODEV | _NOEXEC
        _mount("none", folder, "tmpfs", flags, "size=4k,nr_inodes=1,mode=000")


def renounce_privileges() -> None:
    """Give up all capabilities, for the programs to come as well, and setuid with them."""
    _prctl(_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(OSError):  # past the last one, or never had any
        for capability in range(64):
            _prctl(_CAPBSET_DROP, capability)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    # Where there is no Landlock, this keeps the program from tracing its monitor.
    _prctl(_SET_DUMPABLE, 0)


def landlock_abi() -> int:
    """The version of Landlock that runs here; 0 for none."""
    return max(_syscall(_SYS_CREATE_RULESET, 0, 0, 1), 0)


def landlock_ruleset(abi: int, *, writable: str, readable: Iterable[str], own_proc: bool) -> int:
    """A ruleset, as a file descriptor, for ``landlock_restrict``.

    Everything below ``writable`` may be written, everything below ``readable`` and the system's
    folders read and run; /proc only when it shows nothing but the program's own processes.
    TCP is denied from ABI 4 on, signals and abstract sockets to the outside from ABI 6 on.
    A path of ``readable`` that does not exist is an error.
    """
    # Rights came in order of their bits: 13, then one more each with ABI 2, 3 and 5.
    handled = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    tcp, scopes = 3 if abi >= 4 else 0, 3 if abi >= 6 else 0
    attributes = struct.pack("=QQQ", handled, tcp, scopes)[: 8 * (1 + (abi >= 4) + (abi >= 6))]
    ruleset = _check(_syscall(_SYS_CREATE_RULESET, attributes, len(attributes), 0), "landlock")

    def allow(path: str, rights: int) -> None:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                rights &= _FILE_RIGHTS
            rule = struct.pack("=Qi", rights & handled, fd)
            _check(_syscall(_SYS_ADD_RULE, ruleset, 1, rule, 0), f"landlock rule for {path}")
        finally:
            os.close(fd)

    allow(writable, handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV))
    allow("/dev/null", _READ_FILE | _WRITE_FILE | _TRUNCATE)
    for path in (*_INFORMATION, *(["/proc"] if own_proc else [])):
        if os.path.exists(path):
            allow(path, _READ_FILE | _READ_DIR)
    for path in (*filter(os.path.exists, _SYSTEM), *readable):
        allow(path, _EXECUTE | _READ_FILE | _READ_DIR)
    return ruleset


def landlock_restrict(ruleset: int) -> None:
    """Bind this process and its descendants to a ruleset, for good."""
    _check(_syscall(_SYS_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
