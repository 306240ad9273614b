"""What a restructuring must not change: `make same` compares it with the files in golden/.

parts.py     what is compared: a function for each file
__main__.py  comparing and writing the files
"""
