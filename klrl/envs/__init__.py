"""KL transforms, in the module layout of ``torchrl.envs``."""
