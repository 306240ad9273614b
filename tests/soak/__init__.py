"""Hours of mixed traffic, and a check that neither memory nor any other resource grows."""
