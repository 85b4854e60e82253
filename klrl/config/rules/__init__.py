"""Checks of two settings at once, by the setting that they refuse; two ask what was typed.

unread.py: settings that no job reads. objective.py: halves of an objective.
"""
