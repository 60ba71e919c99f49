"""Which system calls a program in a sandbox may make, and which a worker's container allows.

The source of ``leanq/lean/sandbox/seccomp.*.bpf`` and of ``deploy/seccomp.json``, which
``compile.py`` beside it makes. Names are the kernel's; a name that an architecture lacks means
nothing there. What Lean, its language server and the judge's Python call was seen by strace. The
rest of ``ALLOWED`` is what ordinary programs of files, threads and processes need.
"""

from __future__ import annotations

from typing import NamedTuple

ARCHITECTURES = ("x86_64", "aarch64")


class Condition(NamedTuple):
    """``argument & mask == value``, of the argument with this index."""

    argument: int
    mask: int
    value: int


_ALL = (1 << 64) - 1
_INT = (1 << 32) - 1


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _one_of(argument: int, values: tuple[int, ...]) -> list[Condition]:
    return [Condition(argument, _ALL, value) for value in values]


ALLOWED = _names(
    """
    access alarm arch_prctl brk chdir clock_getres clock_gettime clock_nanosleep close
    close_range copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl
    epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group
    faccessat faccessat2 fadvise64 fallocate fchdir fdatasync fork
    fstat fstatfs fsync ftruncate futex futex_waitv get_robust_list getcpu getcwd getdents
    getdents64 getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid
    getpriority getrandom getresgid getresuid getrlimit getrusage getsid gettid gettimeofday
    getuid getxattr kill lgetxattr link linkat listxattr llistxattr fgetxattr flistxattr lseek
    lstat madvise membarrier mkdir mkdirat mprotect mremap msync munmap nanosleep newfstatat
    open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll pread64 preadv
    preadv2 pselect6 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename
    renameat renameat2 restart_syscall rmdir rseq rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo
    sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
    sched_getscheduler sched_rr_get_interval sched_yield select sendfile set_robust_list
    set_tid_address setitimer setpgid setrlimit setsid sigaltstack signalfd signalfd4 stat
    statfs statx symlink symlinkat sysinfo tgkill time timer_create timer_delete
    timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
    times tkill truncate umask uname unlink unlinkat vfork wait4 waitid
    write writev
    """
)

_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_CLONE_NEW = (1 << 17, *(1 << bit for bit in range(25, 31)))  # CLONE_NEWNS; NEWCGROUP to NEWNET
_SHARED_ANONYMOUS = 0x21
_SIGCHLD = 17

CONDITIONAL: dict[str, list[Condition]] = {
    # No new namespaces, and no thread with open files of its own, beyond the limit of its process.
    "clone": [
        Condition(0, sum(_CLONE_NEW) | _CLONE_THREAD | _CLONE_FILES, value)
        for value in (0, _CLONE_FILES, _CLONE_THREAD | _CLONE_FILES)
    ],
    # A program may ask what becomes of its children, and not change it. Linux would lose the CPU
    # time of children that nobody waits for. Other signals differ from SIGCHLD in one of its bits.
    "rt_sigaction": [
        *(Condition(0, bit, bit & ~_SIGCHLD) for bit in (1 << n for n in range(7))),
        Condition(1, _ALL, 0),
    ],
    # What is shared and anonymous keeps its memory when it is unmapped in part, unseen.
    "mmap": [Condition(3, _SHARED_ANONYMOUS, value) for value in (0x00, 0x01, 0x20)],
    # One's own limits alone, not the supervisor's.
    "prlimit64": _one_of(0, (0,)),
    # Descriptors and their flags; no locks and leases, which would hold up others.
    "fcntl": _one_of(1, (0, 1, 2, 3, 4, 1030, 1032)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
    "ioctl": _one_of(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # Pipes with a name, and no devices.
    "mknod": [Condition(1, 0o170000, 0o010000)],
    "mknodat": [Condition(2, 0o170000, 0o010000)],
    # PDEATHSIG, GET_DUMPABLE, SET_DUMPABLE, SET_NAME, GET_NAME, CAPBSET_READ, SET_NO_NEW_PRIVS,
    # GET_NO_NEW_PRIVS, SET_THP_DISABLE, GET_THP_DISABLE, SET_VMA.
    "prctl": _one_of(0, (1, 3, 4, 15, 16, 23, 38, 39, 41, 42, 0x53564D41)),
}
"""Allowed where one of these holds, and otherwise refused."""

UNKNOWN = _names(
    """
    clone3 io_uring_setup io_uring_enter io_uring_register landlock_create_ruleset
    landlock_add_rule landlock_restrict_self
    """
)
"""Refused as if the kernel did not know them (ENOSYS), so that libraries do without. So is every
call that is named nowhere here, later kernels' among them."""

REFUSED = _names(
    """
    chmod fchmod fchmodat fchmodat2 utime utimes futimesat utimensat
    shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open
    mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr add_key request_key keyctl
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd
    bpf perf_event_open userfaultfd memfd_create memfd_secret remap_file_pages mount umount2
    mount_setattr move_mount open_tree fsopen fsmount fsconfig fspick pivot_root chroot unshare
    setns open_by_handle_at name_to_handle_at socket socketpair bind connect listen accept
    accept4 sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg getsockname getpeername setsockopt
    getsockopt shutdown splice tee vmsplice setpriority sched_setaffinity sched_setattr
    sched_setparam sched_setscheduler ioprio_set mbind set_mempolicy set_mempolicy_home_node
    migrate_pages move_pages setuid setgid setreuid setregid setresuid setresgid setgroups
    setfsuid setfsgid capset chown fchown lchown fchownat  setxattr lsetxattr
    fsetxattr flock inotify_init inotify_init1 inotify_add_watch fanotify_init fanotify_mark
    sync syncfs sync_file_range quotactl quotactl_fd acct swapon swapoff reboot sethostname
    setdomainname iopl ioperm modify_ldt personality seccomp init_module finit_module
    delete_module kexec_load kexec_file_load syslog vhangup clock_settime clock_adjtime adjtimex
    settimeofday lookup_dcookie nfsservctl mlock mlock2 mlockall io_setup io_submit
    """
)
"""Refused with EPERM. Modes and times are among them: Landlock keeps no program from changing
those of whatever belongs to its user, such as the environment."""

# A worker's container also needs the network, and all that makes the sandbox.
CONTAINER = (
    _names(
        """
        chmod fchmod fchmodat fchmodat2 utime utimes futimesat utimensat
    socket socketpair bind connect listen accept accept4 sendto recvfrom sendmsg recvmsg
    sendmmsg recvmmsg getsockname getpeername setsockopt getsockopt shutdown clone unshare setns
    mount umount2 mount_setattr pivot_root fsopen fsmount fsconfig fspick move_mount open_tree
    prctl seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self capget capset
    chroot chown fchown lchown fchownat fcntl flock ioctl mmap prlimit64 sched_setaffinity
    sched_setattr sched_setparam sched_setscheduler setpriority setgid setgroups setregid
    setresgid setresuid setreuid setuid setfsuid setfsgid splice tee memfd_create mincore mlock
    munlock inotify_init inotify_init1 inotify_add_watch inotify_rm_watch io_setup io_submit
    io_getevents io_destroy io_cancel ioprio_get ioprio_set mknod mknodat setxattr lsetxattr
    fsetxattr removexattr lremovexattr fremovexattr sync syncfs sync_file_range vmsplice
    pkey_alloc pkey_free pkey_mprotect shmget shmat shmctl shmdt semget semop semtimedop semctl
    set_thread_area get_thread_area rt_sigaction
    """
    )
    | ALLOWED
)
