"""Benchmarks behind ``geocont bench``: ratios within one run, interleaved, medians."""
