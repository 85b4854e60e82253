"""Environments: simulators, spaces, copies and their episodes."""
