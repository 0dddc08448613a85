"""Figures: each script here is started by tools/figures.py under a Python that has matplotlib."""
