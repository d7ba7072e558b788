"""``python -m groupwise.trl``: every argument of TRL's ``GRPOConfig``, and what becomes of it here."""

from groupwise.trl.arguments import render_table

print(render_table())
