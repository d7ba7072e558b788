"""Isolated functions run what nobody has read. Each test is an attack: by a function that executes its completion, or by a file system.

The sandbox is shared by the tests of this file, as it is by the calls of a run: an attack must not reach the next one either.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from groupwise.config.schema import RewardFunctionConfig, RewardsConfig
from groupwise.errors import RewardError
from groupwise.rewards import RewardSuite, processes, sandbox
from groupwise.rewards.scores import BadResult, read_scores
from tests.waiting import comes

EXECUTES = '''
"""A careless reward: it executes the completion in its own process. The text that ``found`` then has comes back as codes."""
from neighbour import KNOWN

def run(completions, **columns):
    scope = {"found": ""}
    exec(completions[0][0]["content"], scope)
    return [[(i + 1, ord(c)) for i, c in enumerate(str(scope["found"]))] + [(0, KNOWN)]]
'''
SCRATCH = "/dev/shm/groupwise-test-leftover"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes through /proc")
needs_walls = pytest.mark.skipif(bool(sandbox.refusal()), reason=f"no sandbox on this machine: {sandbox.refusal()}")


def is_alive(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def project():
    """A user's folder with a reward file, its neighbour, and what generated code must not see; as after loading the function here."""
    parent = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder = parent / "project"
    folder.mkdir()
    folder.chmod(0o755)  # a call of root's is nobody's, who reads what everybody may
    (folder / "mine.py").write_text(EXECUTES)
    (folder / "neighbour.py").write_text("KNOWN = 7\n")
    (folder / "cases.json").write_text("[1, 2]")
    (folder / ".env").write_text("KEY=hidden")
    deep = folder / "data" / "kept" / "well"
    deep.mkdir(parents=True)
    for name in (".env", "id_rsa", "server.pem", "SERVER.KEY", "Credentials.json", "secrets"):
        (deep / name).write_text("KEY=hidden")
    (deep / "open.txt").write_text("seen")
    for run in (folder / "runs" / "first", folder / "results" / "second", deep / "third", folder / "data" / "runs" / "fourth"):
        run.mkdir(parents=True)
        for name in ("config.yaml", "environment.json"):
            (run / name).write_text("{}")
    (folder.parent / "outside.txt").write_text("hidden")
    before = list(sys.path)
    sys.path.append(str(folder))
    yield folder
    sys.path[:] = before
    shutil.rmtree(parent)


def make_pool(project, sandboxed=True):
    entry = {"function": f"{project}/mine.py:run", "arguments": {}}
    pool = processes.ProcessPool({"run": entry}, 1, {"run"} if sandboxed else ())
    pool.start()
    return pool


@pytest.fixture(scope="module")
def walled(project):
    """``walled(code)``: what code in the sandbox leaves in ``found``."""
    os.environ["GROUPWISE_TEST_SECRET"] = "hidden"
    if os.uname().machine == "x86_64":
        ctypes.CDLL(None).syscall(250, 1, None)  # a session keyring, which what is started from here shares
    pool = make_pool(project)
    del os.environ["GROUPWISE_TEST_SECRET"]

    def run(code, timeout_s=60.0):
        return decoded(pool.call("run", {"completions": [[{"content": textwrap.dedent(code)}]]}, timeout_s))

    run.pool = pool
    yield run
    pool.close()


def decoded(scores):
    *steps, (_, known) = scores[0]
    assert known == 7
    return "".join(chr(int(code)) for _, code in steps)


def raises(walled, code):
    with pytest.raises(processes.CallRaised) as raised:
        walled(code)
    return str(raised.value)


# --- replies ------------------------------------------------------------------------------------------------------------

FORGES = """
import os, pickle, struct, json

class Opens:
    def __reduce__(self):
        return open, ({touched!r}, "w")

for fd in range(3, 64):
    for body in (pickle.dumps(("returned", Opens())), {json!r}.encode()):
        try:
            os.write(fd, {header} + body)
        except OSError:
            pass
os._exit(0)
"""


HEADERS = ("struct.pack('!QQ', 1, len(body))", "struct.pack('!Q', len(body))", "b''")
"""The first is as a reply is written; the others are none in form already."""


