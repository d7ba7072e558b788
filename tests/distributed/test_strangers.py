"""What another program that reaches the processes of a run may do to them: nothing."""

import hashlib
import json
import os
import pickle
import subprocess
import sys

import pytest

from groupwise.distributed.failures import Board, Seal
from groupwise.distributed.launch import launch
from tests.warm import python

LISTENS = """
import os, sys
from pathlib import Path
from groupwise.distributed import open_world
with open_world(True, 600) as world:
    world.all_gather_object(b"x" * 1000 * (world.rank + 1))
    if world.rank == 0:
        pids = os.getpid(), int(os.environ["LAUNCHED_BY"])
        inodes = {os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1] for pid in pids for fd in os.listdir(f"/proc/{pid}/fd")
                  if os.path.lexists(f"/proc/{pid}/fd/{fd}") and "socket" in os.readlink(f"/proc/{pid}/fd/{fd}")}
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
                field = line.split()
                if field[3] == "0A" and field[9] in inodes:
                    print(kind, field[1].partition(":")[0], os.environ["MASTER_PORT"], flush=True)
        import socket
        stranger = socket.socket(type=socket.SOCK_DGRAM)
        try:
            stranger.connect(("198.51.100.1", 9))  # nothing is sent: it says by which address this machine would
            outer = stranger.getsockname()[0]
        except OSError:
            outer = "127.0.0.1"
        if not outer.startswith("127."):
            try:
                socket.create_connection((outer, int(os.environ["MASTER_PORT"])), timeout=20).close()
                print("strangers come in")
            except ConnectionRefusedError:
                pass
    assert world.all_gather_object(world.rank) == [0, 1]
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_processes_of_one_machine_listen_to_it_alone(tmp_path):
    script = tmp_path / "listens.py"
    script.write_text(LISTENS)
    program = (
        "import os, sys; from groupwise.distributed.launch import launch; os.environ['LAUNCHED_BY'] = str(os.getpid()); "
        f"sys.exit(launch([sys.executable, {str(script)!r}], 2))"
    )
    outside = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }  # as somebody sets it who also has runs on several nodes
    environment = {**os.environ, **outside, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([python(), "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    heard = done.stdout.splitlines()
    assert len(heard) >= 2, "the store, and gloo"
    assert {tuple(line.split()[:2]) for line in heard} == {("tcp", "0100007F")}


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
    assert Seal().opened(Seal().closed(b"body", "a"), "a") == b"body"


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
def test_without_a_secret_a_failure_is_believed_within_bounds(written, read):
    board = Board(Store({"failure": json.dumps(written).encode().hex().encode()}), 0, 2)
    found = board.read()
    assert (None if found is None else (found.rank, found.message, found.exit_code)) == read


def test_what_a_stranger_sends_in_place_of_a_value_is_not_opened(monkeypatch, tmp_path):
    from groupwise.distributed.world import World
    from groupwise.errors import RankError

    class Opens:
        def __reduce__(self):
            return open, (str(tmp_path / "touched"), "w")

    world = World(0, 2, seal=Seal("secret", "run 1"))
    monkeypatch.setattr(World, "_gather_bytes", lambda self, mine: [mine, b"\0" * 32 + pickle.dumps(Opens())])
    with pytest.raises(RankError, match="a message of process 1 of 2 is not sealed with this run's secret"):
        world.all_gather_object(1)
    assert not (tmp_path / "touched").exists()
