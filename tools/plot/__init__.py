"""Figures: each script here is started by tools/look/figures.py under a Python that has matplotlib."""
