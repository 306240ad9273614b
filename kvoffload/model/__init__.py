"""The words: ids, groups, causes, facts, events, settings and errors. Imports nothing above it, and no library."""
