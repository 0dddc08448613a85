"""Exercises: showing them, judging answers, recording what judges compare with."""