@pytest.mark.parametrize("sandboxed", [False, pytest.param(True, marks=needs_walls)])
def test_a_pickle_in_the_reply_pipe_is_never_opened(project, tmp_path, sandboxed):
    pool = make_pool(project, sandboxed)
    for place, header in enumerate(HEADERS):
        touched = tmp_path / f"touched-{place}"
        code = FORGES.format(touched=str(touched), json="[1, 2, 3]", header=header)
        with pytest.raises(processes.CallRaised):
            pool.call("run", {"completions": [[{"content": code}]]}, 60.0)
        assert not touched.exists()
    assert decoded(pool.call("run", {"completions": [[{"content": "found = 'next'"}]]}, 60.0)) == "next"
    pool.close()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'["returned", [1e999]]', "inf for completion 0 instead of a finite number"),
        (b'["returned", [1' + b"0" * 400 + b"]]", "of at most 1e+12 in size"),
        (b'["returned", {"a": 1}]', "a dict instead of a list of 1 scores"),
        (b'["returned", [1, 2]]', "2 scores for 1 completions"),
        (b'["returned", [{"StepRewards": [5, 5, 5]}]]', "returned {'StepRewards': [5, 5, 5]} (dict)"),
        (b'["returned", [{"StepRewards": [[1' + b"0" * 400 + b'], [1], "tokens"]}]]', "instead of a finite number"),
        (b'["returned", [{"StepRewards": [[1], ["x"], "tokens"]}]]', "ends at 'x' instead of a whole number"),
        (b'["returned", [{"StepRewards": [[1], [1], "' + b"x" * 5000 + b'"]}]]', "steps in the unit 'xxx"),
    ],
)
def test_a_reply_is_believed_nothing_but_scores(body, said):
    kind, value = processes._parsed(body)
    try:
        (bad,) = read_scores(processes._scores(value), [0])
    except BadResult as raised:
        bad = raised
    assert kind == "returned"
    assert said in str(bad)
    assert len(str(bad)) < 300


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'["raised", "\\u001b]0;title\\u0007"]', r"\x1b]0;title\x07"),
        (b'["raised", {"a": [1]}]', "{'a': [1]}"),
        (b'["raised", "' + b"x" * 5000 + b'"]', "x" * 1000),
    ],
)
def test_an_error_is_told_in_one_short_harmless_line(body, said):
    assert processes._printable_line(processes._parsed(body)[1]) == said


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"{}", b"\xff\xfe", b"[1, 2]", b'["returned"]', b"", b"[" + b"1" * 5000 + b", 2]"]
)
def test_what_is_no_reply_is_refused(body):
    with pytest.raises((ValueError, RecursionError)):
        processes._parsed(body)


def test_a_reply_longer_than_its_request_allows_is_not_read(project):
    pool = make_pool(project, sandboxed=False)
    code = "import os, struct\nfor fd in range(3, 16):\n try: os.write(fd, struct.pack('!QQ', 1, 1 << 40))\n except OSError: pass"
    with pytest.raises(processes.CallRaised, match="its process ended"):
        pool.call("run", {"completions": [[{"content": code}]]}, 60.0)
    pool.close()


# --- walls --------------------------------------------------------------------------------------------------------------


@needs_walls
def test_ordinary_rewards_work_behind_walls(walled, project):
    assert walled("import tempfile; found = open('/tmp/mine', 'w').write('abc') + tempfile.TemporaryFile().write(b'abc')") == "6"
    assert walled(f"found = open({str(project / 'cases.json')!r}).read()") == "[1, 2]"
    assert walled("import numpy; found = numpy.arange(3).sum()") == "3"
    own_python = (
        "import subprocess, sys; found = subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True).stdout"
    )
    assert walled(own_python) == "b'42\\n'"
    assert (
        walled("import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: found = p.map(abs, [-1, -2])") == "[1, 2]"
    )
    assert walled("import asyncio\nasync def f(): return 5\nfound = asyncio.run(f())") == "5"


@needs_walls
@pytest.mark.slow
def test_torch_and_the_library_itself_can_be_imported_behind_walls(walled):
    assert walled("import torch, groupwise.rewards; found = int(torch.ones(3, 3).mm(torch.ones(3, 3)).sum())") == "27"


@needs_walls
def test_nothing_of_a_call_reaches_the_next_one(walled):
    walled("open('/tmp/left', 'w').write('x'); import builtins, os; builtins.changed = 1; os.environ['CHANGED'] = '1'")
    found = "import builtins, os; found = ('left' in os.listdir('/tmp'), hasattr(builtins, 'changed'), 'CHANGED' in os.environ)"
    assert walled(found) == "(False, False, False)"


