"""Declares the choices of a job: factory, and settings with their types, ranges and defaults.

``control`` and ``language`` declare groups of one domain; ``penalty``, ``learning`` and ``record``
declare groups of both. ``root`` declares the settings outside any group.

A setting has its comment on its own line, or above after ``#:``; ``--cfg job`` prints the comment.
Presets are YAML files in ``conf/``.
"""
