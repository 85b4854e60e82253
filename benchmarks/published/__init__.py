"""KL figures that are published, and those of docs/kl.md: computed, beside what they should be."""
