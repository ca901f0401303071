"""The three ways in which Linux can isolate a process, by system call: network namespace, seccomp filter, Landlock.

Each function enforces one of them on the calling process and all children it starts later; none can be undone. One that
the kernel does not have is an `OSError` with the reason. What they are for is in `isolation.py`; here is only how the
kernel is asked. Standard library alone: this runs before anything else is loaded.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCalls:
    """Numbers that differ between processors.

    :ivar audit: AUDIT_ARCH_*, by which a filter knows whose numbers it sees.
    :ivar groups: setpgid, setsid.
    :ivar keys: add_key, request_key, keyctl.
    """

    audit: int
    capset: int
    clone: int
    connect: int
    groups: tuple[int, int]
    ioctl: int
    keys: tuple[int, int, int]
    process_vm_readv: int
    process_vm_writev: int
    ptrace: int
    seccomp: int
    setns: int
    socket: int
    socketpair: int
    unshare: int
    # These came after all processors had agreed on one list (asm-generic/unistd.h).
    io_uring: tuple[int, ...] = (425, 426, 427)
    clone3: int = 435
    pidfd_getfd: int = 438
    landlock: tuple[int, int, int] = (444, 445, 446)


_BY_MACHINE: Final = {
    "x86_64": SystemCalls(
        audit=0xC000003E,
        capset=126,
        clone=56,
        connect=42,
        groups=(109, 112),
        ioctl=16,
        keys=(248, 249, 250),
        process_vm_readv=310,
        process_vm_writev=311,
        ptrace=101,
        seccomp=317,
        setns=308,
        socket=41,
        socketpair=53,
        unshare=272,
    ),
    "aarch64": SystemCalls(
        audit=0xC00000B7,
        capset=91,
        clone=220,
        connect=203,
        groups=(154, 157),
        ioctl=29,
        keys=(217, 218, 219),
        process_vm_readv=270,
        process_vm_writev=271,
        ptrace=117,
        seccomp=277,
        setns=268,
        socket=198,
        socketpair=199,
        unshare=97,
    ),
}


def system_calls() -> SystemCalls:
    """Those of this machine.

    :raises OSError: on a system or processor whose numbers are not known here.
    """
    system, machine = platform.system(), platform.machine()
    if system != "Linux":
        raise OSError(errno.ENOSYS, f"this system is {system or 'unknown'}, isolation needs Linux")
    # A 32-bit interpreter on a 64-bit kernel has other numbers than its machine says.
    if machine not in _BY_MACHINE or struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, f"this processor is {machine or 'unknown'}, isolation needs x86_64 or aarch64")
    return _BY_MACHINE[machine]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    # Without a width, ctypes passes numbers as 32 bits and leaves the upper half of the register as it was.
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(int(_libc().syscall(ctypes.c_long(number), *wide)))


def _prctl(option: int, value: int) -> None:
    _checked(int(_libc().prctl(option, *(ctypes.c_ulong(word) for word in (value, 0, 0, 0)))))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number).lower())
    return result


def _require_one_thread() -> None:
    """The kernel moves or confines the calling thread alone: another one would stay outside, with the same memory."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError(errno.EINVAL, "this process has more than one thread")


