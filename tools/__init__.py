"""The modules behind ./book: Python >= 3.9 and its standard library, nothing else.

Only tools/plot/ needs more (numpy and matplotlib); its scripts run in a process of their own.
"""
