"""The tiny model and the file of sums of the trainer's tests."""

from tests.training.conftest import sums, tiny_folder

__all__ = ["sums", "tiny_folder"]