@needs_walls
@pytest.mark.parametrize(
    "place", [SCRATCH, "{project}/mine.py", "{project}/new.py", "{home}/new", "/usr/new", "/etc/new", "{parent}/new"]
)
def test_no_file_outside_can_be_written(walled, project, place):
    place = place.format(project=project, home=Path.home(), parent=project.parent)
    before = Path(place).read_text() if Path(place).exists() else None
    walled(f"""
        import os
        try:
            os.makedirs(os.path.dirname({place!r}), exist_ok=True)
            open({place!r}, "w").write("written")
        except OSError as error:
            found = error
    """)
    assert (Path(place).read_text() if Path(place).exists() else None) == before


@needs_walls
def test_secrets_cannot_be_seen(walled, project, tmp_path):
    hidden = [
        project / ".env", project / "runs" / "first" / "config.yaml", project / "results" / "second" / "config.yaml",
        *(p for p in (project / "data").rglob("*") if p.is_file() and p.name != "open.txt"),
        project.parent / "outside.txt", Path("/etc/passwd"), Path("/etc/hostname"), Path.home() / ".bashrc", Path("/root/.ssh"),
        Path("/var/log"), Path("/run"), Path("/proc/1/root/etc/passwd"), Path(f"/proc/{os.getpid()}/environ"),
    ]  # fmt: skip
    code = """
        def read(path):
            try:
                return open(path).read()
            except IsADirectoryError:
                import os
                return "".join(os.listdir(path))
            except OSError:
                return ""
        found = "".join(read(path) for path in %r)
    """
    assert walled(code % [str(path) for path in hidden]) == ""
    everything = """
        import glob, os
        found = repr(dict(os.environ)) + "".join(open(path, errors="replace").read() for path in glob.glob("/proc/*/environ"))
    """
    assert "hidden" not in walled(everything)
    others = """
        import os
        opened = [f"/proc/{process}/fd/{number}" for process in (1, 2) for number in os.listdir(f"/proc/{process}/fd")]
        opened = {os.readlink(path) for path in opened if os.path.lexists(path)}
        found = sorted(what.partition(":")[0] for what in opened)
    """
    assert walled(others) == "['/dev/null', 'pipe', 'pipe']"  # for its answer, and for what it prints


@needs_walls
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_keys_of_the_session_stay_outside(walled):
    """The serial number of the session's keyring (-1 where the kernel keeps no keys)."""
    asks = "import ctypes; found = ctypes.CDLL(None).syscall(250, 0, -3, 0)"
    scope: dict[str, int] = {}
    exec(asks, scope)
    assert scope["found"] == -1 or walled(asks) != str(scope["found"])


