"""The settings of a run: schema, loading, documentation. Importing this does not import torch."""

from groupwise.config import problems, section
from groupwise.config.combinations import notes
from groupwise.config.fields import FieldDoc, explain
from groupwise.config.load import Recipe, build_config, build_known, changed_settings, dump_config, load_config, recipes
from groupwise.config.schema import Config

__all__ = [
    "Config", "FieldDoc", "Recipe", "build_config", "build_known", "changed_settings", "dump_config", "explain", "load_config", "notes",
    "recipes",
]  # fmt: skip

section.SENTENCES = problems  # which a section cannot import, being what the schema is made of
