"""Declares the choices of a job: settings with type, range, value and comment, and factories.

``control`` and ``language`` declare the groups of one domain, ``penalty``, ``learning`` and
``record`` those of both, and ``root`` the settings outside any group.

``--cfg job`` prints the comment of a setting, which follows on the same line or precedes it after
``#:``. Presets are YAMLs in ``conf/``. OmegaConf reads ``Optional[...]``, but not ``... | None``.
"""
