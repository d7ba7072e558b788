"""Small experiments whose numbers and figures stand in ``docs/``; the README in this folder lists them."""
