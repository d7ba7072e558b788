"""Walls for code that nobody has read, of Linux alone and without privileges: user, mount, pid, network, ipc and uts namespaces.

A *zygote*, the first process of a pid namespace, sees a file system made of the folders that it is given, read only, and imports the
reward functions in there. Every call is a copy of it in a pid namespace of its own, with an empty writable folder, limits and no
capabilities: what a call starts ends with it, and nothing that it does reaches the next call. ``docs/security.md`` says what it holds.

Its first half runs in a fresh interpreter with a single thread, and imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import pwd
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Ended", "Late", "Refused", "contained", "enter", "environment", "plan", "readable", "refusal"]

WORK = "/tmp"
"""The one writable folder of a call, in memory; ``/dev/shm`` leads to it."""
PROCESSES = 64
"""Processes and threads that a call may have at a time."""
MEMORY_BYTES = 4 << 30
"""What a process of a call may map beyond what it was born with, and what all processes of the call may use together."""
FILES_BYTES = 256 << 20
OPEN_FILES = 256
OUTPUT_BYTES = 8 << 10
"""What is shown of what a call prints."""
LOOK_EVERY_S = 0.1

_NOBODY = 65534
_NEW_MOUNT, _NEW_CGROUP, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_READ_ONLY, _NO_SUID, _NO_DEVICES, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 1, 2, 4, 4096, 16384, 1 << 18, 2
_DEATH_SIGNAL, _DUMPABLE, _KEEP_CAPABILITIES, _NO_NEW_PRIVILEGES, _DROP_BOUNDING = 1, 4, 8, 38, 24
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_SETATTR = 442  # mount_setattr(2), the same number on every architecture
_CAPABILITIES = (2, 5, 19, 21)  # DAC_READ_SEARCH, to import what only root may read; KILL, SYS_PTRACE, SYS_ADMIN, to make calls
_KEYS = re.compile(
    r"(?i)^\.|^id_(rsa|dsa|ecdsa|ed25519)$|\.(pem|key|p12|pfx|jks|kdbx|keystore)$|^(credentials|secrets?)(\.(?!pyi?$)\w+)?$"
)
"""Names in the user's folders that are not seen."""
_INSTALLED = {"site-packages", "dist-packages"}
_MOST = 20_000
"""Names of a folder that are looked at."""
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/alternatives", "/etc/localtime", "/etc/ssl/certs", "/sys/devices/system/cpu",
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom")


class Refused(Exception):
    """The kernel, or whoever set it up, does not allow the walls; the message says which."""


class Late(Exception):
    """The call was killed at its time limit."""


class Ended(Exception):
    """The call ended without an answer, or was killed for what it took; the message is a sentence's end."""


# --- what may be seen: decided outside ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One act of making the file system: a ``link`` to ``target``, a folder or file to ``hide``, or one to ``bind``."""

    path: str
    kind: str
    target: str = ""


