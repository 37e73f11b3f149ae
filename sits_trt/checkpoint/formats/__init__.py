"""Quantized checkpoints of other programs: read as ours, and written from ours. One file for each format."""
