"""`kvoffload bench scale`: what the scheduler's side costs as requests and slots grow, without an engine."""
