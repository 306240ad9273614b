"""`kvoffload top`: a live view of a server's metrics in a terminal."""
