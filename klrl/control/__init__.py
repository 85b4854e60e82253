"""Control: the parts of a run that language does not share."""
