"""What geocont measures: pure functions, one formula each, tensors in and tensors out."""
