"""MuJoCo at a million frames: the search for one setting, and the runs of its page."""
