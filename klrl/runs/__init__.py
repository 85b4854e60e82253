"""A run's folder and records, and their readers."""