@needs_walls
def test_there_is_no_network_and_no_socket_of_others(walled, tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        name = f"\0groupwise-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        named.bind(str(tmp_path / "socket"))
        named.listen()
        code = """
            import socket
            found = []
            for kind, address in ((2, ("127.0.0.1", %d)), (2, ("192.0.2.1", 80)), (1, %r), (1, %r)):
                try:
                    with socket.socket(kind) as s:
                        s.settimeout(20)
                        s.connect(address)
                        found.append(address)
                except OSError:
                    pass
        """
        assert walled(code % (server.getsockname()[1], name, str(tmp_path / "socket"))) == "[]"
    assert walled("import os; found = [l for l in open('/proc/net/dev').read().splitlines()[2:] if 'lo:' not in l]") == "[]"


@needs_walls
def test_a_fork_bomb_is_bounded_and_ends_with_its_call(walled):
    count = """
        import os, time
        made = 0
        for _ in range(500):
            try:
                if os.fork() == 0:
                    time.sleep(600)
                made += 1
            except BlockingIOError:
                break
        found = made
    """
    assert 0 < int(walled(count)) < sandbox.PROCESSES
    with pytest.raises(processes.CallTimedOut):
        walled("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout_s=1.0)
    zygote = int(
        Path(
            f"/proc/{walled.pool._alive.copy().pop().process.pid}/task/{walled.pool._alive.copy().pop().process.pid}/children"
        ).read_text()
    )
    assert not Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    assert walled("found = 'lives'") == "lives"


@needs_walls
@pytest.mark.parametrize("way", ["memory", "mapping", "file", "many files"])
def test_memory_is_bounded(walled, monkeypatch, way):
    code = {
        "memory": "found = len(bytearray(6 << 30))",
        "mapping": "import mmap; found = len(mmap.mmap(-1, 6 << 30))",
        "file": "open('/tmp/big', 'wb').truncate(1 << 30); found = 1",
        "many files": "for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(40 << 20))\nfound = 1",
    }[way]
    assert any(word in raises(walled, code) for word in ("MemoryError", "OSError", "signal 25"))


@needs_walls
def test_processes_that_together_take_too_much_are_killed(project, monkeypatch):
    """With a bound of 300 MB: three processes of 150 MB each."""
    small = project.parent / "small"
    small.mkdir(exist_ok=True)
    source = Path(sandbox.__file__).read_text().replace("MEMORY_BYTES = 4 << 30", "MEMORY_BYTES = 300 << 20")
    for name in ("process_worker.py", "processes.py"):
        (small / name).write_text(Path(processes.__file__).with_name(name).read_text())
    (small / "sandbox.py").write_text(source)
    monkeypatch.setattr(processes, "__file__", str(small / "processes.py"))
    pool = make_pool(project)
    code = "import os, time\nfor _ in range(2): os.fork()\nkept = bytearray(150 << 20)\ntime.sleep(100)"
    with pytest.raises(processes.CallRaised, match=r"took more than 0\.293 GiB of memory and was killed"):
        pool.call("run", {"completions": [[{"content": code}]]}, 60.0)
    assert pool.killed == {"run": 1}
    pool.close()


@needs_walls
def test_endless_output_is_cut_and_cannot_act_on_a_terminal(project, capfd):
    pool = make_pool(project)
    code = "import sys\nprint('\\x1b[2Jhello')\nfor _ in range(2000): sys.stdout.write('x' * 10000)\nfound = 1"
    assert decoded(pool.call("run", {"completions": [[{"content": code}]]}, 60.0)) == "1"
    pool.close()
    said = capfd.readouterr().err
    assert said.startswith("\\x1b[2Jhello\nxxx")
    assert said.endswith("\n[...]\n")
    assert len(said) < sandbox.OUTPUT_BYTES + 100


def test_endless_output_does_not_hold_up_the_kill(monkeypatch, capfd):
    """Who reads more slowly than others print never finds the pipe empty."""
    reads, drain = [], sandbox._drain

    def slow(*arguments, **more):
        reads.append(arguments)
        assert len(reads) < 200, "it reads on, and kills nobody"
        time.sleep(0.005)
        return drain(*arguments, **more)

    monkeypatch.setattr(sandbox, "_drain", slow)
    monkeypatch.setattr(sandbox, "_used_bytes", lambda: 0)
    (answer, answer_in), (output, output_in) = os.pipe(), os.pipe()
    prints = os.posix_spawnp("yes", ["yes"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, output_in, 1)])
    os.close(answer_in)
    os.close(output_in)
    with pytest.raises(sandbox.Late):
        sandbox._listen(prints, answer, output, 0.2, 1 << 10)
    os.close(answer)
    os.close(output)


@needs_walls
def test_a_late_call_is_killed_and_the_sandbox_goes_on(walled):
    worker = walled.pool._alive.copy().pop()
    for code in (
        "while True: pass",
        "import time; time.sleep(600)",
        "import os, time\nif os.fork(): os._exit(0)\nwhile True: pass",
    ):
        with pytest.raises((processes.CallTimedOut, processes.CallRaised)):
            walled(code, timeout_s=0.5)
    assert walled("found = 1") == "1"
    assert walled.pool._alive == {worker}


@needs_walls
def test_what_a_call_leaves_behind_ends_with_it(walled):
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True: time.sleep(1)
            os._exit(0)
        found = "left"
    """
    assert walled(code) == "left"
    assert walled("import os; found = sorted(int(n) for n in os.listdir('/proc') if n.isdigit())") == "[1, 2]"


@needs_walls
def test_no_other_process_can_be_killed_or_traced(walled):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    code = """
        import ctypes, os
        found = []
        for pid in [os.getppid(), %d, %d]:
            try:
                os.kill(pid, 9)
                found.append(("killed", pid))
            except OSError:
                pass
            if pid != 1 and ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0:
                found.append(("traced", pid))
    """
    assert walled(code % (victim.pid, os.getpid())) == "[('killed', 1)]"  # the kernel takes the signal, and forgets it
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    assert "ended" in raises(walled, "import os; os.kill(os.getpid(), 9)")
    assert walled("found = 1") == "1"


@needs_walls
def test_there_is_no_way_back_to_privileges(walled):
    code = """
        import ctypes, os
        libc, found = ctypes.CDLL(None), []
        for name, arguments in (
            ("unshare", (0x10000000,)), ("unshare", (0x20000,)), ("setuid", (0,)), ("chroot", (b"/tmp",)), ("umount2", (b"/proc", 2)),
            ("mount", (b"proc", b"/tmp", b"proc", 0, None)), ("mount", (None, b"/usr", None, 32 | 4096, None)),
        ):
            if getattr(libc, name)(*arguments) == 0:
                found.append(name)
        status = open("/proc/self/status").read()
        found += [line for line in status.splitlines() if line.startswith("Cap") and int(line.split()[1], 16)]
        found += [] if "NoNewPrivs:\\t1" in status else ["may gain privileges"]
        found += ["is root"] if os.getuid() == 0 else []
        for path in ("/proc/sys/kernel/hostname", "/proc/self/oom_score_adj", "/proc/sys/user/max_user_namespaces", "/dev/sda", "/dev/mem"):
            try:
                open(path, "w").write("0")
                found.append(path)
            except OSError:
                pass
        found += [] if open("/proc/self/oom_score_adj").read() == "1000\\n" else ["not the first to be killed"]
    """
    assert walled(code) == "[]"


@needs_walls
def test_what_ends_a_call_is_told(walled):
    assert "its process ended with signal 11" in raises(walled, "import ctypes; ctypes.string_at(0)")
    assert "its process ended with status 3" in raises(walled, "import os; os._exit(3)")
    assert "ValueError: no (mine.py" in raises(walled, "raise ValueError('no')")


# --- refusing, and the end of a run ----------------------------------------------------------------------------------------


def test_where_the_kernel_allows_the_parts_it_allows_the_sandbox():
    """So that the tests above cannot skip because the sandbox is broken."""
    parts = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--fork",
        "--net",
        "mount",
        "-t",
        "proc",
        "proc",
        "/proc",
    ]
    if not shutil.which("unshare") or subprocess.run(parts, capture_output=True, check=False).returncode:
        pytest.skip("the kernel forbids namespaces, or there is nothing to try them with")
    assert sandbox.refusal() is None


@needs_walls
def test_where_the_kernel_forbids_it_one_sentence_says_so(walled):
    """A sandbox within a sandbox is what the kernel forbids."""
    said = walled(f"import sys; sys.argv = ['x']; import runpy; found = runpy.run_path({sandbox.__file__!r})['_try']()")
    assert said.startswith(("the kernel said", "trying it failed"))


def test_a_refusal_comes_before_the_run_with_its_remedy(project, monkeypatch):
    monkeypatch.setattr("groupwise.rewards.load.refusal", lambda: "the kernel said no")
    entry = RewardFunctionConfig(function=f"{project}/mine.py:run", isolate="sandbox")
    with pytest.raises(RewardError, match="isolate=sandbox, but this machine does not allow that: the kernel said no; run where"):
        RewardSuite.from_config(RewardsConfig(functions=[entry]), "xml")


@pytest.mark.parametrize("sandboxed", [False, pytest.param(True, marks=needs_walls)])
def test_when_the_run_is_killed_nothing_stays_behind(project, sandboxed):
    """As a second SIGTERM does, or the kernel: the run has no time for anything. Its function has a child in a session of its own."""
    script = f"""
        import os, sys, threading
        sys.path.append({str(project)!r})
        from groupwise.rewards.processes import ProcessPool
        pool = ProcessPool({{"run": {{"function": "{project}/mine.py:run", "arguments": {{}}}}}}, 1, {{"run"}} if {sandboxed} else ())
        pool.start()
        print(next(iter(pool._alive)).process.pid, flush=True)
        begets = "import subprocess, sys, time; subprocess.Popen(['sleep', '987'], start_new_session=True); time.sleep(600)"
        threading.Thread(target=pool.call, args=("run", {{"completions": [[{{"content": begets}}]]}}, 500.0), daemon=True).start()
        threading.Event().wait()
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        keeper = int(run.stdout.readline())
        assert comes(lambda: any(b"987" in command for command in commands(keeper)))
        family = below(keeper)
        assert len(family) >= 3
        run.send_signal(signal.SIGKILL)
        assert comes(lambda: not any(is_alive(pid) for pid in family))
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


def below(pid):
    """A process and all its descendants."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            found += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
    return found


def commands(pid):
    for one in below(pid):
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{one}/cmdline").read_bytes()


# --- what is seen -----------------------------------------------------------------------------------------------------------


def test_of_a_home_folder_only_code_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine.py", "notes.txt", "package/__init__.py", "package/.env", "letters/one.txt", ".ssh/id"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    steps = sandbox.plan([], [str(tmp_path), str(tmp_path.parent), "/"])
    assert below_folder(tmp_path, steps) == [".ssh hide", "mine.py bind", "package bind", "package/.env hide"]
    assert not [step for step in steps if step.path == "/"]


def below_folder(folder, steps):
    """Whatever the user's own folders are besides."""
    return [f"{Path(step.path).relative_to(folder)} {step.kind}" for step in steps if Path(step.path).is_relative_to(folder)]


def write_empty(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_a_project_in_a_folder_of_python_s_keeps_its_secrets(tmp_path, monkeypatch):
    """As one in /usr/src, or with a virtual environment in the project itself."""
    certificates = "lib/python3/site-packages/certifi/cacert.pem"
    write_empty(tmp_path, ".env", "code/mine.py", "code/data/.env", certificates)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "code"), str(tmp_path / "lib/python3/site-packages")])
    found = below_folder(tmp_path, sandbox.plan(*sandbox.readable()))
    assert found == [". bind", ".env hide", "code bind", "code/data/.env hide"]


