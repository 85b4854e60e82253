"""Causal LMs: tokenizer, adapters, precision, hidden states and log-probs."""
