"""The command ``groupwise``: a thin door. Commands import torch and transformers only when they run."""

from groupwise.cli.app import app, main

__all__ = ["app", "main"]
