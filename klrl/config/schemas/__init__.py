"""Declares the choices of a job: their factories, and settings with type, range and default.

``control`` and ``language`` declare groups of one domain; ``penalty``, ``learning`` and ``record``
declare groups of both. ``root`` declares the settings outside any group.

The comment of a setting stands on the same line, or above it after ``#:``; ``--cfg job`` prints it.
Presets are YAML files in ``conf/``. OmegaConf reads ``Optional[...]``, but not ``... | None``.
"""