def readable() -> tuple[list[str], list[str]]:
    """Folders of the system and of Python, and the user's own: what this process imports from, and where its modules lie."""
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    system = [*_SYSTEM, *prefixes, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    files = [getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if "." not in name]
    places = [os.path.dirname(os.path.dirname(f) if os.path.basename(f).startswith("__init__.") else f) for f in files if f]
    system = [p for p in system if p and p != "/"]
    within = tuple(os.path.join(os.path.realpath(p), "") for p in system)
    environments = [sys.prefix] if sys.prefix != sys.base_prefix else []  # it may have been made in the project itself
    own = dict.fromkeys(os.path.abspath(p) for p in [*sys.path, *places, *environments])
    return system, [p for p in own if not (_is_library(real := os.path.realpath(p)) and (real + "/").startswith(within))]


def plan(system: Iterable[str], own: Iterable[str]) -> list[Step]:
    """How to make a file system of what exists of these, in order.

    Of the user's ``own`` folders names that begin with a dot (``.env``, ``.git``, ``.ssh``), files of keys and folders of runs
    stay hidden, at any depth, also where the folder lies in one of the ``system``; of the home folder, of the folder for temporary
    files, of what lies above them, and of a folder with more than ``_MOST`` names, only Python files and packages are seen.
    Installed packages are seen whole.
    """
    steps: set[Step] = set()
    for path in system:
        steps |= _placed(path)
    for path in own:
        real = os.path.realpath(path)
        wide = _is_wide(real)
        if not os.path.isdir(real) or (not wide and _is_library(real)):  # a zip file, say
            steps |= _placed(path)
            continue
        packages = not wide and _is_installed(real)
        private, all_seen = _private(real, 0 if wide else sys.maxsize if packages else _MOST)
        if packages:  # which need their certificates
            private = [place for place in private if not place.endswith(".pem")]
        steps |= {Step(place, "hide") for place in private}
        if all_seen and not wide:
            steps |= _placed(path)
            continue
        for entry in _entries(real):
            if entry.name.endswith(".py"):
                steps |= _placed(entry.path)
            elif os.path.isfile(os.path.join(entry.path, "__init__.py")):
                private, all_seen = _private(os.path.realpath(entry.path))
                steps |= {Step(place, "hide") for place in private} | (_placed(entry.path) if all_seen else set())
    order = ("link", "hide", "bind")
    return sorted(steps, key=lambda step: (step.path.count("/"), order.index(step.kind), step.path))


def _placed(path: str) -> set[Step]:
    """The real path bound, and the symbolic links on the way to it."""
    steps, real, ahead = set[Step](), "/", path.split("/")
    for _ in range(256):  # links may lead in circles
        if not ahead:
            return steps | {Step(real, "bind")} if os.path.exists(real) and real != "/" else set()
        name = ahead.pop(0)
        if name in ("", ".", ".."):
            real = os.path.dirname(real) if name == ".." else real
        elif os.path.islink(following := os.path.join(real, name)):
            target = os.readlink(following)
            steps.add(Step(following, "link", target))
            real, ahead = "/" if target.startswith("/") else real, target.split("/") + ahead
        else:
            real = following
    return set()


def _is_wide(folder: str) -> bool:
    homes = [os.path.expanduser("~"), tempfile.gettempdir(), "/tmp", "/var/tmp"]
    with contextlib.suppress(KeyError):
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    return any((os.path.realpath(home) + "/").startswith(folder.rstrip("/") + "/") for home in homes)


def _is_library(folder: str) -> bool:
    """The standard library, or a folder that pip installs packages into; or in one of them."""
    library = os.path.realpath(os.path.dirname(os.__file__))
    return bool(_INSTALLED & set(folder.split("/"))) or (folder + "/").startswith(library + "/")


def _is_installed(folder: str) -> bool:
    """Packages of ``pip install --target``, which have nothing of a project's directly beside them."""
    return any(e.name.endswith(".dist-info") for e in _entries(folder)) and not _private(folder, 0)[0]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []


def _private(folder: str, most: int = _MOST) -> tuple[list[str], bool]:
    """What is hidden of it, and whether it was all looked at: not where it has more than ``most`` names. Those directly in it are
    always looked at, and installed packages never: they need their certificates.
    """
    hidden, seen = [], 0
    for place, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        private = {name for name in (*folders, *files) if _KEYS.search(name) or (name == "runs" and name in folders)}
        private |= {name for name in folders if _is_run(os.path.join(place, name))}
        hidden += [path for path in (os.path.join(place, name) for name in sorted(private)) if not os.path.islink(path)]
        if seen > most:
            return hidden, False
        folders[:] = [name for name in folders if name not in private and name not in _INSTALLED]
    return hidden, True


def _is_run(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "config.yaml")) and os.path.isfile(os.path.join(path, "environment.json"))


def environment() -> dict[str, str]:
    """All that code in the sandbox finds in its environment: no secret, and one thread, since a call is a copy of a process."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ", "PYTHONHASHSEED") if name in os.environ}
    return {
        **kept, **dict.fromkeys(threads, "1"), "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
        "HOME": WORK, "TMPDIR": WORK, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


@functools.cache
def refusal() -> str | None:
    """Why this machine does not allow the sandbox, as the end of a sentence; None where it does. Tries it, once."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    command = [sys.executable, "-P", __file__]
    try:
        tried = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"trying it failed ({error})"
    said = " ".join(tried.stdout.split())[-300:]
    return None if said == "ok" else said or f"trying it ended with status {tried.returncode}"


# --- making the walls: in a process of its own ---------------------------------------------------------------------------


def enter(steps: Sequence[Step]) -> int:
    """Behind walls. Returns twice, as ``os.fork`` does: 0 in the zygote, which is inside, and its process id outside.

    The process must have one thread. It gives up the privileges of root, if it has them. Raises Refused, also in the zygote.
    """
    try:
        _become_private()
        child = os.fork()
        if child == 0:
            _build(steps)
            _become_weak()
        return child
    except OSError as error:
        raise Refused(_describe_error(error)) from error


