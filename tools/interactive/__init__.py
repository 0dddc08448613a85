"""The data of the interactive pages."""
