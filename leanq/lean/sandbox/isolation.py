"""Linux's means to isolate a program, by ctypes: namespaces, mounts, capabilities, Landlock,
seccomp.

For the supervisor and its monitor alone: most calls change the calling process for good. Each
function does one thing and raises ``OSError`` if the kernel refuses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
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
_REMOUNT, _BIND, _MOVE, _RECURSIVE, _PRIVATE = 0x20, 0x1000, 0x2000, 0x4000, 0x40000
_UMOUNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
# <asm/unistd.h>; the other calls have one number everywhere.
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MACHINE = os.uname().machine
_FILTER = f"{os.path.dirname(__file__)}/seccomp.{_MACHINE}.bpf"
# <sys/prctl.h> and <linux/capability.h>
_SET_PDEATHSIG, _SET_DUMPABLE, _CAPBSET_DROP = 1, 4, 24
_SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS, _CAPABILITY_VERSION = 36, 38, 0x20080522
_GET_SECCOMP, _SET_SECCOMP, _SECCOMP_FILTER = 21, 22, 2
# <linux/landlock.h>
_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_MAKE_CHAR, _MAKE_BLOCK, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec"),
    "/usr/share/zoneinfo",
    "/sys/devices/system/cpu",  # older C libraries count the processors there
    # Names of users and of the machine's time zone, and the places of libraries and programs.
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime"),
    *("/etc/ld.so.cache", "/etc/alternatives"),
)
"""The paths of the machine that every program may read and run, if they exist."""
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")


_NO_CAPABILITIES = struct.pack("=Ii", _CAPABILITY_VERSION, 0)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def _syscall(number: int, *arguments: int | bytes) -> int:
    """Makes a system call that libc may not know. Bytes are passed by address, and only read."""
    plain = (ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments)
    return int(_libc.syscall(ctypes.c_long(number), *plain))


def _prctl(option: int, value: int, argument: bytes | None = None) -> None:
    zero = ctypes.c_ulong(0)
    values = ctypes.c_int(option), ctypes.c_ulong(value), ctypes.c_char_p(argument)
    _check(_libc.prctl(*values, zero, zero), f"prctl {option}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [os.fsencode(text) for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data))
    _check(result, f"mount on {target}")


def adopt_orphans() -> None:
    """From here on, a descendant whose parent ends becomes a child of this process."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int) -> None:
    """Has the kernel send ``signal`` to this process when its parent ends."""
    _prctl(_SET_PDEATHSIG, signal)


def unshare(names: Collection[str]) -> None:
    """Takes new namespaces: a new ``pid`` for children alone. In a new ``user`` the caller has all
    capabilities, and only its own uid and gid. A new ``net`` has no interface up."""
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


def forbid_user_namespaces() -> None:
    """Bars processes here from capabilities in a user namespace of their own, if it can."""
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def set_pid_namespace(fd: int) -> None:
    """Has the caller's children born in the pid namespace of a /proc/PID/ns/pid."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(_NAMESPACES["pid"])), "setns")


def mount_proc(target: str = "/proc", *, minimal: bool = False) -> None:
    """Mounts the /proc of the caller's pid namespace; if minimal, processes alone, to read."""
    flags = _NOSUID | _NODEV | _NOEXEC
    if minimal:
        try:
            _mount("proc", target, "proc", flags | _RDONLY, "subset=pid")
            return
        except OSError:
            flags |= _RDONLY  # a kernel before 5.8
    _mount("proc", target, "proc", flags)


def keep_own_proc(spare: str) -> None:
    """Leaves of /proc this process alone, where the loader, and so Lean, finds libraries beside a
    program by /proc/self/exe. ``spare`` is any folder."""
    pid = str(os.getpid())
    _mount(f"/proc/{pid}", spare, "", _BIND)
    mount_memory("/proc", mode="755", size_bytes=1 << 16)
    os.mkdir(f"/proc/{pid}")
    os.symlink(pid, "/proc/self")
    _mount(spare, f"/proc/{pid}", "", _MOVE)
    freeze("/proc")


def bind(source: str, target: str) -> None:
    _mount(source, target, "", _BIND | _RECURSIVE)


