"""Ids, groups, causes, facts, events, settings and errors, which all packages use. Imports no other layer."""
