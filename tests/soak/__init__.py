"""Runs hours of mixed traffic, and checks that neither memory nor any other resource grows."""
