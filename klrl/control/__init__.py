"""Control: what is control's alone of a run."""
