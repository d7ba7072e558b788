"""Checks for the driver's tests."""

import os
import sys
import time
from pathlib import Path

from benchmarks.first_light_place import Found, answer


def good(place):
    return Found("as expected", "all is well", "nothing to do", {"x": 1.23456789})


last = good


def bad(place):
    raise ValueError("no such number")


def dead(place):
    os._exit(3)


def stuck(place):
    print("on my way", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    name, device, folder = sys.argv[1:]
    answer(globals()[name], device, Path(folder), name)