def _describe_error(error: OSError) -> str:
    what = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return f"the kernel said {what!r}; containers and some systems forbid user namespaces to programs"


def _become_private() -> None:
    """Move into new namespaces. Root maps itself, to reach files that are root's, and ``nobody``, whom it becomes."""
    with open("/proc/self/oom_score_adj", "w") as first_to_go:
        first_to_go.write("1000")  # when memory runs out, this is killed before the run
    uid, gid, me = os.getuid(), os.getgid(), os.getpid()
    users, groups = (f"0 0 1\n{_NOBODY} {_NOBODY} 1\n",) * 2 if uid == 0 else (f"{uid} {uid} 1\n", f"{gid} {gid} 1\n")
    every = _NEW_USER | _NEW_MOUNT | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_CGROUP
    if uid != 0:
        _system("unshare", every)
        _map(me, users, groups, deny=True)
        return
    ready, go = os.pipe()
    helper = os.fork()  # only somebody outside may map two users
    if helper == 0:
        os.close(go)
        os.read(ready, 1)
        try:
            _map(me, users, groups)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    os.close(ready)
    try:
        _system("unshare", every)
    finally:
        os.close(go)
        status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if status:
        raise OSError(status, os.strerror(status), "/proc/self/uid_map")


def _map(process: int, users: str, groups: str, deny: bool = False) -> None:
    for name, text in (*([("setgroups", "deny")] if deny else []), ("uid_map", users), ("gid_map", groups)):
        file = os.open(f"/proc/{process}/{name}", os.O_WRONLY)
        os.write(file, text.encode())
        os.close(file)


def _build(steps: Sequence[Step]) -> None:
    with open("/proc/sys/user/max_user_namespaces", "w") as nested:
        nested.write("0")  # nobody in here gets capabilities by a namespace of his own
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755,size=64m")
    for folder in ("/tmp/old", "/tmp/new"):
        os.mkdir(folder)
    _system("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    _mount("/new", "/new", None, _BIND)
    for step in steps:
        _take(step)
    for folder in ("/new/proc", "/new/dev", "/new" + WORK):
        os.makedirs(folder, exist_ok=True)
    for name in _DEVICES:
        _bind(f"/dev/{name}", _READ_ONLY | _NO_SUID)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"/new/dev/{name}")
    for name in ("dev/shm", "var/tmp"):
        if not os.path.lexists(f"/new/{name}"):
            os.makedirs(os.path.dirname(f"/new/{name}"), exist_ok=True)
            os.symlink(WORK, f"/new/{name}")
    _seen_in_work.extend(os.listdir("/new" + WORK))
    _mount_proc("/new/proc")
    os.chdir("/new")
    _system("pivot_root", b".", b".")
    _system("umount2", b".", _DETACH)
    os.chdir("/")
    _restrict("/", _READ_ONLY)
    _mount_work()
    _system("sethostname", b"sandbox", 7)


def _take(step: Step) -> None:
    place = "/new" + step.path
    with contextlib.suppress(PermissionError):  # what this user cannot reach is not seen
        if step.kind == "bind":
            _bind(step.path, _READ_ONLY | _NO_SUID | _NO_DEVICES)
        elif step.kind == "link" and not os.path.lexists(place):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(step.target, place)
        elif step.kind == "hide" and os.path.isdir(place):
            _mount("tmpfs", place, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755,size=1m")
        elif step.kind == "hide" and os.path.exists(place):
            _mount("/old/dev/null", place, None, _BIND)


def _bind(path: str, flags: int) -> None:
    source, place = "/old" + path, "/new" + path
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    elif not os.path.lexists(place):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w"):
            pass
    _mount(source, place, None, _BIND | _RECURSIVE)
    _restrict(place, flags)


def _mount_proc(place: str) -> None:
    _mount("proc", place, "proc", _READ_ONLY | _NO_SUID | _NO_DEVICES | 8)


_seen_in_work: list[str] = []
"""Names in the work folder under which folders of the user's lie, which must be seen though it is empty for every call."""


def _mount_work() -> None:
    seen = {os.path.join(WORK, name): os.open(os.path.join(WORK, name), os.O_PATH) for name in _seen_in_work}
    options = f"mode=700,size={FILES_BYTES},nr_inodes=16384,uid={os.geteuid() or _NOBODY},gid={os.getegid() or _NOBODY}"
    _mount("tmpfs", WORK, "tmpfs", _NO_SUID | _NO_DEVICES, options)
    for place, opened in seen.items():
        if os.path.isdir(f"/proc/self/fd/{opened}"):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT))
        _mount(f"/proc/self/fd/{opened}", place, None, _BIND | _RECURSIVE)
        _restrict(place, _READ_ONLY | _NO_SUID | _NO_DEVICES)
        os.close(opened)


