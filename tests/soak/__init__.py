"""Hours of mixed traffic, and a check that nothing grows."""
