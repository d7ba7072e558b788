"""What another program that reaches the processes of a run may do to them: nothing."""

import hashlib
import json
import os
import pickle
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from groupwise.distributed import join_world
from groupwise.distributed import open as opening
from groupwise.distributed.failures import Board, Seal
from groupwise.distributed.launch import SECRET, held_port, launch
from groupwise.distributed.secret import handed_out, received, refuse_without_secret
from groupwise.errors import ConfigError, RankError
from tests.warm import python

LISTENS = """
import json, os, sys, time
from pathlib import Path
from groupwise.distributed import open_world
with open_world(True, 600) as world:
    world.all_gather_object(b"x" * 1000 * (world.rank + 1))
    if world.rank == 0:
        pids = os.getpid(), int(os.environ.get("LAUNCHED_BY", os.getpid()))
        inodes = {os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1] for pid in pids for fd in os.listdir(f"/proc/{pid}/fd")
                  if os.path.lexists(f"/proc/{pid}/fd/{fd}") and "socket" in os.readlink(f"/proc/{pid}/fd/{fd}")}
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
                field = line.split()
                if field[3] == "0A" and field[9] in inodes:
                    print(kind, field[1].partition(":")[0], flush=True)
        import socket
        stranger = socket.socket(type=socket.SOCK_DGRAM)
        try:
            stranger.connect(("198.51.100.1", 9))  # nothing is sent: it says by which address this machine would
            outer = stranger.getsockname()[0]
        except OSError:
            outer = "127.0.0.1"
        if not outer.startswith("127.") and "TORCHELASTIC_RUN_ID" not in os.environ:  # at that port torchrun itself listens
            try:
                socket.create_connection((outer, int(os.environ["MASTER_PORT"])), timeout=20).close()
                print("strangers come in")
            except ConnectionRefusedError:
                pass
        # who has found the store all the same, another user of this machine, tells the processes that one of them failed
        ends = json.dumps({"rank": 1, "message": "a stranger ends this run", "exit_code": 3})
        world._board.store.compare_set("failure", "", ends.encode().hex())
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        time.sleep(0.1)
    assert world.all_gather_object(world.rank) == [0, 1]
"""


def by_our_launcher(script, environment):
    program = (
        "import os, sys; from groupwise.distributed.launch import launch; os.environ['LAUNCHED_BY'] = str(os.getpid()); "
        f"sys.exit(launch([sys.executable, {str(script)!r}], 2))"
    )
    # as somebody sets it who also has runs on several nodes
    outside = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    return [subprocess.Popen([python(), "-c", program], env=environment | outside, stdout=subprocess.PIPE)]


def by_torchrun(script, environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(script.parent / "log"), str(script)]
    return [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)]


