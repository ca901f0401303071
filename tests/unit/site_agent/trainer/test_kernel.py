"""The filter by its instructions, for both processors; the rules that leave a denied folder out."""

from __future__ import annotations

import errno
import socket
import termios
from pathlib import Path

import pytest

from site_agent.trainer import kernel
from site_agent.trainer.kernel import Instruction, SystemCalls, socket_filter

X86_64, AARCH64 = kernel._BY_MACHINE["x86_64"], kernel._BY_MACHINE["aarch64"]
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSED, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def answer(program: list[Instruction], audit: int, number: int, *arguments: int) -> int:
    """What the kernel would do: classic BPF as its manual describes it, over struct seccomp_data."""
    data = {0: number, 4: audit} | {16 + 8 * at: value & 0xFFFFFFFF for at, value in enumerate(arguments)}
    accumulator = at = 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = data[value]
        elif code == 0x54:
            accumulator &= value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("numbers", [X86_64, AARCH64], ids=["x86_64", "aarch64"])
class TestFilter:
    def ask(self, numbers: SystemCalls, number: int, *arguments: int) -> int:
        return answer(socket_filter(numbers), numbers.audit, number, *arguments)

    def test_no_family_of_sockets_is_left(self, numbers: SystemCalls) -> None:
        # 40 is AF_VSOCK, which leads out of a virtual machine and belongs to no network namespace.
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, 40):
            assert self.ask(numbers, numbers.socket, family, socket.SOCK_STREAM) == REFUSED

    def test_a_pair_is_local_and_a_stream(self, numbers: SystemCalls) -> None:
        def pair(family: int, kind: int) -> int:
            return self.ask(numbers, numbers.socketpair, family, kind)

        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            assert pair(socket.AF_UNIX, kind) == pair(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) == ALLOW
        for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
            assert pair(socket.AF_UNIX, kind) == pair(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) == REFUSED
        assert pair(socket.AF_INET, socket.SOCK_STREAM) == REFUSED
        # The upper half of a register is not part of an argument: it neither allows nor refuses.
        assert pair(socket.AF_UNIX | 1 << 32, socket.SOCK_DGRAM) == REFUSED

    def test_threads_and_children_but_no_namespaces(self, numbers: SystemCalls) -> None:
        threads = 0x3D0F00  # what glibc asks for
        assert self.ask(numbers, numbers.clone, threads) == self.ask(numbers, numbers.clone, 17) == ALLOW
        for flag in (kernel.CLONE_NEWNET, kernel.CLONE_NEWUSER, 0x20000):
            assert self.ask(numbers, numbers.clone, flag | 17) == REFUSED
        assert self.ask(numbers, numbers.clone3, 0) == UNKNOWN
        assert self.ask(numbers, numbers.unshare, 0) == self.ask(numbers, numbers.setns, 3, 0) == REFUSED

    def test_ways_around_are_refused(self, numbers: SystemCalls) -> None:
        around = (*numbers.io_uring, numbers.ptrace, numbers.process_vm_readv, numbers.process_vm_writev)
        for number in (*around, numbers.pidfd_getfd, numbers.connect, *numbers.keys, *numbers.groups):
            assert self.ask(numbers, number, 0, 0) == REFUSED

    def test_a_terminal_may_be_asked_and_not_typed_at(self, numbers: SystemCalls) -> None:
        assert self.ask(numbers, numbers.ioctl, 1, termios.TCGETS) == ALLOW
        # TIOCLINUX, which can paste at a console. The upper half of a register is not part of an argument.
        for request in (termios.TIOCSTI, 0x541C, termios.TIOCSTI | 1 << 32):
            assert self.ask(numbers, numbers.ioctl, 1, request) == REFUSED

    def test_another_table_of_numbers_is_not_taken_for_ours(self, numbers: SystemCalls) -> None:
        program = socket_filter(numbers)
        assert answer(program, 0x40000003, 102, 0) == KILL  # i386, where all socket calls have one number
        assert answer(program, numbers.audit, 0x40000000 | numbers.socket, 2, 1) == REFUSED  # x32
        assert answer(program, numbers.audit, 0, 0) == ALLOW

    def test_no_jump_leaves_the_program(self, numbers: SystemCalls) -> None:
        program = socket_filter(numbers)
        assert program[-1][0] == 0x06
        for at, (code, if_true, if_false, _) in enumerate(program):
            assert code == 0x06 or at + 1 + max(if_true, if_false) < len(program)


def test_numbers_of_this_machine_are_the_kernels() -> None:
    """By what they do: a wrong number would do something else, or nothing."""
    numbers = kernel.system_calls()
    descriptor = kernel._call(numbers.socket, socket.AF_UNIX, socket.SOCK_STREAM, 0)
    with socket.socket(fileno=descriptor) as found:
        assert found.family == socket.AF_UNIX
    with pytest.raises(OSError) as bad:
        kernel._call(numbers.setns, -1, 0)
    assert bad.value.errno == errno.EBADF
    with pytest.raises(OSError) as wrong:
        kernel._call(numbers.unshare, 1)
    assert wrong.value.errno == errno.EINVAL


def test_a_processor_without_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError, match="this processor is riscv64"):
        kernel.system_calls()


def test_rules_give_everything_but_what_is_denied(tmp_path: Path) -> None:
    (tmp_path / "identity" / "keys" / "epochs").mkdir(parents=True)
    (tmp_path / "state").mkdir()
    (tmp_path / "identity" / "root.pem").touch()
    (tmp_path / "link").symlink_to(tmp_path / "identity" / "keys")
    keys = tmp_path / "identity" / "keys"
    found = dict(kernel.without([tmp_path, keys / "epochs", tmp_path / "state"], [keys], kernel.READ))
    assert found == {
        tmp_path: kernel.LIST,
        tmp_path / "identity": kernel.LIST,
        tmp_path / "identity" / "root.pem": kernel.READ,
        tmp_path / "state": kernel.READ,
    }
    assert list(kernel.without([tmp_path / "state"], [keys], kernel.WRITE)) == [(tmp_path / "state", kernel.WRITE)]
