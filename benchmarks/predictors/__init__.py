"""Does KL predict forgetting, and which KL? The runs, and an analysis fixed before them."""
