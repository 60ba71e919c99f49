"""Proves the scaler: fleets in simulated time, under its policies and others."""
