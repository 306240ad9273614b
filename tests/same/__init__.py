"""What a restructuring must not change: `make same` compares it with the files in golden/.

parts.py     what is compared: a function for each file
__main__.py  comparing and writing the files
journeys.py  `make journeys`: functions in the way of a store and a load, to compare two commits with
"""