@pytest.mark.parametrize("name", ["site-packages", "target"])
def test_installed_packages_are_seen_whole_however_many(tmp_path, monkeypatch, name):
    """Those of ``pip install --user`` lie outside of Python's own folders, those of ``--target`` anywhere."""
    monkeypatch.setattr(sandbox, "_MOST", 3)
    names = ("numpy/__init__.py", "numpy.libs/blas.so", "numpy-2.0.dist-info/METADATA", "certifi/cacert.pem", "six.py")
    write_empty(tmp_path / name, *names)
    assert below_folder(tmp_path, sandbox.plan([], [str(tmp_path / name)])) == [f"{name} bind"]
    if name == "target":
        write_empty(tmp_path / name, "conf/.env")
        assert below_folder(tmp_path, sandbox.plan([], [str(tmp_path / name)])) == [f"{name} bind", f"{name}/conf/.env hide"]
        write_empty(tmp_path / name, ".env")
        found = below_folder(tmp_path, sandbox.plan([], [str(tmp_path / name)]))
        assert found == ["target/.env hide", "target/numpy bind", "target/six.py bind"], "a project with packages stays one"


def test_links_on_the_way_to_a_folder_are_kept(tmp_path):
    (tmp_path / "real" / "code").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "circle").symlink_to("circle")  # is left out
    steps = sandbox.plan([str(tmp_path / "link" / "code"), str(tmp_path / "circle"), str(tmp_path / "missing")], [])
    assert [(step.path, step.kind, step.target) for step in steps] == [
        (str(tmp_path / "link"), "link", "real"),
        (str(tmp_path / "real" / "code"), "bind", ""),
    ]


