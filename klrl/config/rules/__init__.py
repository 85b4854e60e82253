"""Checks of two settings at once, by the setting that they refuse; unread.py: what no job reads."""
