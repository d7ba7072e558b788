"""Where the processes of one machine meet: a port that nobody else is given before they are there."""

import sys

import pytest

from groupwise.distributed.launch import launch

ASKS = """
import os, socket
place = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
with socket.socket() as other:
    try:
        other.bind(place)
    except OSError:
        pass
    else:
        raise SystemExit("somebody else can have the port")
with socket.socket() as first:
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    first.bind(place)
    first.listen()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no way to keep a port")
def test_the_port_is_kept_for_the_first_process():
    assert launch([sys.executable, "-c", ASKS], 1) == 0
