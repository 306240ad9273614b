"""`kvoffload gpu-check`: what only a GPU can tell, through the driver that ships. `command.py` lists the parts."""
