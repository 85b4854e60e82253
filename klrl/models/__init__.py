"""Policies and critics, built from environment specs."""

from klrl.models.actor import Agent, make_agent
from klrl.models.distributions import Family

__all__ = ["Agent", "Family", "make_agent"]
