"""Exercises to complete: `flashtile learn NAME` copies one of these files, then checks the copy."""
