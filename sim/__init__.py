"""The scaler's proof: fleets in simulated time, under its policies and others."""
