"""How fast chapters are, beside what limits them on the same machine."""
