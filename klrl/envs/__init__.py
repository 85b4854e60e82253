"""KL transforms in TorchRL's own layout: ``torchrl.envs`` becomes ``klrl.envs``."""
