"""The vocabulary: ids, groups, causes, facts, events, settings and errors. It imports no other layer."""
