"""Checking a GPU's results and speed, also on a bare machine."""