def freeze(target: str, *, devices: bool = False) -> None:
    """Makes all mounts at and below ``target`` read-only, without setuid and, unless asked for,
    without devices. Nothing is executed from devices."""
    flags = _RDONLY | _NOSUID | (_NOEXEC if devices else _NODEV)
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)  # the same bits there
    arguments = (_AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, len(attributes))
    _check(_syscall(_SYS_MOUNT_SETATTR, *arguments), f"mount_setattr on {target}")


def mount_memory(target: str, *, mode: str, size_bytes: float) -> None:
    """Mounts an empty file system in memory, of half the machine's if the size is infinite."""
    flags = _NOSUID | _NODEV | _NOEXEC
    _mount("leanq", target, "tmpfs", flags, f"mode={mode},{_size(size_bytes)}")


def resize_memory(target: str, size_bytes: float) -> None:
    """Sets the size of a mount of :func:`mount_memory`."""
    flags = _REMOUNT | _NOSUID | _NODEV | _NOEXEC
    _mount("leanq", target, "tmpfs", flags, _size(size_bytes))


def _size(size_bytes: float) -> str:
    if math.isinf(size_bytes):
        return "size=50%"
    # A file without content takes memory as well.
    return f"size={int(size_bytes)},nr_inodes={max(int(size_bytes) >> 12, 64)}"


def unmount(target: str) -> None:
    """Removes the mount there. Its open files stay as long as they are open."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(_UMOUNT_DETACH)), f"umount {target}")


def change_root(folder: str) -> None:
    """Makes a mount the root of all files, and lets go of the old one."""
    os.chdir(folder)
    number = _SYS_PIVOT_ROOT.get(_MACHINE)
    if number is None:
        raise OSError(errno.ENOSYS, "pivot_root is not known here")
    _check(_syscall(number, b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def cover(folder: str) -> None:
    """Puts an empty folder that no process may enter over ``folder``, if there is one."""
    if os.path.isdir(folder):
        flags = _RDONLY | _NOSUID | _NODEV | _NOEXEC
        _mount("none", folder, "tmpfs", flags, "size=4k,nr_inodes=1,mode=000")


def keep_mounts() -> None:
    """Hides what happens to mounts in this namespace, and in copies of it, from outside."""
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)


def bar_privileges() -> None:
    """Bars programs, not this process, from any privilege by setuid or by capabilities."""
    _prctl(_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(OSError):  # past the last one, or never had any
        for capability in range(64):
            _prctl(_CAPBSET_DROP, capability)


def renounce_privileges() -> None:
    """Gives up all capabilities, after ``bar_privileges``."""
    _check(_libc.capset(_NO_CAPABILITIES, bytes(24)), "capset")


def keep_to_itself() -> None:
    """Keeps processes without privileges from tracing this one and reading its memory."""
    _prctl(_SET_DUMPABLE, 0)


def landlock_abi() -> int:
    """Returns the version of Landlock that runs here; 0 for none."""
    return max(_syscall(_SYS_CREATE_RULESET, 0, 0, 1), 0)


def landlock_ruleset(abi: int, *, writable: str, readable: Iterable[str]) -> int:
    """Returns a ruleset, as a file descriptor: everything below ``writable`` may be written,
    everything below ``readable`` read and run, whatever is mounted there later. It denies TCP from
    ABI 4 on; from 6 on, signals and abstract sockets to the outside. A missing path is an error."""
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
    for path in ("/dev/random", "/dev/urandom"):
        allow(path, _READ_FILE)
    for path in readable:
        allow(path, _EXECUTE | _READ_FILE | _READ_DIR)
    return ruleset


def landlock_restrict(ruleset: int) -> None:
    _check(_syscall(_SYS_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")


def seccomp_filter() -> bytes:
    """Returns the filter of deploy/seccomp/policy.py; b"" if this machine can have none."""
    try:
        _prctl(_GET_SECCOMP, 0)
        with open(_FILTER, "rb") as file:
            return file.read()
    except OSError:
        return b""


def seccomp_restrict(filter_: bytes) -> None:
    """Binds this process and its descendants to a filter, after it has given up setuid."""
    program = ctypes.create_string_buffer(filter_, len(filter_))
    header = struct.pack("@HP", len(filter_) // 8, ctypes.addressof(program))
    _prctl(_SET_SECCOMP, _SECCOMP_FILTER, header)
