"""The algorithm; knows no domain."""
