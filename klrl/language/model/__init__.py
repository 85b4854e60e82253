"""A causal LM: its files, tokenizer, adapters and precision, its hidden states and log-probs."""
