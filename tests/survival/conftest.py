"""The tiny model and data of the training tests."""

from tests.training.conftest import letters, quiet, small_config, sums, tiny_folder

__all__ = ["letters", "quiet", "small_config", "sums", "tiny_folder"]
