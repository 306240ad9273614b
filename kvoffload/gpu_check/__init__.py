"""`kvoffload gpu-check`: checks and measurements that need a GPU. `command.py` has the list of parts."""
