"""The settings of a job, by group, with their types and ranges; values are in ``conf/``.

``control`` and ``language`` hold the groups of one domain; ``penalty``, ``learning`` and ``record``
those of both; ``root`` what is outside any group.

Where an annotation is ``Optional[...]`` and not ``... | None``, OmegaConf reads it.
"""