def _become_weak() -> None:
    """Nobody, where it was root, with the capabilities that it takes to make a call."""
    for capability in range(64):
        with contextlib.suppress(OSError):  # the kernel knows fewer
            _system("prctl", _DROP_BOUNDING, capability, 0, 0, 0)
    if os.getuid() == 0:
        _system("prctl", _KEEP_CAPABILITIES, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _keep_capabilities(_CAPABILITIES)
    with contextlib.suppress(
        OSError, KeyError
    ):  # a new session keyring: the old one may hold tickets; few kernels have none at all
        _system("syscall", _KEYCTL[os.uname().machine], 1, 0)
    _system("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _system("prctl", _DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _keep_capabilities(kept: Iterable[int]) -> None:
    bits = sum(1 << capability for capability in kept)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    _system("capset", header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0))


# --- a call ---------------------------------------------------------------------------------------------------------------


def contained(work: Callable[[], bytes], timeout_s: float | None, most_bytes: int) -> bytes:
    """What ``work`` returned in a copy of this process, behind walls of its own. Only in a zygote.

    The bytes are whatever code in there chose to send. Raises Late, Ended, or OSError where the copy could not be made.
    """
    answer, answer_in = os.pipe()
    output, output_in = os.pipe()
    keeper = _fork_into_new_pids()
    if keeper == 0:
        try:
            _keep(work, timeout_s, answer_in, output_in)
        except BaseException as error:
            os.write(2, f"groupwise: the sandbox failed: {error}\n".encode())
        finally:
            os._exit(125)
    os.close(answer_in)
    os.close(output_in)
    try:
        return _listen(keeper, answer, output, timeout_s, most_bytes)
    finally:
        os.close(answer)
        os.close(output)


def _fork_into_new_pids() -> int:
    """A pid namespace is that of the next child; this process's own is set back for the one after it."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        _system("unshare", _NEW_PID)
        child = os.fork()
        if child:
            _system("setns", own, _NEW_PID)
        return child
    finally:
        os.close(own)


def _keep(work: Callable[[], bytes], timeout_s: float | None, answer: int, output: int) -> None:
    """The first process of the call's pid namespace: when it ends, the kernel kills all others. It waits for the second one, the call."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    ours = os.dup(answer)  # a number that the first three do not replace
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):  # before the call begins, which could open what this process has open
        if int(name) > 2 and int(name) != ours:
            with contextlib.suppress(OSError):  # the list's own
                os.close(int(name))
    _system("unshare", _NEW_MOUNT | _NEW_IPC)
    _mount_proc("/proc")
    _mount_work()
    os.chdir(WORK)
    _limit(timeout_s)
    _keep_capabilities(())
    _system("prctl", _DUMPABLE, 1, 0, 0, 0)
    call = os.fork()
    if call:
        os.closerange(0, OPEN_FILES)  # so that who listens hears of the end
        while True:
            ended, status = os.wait()
            if ended == call:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
    for heard in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(heard, signal.SIG_DFL)
    said = memoryview(work())
    while said:
        said = said[os.write(ours, said) :]
    os._exit(0)


