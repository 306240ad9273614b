"""The vocabulary: ids, groups, causes, facts, events, settings and errors. Imports no library and no other layer."""
