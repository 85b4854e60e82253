"""KL(policy||reference) as TorchRL transforms."""
