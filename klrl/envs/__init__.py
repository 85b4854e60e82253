"""Environments: one factory, one batched environment over Gymnasium."""

from klrl.envs.factory import make_copies, make_env, transformed
from klrl.envs.gym_vector import VectorGymEnv

__all__ = ["VectorGymEnv", "make_copies", "make_env", "transformed"]