def by_hand(script, environment):
    """As any launcher does it that makes no secret; each process has a parent of its own."""
    told = environment | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [told | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return [subprocess.Popen([python(), str(script)], env=own, stdout=subprocess.PIPE) for own in ranks]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("start", [by_hand, by_our_launcher, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_processes_of_one_machine_listen_to_it_and_to_each_other_alone(start, tmp_path):
    """Without anything that the user does."""
    script = tmp_path / "listens.py"
    script.write_text(LISTENS)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", SECRET)}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with held_port() as port:
        started = start(script, environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        heard = "".join(process.communicate(timeout=300)[0].decode() for process in started)
    assert [process.returncode for process in started] == [0] * len(started)
    assert len(heard.splitlines()) >= 2, "the store, and gloo"
    assert set(heard.splitlines()) == {"tcp 0100007F"}
    assert not list(tmp_path.glob("groupwise-launches/*")), "the secret is removed"


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A launch of two on one machine that has no secret; the folder in which one is shared."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(SECRET, raising=False)
    return tmp_path / "groupwise-launches"


def test_the_secret_that_processes_share_is_in_a_file_for_their_user_alone(alone):
    before = os.umask(0)
    try:
        with handed_out(4321) as secret:
            (file,) = alone.iterdir()
            assert [stat.S_IMODE(path.stat().st_mode) for path in (alone, file)] == [0o700, 0o600]
            assert received(60) == (secret, 4321)
    finally:
        os.umask(before)
    assert not list(alone.iterdir())
    with handed_out(4321) as other:
        assert len(secret) == len(other) == 64
        assert secret != other


def link_to_another_folder(folder):
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def folder_that_others_write(folder):
    folder.mkdir()
    folder.chmod(0o770)


@pytest.mark.parametrize("plant", [link_to_another_folder, folder_that_others_write])
def test_a_folder_that_is_not_the_users_own_alone_gets_no_secret(alone, plant):
    plant(alone)
    with pytest.raises(ConfigError, match=r"groupwise-launches.*export GROUPWISE_SECRET="), handed_out(1):
        pass
    with pytest.raises(ConfigError, match=r"groupwise-launches.*export GROUPWISE_SECRET="):
        received(60)
    assert not list((alone.parent / "elsewhere").glob("*"))


@pytest.mark.parametrize("plant", ["a link", "a file that others read", "something else"])
def test_a_planted_file_is_no_secret(alone, plant):
    with handed_out(4321):
        (file,) = alone.iterdir()
        if plant == "a link":
            file.rename(alone.parent / "planted")
            file.symlink_to(alone.parent / "planted")
        elif plant == "something else":
            file.write_text('["secret"]')
        else:
            file.chmod(0o640)
        with pytest.raises(ConfigError, match=r"cannot be shared in .*export GROUPWISE_SECRET="):
            received(60)


def test_what_a_process_left_that_is_no_more_is_no_secret(alone):
    child = os.fork()
    if child == 0:
        with handed_out(4321):
            os._exit(0)
    os.waitpid(child, 0)
    assert list(alone.iterdir())
    with pytest.raises(ConfigError, match="handed out no secret"):
        received(0.2)
    with handed_out(4322) as secret:
        assert received(60) == (secret, 4322)


@pytest.mark.parametrize("here", ["1", None])
def test_processes_on_several_machines_without_a_secret_are_refused(monkeypatch, alone, here):
    monkeypatch.delenv("LOCAL_WORLD_SIZE") if here is None else monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    with pytest.raises(ConfigError, match=r"2 processes were started.*GROUPWISE_SECRET.*is not set.*`openssl rand -hex 32`"):
        join_world(True, 1)
    monkeypatch.setenv(SECRET, "0" * 64)
    refuse_without_secret()


@pytest.fixture
def join_on_gpus(monkeypatch):
    """``join_on_gpus(state)``, where `accelerate launch` asks for DeepSpeed: ``state`` is in place of ``PartialState``."""
    monkeypatch.setattr(opening, "_joined", None)
    monkeypatch.setattr(opening, "_meet", lambda timeout_s: ("secret", "store"))
    monkeypatch.setattr(opening.atexit, "register", lambda function: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # what joining sets is put back

    def join(state):
        monkeypatch.setattr("accelerate.PartialState", state)
        opening._join(False, 600)

    return join


def test_with_deepspeed_the_processes_meet_at_the_store_of_this_machine_too(join_on_gpus):
    found = {}

    def state(cpu, timeout, **own):
        found.update(own, deepspeed=os.environ.get("ACCELERATE_USE_DEEPSPEED"))
        return SimpleNamespace(process_index=0, num_processes=2, device=torch.device("cuda", 0))

    join_on_gpus(state)
    assert found == {"store": "store", "rank": 0, "world_size": 2, "deepspeed": None}
    assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true", "groupwise divides as it says"


def test_cards_that_nccl_needs_settings_for_are_named_with_them(join_on_gpus):
    def state(cpu, timeout, **own):
        raise NotImplementedError("Using RTX 4000 series doesn't support faster communication broadband via P2P or IB.")

    with pytest.raises(ConfigError, match="export NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1"):
        join_on_gpus(state)
    assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true"


def test_the_launcher_gives_each_run_a_secret(tmp_path):
    writes = f"import os, pathlib; pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(os.environ['GROUPWISE_SECRET'])"
    secrets = set()
    for _ in range(2):
        assert launch([sys.executable, "-c", writes], 2) == 0
        assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
        secrets.add((tmp_path / "0").read_text())
    assert len(secrets) == 2
    assert all(len(secret) == 64 for secret in secrets)


def test_a_seal_is_of_one_message_of_one_run():
    seal = Seal("secret", "run 1")
    message = seal.closed(b"body", "value 1 of process 0")
    assert seal.opened(message, "value 1 of process 0") == b"body"
    assert seal.opened(message, "value 2 of process 0") is None
    assert Seal("secret", "run 2").opened(message, "value 1 of process 0") is None
    assert Seal("other", "run 1").opened(message, "value 1 of process 0") is None
    assert seal.opened(message[:-1] + b"x", "value 1 of process 0") is None
    assert seal.opened(b"body", "value 1 of process 0") is None
    assert seal.opened(hashlib.sha256(b"body").digest() + b"body", "value 1 of process 0") is None


class Store(dict):
    def check(self, keys):
        return all(key in self for key in keys)

    def compare_set(self, key, expected, value):
        self.setdefault(key, value.encode())


def test_a_failure_that_a_stranger_wrote_ends_nothing():
    board = Board(Store(), 0, 2, Seal("secret", "run 1"))
    for found in (b"", b"x", b"00", json.dumps({"rank": 1, "message": "x", "exit_code": 0}).encode(), b"\xff"):
        board.store["failure"] = found
        assert board.read() is None
    other = Board(Store(), 1, 2, Seal("guessed", "run 1"))
    other.post(ValueError("no"))
    board.store["failure"] = other.store["failure"]
    assert board.read() is None


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"rank": 1, "message": "a\x1b[2Jb\nc", "exit_code": 2}, (1, r"a\x1b[2Jb\nc", 2)),
        ({"rank": 1, "message": "a" * 100_000, "exit_code": 2}, (1, "a" * 4000, 2)),
        ({"rank": 1, "message": "a", "exit_code": 0}, (1, "a", 1)),
        ({"rank": 1, "message": "a", "exit_code": 256}, (1, "a", 1)),
        ({"rank": 1, "message": "a", "exit_code": "0"}, (1, "a", 1)),
        ({"rank": 2, "message": "a", "exit_code": 2}, None),
        ({"rank": -1, "message": "a", "exit_code": 2}, None),
        ({"rank": 1, "message": ["a"], "exit_code": 2}, None),
        ([], None),
    ],
)
def test_a_failure_of_an_own_process_is_believed_within_bounds(written, read):
    """As far as its form goes: a process that was taken over knows the secret too."""
    seal = Seal("secret", "run 1")
    board = Board(Store({"failure": seal.closed(json.dumps(written).encode(), "failure").hex().encode()}), 0, 2, seal)
    found = board.read()
    assert (None if found is None else (found.rank, found.message, found.exit_code)) == read


def test_what_a_stranger_sends_in_place_of_a_value_is_not_opened(monkeypatch, tmp_path):
    from groupwise.distributed.world import World

    class Opens:
        def __reduce__(self):
            return open, (str(tmp_path / "touched"), "w")

    world = World(0, 2, seal=Seal("secret", "run 1"))
    monkeypatch.setattr(World, "_gather_bytes", lambda self, mine: [mine, b"\0" * 32 + pickle.dumps(Opens())])
    with pytest.raises(RankError, match="a message of process 1 of 2 is not sealed with this run's secret"):
        world.all_gather_object(1)
    assert not (tmp_path / "touched").exists()
