"""What a run leaves: its folder, and what reads it."""
