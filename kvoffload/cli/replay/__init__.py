"""`kvoffload replay-journal`: drives a core through what a journal recorded, and says where it decides otherwise."""
