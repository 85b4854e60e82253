"""What every part of klrl may use and what uses none of them: texts and files."""
