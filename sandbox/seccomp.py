"""The system calls that a sandboxed program may make, as a filter for the kernel.

Everything that is not listed fails as if the kernel did not know it (ENOSYS), so that
libraries take their other way; what a newer kernel adds is refused until it is listed.
"""

import errno
import socket
import tempfile

# What programs, compilers, test runners and shells need. Not among them: namespaces and
# mounts, tracing and the memory of other processes, kernel keys, bpf, io_uring, modules,
# clocks, handles of files, and whatever else acts on the machine.
ALLOWED = """
    accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown
    clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range
    creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2
    epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2
    fadvise64 fallocate fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr
    flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex
    futex_waitv futimesat get_robust_list getcpu getcwd getdents getdents64 getegid
    geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid
    getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
    getsockopt gettid gettimeofday getuid getxattr inotify_add_watch inotify_init
    inotify_init1 inotify_rm_watch ioctl ioprio_get kill lchown lgetxattr
    link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise
    membarrier memfd_create mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall
    mmap mprotect mremap msync munlock munlockall munmap nanosleep newfstatat open
    openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll prctl
    pread64 preadv preadv2 pselect6 pwrite64 pwritev pwritev2 read readahead
    readlink readlinkat readv recvfrom recvmmsg recvmsg removexattr rename renameat
    renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo
    sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
    sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
    sched_yield select semctl semget
    semop semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_tid_address
    setfsgid setfsuid setgid setgroups setitimer setpgid setregid setresgid
    setresuid setreuid setrlimit setsid setsockopt setuid setxattr shmat shmctl shmdt
    shmget shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx
    symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create
    timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
    timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat
    utime utimensat utimes vfork vmsplice wait4 waitid write writev
""".split()  # noqa: SIM905 (a list of 250 is a page)

# Sockets of other families reach past the network namespace (AF_VSOCK the hypervisor,
# AF_ALG the kernel's ciphers).
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
# Calls that a process may make about itself, by their argument that says of whom: the
# sandbox's first process has the same user, and must not be hindered.
ABOUT_ITSELF = {
    "prlimit64": 0,
    "sched_setattr": 0,
    "sched_setparam": 0,
    "sched_setscheduler": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
# The flags of clone that make namespaces.
NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x7C000000


def program() -> bytes:
    """The filter in the kernel's form, for this machine.

    Calls in the manner of another architecture (32 bits on a machine of 64) kill.

    Raises:
      RuntimeError: what compiles it is missing.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            "pyseccomp and libseccomp make the filter of system calls, and one is missing: "
            "pip install pyseccomp; apt-get install libseccomp2."
        ) from error

    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    # A tree in place of a list: the kernel tries every call when it takes a filter.
    rules.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)
    for name in ALLOWED:
        rules.add_rule(pyseccomp.ALLOW, name)
    for family in FAMILIES:
        argument = pyseccomp.Arg(0, pyseccomp.EQ, family)
        rules.add_rule(pyseccomp.ALLOW, "socket", argument)
    for name, position in ABOUT_ITSELF.items():
        argument = pyseccomp.Arg(position, pyseccomp.EQ, 0)
        rules.add_rule(pyseccomp.ALLOW, name, argument)
    # clone3 has its flags in memory, where no filter can look; libraries then use clone.
    argument = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, NEW_NAMESPACES, 0)
    rules.add_rule(pyseccomp.ALLOW, "clone", argument)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