def _limit(timeout_s: float | None) -> None:
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_NPROC: PROCESSES, resource.RLIMIT_AS: mapped + MEMORY_BYTES, resource.RLIMIT_FSIZE: FILES_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_CORE: 0,
        **({} if timeout_s is None else {resource.RLIMIT_CPU: math.ceil(timeout_s) + 1}),
    }  # fmt: skip
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def _listen(keeper: int, answer: int, output: int, timeout_s: float | None, most_bytes: int) -> bytes:
    """Wait until the call has ended, or must be ended."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    over = os.pidfd_open(keeper)
    said, printed = bytearray(), bytearray()
    verdict: Exception | None = None
    poll = select.poll()
    for descriptor in (over, answer, output):
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    try:
        while verdict is None:
            happened = [descriptor for descriptor, _ in poll.poll(LOOK_EVERY_S * 1000)]
            for descriptor, kept, most in ((answer, said, most_bytes), (output, printed, OUTPUT_BYTES)):
                if descriptor in happened and not _drain(descriptor, kept, most):
                    poll.unregister(descriptor)
            if over in happened:
                break
            if len(said) > most_bytes:
                verdict = Ended(f"more than {most_bytes:,} bytes")
            elif time.monotonic() > deadline:
                verdict = Late()
            elif _used_bytes() > MEMORY_BYTES:
                verdict = Ended(f"nothing, but it took more than {MEMORY_BYTES / (1 << 30):.3g} GiB of memory and was killed")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
        os.close(over)
    # All have ended with the keeper: what they left in the pipes has an end, which what many print at once has not.
    for descriptor, kept, most in ((answer, said, most_bytes), (output, printed, OUTPUT_BYTES)):
        while _drain(descriptor, kept, most, again=False):
            pass
    _show(bytes(printed))
    if verdict is not None:
        raise verdict
    if not said:
        raise Ended(f"nothing, but its process ended with {f'signal {status - 128}' if status > 128 else f'status {status}'}")
    if len(said) > most_bytes:
        raise Ended(f"more than {most_bytes:,} bytes")
    return bytes(said)


def _drain(descriptor: int, kept: bytearray, most: int, again: bool = True) -> bool:
    """Read once; what is beyond the first ``most`` bytes and one is forgotten. Whether there may be more (``again``: later)."""
    try:
        more = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return again
    kept += more[: max(0, most + 1 - len(kept))]
    return bool(more)


def _used_bytes() -> int:
    """Memory of all processes of the call, about; those of this namespace apart from the zygote, which is its first."""
    page, others = resource.getpagesize(), [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def add_up(file: str, read: Callable[[str], int]) -> int:
        total = 0
        for name in others:
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/{file}") as opened:  # it may have ended
                total += read(opened.read())
        return total

    resident = add_up("statm", lambda text: int(text.split()[1]) * page)
    if resident <= MEMORY_BYTES:
        return resident
    # That counts a shared page once for each process; this does not, and takes longer.
    return add_up("smaps_rollup", lambda text: sum(1024 * int(kib) for kib in re.findall(r"^Pss: +(\d+)", text, re.M)))


def _show(printed: bytes) -> None:
    """Write to the run's own error stream, in a form that cannot act on a terminal."""
    if not printed:
        return
    text = printed[:OUTPUT_BYTES].decode("utf-8", "replace") + ("\n[...]\n" if len(printed) > OUTPUT_BYTES else "")
    with contextlib.suppress(OSError):
        os.write(2, "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text).encode())


# --- the kernel -----------------------------------------------------------------------------------------------------------


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _system(name: str, *arguments: object) -> int:
    try:
        function = getattr(_library(), name)
    except AttributeError:
        raise OSError(38, "Function not implemented", name) from None
    result = int(function(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _mount(source: str, place: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, place, kind)]
    try:
        _system("mount", *texts, flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"mount {kind or source}") from None


def _restrict(place: str, flags: int) -> None:
    """The mount and all below it; without it (before Linux 5.12) what is mounted below would stay writable."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    try:
        _system("syscall", _SETATTR, -100, place.encode(), 0x8000, attributes, ctypes.sizeof(attributes))
    except OSError as error:
        raise OSError(error.errno, error.strerror, "mount_setattr") from None


def _try() -> str:
    """``ok``, or why not. With a call that must be able to write where it may, and to start a process only while it may."""

    def attempt() -> bytes:
        with open(os.path.join(WORK, "file"), "w") as file:
            file.write("written")
        os.waitpid(os.fork() or os._exit(0), 0)  # type: ignore[func-returns-value]
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        try:
            if os.fork() == 0:
                os._exit(0)
        except BlockingIOError:
            return b"ok"
        return b"its limit on processes does not hold"

    try:
        steps = plan(*readable())
        if child := enter(steps):
            os.waitpid(child, 0)
            return ""
        return contained(attempt, 30.0, 1 << 10).decode()
    except (Refused, Ended) as error:
        return str(error)
    except (Late, OSError) as error:
        return f"trying it failed ({type(error).__name__}: {error})"


if __name__ == "__main__":
    print(_try(), end="", flush=True)
    os._exit(0)
