"""The pages of ``docs/results/``: their tables, made of the committed cells.

The programs that ran the cells of results 4, 5, 6, 7 and 9, and drew the pictures, are in commit
90aeafb2 (benchmarks/shipped, mujoco, predictors); each page has the commands.
"""
