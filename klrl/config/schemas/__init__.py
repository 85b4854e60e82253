"""The choices of a job: their settings with type, range, value and comment, and their factories.

``control`` and ``language`` hold the groups of one domain; ``penalty``, ``learning`` and ``record``
those of both; ``root`` what is outside any group.

The comment of a setting, beside it or above it after ``#:``, is what ``--cfg job`` says. Presets
are YAMLs in ``conf/``. OmegaConf reads ``Optional[...]`` where it does not read ``... | None``.
"""
