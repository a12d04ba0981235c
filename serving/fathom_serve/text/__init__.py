"""From tokens to text: incremental decoding, stop strings, tints."""
