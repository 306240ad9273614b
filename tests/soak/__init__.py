"""Hours of mixed traffic, and whether anything grew."""