def die_with_parent(signal_number: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def no_core_dumps() -> None:
    """A crash writes no memory to disk, with images and prototypes in it; nor that of a child.

    One byte instead of none: a program that the system has for crashes is given nothing either then (core(5) says that
    it does not keep to other limits; kernel/coredump.c).
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    if most == resource.RLIM_INFINITY or most > 1:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


# An empty network namespace: no interface but a loopback that is down, so that no address has a route.

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
_CAP_LAST: Final = 63
# What root keeps: reading and writing files of other users, as it could before. CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH,
# FOWNER, FSETID (linux/capability.h).
_FILE_CAPABILITIES: Final = 0b11111
_CAPABILITY_VERSION_3: Final = 0x20080522


def enter_network_namespace() -> None:
    """Leave the machine's network.

    Root moves alone. Everybody else needs a user namespace around it, in which the user and group stay what they are,
    so that files keep their owner.
    """
    numbers = system_calls()
    _require_one_thread()
    try:
        _call(numbers.unshare, CLONE_NEWNET)
        kept = _FILE_CAPABILITIES
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _call(numbers.unshare, CLONE_NEWUSER | CLONE_NEWNET)
        # Before a group may be mapped without privilege, the right to leave groups has to go (user_namespaces(7)).
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_bytes(text.encode())
        kept = 0
    # A new namespace comes with all powers over it. With them the process could undo some of this.
    _keep_capabilities(numbers, kept)


def _keep_capabilities(numbers: SystemCalls, kept: int) -> None:
    for capability in range(_CAP_LAST + 1):
        if not kept >> capability & 1:
            try:
                _prctl(_PR_CAPBSET_DROP, capability)
            except OSError as error:
                # EINVAL: the kernel has no capability of this number. EPERM: we may not shorten the set, and then
                # have none to give away.
                if error.errno not in (errno.EINVAL, errno.EPERM):
                    raise
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    held = kept & _effective()
    low, high = held & 0xFFFFFFFF, held >> 32
    _call(numbers.capset, header, struct.pack("<6I", low, low, 0, high, high, 0))


def _effective() -> int:
    for line in Path("/proc/self/status").read_bytes().splitlines():
        if line.startswith(b"CapEff:"):
            return int(line.split()[1], 16)
    return 0


# A seccomp filter: a program in the kernel that looks at the number and arguments of each system call.

_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_FILTER_FLAG_TSYNC: Final = 1
_ALLOW: Final = 0x7FFF0000
_KILL_PROCESS: Final = 0x80000000
_REFUSE: Final = 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_AT_NUMBER, _AT_AUDIT, _AT_ARGUMENTS = 0, 4, 16
_X32: Final = 0x40000000
# All of CLONE_NEW* that clone(2) takes.
_NEW_NAMESPACES: Final = 0x7E020000
_KIND_OF_SOCKET: Final = 0xF
# Requests to a terminal: put a letter into its input; paste into that of a console.
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C

Instruction = tuple[int, int, int, int]


def _argument(number: int) -> Instruction:
    """The lower half, at the lower address on both processors: the kernel takes these arguments as 32 bits too."""
    return (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * number)


def socket_filter(numbers: SystemCalls) -> list[Instruction]:
    """Refuses every way to a new socket but a pair, and the ways around the filter and the namespace.

    Local sockets are refused with the others: one with a name in the file system crosses a network namespace, and may
    lead to a service that sends (a name resolver, a container service, a system log). A pair of datagram sockets could
    be pointed at such a name later, so that a pair has to be a stream, which stays connected to its other end.
    """
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    program: list[Instruction] = [
        # The same number means something else in the 32-bit table.
        (_LOAD, 0, 0, _AT_AUDIT),
        (_EQUAL, 1, 0, numbers.audit),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _AT_NUMBER),
        # x32: a third table of x86_64, with this bit in each number.
        (_AT_LEAST, 0, 1, _X32),
        refuse,
    ]
    refused = (
        numbers.socket,
        *numbers.groups,  # leaves the group of processes that ends with this one
        numbers.connect,  # points a socket that is a standard stream at somebody else
        *numbers.keys,  # has the kernel start a program outside, which asks a name server (key type dns_resolver)
        *numbers.io_uring,  # opens and connects sockets by a queue that no filter sees
        numbers.setns,
        numbers.unshare,
        numbers.ptrace,
        numbers.process_vm_readv,
        numbers.process_vm_writev,
        numbers.pidfd_getfd,  # takes a socket from another process
    )
    for number in refused:
        program += [(_EQUAL, 0, 1, number), refuse]
    # Its flags are behind a pointer, which a filter cannot follow. Told that there is no such call, libraries go back
    # to clone.
    program += [(_EQUAL, 0, 1, numbers.clone3), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    # Would type at the terminal that a command was started from: its shell would carry that out.
    program += [(_EQUAL, 0, 5, numbers.ioctl), _argument(1)]
    program += [(_EQUAL, 1, 0, _TIOCSTI), (_EQUAL, 0, 1, _TIOCLINUX), refuse, allow]
    program += [(_EQUAL, 0, 4, numbers.clone), _argument(0), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), refuse, allow]
    program += [
        (_EQUAL, 0, 8, numbers.socketpair),
        _argument(0),
        (_EQUAL, 0, 5, socket.AF_UNIX),
        _argument(1),
        (_AND, 0, 0, _KIND_OF_SOCKET),
        (_EQUAL, 1, 0, socket.SOCK_STREAM),
        (_EQUAL, 0, 1, socket.SOCK_SEQPACKET),
        allow,
        refuse,
        allow,
    ]
    return program


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def enter_seccomp() -> None:
    """For all threads of this process, and for what it starts."""
    numbers = system_calls()
    program = socket_filter(numbers)
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    filter_program = _Program(len(program), code)
    _call(numbers.seccomp, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(filter_program))


# Landlock: a list of files and folders that may be used; everything else is refused, whoever owns it.

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
LIST: Final = _READ_DIR
READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
WRITE: Final = (
    _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG
)
# A card's driver is spoken to by ioctl; a file that is no device has no use for it.
DEVICE: Final = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_RULE_PATH_BENEATH: Final = 1
_CREATE_RULESET_VERSION: Final = 1
_BIND_AND_CONNECT_TCP: Final = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 0b11


def landlock_version() -> int:
    """Of the kernel's Landlock.

    :raises OSError: where it has none, or it is switched off.
    """
    return _call(system_calls().landlock[0], None, 0, _CREATE_RULESET_VERSION)


def _handled(version: int, *, network: bool = False) -> bytes:
    """The rights that are refused unless a rule gives them, as much as this version knows (landlock(7)).

    :param network: TCP stays permitted.
    """
    files = (1 << 13) - 1
    for since, right in ((2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        files |= right if version >= since else 0
    words = [files]
    if version >= 4:
        words.append(0 if network else _BIND_AND_CONNECT_TCP)
    if version >= 6:
        words.append(_ABSTRACT_SOCKETS_AND_SIGNALS)
    return struct.pack(f"<{len(words)}Q", *words)


def enter_landlock(rules: Iterable[tuple[Path, int]], *, network: bool = False) -> None:
    """From now on files are what `rules` say. TCP is refused from version 4 on, abstract sockets and signals from 6.

    :param rules: an existing file or folder each, and the rights to it and to all that lies in it.
    :param network: TCP stays permitted.
    """
    create, add, restrict = system_calls().landlock
    _require_one_thread()
    handled = _handled(landlock_version(), network=network)
    known = struct.unpack_from("<Q", handled)[0]
    ruleset = _call(create, handled, len(handled), 0)
    try:
        for path, rights in rules:
            _add_rule(add, ruleset, path, rights & known)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _call(restrict, ruleset, 0)
    finally:
        os.close(ruleset)


def _add_rule(add: int, ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # gone since it was listed, or not ours to reach: no rule, so no right
    try:
        granted = rights if stat.S_ISDIR(os.fstat(descriptor).st_mode) else rights & _OF_FILES
        if granted:
            _call(add, ruleset, _RULE_PATH_BENEATH, struct.pack("<Qi", granted, descriptor), 0)
    finally:
        os.close(descriptor)


def without(paths: Iterable[Path], denied: Iterable[Path], rights: int) -> Iterator[tuple[Path, int]]:
    """Rules that give rights to `paths` but not to the content of what is denied, which may lie inside of them.

    Landlock can only give, and gives to a whole tree. So a folder with something denied in it is given entry by entry.
    The names in it may be listed, because programs look for their modules that way.
    """
    refused = [path.resolve() for path in denied]
    for path in dict.fromkeys(path.resolve() for path in paths):
        yield from _beneath(path, refused, rights)


def _beneath(path: Path, refused: list[Path], rights: int) -> Iterator[tuple[Path, int]]:
    if any(other == path or other in path.parents for other in refused):
        return
    if not any(path in other.parents for other in refused):
        yield path, rights
        return
    yield path, LIST
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return
    for entry in entries:
        # A link gives what it points to, which is not in this folder; whoever needs that names it.
        if not entry.is_symlink():
            yield from _beneath(entry, refused, rights)
