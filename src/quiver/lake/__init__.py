"""The lake: one Delta table for each signal, written by delta-rs, read by every engine.

Rows are decoded, sorted and written as Parquet in Arrow; a commit lists the files and says, in the
same breath, how far each source has come. What is in the lake is in it once.
"""