def test_true_is_a_process_and_the_rows_of_a_dry_run_say_which(project):
    assert RewardFunctionConfig(function="accuracy", isolate=True).isolate == "process"
    assert RewardFunctionConfig(function="accuracy", isolate=False).isolate is False


@needs_walls
def test_code_among_the_temporary_files_is_seen_and_cannot_be_written(project, tmp_path):
    """The folder for temporary files is the one that is empty for every call."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mine.py").write_text(EXECUTES)
    pool = processes.ProcessPool({"run": {"function": f"{tmp_path}/pack/mine.py:run", "arguments": {}}}, 1, {"run"})
    sys.path.append(str(tmp_path / "pack"))
    code = f"""
        import os
        open("/tmp/mine", "w").write("written")
        try:
            open({str(tmp_path / "pack" / "mine.py")!r}, "a").write("#")
        except OSError as error:
            found = type(error).__name__, os.path.exists({str(tmp_path / "pack")!r})
    """
    for _ in range(2):
        assert decoded(pool.call("run", {"completions": [[{"content": textwrap.dedent(code)}]]}, 60.0)) in (
            "('OSError', True)", "('PermissionError', True)",
        )  # fmt: skip
    pool.close()
    sys.path.remove(str(tmp_path / "pack"))
    assert (tmp_path / "pack" / "mine.py").read_text() == EXECUTES
