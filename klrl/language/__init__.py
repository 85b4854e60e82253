"""Language policies: their data, the model, the run."""
