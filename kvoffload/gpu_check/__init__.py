"""`kvoffload gpu-check`: checks and measurements that need a GPU. `command.py` lists the parts."""
